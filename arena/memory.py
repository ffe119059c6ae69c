"""Which memory there is and whose it is: the blocks of torch's allocator, what an owner owns, and how both are named. For
audits and reports: any thread may call, none on a hot path, and nothing here initialises CUDA or imports torch."""

from __future__ import annotations

import contextlib
import math
import sys
import time
import types
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

SHARED_POOL = (0, 0)
"""The id of torch's pool for all that is in no private one."""

HISTORY = 100_000
"""Events of torch's allocator that are kept where an audit asked for its history; the oldest are overwritten."""

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
    """Where torch has not touched a GPU, there is no allocator to ask."""

    def blocks(self) -> list[Block]:
        return []

    def freed(self) -> int:
        return 0

    def watch(self) -> None:
        return

    def events(self, since: int) -> tuple[list[Event], bool]:
        return [], True


class TorchAllocator:
    """torch's caching allocator."""

    FREES = {"free_requested": "free", "segment_free": "unmap", "segment_unmap": "unmap", "alloc": "alloc"}
    lean = True  # torch can leave the history out of a snapshot

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.watched_from = 0  # microseconds; 0: not asked to watch

    def snapshot(self, history: bool) -> dict[str, Any]:
        if self.lean:
            try:
                return self.torch._C._cuda_memorySnapshot((*SHARED_POOL, history))  # type: ignore[no-any-return]
            except Exception:  # an older one: always with history
                TorchAllocator.lean = False
        return self.torch._C._cuda_memorySnapshot(None)  # type: ignore[no-any-return]

    def blocks(self) -> list[Block]:
        found = []
        for segment in self.snapshot(False)["segments"]:
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

    def watch(self) -> None:
        if self.watched_from or getattr(self.torch._C, "_cuda_isHistoryEnabled", lambda: False)():
            return  # somebody's own history serves as well, and is not ours to change
        self.torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=HISTORY)
        self.watched_from = now()

    def events(self, since: int) -> tuple[list[Event], bool]:
        enabled = bool(self.watched_from) or getattr(self.torch._C, "_cuda_isHistoryEnabled", lambda: False)()
        if not enabled:
            return [], False
        found, whole = [], bool(self.watched_from) and self.watched_from <= since
        for trace in self.snapshot(True)["device_traces"]:
            if len(trace) >= HISTORY and trace[0]["time_us"] > since:
                whole = False
            for each in trace:
                action = self.FREES.get(each["action"])
                if action and each["time_us"] >= since:
                    found.append(Event(action, each["addr"], each["size"], each["time_us"]))
        return found, whole


def now() -> int:
    """Microseconds since 1970, the clock of torch's allocator."""
    return time.time_ns() // 1000


_nothing = Nothing()
_torch: TorchAllocator | None = None


def allocator() -> Allocator:
    """torch's, once torch has begun to use a GPU."""
    global _torch
    torch = sys.modules.get("torch")
    if torch is None or not getattr(torch, "cuda", None) or not torch.cuda.is_initialized():
        return _nothing
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
    own = _own(owner)  # most are one tensor
    if own is not None:
        return [own] if own[1] else []
    found: dict[int, int] = {}
    _search(owner, DEPTH, found, set())
    return list(found.items())


def _search(thing: Any, depth: int, found: dict[int, int], seen: set[int]) -> None:
    if id(thing) in seen or isinstance(thing, PLAIN):
        return
    own = _own(thing)
    if own is not None:
        if own[1]:
            found[own[0]] = max(own[1], found.get(own[0], 0))
        return
    if not depth or len(seen) > BREADTH:
        return
    seen.add(id(thing))
    for part in _parts(thing):
        _search(part, depth - 1, found, seen)


PLAIN = (str, bytes, int, float, complex, type(None), type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def _own(thing: Any) -> tuple[int, int] | None:
    """The one range that is a tensor's, a storage's or an array's; None: it is none of these."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None:
            if isinstance(thing, torch.Tensor):
                thing = thing.untyped_storage()
            if isinstance(thing, torch.UntypedStorage):
                return thing.data_ptr(), thing.nbytes()
        if hasattr(type(thing), "__cuda_array_interface__"):
            interface = thing.__cuda_array_interface__
            size = int(interface["typestr"][2:])
            return interface["data"][0], size * math.prod(interface["shape"])
    except Exception:  # a fake tensor, a freed array, a torch that is half imported
        return None
    return None


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
