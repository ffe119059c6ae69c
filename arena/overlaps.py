"""Who else has these bytes: a watch over workspace requests, for debugging.

While a manager is watched, each of its requests is noted with its call site and stream. Reported, with the call sites of
both: bytes handed out again while an earlier view of them is kept, a stale view that is retained or used, and bytes that two
streams use with nothing to order them. Fresh bytes are poisoned on request. Any thread may call any of it; what is not
watched pays nothing. No failure of ours fails a request or a capture: a watch that cannot go on says so and ends.
"""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined, unused-ignore]

from arena import _registry, _workspace, ordering
from arena.ordering import current_stream, key_of, name_of
from arena.workspace import caller

__all__ = ["Overlap", "OverlapError", "OverlapWarning", "Use", "Watch", "from_environment", "used", "watch"]

log = logging.getLogger("arena")

Report = Callable[["Overlap"], object]

UNKNOWN = -1  # a capture that has no id any more

_watches: list[Watch] = []


class OverlapWarning(RuntimeWarning):
    """Bytes of a workspace have two users."""


class OverlapError(RuntimeError):
    """The same, where it was asked to be an error."""


# ---- what is told ----


@dataclass(frozen=True)
class Use:
    """Bytes that a request handed out, or that `used()` was told of."""

    site: str  # "file:line:function"
    stream: Any  # a torch.cuda.Stream; None on the CPU
    capture: int | None  # what the stream was capturing
    begin: int  # bytes into the slot's block
    end: int
    tick: int = 0  # its number among the uses of its stream

    def __str__(self) -> str:
        where = f"at {self.site}"
        if self.stream is not None:
            where += f" on {name_of(self.stream)}"
        return where if self.capture is None else f"{where} in capture {self.capture}"


@dataclass(frozen=True)
class Overlap:
    """Two uses of the same bytes of one slot.

    `kind` says what is wrong: "alive": a view that was made by `earlier` still lives, and `later` handed its bytes out again;
    "retained", "used": at `site`, that happened to such a view; "unordered": nothing orders `later`'s stream behind
    `earlier`'s; "captures": one graph overwrites the other's bytes.
    """

    kind: Literal["alive", "retained", "used", "unordered", "captures"]
    ubatch: int
    lane: int
    earlier: Use
    later: Use
    site: str | None = None

    @property
    def bytes(self) -> tuple[int, int]:
        """What they have in common: (begin, end) in the slot's block."""
        return max(self.earlier.begin, self.later.begin), min(self.earlier.end, self.later.end)

    def __str__(self) -> str:
        begin, end = self.bytes
        slot = f"workspace slot (ubatch {self.ubatch}, lane {self.lane})"
        if self.kind == "unordered":
            return (
                f"{slot}: bytes {begin} to {end}, used {self.earlier}, are used {self.later}, and nothing orders the second "
                f"stream behind the first: make it wait, or use another lane"
            )
        if self.kind == "captures":
            return f"{slot}: bytes {begin} to {end} are used {self.earlier} and {self.later}"
        what = f"the view made {self.earlier} "
        what += "is still alive" if self.kind == "alive" else f"was {self.kind} at {self.site}"
        return f"{slot}: {what}, but its bytes {begin} to {end} were handed out again {self.later}"


# ---- the watch ----


@dataclass
class View:
    """A tensor that was handed out, by the storage that it and what is made from it share with nobody else."""

    weak: Any  # its StorageWeakRef
    use: Use
    slot: WatchedSlot
    again: Use | None = None  # what handed its bytes out again, first
    excused: bool = False  # it may live on: a graph retained it in time, or it was reported

    def alive(self) -> bool:
        return not self.weak.expired()


@dataclass
class WatchedSlot:
    """What is known of one slot on one block. A larger block is other bytes: its slot begins anew."""

    ubatch: int
    lane: int
    block: weakref.ref[Any]
    views: list[View] = field(default_factory=list)
    uses: dict[int | None, dict[Hashable, Use]] = field(default_factory=dict)  # by capture, by stream: the last
    captured: dict[int, dict[tuple[str, int, int], Use]] = field(default_factory=dict)


