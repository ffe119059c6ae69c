"""`arena.report()`: what every living graph and every workspace slot holds, as a table, as JSON, as a page with a picture; and
`arena.owner_of(ptr)`. It asks the registry for its lists and resolves their owners to memory when first asked; what it learnt
of a list is kept as long as it is the same and has as many owners. Any thread may call it; nothing of it runs otherwise.
"""

from __future__ import annotations

import json
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from arena import _audit, _registry, captures
from arena.memory import SHARED_POOL, Ranges, TorchAllocator, allocator, bytes_of, memory_of, name_of

NUMBERS = {"owners", "outside", "inside", "shared", "retired", "bytes", "high water"}  # columns to be read from the right

__all__ = ["GraphReport", "Life", "Owner", "Report", "SlotReport", "owner_of", "report", "workspaces"]


@dataclass(slots=True)
class GraphReport:
    """What one graph holds."""

    name: str
    capture: int
    owners: int
    """Python owners; one retained twice counts twice."""
    opaque: int
    """Owners from C, whose memory nobody can see."""
    outside: int
    """Bytes of owners outside the graph's own pool."""
    inside: int
    """Bytes of owners inside it: the pool lives as long as the graph without them, so these are retained for nothing."""
    shared: int
    """Of both, bytes that other graphs hold too."""
    shared_with: list[str]
    retired: int
    """Bytes of retired workspace blocks that the graph keeps."""
    born: float
    """When, in seconds since 1970; 0: unknown."""


@dataclass(slots=True)
class SlotReport:
    """One workspace slot, as the workspace tells it."""

    name: str
    bytes: int
    """Of its block now."""
    high_water: int
    """The most bytes that anyone asked for."""
    set_by: str
    """Who did."""
    holders: list[str]
    """What holds its block, besides the slot: graphs and views."""
    retired: list[tuple[int, int]] = field(default_factory=list)
    """(address, bytes) of blocks that it has given up and that graphs still use."""

    def __post_init__(self) -> None:
        self.retired = [(address, size) for address, size in self.retired]  # JSON makes lists of them


@dataclass(slots=True)
class Life:
    """From the begin of a capture to the death of its owner list."""

    name: str
    capture: int
    owners: int
    born: float
    died: float | None
    """None: alive."""


