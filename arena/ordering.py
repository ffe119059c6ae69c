"""Which stream waits for which, as far as torch was told: its streams and events, patched in place between `begin()` and
`end()`, so that it can be said whether one piece of work comes before another. `arena.overlaps` asks. Any thread may call
torch meanwhile; the rest is called with `lock`. No failure of ours fails a call of torch.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch

from arena import _registry

if TYPE_CHECKING:
    from arena.overlaps import Use

log = logging.getLogger("arena")

Clock = dict[Hashable, int]


class Order:
    """What happens before what, as far as torch was told.

    `clocks[s][t]`: so many uses on stream t come before whatever s does next. `done[t]`: so many are known to have ended.
    """

    def __init__(self) -> None:
        self.clocks: dict[Hashable, Clock] = {}
        self.done: Clock = {}

    def next(self, stream: Any) -> int:
        """The number of a new use on that stream."""
        clock = self.clocks.setdefault(key_of(stream), {})
        clock[key_of(stream)] = tick = clock.get(key_of(stream), 0) + 1
        return tick

    def now(self, stream: Any) -> Clock:
        """All that the stream comes behind."""
        return dict(self.clocks.get(key_of(stream), {}))

    def everything(self) -> Clock:
        return {key: clock.get(key, 0) for key, clock in self.clocks.items()}

    def at(self, event: Any) -> Clock:
        """What comes before the event. One whose record we did not see is taken to come behind everything: no false alarm."""
        order, clock = getattr(event, "_arena_behind", (None, {}))
        return clock if order is self else self.everything()

    def recorded(self, event: Any, clock: Clock) -> None:
        if type(event) is not torch.Event:  # its own record() cannot be seen: the next one would be missed
            # On the event itself: weak references to torch's events are not cleared when these die (seen with 2.11).
            event._arena_behind = self, clock

    def waits(self, stream: Any, behind: Clock) -> None:
        advance(self.clocks.setdefault(key_of(stream), {}), behind)

    def ended(self, behind: Clock) -> None:
        advance(self.done, behind)

    def before(self, use: Use, stream: Any) -> bool:
        """Whether the use comes before what the stream does next. Nothing that was captured has ended: it runs at replay."""
        key = key_of(use.stream)
        done = self.done.get(key, 0) if use.capture is None else 0
        return use.tick <= max(done, self.clocks.get(key_of(stream), {}).get(key, 0))


def advance(clock: Clock, behind: Clock) -> None:
    for key, tick in behind.items():
        clock[key] = max(tick, clock.get(key, 0))


def key_of(stream: Any) -> Hashable:
    """What the same stream has in common, whichever object stands for it."""
    if isinstance(stream, torch.Stream) and not hasattr(stream, "cuda_stream"):
        same: Any = torch.cuda.Stream
        stream = same(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)
    handle = getattr(stream, "cuda_stream", None)
    if handle is None:
        key: Hashable = stream
        return key
    return stream.device.index, handle


def name_of(stream: Any) -> str:
    handle = getattr(stream, "cuda_stream", None)
    return str(stream) if handle is None else f"stream {handle:#x} of {stream.device}"


def current_stream(device: torch.device) -> Any:
    """torch's current stream of a device; None where there are no streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def idle(stream: Any) -> bool:
    """Whether the stream has ended all that it was given: then the host has waited for it, in a way that we did not see."""
    if not hasattr(stream, "cuda_stream"):
        return bool(stream.query())
    if stream.stream_id != 0 and not stream.stream_id & 1:
        return False  # not torch's: it may have been destroyed, and to ask it would be the end of the process
    mode = _registry.enter_relaxed()
    try:
        if mode is None:
            return False
        with torch.cuda.stream(stream):
            return not torch.cuda.is_current_stream_capturing() and bool(stream.query())
    except RuntimeError:
        return False
    finally:
        _registry.leave_relaxed(mode)


# Each is called before torch's own, with its arguments, and says what to do with the result.
Note = Callable[..., Callable[[Any], object]]


def given(stream: Any) -> Any:
    return stream if stream is not None else torch.cuda.current_stream()


def event_record(event: Any, stream: Any = None) -> Callable[[Any], object]:
    clock = order.now(given(stream))
    return lambda _: order.recorded(event, clock)


def event_wait(event: Any, stream: Any = None) -> Callable[[Any], object]:
    stream, clock = given(stream), order.at(event)
    return lambda _: order.waits(stream, clock)


def event_synchronize(event: Any) -> Callable[[Any], object]:
    clock = order.at(event)
    return lambda _: order.ended(clock)


def event_query(event: Any) -> Callable[[Any], object]:
    clock = order.at(event)
    return lambda ended: order.ended(clock if ended else {})


def stream_wait_event(stream: Any, event: Any) -> Callable[[Any], object]:
    return event_wait(event, stream)


def stream_wait_stream(stream: Any, other: Any) -> Callable[[Any], object]:
    clock = order.now(other)
    return lambda _: order.waits(stream, clock)


def stream_record_event(stream: Any, event: Any = None) -> Callable[[Any], object]:
    clock = order.now(stream)
    return lambda recorded: order.recorded(recorded, clock)


def stream_synchronize(stream: Any) -> Callable[[Any], object]:
    clock = order.now(stream)
    return lambda _: order.ended(clock)


def stream_query(stream: Any) -> Callable[[Any], object]:
    clock = order.now(stream)
    return lambda ended: order.ended(clock if ended else {})


def device_synchronize(device: Any = None) -> Callable[[Any], object]:
    clock = order.everything()
    return lambda _: order.ended(clock)


EVENT: dict[str, Note] = {
    "record": event_record,
    "wait": event_wait,
    "synchronize": event_synchronize,
    "query": event_query,
}
STREAM: dict[str, Note] = {
    "wait_event": stream_wait_event,
    "wait_stream": stream_wait_stream,
    "record_event": stream_record_event,
    "synchronize": stream_synchronize,
    "query": stream_query,
}
PATCHED: list[tuple[Any, dict[str, Note]]] = [
    (torch.cuda.Event, EVENT),
    (torch.cuda.Stream, STREAM),
    (torch.cuda, {"synchronize": device_synchronize}),
    (torch.accelerator, {"synchronize": device_synchronize}),
]

lock = threading.RLock()  # around every look at `order`, whoever takes it
order = Order()  # since begin()
_replaced: list[tuple[Any, str, Any, Any]] = []  # (owner, name, what its __dict__ had or MISSING, ours)
MISSING = object()


def noted(original: Callable[..., Any], note: Note) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _replaced:  # somebody kept this one
            return original(*args, **kwargs)
        after: Callable[[Any], object] | None = None
        try:
            with lock:
                after = note(*args, **kwargs)
        except Exception:
            log.debug("an ordering of streams was not noted", exc_info=True)
        result = original(*args, **kwargs)
        try:
            if after is not None:
                with lock:
                    after(result)
        except Exception:
            log.debug("an ordering of streams was not noted", exc_info=True)
        return result

    return call


def begin() -> None:
    """Patches torch's methods: from here on `order` knows what was told. With the lock."""
    global order
    order = Order()
    for owner, notes in PATCHED:
        for name, note in notes.items():
            ours = noted(getattr(owner, name), note)
            _replaced.append((owner, name, vars(owner).get(name, MISSING), ours))
            setattr(owner, name, ours)


def end() -> None:
    """Puts torch's own methods back. With the lock."""
    while _replaced:
        owner, name, before, ours = _replaced.pop()
        if vars(owner).get(name) is not ours:
            continue  # patched by others since: theirs calls ours, which does nothing any more
        if before is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