class Watch:
    """Made by `watch()`. Active until `stop()`, or the end of the `with` that it is used in."""

    found: list[Overlap]

    def __init__(
        self,
        managers: Iterable[Any],
        poison: int | None,
        poison_captures: bool,
        report: Literal["warn", "raise"] | Report,
        current_stream: Callable[[torch.device], Any],
    ) -> None:
        if poison is not None and not 0 <= poison <= 255:
            raise ValueError(f"poison is the value of a byte, 0 to 255, not {poison}")
        if report not in ("warn", "raise") and not callable(report):
            raise ValueError(f'report is "warn", "raise" or what to call with each Overlap, not {report!r}')
        self.managers = weakref.WeakSet(managers)
        self.poison, self.poison_captures = poison, poison_captures
        self.report, self.current_stream = report, current_stream
        self.found = []
        self.told: set[tuple[Any, ...]] = set()
        self.views: dict[int, View] = {}  # by address of its storage, which its weak reference keeps from being reused
        self.outgrown: list[WatchedSlot] = []  # that captures were served on
        self.slots: weakref.WeakKeyDictionary[Any, dict[int, WatchedSlot]] = weakref.WeakKeyDictionary()
        with ordering.lock:
            for manager in self.managers:
                if manager.watch is not None:
                    raise RuntimeError(f"{manager!r} is watched already")
            if not _watches:
                ordering.begin()
                _registry.watch_retains(retained)
            _watches.append(self)
            for manager in self.managers:
                manager.watch = self

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Nothing is watched any more; torch's methods are what they were. Twice is once."""
        with ordering.lock:
            for manager in self.managers:
                if manager.watch is self:
                    manager.watch = None
            if self in _watches:
                _watches.remove(self)
                if not _watches:
                    _registry.watch_retains(None)
                    ordering.end()

    def __call__(self, manager: Any, slot: Any, specs: object, served: list[torch.Tensor]) -> None:
        """What the request path calls: `served` becomes what is handed out."""
        try:
            with ordering.lock:
                found = self.request(manager, slot, served)
        except Exception:
            log.warning("this workspace is not watched any more", exc_info=True)
            manager.watch = None
            return
        self.tell(found)

    def request(self, manager: Any, slot: Any, served: list[torch.Tensor]) -> list[Overlap]:
        block = slot.current
        views = [each for each in served if type(each) is torch.Tensor and each.numel()]
        # What is made under somebody's mode (FakeTensorMode) is in no slot; what another thread has outgrown is in none.
        if block is None or not views or any(each.data_ptr() == 0 for each in views):
            return []
        begin = block.base.data_ptr()
        if not all(begin <= each.data_ptr() < begin + block.nbytes for each in views):
            return []
        here = self.slot(manager, slot, block)
        use = self.use(views[0].device, 0, max(each.data_ptr() - begin + each.nbytes for each in views))
        found = [*self.outlived(here), *self.unordered(here, use)]
        if found and self.report == "raise":
            return found  # nobody gets these bytes
        self.note(here, use)
        for view in here.views:
            if view.again is None and view.use.begin < use.end and use.begin < view.use.end:
                view.again = use
        for place, each in enumerate(served):
            if each.numel():
                served[place] = fresh = self.alias(block.base, each, use)
                offset = each.data_ptr() - begin
                weak: Any = StorageWeakRef
                made = View(weak(fresh.untyped_storage()), replace(use, begin=offset, end=offset + each.nbytes), here)
                here.views.append(made)
                self.views[fresh.untyped_storage()._cdata] = made
        return found

    def slot(self, manager: Any, slot: Any, block: Any) -> WatchedSlot:
        places = self.slots.setdefault(manager, {})
        place = manager._current_workspaces.parts.index(slot)
        known = places.get(place)
        if known is None or known.block() is not block:
            if known is not None and known.captured:
                self.outgrown.append(known)
            ubatch, lane = divmod(place, manager._num_lanes)
            known = places[place] = WatchedSlot(ubatch, lane, weakref.ref(block))
        self.views = {address: view for address, view in self.views.items() if view.alive()}
        known.views = [view for view in known.views if view.alive()]
        return known

    def use(self, device: torch.device, begin: int, end: int) -> Use:
        stream = self.current_stream(device)
        try:
            capture = _registry.capture_id()
        except Exception:
            capture = UNKNOWN
        return Use(caller(), stream, capture, begin, end, 0 if stream is None else ordering.order.next(stream))

    def outlived(self, slot: WatchedSlot) -> list[Overlap]:
        """Views that live still, although an earlier request handed out their bytes again. Those whose bytes this one hands
        out are none yet: whoever asks in a loop lets go of the old view after the new one is there."""
        found = []
        for view in slot.views:
            if view.again is not None and not view.excused and view.alive():
                view.excused = True
                found.append(Overlap("alive", slot.ubatch, slot.lane, view.use, view.again))
        return found

    def unordered(self, slot: WatchedSlot, use: Use) -> list[Overlap]:
        """Only what runs together is compared: the uses of one capture, or those of none."""
        found = []
        for key, other in list(slot.uses.get(use.capture, {}).items()):
            if use.stream is None or key == key_of(use.stream) or other.end <= use.begin or use.end <= other.begin:
                continue
            if not ordering.order.before(other, use.stream) and not (use.capture is None and self.ended(other.stream)):
                found.append(Overlap("unordered", slot.ubatch, slot.lane, other, use))
        return found

    def ended(self, stream: Any) -> bool:
        behind = ordering.order.now(stream)
        if not ordering.idle(stream):
            return False
        ordering.order.ended(behind)
        return True

    def note(self, slot: WatchedSlot, use: Use) -> None:
        """The last use of each stream stands for its earlier ones, and for those of others that it was compared with."""
        uses = slot.uses.setdefault(use.capture, {})
        if use.stream is not None:
            own = key_of(use.stream)
            before = uses.pop(own, use)
            for key, other in list(uses.items()):
                if use.begin <= other.begin and other.end <= use.end:
                    del uses[key]
            uses[own] = replace(use, begin=min(before.begin, use.begin), end=max(before.end, use.end))
        if use.capture is not None:
            slot.captured.setdefault(use.capture, {}).setdefault((use.site, use.begin, use.end), use)

    def alias(self, base: torch.Tensor, view: torch.Tensor, use: Use) -> torch.Tensor:
        """The same view on a storage of its own, which keeps the block and dies with the last view made from this one."""
        offset, size = view.data_ptr() - base.data_ptr(), view.element_size()
        with torch.inference_mode(base.is_inference()):
            whole = from_dlpack(to_dlpack(base))
            if self.poison is not None and (use.capture is None or self.poison_captures):
                mode = _registry.enter_relaxed()
                try:
                    whole[offset : offset + view.nbytes].fill_(self.poison)
                finally:
                    _registry.leave_relaxed(mode)
        typed = whole[: whole.numel() // size * size].view(view.dtype)
        return typed.as_strided(view.shape, view.stride(), offset // size)

    # ---- what happens to a view afterwards ----

    def view_of(self, tensor: torch.Tensor) -> View | None:
        try:
            view = self.views.get(tensor.untyped_storage()._cdata)
        except Exception:  # one without a storage
            return None
        return view if view is not None and view.alive() else None

    def used(self, tensor: torch.Tensor) -> list[Overlap]:
        view = self.view_of(tensor)
        if view is None:
            return []
        if view.again is not None:
            return [Overlap("used", view.slot.ubatch, view.slot.lane, view.use, view.again, caller())]
        use = self.use(tensor.device, view.use.begin, view.use.end)
        found = self.unordered(view.slot, use)
        if not (found and self.report == "raise"):
            self.note(view.slot, use)
        return found

    def retained(self, tensor: torch.Tensor, capturing: bool) -> list[Overlap]:
        view = self.view_of(tensor)
        if view is None:
            return []
        if view.again is not None:
            return [Overlap("retained", view.slot.ubatch, view.slot.lane, view.use, view.again, caller())]
        view.excused = view.excused or capturing
        return []

    def check(self) -> list[Overlap]:
        """Reports at once every view that lives although its bytes were handed out again; variables that nobody reads any
        more are among them. What a graph retained in time is not."""
        with ordering.lock:
            found = []
            for view in list(self.views.values()):
                if view.again is not None and not view.excused and view.alive():
                    found.append(Overlap("alive", view.slot.ubatch, view.slot.lane, view.use, view.again))
        self.tell(found)
        return found

    def shared(self, first: int, second: int) -> list[Overlap]:
        """The bytes that two captures were both handed out: what the replay of one overwrites for the other.

        Args:
            first: What `arena.capture_id()` said inside the one capture.
            second: And inside the other.
        """
        with ordering.lock:
            return [
                Overlap("captures", slot.ubatch, slot.lane, one, other)
                for slot in [*self.outgrown, *(slot for places in self.slots.values() for slot in places.values())]
                for one in slot.captured.get(first, {}).values()
                for other in slot.captured.get(second, {}).values()
                if one.begin < other.end and other.begin < one.end
            ]

    def tell(self, found: list[Overlap]) -> None:
        """Each pair of call sites, of streams and of a slot once; an error, each time."""
        if found and self.report == "raise":
            self.found.extend(found)
            raise OverlapError("\n".join(map(str, found)))
        for each in found:
            uses = [(use.site, None if use.stream is None else key_of(use.stream)) for use in (each.earlier, each.later)]
            pair = (each.kind, each.ubatch, each.lane, each.site, *uses)
            if pair in self.told:
                continue
            self.told.add(pair)
            self.found.append(each)
            if callable(self.report):
                self.report(each)
            else:
                warnings.warn(str(each), OverlapWarning, stacklevel=2)


def retained(owner: Any, stream: int | None) -> None:
    """Told of each `arena.retain()` while somebody watches."""
    try:
        capturing = stream is not None and _registry.capture_id(stream) is not None
        if hasattr(type(owner), "__cuda_owners__"):
            owner = tuple(owner.__cuda_owners__()) if capturing else ()  # it is promised to be asked only then
        tensors = _workspace.tensors_in(owner)
    except Exception:
        return  # retain() itself says what is wrong
    look(lambda watching: [each for tensor in tensors for each in watching.retained(tensor, capturing)])


def look(at: Callable[[Watch], list[Overlap]]) -> None:
    for watching in list(_watches):
        try:
            with ordering.lock:
                found = at(watching)
        except Exception:
            log.warning("what is done with workspace views is not seen", exc_info=True)
        else:
            watching.tell(found)


def used(*tensors: torch.Tensor) -> None:
    """Tells every watch that these are used here, on the current stream: a kernel launch that torch does not see, say.

    Raises:
        OverlapError: One of them is a view whose bytes were handed out again, or that another stream uses with nothing to
            order the two; where a watch was asked to raise.
    """
    look(lambda watching: [each for tensor in tensors for each in watching.used(tensor)])


def watch(
    manager: Any = None,
    *,
    poison: int | None = None,
    poison_captures: bool = False,
    report: Literal["warn", "raise"] | Report = "warn",
    current_stream: Callable[[torch.device], Any] = current_stream,
) -> Watch:
    """Watches a workspace manager, for debugging: requests take the slow way, and `reuse_views` is not followed.

    Args:
        manager: Which one; None: every one that there is now.
        poison: Fill what a request hands out with this byte (255: NaN, and -1), on the current stream.
        poison_captures: Also inside captures: each replay then poisons again.
        report: "warn": an OverlapWarning, once for each pair of call sites; "raise": an OverlapError, and the request hands
            out nothing; or what is called with each `Overlap`.
        current_stream: Says on which stream work of a device is issued.

    Returns:
        The watch, which is active; a context manager that stops it. What was found is in its `found`.

    Raises:
        RuntimeError: A manager is watched already.
        ValueError: `poison` is not a byte, or `report` none of these.
    """
    managers = list(_workspace.managers) if manager is None else [manager]
    return Watch(managers, poison, poison_captures, report, current_stream)


def from_environment(manager: Any) -> Watch | None:
    """Watches a new manager for good, where ARENA_WATCH (1, warn or raise) or ARENA_POISON (a byte, as 0xFF) ask for it.

    Raises:
        ValueError: One of them says something else.
    """
    asked, poison = os.environ.get("ARENA_WATCH", ""), os.environ.get("ARENA_POISON", "")
    if asked in ("", "0") and not poison:
        return None
    if asked not in ("", "0", "1", "warn", "raise"):
        raise ValueError(f"ARENA_WATCH is 0, 1, warn or raise, not {asked!r}")
    try:
        byte = int(poison, 0) if poison else None
    except ValueError:
        raise ValueError(f"ARENA_POISON is the value of a byte, as 0xFF, not {poison!r}") from None
    return watch(manager, poison=byte, report="raise" if asked == "raise" else "warn")