@dataclass(slots=True)
class Report:
    """What is held at one moment. `str()` is a table."""

    when: float
    graphs: list[GraphReport]
    """The one that holds most first."""
    slots: list[SlotReport]
    lives: list[Life]
    """The living, and the last that died; in order of birth."""
    owners: int
    """All that living graphs retain, those that no list below tells of included."""
    bytes: int
    """All memory of owners, a shared block once."""
    reserved: int
    """Bytes that torch's allocator has from the driver."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Report:
        """From what `as_dict` gave, or `json`.

        Raises:
            ValueError: Neither gave this.
        """
        parts: dict[str, Any] = {"graphs": GraphReport, "slots": SlotReport, "lives": Life}
        try:
            made: dict[str, Any] = {name: [kind(**each) for each in told[name]] for name, kind in parts.items()}
            return cls(**{**told, **made})
        except (TypeError, KeyError) as error:
            raise ValueError(f"it has not the parts of a report ({type(error).__name__}: {error})") from error

    def json(self, path: str | Path | None = None) -> str:
        """As JSON; also written to `path`."""
        text = json.dumps(self.as_dict(), indent=1)
        if path is not None:
            Path(path).write_text(text)
        return text

    def html(self, path: str | Path | None = None) -> str:
        """As one page that needs nothing else, with a picture; also written to `path`."""
        from arena import page

        text = page.render(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8", errors="replace")  # a file's name may have what is no Unicode
        return text

    def rows(self) -> list[tuple[str, ...]]:
        """The table of graphs, its head first."""
        rows: list[tuple[str, ...]] = [("graph", "owners", "outside", "inside", "shared", "retired", "shared with")]
        return rows + [
            (
                each.name,
                str(each.owners + each.opaque),
                bytes_of(each.outside),
                bytes_of(each.inside),
                bytes_of(each.shared),
                bytes_of(each.retired),
                _others(each.shared_with),
            )
            for each in self.graphs
        ]

    def slot_rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("slot", "bytes", "high water", "set by", "holders", "retired")]
        return rows + [
            (
                each.name,
                bytes_of(each.bytes),
                bytes_of(each.high_water),
                each.set_by,
                _some(each.holders),
                bytes_of(sum(size for _, size in each.retired)),
            )
            for each in self.slots
        ]

    def __str__(self) -> str:
        parts = [self.total(), _table(self.rows())]
        if self.slots:
            parts.append(_table(self.slot_rows()))
        return "\n\n".join(parts)

    def print(self) -> None:
        """On the terminal; with `rich`, where that is installed."""
        try:
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text
        except ImportError:
            print(self)
            return
        console = Console()
        for title, rows in (("Graphs", self.rows()), ("Workspace", self.slot_rows())):
            if title == "Graphs" or len(rows) > 1:
                table = Table(title=title, title_justify="left")
                for each in rows[0]:
                    right = each in NUMBERS
                    table.add_column(each, justify="right" if right else "left", overflow="fold", no_wrap=right)
                    table.columns[-1].min_width = None if right else 12
                for row in rows[1:]:
                    table.add_row(*map(Text, row))  # as they are: a name may have what rich takes for its own marks
                console.print(table)
        console.print(self.total())

    def total(self) -> str:
        """One line."""
        graphs, owners = len(self.graphs), self.owners
        hold = "graph holds" if graphs == 1 else "graphs hold"
        return f"{graphs} {hold} {owners} owner{'s' * (owners != 1)}, {bytes_of(self.bytes)}"

    __repr__ = __str__


@dataclass(frozen=True, slots=True)
class Owner:
    """What is known of an address."""

    address: int
    by: str
    """One sentence."""
    start: int
    """Of the memory that has it; 0: unknown."""
    bytes: int
    graphs: list[str]
    """The living graphs that hold it."""
    objects: list[Any]
    """The owners of these graphs that have it."""

    def __str__(self) -> str:
        return f"{self.address:#x}: {self.by}"


def _slots() -> Iterable[SlotReport]:
    """Of the managers of `arena.workspace` and of its vLLM plugin, if there are any."""
    loaded = sys.modules.get("arena._workspace")
    if loaded is None:
        return
    storages = sys.modules["torch"].UntypedStorage
    holders: dict[int, list[str]] = {}
    for capture, _, _, _, owners, _, birth in _registry.lists():
        for owner in owners:
            if isinstance(owner, loaded.Block):
                holders.setdefault(id(owner), []).append(_known_as(capture, birth)[0])
    for manager in list(loaded.managers):
        for place, slot in enumerate(manager._current_workspaces.parts):
            block = slot.current  # which another thread may replace
            if block is None and slot.high is None:
                continue
            ubatch, lane = divmod(place, manager._num_lanes)
            asked, specs, site = slot.high or (0, (), "")
            shapes = " + ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in specs)
            retired = []
            for reference, _, nbytes, _ in list(slot.retired):
                alive = storages._new_with_weak_ptr(reference.cdata)
                if alive is not None:
                    retired.append((alive.data_ptr(), nbytes))
            yield SlotReport(
                f"ubatch {ubatch}, lane {lane}",
                block.nbytes if block is not None else 0,
                asked,
                f"{site}: {shapes}" if site else "",
                holders.get(id(block), []),
                retired,
            )


workspaces: list[Callable[[], Iterable[SlotReport]]] = [_slots]
"""What tells of workspace slots: functions that make a `SlotReport` of each. Others than `arena.workspace` may add theirs."""


# ---- what is known of a list, kept ----


@dataclass(slots=True)
class _Known:
    owners: int
    birth: Any  # another capture into the same graph has its number
    outside: int
    inside: int
    ranges: dict[int, int]  # address: bytes
    starts: list[int]  # of the ranges, in order

    def begins_in(self, start: int, end: int) -> bool:
        """Whether one of its ranges does."""
        at = bisect_left(self.starts, start)
        return at < len(self.starts) and self.starts[at] < end


_known: dict[int, _Known] = {}  # by capture
_summary: tuple[object, dict[int, tuple[int, list[int]]], int] | None = None  # (of what, sharing by capture, bytes in all)


def report() -> Report:
    """What every living graph and every workspace slot holds now.

    Counts are always at hand. The memory of owners is looked up when first asked for and then kept; an owner that changes its
    memory later is reported with what it had. A block that several graphs hold is counted with each of them, and once in the
    total.

    Returns:
        A `Report`: print it, or ask it for `json()` or `html()`.
    """
    lists = _registry.lists()
    learnt = _learn(lists)
    sharing, total = _share(lists, learnt)
    slots = [each for provider in workspaces for each in provider()]
    retired = [range for each in slots for range in each.retired]
    known_as = {each[0]: _known_as(each[0], each[6]) for each in lists}
    graphs = []
    for capture, _, _, _, owners, opaque, _ in lists:
        if not owners and not opaque:
            continue
        known = learnt[capture]
        shared, others = sharing[capture]
        kept = sum(size for start, size in retired if known.begins_in(start, start + size))
        name, born = known_as[capture]
        graphs.append(
            GraphReport(
                name=name,
                capture=capture,
                owners=len(owners),
                opaque=opaque,
                outside=known.outside,
                inside=known.inside,
                shared=shared,
                shared_with=[known_as[each][0] for each in others],
                retired=kept,
                born=born,
            )
        )
    graphs.sort(key=lambda each: (-each.outside - each.inside, each.capture))
    lives = [Life(each.name, each.capture, each.owners + each.opaque, each.born, None) for each in graphs]
    for capture, count, when, birth in _registry.died():
        if count:
            name, born = _known_as(capture, birth)
            lives.append(Life(name, capture, count, born or when, when))
    lives.sort(key=lambda each: (each.born, each.capture))
    return Report(time.time(), graphs, slots, lives, _registry.stats().owners, total, _reserved())


def _known_as(capture: int, birth: Any) -> tuple[str, float]:
    """The name of a capture, and when it began, in seconds; 0: unknown."""
    noted = captures.of(capture, birth)
    return (noted.name, noted.began / 1e6) if noted else (f"capture {capture}", 0.0)


def _learn(lists: list[Any]) -> dict[int, _Known]:
    """What is known of these lists, by capture: looks up the memory of owners that are new. Other threads may do so meanwhile,
    with more lists or with fewer: what is known is replaced, never changed."""
    global _known
    before, learnt, new = _known, {}, []
    for each in lists:
        known = before.get(each[0])
        if known is not None and (known.owners, known.birth) == (len(each[4]), each[6]):
            learnt[each[0]] = known
        else:
            new.append(each)
    if not new:
        _known = learnt
        return learnt
    blocks = allocator().blocks()
    ranges = Ranges((each.address, each.size) for each in blocks)
    pools = {each.address: each.pool for each in blocks}
    looked: dict[int, list[tuple[int, int]]] = {}  # by owner: graphs share them
    where: dict[int, tuple[int, int]] = {}  # pool by address
    for capture, _, _, _, owners, _, birth in new:
        noted = captures.of(capture, birth)
        pool = noted.pool if noted else None
        known = _Known(len(owners), birth, 0, 0, {}, [])
        for owner in owners:
            if id(owner) not in looked:
                looked[id(owner)] = memory_of(owner)
            for start, size in looked[id(owner)]:
                known.ranges[start] = max(size, known.ranges.get(start, 0))
        for start, size in known.ranges.items():
            if start not in where:
                number = ranges.find(start)
                where[start] = SHARED_POOL if number is None else pools[ranges.starts[number]]
            if _is_inside(where[start], pool):
                known.inside += size
            else:
                known.outside += size
        known.starts = sorted(known.ranges)
        learnt[capture] = known
    _known = learnt
    return learnt


def _is_inside(there: tuple[int, int], pool: tuple[int, int] | None) -> bool:
    """Whether a block of the pool `there` is in the graph's own; of a graph whose pool is unknown, in any private one."""
    return there == pool != SHARED_POOL if pool is not None else there != SHARED_POOL


