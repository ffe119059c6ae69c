"""Which memory there is and whose it is: the blocks of torch's allocator, what an owner owns, and how both are named. For
audits and reports: any thread may call, none on a hot path, and nothing here initialises CUDA or imports torch."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
import types
import weakref
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

SHARED_POOL = (0, 0)
"""The id of torch's pool for all that is in no private one."""

HISTORY = 100_000
"""Events of torch's allocator that are kept at least, where an audit asked for its history."""

DEPTH, BREADTH = 3, 4096  # how far an owner is searched for memory


class Block(NamedTuple):
    """A piece of memory that an allocator hands out, or keeps."""

    address: int
    size: int
    used: bool
    """Somebody has it: neither free nor waiting to become free."""
    pool: tuple[int, int]
    segment: int
    """The address of what the allocator got from the driver."""
    requested: int
    """The bytes asked for."""


class Event(NamedTuple):
    """What an allocator did."""

    action: str
    """"alloc", "free" or "unmap" (the memory went back to the driver)."""
    address: int
    size: int
    when: int
    """Microseconds since 1970."""


class Allocator(Protocol):
    """An allocator that hands out pieces of larger ones, which is why the driver cannot say what is free."""

    def blocks(self) -> list[Block]: ...
    def freed(self) -> int:
        """How many blocks were ever freed: while that stays the same, nothing was."""

    def watch(self) -> None:
        """Begins to remember events."""

    def events(self, since: int) -> tuple[list[Event], bool]:
        """Those from `since` on, and whether they are all."""


class Nothing:
    """Where torch has not touched a GPU, there is no allocator to ask; nor where it hands out what the driver (its backend
    "cudaMallocAsync") or somebody's plugin gives it, piece by piece: then the driver says what is there, but no history."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole

    def blocks(self) -> list[Block]:
        return []

    def freed(self) -> int:
        return 0

    def watch(self) -> None:
        return

    def events(self, since: int) -> tuple[list[Event], bool]:
        return [], self.whole


class TorchAllocator:
    """torch's caching allocator. Its history is taken over as it is read, so that no reading costs more than what is new. It
    comes with all segments: torch 2.11 does not survive being asked for those of a pool that is not there."""

    ACTIONS = {"free_requested": "free", "segment_free": "unmap", "segment_unmap": "unmap", "alloc": "alloc"}

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.known_from = 0  # microseconds: from here on nothing was missed. 0: nobody watches
        self.kept: list[Event] = []  # in order, at most twice HISTORY
        self.lock = threading.Lock()
        self.form = 0  # of the argument that this torch's snapshot takes

    def snapshot(self, pool: tuple[int, int], history: bool) -> dict[str, Any]:
        forms: list[Any] = [(*pool, history), pool, None]  # the newest torch's first
        while True:
            try:
                return self.torch._C._cuda_memorySnapshot(forms[self.form])  # type: ignore[no-any-return]
            except (TypeError, ValueError, RuntimeError):
                if self.form == len(forms) - 1:
                    raise
                self.form += 1

    def blocks(self) -> list[Block]:
        found = []
        for segment in self.snapshot(SHARED_POOL, False)["segments"]:
            pool, start = tuple(segment.get("segment_pool_id", SHARED_POOL)), segment["address"]
            address = start
            for block in segment["blocks"]:
                size = block["size"]
                used = block["state"] == "active_allocated"
                found.append(Block(address, size, used, pool, start, block.get("requested_size", size)))
                address += size
        return found

    def freed(self) -> int:
        stats = self.torch._C._cuda_memoryStats
        return sum(stats(device)["allocation"]["all"]["freed"] for device in range(self.torch.cuda.device_count()))

    def enabled(self) -> bool:
        return bool(getattr(self.torch._C, "_cuda_isHistoryEnabled", lambda: self.known_from > 0)())

    def record(self) -> bool:
        """Has torch keep its history, and forget what it has. False: this torch forgets nothing."""
        record = self.torch.cuda.memory._record_memory_history
        options: dict[str, Any] = {"context": None, "stacks": "python", "max_entries": HISTORY}
        try:
            record("all", clear_history=True, **options)
        except TypeError:
            record("all", **options)
            return False
        return True

    def watch(self) -> None:
        with self.lock:
            if self.enabled():
                return  # ours already, or somebody else's: that one serves as well, and is not ours to change
            self.known_from, self.kept = now() if self.record() else 0, []

    def events(self, since: int) -> tuple[list[Event], bool]:
        with self.lock:
            if not self.enabled():
                self.known_from = 0
                return [], False
            if not self.known_from:
                events, _, known_from = self.read()
                return events[bisect_left(events, since, key=when) :], known_from <= since
            self.take_over()
            return self.kept[bisect_left(self.kept, since, key=when) :], self.known_from <= since

    def read(self) -> tuple[list[Event], bool, float]:
        """torch's history, in order, whether it overflowed at our size, and from when on it tells of all devices."""
        found, full, firsts = [], False, []
        for trace in self.snapshot(SHARED_POOL, True)["device_traces"]:
            full = full or len(trace) >= HISTORY
            for each in trace:
                action = self.ACTIONS.get(each["action"])
                if action:
                    found.append(Event(action, each["addr"], each["size"], each["time_us"]))
            firsts += [min(each["time_us"] for each in trace)] if trace else []  # each overflows by itself
        return sorted(found, key=when), full, max(firsts, default=math.inf)

    def take_over(self) -> None:
        """Makes torch's history ours, and empties it. What another thread frees between the two is lost, but not unnoticed."""
        before = self.freed()
        events, full, _ = self.read()
        self.record()
        if full or self.freed() != before:
            self.known_from = now()
        self.kept += events
        if len(self.kept) > 2 * HISTORY:
            self.known_from = max(self.known_from, self.kept[-HISTORY].when)
            self.kept = self.kept[-HISTORY:]