def _share(lists: list[Any], learnt: dict[int, _Known]) -> tuple[dict[int, tuple[int, list[int]]], int]:
    """By capture, the bytes that others hold too and who they are; and the bytes of all, shared ones once."""
    global _summary
    state = tuple((each[0], len(each[4]), each[6]) for each in lists)
    summary = _summary  # another thread may replace it
    if summary is not None and summary[0] == state:
        return summary[1], summary[2]
    holders: dict[int, int] = {}  # by address, a bit for each list
    sizes: dict[int, int] = {}
    for number, (capture, *_) in enumerate(lists):
        for start, size in learnt[capture].ranges.items():
            holders[start] = holders.get(start, 0) | 1 << number
            if size > sizes.get(start, 0):
                sizes[start] = size
    sharing = {}
    for number, (capture, *_) in enumerate(lists):
        shared, all_of, own = 0, 0, 1 << number
        for start, size in learnt[capture].ranges.items():
            if holders[start] != own:
                shared += size
                all_of |= holders[start]
        all_of &= ~own
        sharing[capture] = shared, [each[0] for other, each in enumerate(lists) if all_of >> other & 1]
    total = sum(sizes.values())
    _summary = state, sharing, total
    return sharing, total


def _reserved() -> int:
    """Without a snapshot: torch keeps the sum."""
    if not isinstance(allocator(), TorchAllocator):
        return 0
    torch = sys.modules["torch"]
    return sum(int(torch.cuda.memory_reserved(device)) for device in range(torch.cuda.device_count()))


def owner_of(ptr: int) -> Owner:
    """Whose memory an address is in.

    Args:
        ptr: An address, as an int of 64 bits: a tensor's `data_ptr()`, or one from a fault report.

    Returns:
        An `Owner`, whose `by` says what is known: a retained owner and its graphs, a workspace slot, a block of torch's
        allocator, an allocation of somebody else, or nothing.
    """
    if isinstance(ptr, bool) or not isinstance(ptr, int) or not 0 <= ptr < 1 << 64:
        raise TypeError(f"owner_of() needs an address as an int, not {ptr!r}")
    graphs, objects, range = [], [], (0, 0)
    for capture, _, _, _, owners, _, birth in _registry.lists():
        here = [(owner, each) for owner in owners for each in memory_of(owner) if each[0] <= ptr < each[0] + each[1]]
        if here:
            graphs.append(_known_as(capture, birth)[0])
            objects += [owner for owner, _ in here]
            range = here[0][1]
    where, start, size = _where(ptr)
    for slot in (each for provider in workspaces for each in provider()):
        if any(address <= ptr < address + size for address, size in slot.retired):
            where = f"a retired block of workspace slot {slot.name}, {where}"
    if graphs:
        by = f"{name_of(objects[0])} ({bytes_of(range[1])}), retained by {_some(graphs)}; {where}"
        return Owner(ptr, by, *range, graphs, objects)
    return Owner(ptr, f"no graph's; {where}", start, size, [], [])


def _where(ptr: int) -> tuple[str, int, int]:
    for block in allocator().blocks():
        if block.address <= ptr < block.address + block.size:
            state = "block in use" if block.used else "free block"
            pool = "" if block.pool == SHARED_POOL else f", private pool {block.pool[0]}.{block.pool[1]}"
            return f"a {state} of torch's ({bytes_of(block.size)}), segment {block.segment:#x}{pool}", *block[:2]
    mode = _registry.enter_relaxed()
    try:
        told = _audit.pointed(ptr)
    except _registry.DriverError as error:
        return f"not torch's, and more cannot be told: {error}", 0, 0
    finally:
        _registry.leave_relaxed(mode)
    if told is None:
        return "no memory that the driver knows", 0, 0
    kind = "host memory" if told[0] == 1 else f"memory of device {told[4]}"
    return f"not torch's: {kind} ({bytes_of(told[2])})", told[1], told[2]


# ---- words ----


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _others(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} graphs" if names else ""


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