def when(event: Event) -> int:
    return event.when


def now() -> int:
    """Microseconds since 1970, the clock of torch's allocator."""
    return time.time_ns() // 1000


_nothing, _driver = Nothing(True), Nothing(False)
_torch: TorchAllocator | None = None


def allocator() -> Allocator:
    """torch's, once torch has begun to use a GPU."""
    global _torch
    torch = sys.modules.get("torch")
    if torch is None or not getattr(torch, "cuda", None) or not torch.cuda.is_initialized():
        return _nothing
    if torch.cuda.get_allocator_backend() != "native":
        return _driver
    if _torch is None:
        _torch = TorchAllocator(torch)
    return _torch


class Ranges:
    """Ranges that do not overlap, sorted: which one has an address?"""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        """(address, bytes) each; of several that begin at one place the largest counts."""
        largest: dict[int, int] = {}
        for start, size in ranges:
            largest[start] = max(size, largest.get(start, 0))
        self.starts = array("Q", sorted(largest))
        self.ends = array("Q", (start + largest[start] for start in self.starts))

    def find(self, address: int) -> int | None:
        """The number of the range that has it."""
        at = bisect_right(self.starts, address) - 1
        return at if at >= 0 and address < self.ends[at] else None


# ---- what an owner owns ----


def memory_of(owner: object) -> list[tuple[int, int]]:
    """(address, bytes) of the memory that an owner keeps alive, as far as it can be seen: tensors, storages, anything with
    `__cuda_array_interface__`, and what of these lies in its attributes, items or fields."""
    own = None if issubclass(type(owner), PLAIN) else _own(owner)  # most are one tensor
    if own is not None:
        return [own] if own[1] else []
    found: dict[int, int] = {}
    _search(owner, DEPTH, found, set())
    return list(found.items())


def _search(thing: Any, depth: int, found: dict[int, int], seen: set[int]) -> None:
    if id(thing) in seen or issubclass(type(thing), PLAIN):  # a dead proxy fails who asks it for its class
        return
    own = _own(thing)
    if own is not None:
        if own[1]:
            found[own[0]] = max(own[1], found.get(own[0], 0))
        return
    if not depth or len(seen) > BREADTH:
        return
    seen.add(id(thing))
    try:
        parts = list(_parts(thing))
    except Exception:  # of a class that makes them when asked
        return
    for part in parts:
        _search(part, depth - 1, found, seen)


FUNCTIONS: tuple[type, ...] = (types.FunctionType, types.BuiltinFunctionType)
PLAIN: tuple[type, ...] = (str, bytes, int, float, complex, type(None), type, types.ModuleType, *FUNCTIONS, *weakref.ProxyTypes)
"""What has no memory, or is not kept by who refers to it."""


def _own(thing: Any) -> tuple[int, int] | None:
    """The one range that is a tensor's, a storage's or an array's; None: it is none of these."""
    torch = sys.modules.get("torch")
    workspace = sys.modules.get("arena._workspace")
    try:
        if workspace is not None and isinstance(thing, workspace.Block):
            thing = thing.storage
        if torch is not None:
            if isinstance(thing, torch.Tensor):
                thing = thing.untyped_storage()
            if isinstance(thing, torch.UntypedStorage):
                address = thing.data_ptr()
                return address, thing.nbytes() if address else 0  # on the meta device there are none
        if hasattr(type(thing), "__cuda_array_interface__"):
            return _extent(thing.__cuda_array_interface__)
    except Exception:  # a fake tensor, a freed array, a torch that is half imported
        return None
    return None


def _extent(interface: dict[str, Any]) -> tuple[int, int]:
    """(address, bytes) from an array's first byte to its last: strides leave gaps, and may be negative."""
    start, size, shape = interface["data"][0], int(interface["typestr"][2:]), interface["shape"]
    strides = interface.get("strides")
    if strides is None or 0 in shape:
        return start, size * math.prod(shape)
    steps = [(count - 1) * stride for count, stride in zip(shape, strides, strict=True)]
    return start + sum(each for each in steps if each < 0), sum(map(abs, steps)) + size


def _parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, dict):
        yield from list(thing.values())[:BREADTH]
    elif isinstance(thing, (list, tuple, set, frozenset)):
        yield from list(thing)[:BREADTH]
    else:
        yield from list(getattr(thing, "__dict__", {}).values())
        for kind in type(thing).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                with contextlib.suppress(AttributeError):
                    yield getattr(thing, name)


# ---- words for people ----


def name_of(owner: object) -> str:
    """What an owner is: its type, and of a tensor its shape. Never its `repr`, which may launch kernels."""
    kind = type(owner)
    name = kind.__name__ if kind.__module__ in ("builtins", "torch", "__main__") else f"{kind.__module__}.{kind.__name__}"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(owner, torch.Tensor):
        with contextlib.suppress(Exception):
            return f"{name} {str(owner.dtype).removeprefix('torch.')}{list(owner.shape)}"
    return name


def bytes_of(count: int) -> str:
    """A number of bytes, short: "32 MiB"."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if value >= 100 or value == int(value) else f"{value:.1f} {units[0]}"
