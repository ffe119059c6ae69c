"""`arena.audit(graph)`: which memory a captured graph points into, and who keeps it.

A captured graph is read back, each pointer in its nodes is resolved to an allocation, and the allocations are sorted: held,
external, freed, and what cannot be told. `Audit.check()` says what has changed since. Any thread may call it; it is in relaxed
capture mode, so it breaks nobody's capture. Nothing of it runs unless it is asked for; where that is wanted, arena/watching.py
asks at each capture.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from arena import _audit, _registry, captures
from arena.memory import Allocator, Block, Event, Ranges, allocator, bytes_of, memory_of, name_of, now

__all__ = ["Allocation", "Audit", "AuditError", "AuditWarning", "Finding", "Use", "audit"]

PLAIN_PARAMETER = 64
"""Bytes up to which a parameter is taken for pointers and numbers alone. A larger struct may have words that nobody has set,
with stale addresses in them: those need a witness."""

HOST, DEVICE = 1, 2  # memory types of the driver


class AuditError(RuntimeError):
    """An audit that was asked to raise has findings."""

    __module__ = "arena"


class AuditWarning(UserWarning):
    """An audit that was asked to warn has findings."""

    __module__ = "arena"


@dataclass(frozen=True, slots=True)
class Use:
    """One place in a graph where a pointer stands."""

    kind: str
    """"kernel", "memcpy" or "memset"."""
    name: str
    """The kernel's, as the driver gives it; else the kind."""
    node: tuple[int, ...]
    """The node's number in its graph, with those of the graphs around it."""
    parameter: int
    """Of a kernel, from 0 on; of a copy 0 is the destination and 1 the source."""
    offset: int
    """Bytes into that parameter."""
    address: int

    def __str__(self) -> str:
        where = ".".join(map(str, self.node))
        if self.kind != "kernel":
            end = ("destination", "source")[self.parameter]
            return f"{self.kind} (node {where}), {end}"
        inside = f" at byte {self.offset}" if self.offset else ""
        return f"kernel {self.name} (node {where}), parameter {self.parameter}{inside}"


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory that the graph points into."""

    state: str
    """"held", "external", "host", "foreign" or "possible"."""
    by: str
    """What holds it, or what is known of it."""
    address: int
    bytes: int
    segment: int
    """The address of what the driver handed out; 0: unknown."""
    uses: tuple[Use, ...]

    def __str__(self) -> str:
        return f"{self.address:#x} ({bytes_of(self.bytes)}), {self.by}: {_first_of(self.uses)}"


@dataclass(frozen=True, slots=True)
class Finding:
    """Memory that the graph uses and that is no longer what it was when it was captured."""

    what: str
    """"freed", "handed out again", or "moved": its owner has other memory now."""
    address: int
    bytes: int
    uses: tuple[Use, ...]
    detail: str

    def __str__(self) -> str:
        return f"{self.what}: {self.address:#x} ({bytes_of(self.bytes)}), {self.detail}: {_first_of(self.uses)}"


def _first_of(uses: tuple[Use, ...]) -> str:
    return f"{uses[0]}" + (f" and {len(uses) - 1} more" if len(uses) > 1 else "") if uses else "no use known"


@dataclass(slots=True)
class _Tracked:
    """An allocation that `check` looks at again."""

    address: int
    bytes: int
    requested: int
    id: int  # the driver's, of what lies there; 0: unknown
    words: list[int]
    torch: bool  # torch's allocator hands it out
    owner: tuple[int, int] | None = None  # (number in the owner list, address that the owner had)
    gone: bool = False  # was seen free once


def audit(
    graph: Any, *, pool: tuple[int, int] | None = None, capture: int | None = None, allocations: Allocator | None = None
) -> Audit:
    """Reads a captured graph and sorts the memory that it points into.

    Args:
        graph: A `torch.cuda.CUDAGraph(keep_graph=True)` that was captured, a `cuda.core` graph, an object whose `handle` is
            a CUgraph, or that handle as an int. A graph that is not kept is read at the end of its capture:
            `arena.torch.graph(..., audit="warn")`.
        pool: The id of the graph's own memory pool, where the graph cannot tell.
        capture: The capture's id, where the graph cannot tell; None: the live capture with that handle.
        allocations: What hands out memory, instead of torch's allocator.

    Returns:
        An `Audit`: `findings` are what is wrong, the other lists what was seen.

    Raises:
        TypeError: `graph` is none of these.
        AuditError: The graph's template is not kept or was not captured.
        DriverError: There is no driver, it is older than CUDA 12.4, or it does not know the graph.
    """
    handle, own, number, known = _handle_of(graph)
    if capture is None:
        capture = number
    lists = _registry.lists()
    if capture is None and not known:
        capture = max((each[0] for each in lists if each[1] == handle), default=None)
    noted = captures.of(capture)
    mode = _registry.enter_relaxed()
    try:
        seen = Audit(
            _audit.read(handle),
            capture=capture,
            pool=pool or own or (noted.pool if noted else None),
            since=noted.began if noted else 0,
            alive=None,
            source=allocations or allocator(),
        )
        # Of other captures the first owner was seen, and not the begin.
        seen.exact = seen.exact and any(each[0] == capture and each[2] for each in lists)
        return seen
    finally:
        _registry.leave_relaxed(mode)


def _handle_of(graph: Any) -> tuple[int, tuple[int, int] | None, int | None, bool]:
    """(CUgraph, pool, capture id, whether that None means that it has no owners), where the graph can tell."""
    if hasattr(graph, "raw_cuda_graph"):
        try:
            handle = graph.raw_cuda_graph()
        except RuntimeError as error:
            raise AuditError(
                "this graph's template is not there to be read (keep_graph=True keeps it; arena.torch.graph(..., audit='warn') "
                f"reads it at the end of the capture): {error}"
            ) from error
        held = getattr(graph, "_arena_capture", None)
        begun = "_arena_capture" in getattr(graph, "__dict__", ())
        return int(handle), captures.pool_of(graph), held.id if held is not None else None, begun
    handle = getattr(graph, "handle", graph)
    if isinstance(handle, bool) or not hasattr(handle, "__int__") or isinstance(handle, (str, float)):
        raise TypeError(f"a graph is a torch.cuda.CUDAGraph, has a handle or is one, as an int; got {type(graph).__name__}")
    if int(handle) <= 0:
        raise TypeError(f"{int(handle)} is not a graph handle")
    return int(handle), None, None, False


class Audit:
    """What a graph points into, sorted. `findings` empty: nothing is wrong that an audit can see."""

    name: str
    """The graph's name, or where it was captured."""
    nodes: int
    held: list[Allocation]
    """In the graph's own pool, or an owner's that this graph retains."""
    external: list[Allocation]
    """Alive, and nobody keeps it for the graph: weights and inputs, and what was forgotten. The largest first."""
    host: list[Allocation]
    foreign: list[Allocation]
    """Device memory that torch's own allocator did not hand out: cudaMalloc, VMM, another library's."""
    possible: list[Allocation]
    """Words that look like pointers, and may not be."""
    unread: list[tuple[tuple[int, ...], str, str]]
    """(node, kind, reason) of what could not be read."""
    exact: bool
    """The allocator's history since the capture is there: a block handed out again at the same place and size is seen."""

    def __init__(
        self,
        nodes: _audit.Nodes,
        *,
        capture: int | None,
        pool: tuple[int, int] | None,
        since: int,
        alive: Ranges | None,
        source: Allocator,
    ) -> None:
        self._nodes, self._source, self._capture = nodes, source, capture
        noted = captures.of(capture)
        self.name = noted.name if noted else f"capture {capture}" if capture is not None else "a graph"
        self.nodes, self.unread = len(nodes), nodes.unread
        self.findings: list[Finding] = []
        self._tracked: list[_Tracked] = []
        self.held, self.external, self.host, self.foreign, self.possible = [], [], [], [], []
        self._freed, self._since = source.freed(), now()
        blocks = sorted(source.blocks())
        events, self.exact = source.events(since) if since else ([], False)
        owners = _Owners(capture)
        self._owned = owners.alive
        inside, outside = nodes.where(array("Q", (b.address for b in blocks)), array("Q", (b.address + b.size for b in blocks)))
        witness = _Witness(events, alive)
        for number, words in inside.items():
            self._sort_block(blocks[number], words, pool, owners, witness)
        self._sort_rest(outside, owners, witness, {each.address >> 36 for each in blocks})
        self.external.sort(key=lambda each: -each.bytes)

    # ---- sorting ----

    def _sort_block(
        self, block: Block, words: list[int], pool: tuple[int, int] | None, owners: _Owners, witness: _Witness
    ) -> None:
        private = block.pool != (0, 0)
        if private and block.pool == pool:
            self._put("held", "in the graph's own pool", block.address, block.size, block.segment, words)
            return
        where = f"pool {block.pool[0]}.{block.pool[1]}" if private else "torch's memory"
        found = witness.freed(self._values(words))
        if not block.used:
            seen = found or witness.alive(self._values(words))
            certain = seen is not None or ((not private or pool is not None) and self._plain(words))
            start, size = (seen or (block.address, block.size))[:2]
            if certain:
                self._find("freed", start, size, words, f"free in {where}")
            else:
                self._put("possible", f"a free block of {where}", block.address, block.size, block.segment, words)
            return
        holder = owners.holding(block.address, block.size)
        # What the graph retains may well have been allocated where something was freed during the capture.
        if found is not None and holder is None:
            self._find("handed out again", block.address, block.size, words, f"freed during the capture, used again in {where}")
            return
        tracked = _Tracked(block.address, block.size, block.requested, _id_at(block.address), words, True)
        self._tracked.append(tracked)
        if holder is not None:
            tracked.owner = holder[:2]
            self._put("held", holder[2], block.address, block.size, block.segment, words)
        else:
            self._put("external", where, block.address, block.size, block.segment, words)

    def _sort_rest(self, outside: dict[int, list[int]], owners: _Owners, witness: _Witness, windows: set[int]) -> None:
        """Words that lie in no block of the allocator."""
        # Words by allocation and owner: others may have pieces of the same.
        ranges: dict[tuple[int, tuple[int, int, str] | None], list[int]] = {}
        unknown: dict[int, list[int]] = {}
        allocations: dict[int, tuple[int, int, int, int, int, int]] = {}  # by start
        start = end = 0
        for value, words in sorted(outside.items()):
            if not start <= value < end:
                told = _audit.pointed(value)
                if told is None:
                    unknown[value] = words
                    continue
                start, end = told[1], told[1] + told[2]
                allocations[start] = told
                windows.add(start >> 36)
            ranges.setdefault((start, owners.holding(value, 1)), []).extend(words)
        for (start, holder), words in ranges.items():
            kind, _, size, number, device, _ = allocations[start]
            if holder is None and witness.freed(self._values(words)) is not None:
                self._find("handed out again", start, size, words, "freed during the capture, and then the driver's to give")
                continue
            self._tracked.append(_Tracked(start, size, size, number, words, False, holder[:2] if holder else None))
            if holder is not None:
                self._put("held", holder[2], start, size, start, words)
            elif kind == HOST:
                self._put("host", "page-locked host memory", start, size, start, words)
            else:
                self._put("foreign", f"device {device}'s, not torch's", start, size, start, words)
        for value, words in unknown.items():
            found = witness.freed([value])
            if found is not None:
                self._find("freed", found[0], found[1], words, "its memory went back to the driver")
            elif any(self._nodes.kinds[self._nodes.word(each)[0]] == "memcpy" for each in words):
                self._put("host", "pageable host memory, or no memory at all", value, 0, 0, words)
            elif value >> 36 in windows:
                self._put("possible", "no memory that the driver knows", value, 0, 0, words)

    def _put(self, state: str, by: str, address: int, size: int, segment: int, words: list[int]) -> None:
        getattr(self, state).append(Allocation(state, by, address, size, segment, self._uses(words)))

    def _find(self, what: str, address: int, size: int, words: list[int], detail: str) -> None:
        self.findings.append(Finding(what, address, size, self._uses(words), detail))

    def _uses(self, words: list[int]) -> tuple[Use, ...]:
        nodes, found = self._nodes, []
        for each in words:
            node, parameter, offset, _, value = nodes.word(each)
            kind = nodes.kinds[node]
            found.append(Use(kind, nodes.names[node] or kind, nodes.paths[node], parameter, offset, value))
        return tuple(found)

    def _values(self, words: list[int]) -> list[int]:
        return [self._nodes.word(each)[4] for each in words]

    def _plain(self, words: list[int]) -> bool:
        return any(self._nodes.word(each)[3] <= PLAIN_PARAMETER for each in words)

    # ---- checking ----

    def check(self) -> list[Finding]:
        """Looks again, between replays: what is not any more what was captured.

        Where nothing was freed in the process since the last look, that is all it costs to know it. Nothing is looked at once
        the graph is dead, which is known of one that retains owners. A block of torch that was
        freed and handed out again at the same place, with the same size, is seen only if the allocator's history is kept
        (`exact`), or if a look fell between the two.

        Returns:
            The findings, those of the audit itself included; also in `findings`.
        """
        mode = _registry.enter_relaxed()
        try:
            self._check()
        finally:
            _registry.leave_relaxed(mode)
        return self.findings

    def _check(self) -> None:
        owners = _Owners(self._capture)
        if self._owned and not owners.alive:
            return  # the graph is dead: what it used may go
        freed, since = self._source.freed(), now()
        blocks: Ranges | None = None
        again = any(each.gone and each.torch for each in self._tracked)
        if freed != self._freed or again:
            events, whole = self._source.events(self._since)
            # The allocator's clock is not ours: were one set, frees might seem to be older than the last look.
            whole = whole and sum(each.action == "free" for each in events) >= freed - self._freed
            self.exact = self.exact and whole
            witness = _Witness(events, None)
            # With all of the history, blocks need a look only where it says that one of the graph's went.
            if again or not whole or any(each.torch and witness.freed([each.address]) for each in self._tracked):
                now_there = self._source.blocks()
                by_start = {each.address: each for each in now_there}
                blocks = Ranges((each.address, each.size) for each in now_there)
            self._freed, self._since = freed, since
        left = []
        for each in self._tracked:
            finding: tuple[str, str] | None = None
            if not each.torch:
                finding = self._look_at_foreign(each)
            elif blocks is not None:
                number = blocks.find(each.address)
                block = by_start[blocks.starts[number]] if number is not None else None
                finding = self._look_at_block(each, block, witness)
            if finding is None and each.owner is not None:
                finding = owners.moved(*each.owner)
            if finding is None:
                left.append(each)
            else:
                self._replace(*finding, each)
                if finding[0] == "freed":
                    each.gone = True
                    left.append(each)  # it may be handed out again
        self._tracked = left

    def _look_at_block(self, each: _Tracked, block: Block | None, witness: _Witness) -> tuple[str, str] | None:
        if block is None:
            return "freed", "its memory went back to the driver"
        if not block.used:
            return "freed", "a free block of torch's allocator"
        again = (block.address, block.size, block.requested) != (each.address, each.bytes, each.requested)
        if each.gone or again or (each.id and _id_at(each.address) not in (0, each.id)):
            return "handed out again", f"now in a block of {bytes_of(block.size)} that others use"
        if witness.freed([each.address]) is not None:
            return "handed out again", "others use a block of the same size at the same place"
        return None

    @staticmethod
    def _look_at_foreign(each: _Tracked) -> tuple[str, str] | None:
        told = _audit.pointed(each.address)
        if told is None:
            return "freed", "the driver knows no memory there any more"
        if each.gone or (each.id and told[3] != each.id) or told[1:3] != (each.address, each.bytes):
            return "handed out again", "the driver has given that address to another allocation"
        return None

    def _replace(self, what: str, detail: str, each: _Tracked) -> None:
        """A finding for an allocation; one that was told before gives way."""
        uses = self._uses(each.words)
        self.findings = [old for old in self.findings if old.uses != uses]
        self.findings.append(Finding(what, each.address, each.bytes, uses, detail))

    # ---- telling ----

    def by_segment(self) -> dict[tuple[int, str], list[Allocation]]:
        """The external allocations, grouped by segment and by the kernel that uses them first."""
        groups: dict[tuple[int, str], list[Allocation]] = {}
        for each in self.external:
            groups.setdefault((each.segment, each.uses[0].name), []).append(each)
        return groups

    def as_dict(self) -> dict[str, Any]:
        """All of it, in types that JSON has."""

        def plain(each: Allocation | Finding) -> dict[str, Any]:
            return {
                **{name: getattr(each, name) for name in each.__slots__ if name != "uses"},
                "uses": [{name: getattr(use, name) for name in use.__slots__} for use in each.uses],
            }

        lists = ("findings", "held", "external", "host", "foreign", "possible")
        return {
            "name": self.name,
            "nodes": self.nodes,
            "exact": self.exact,
            **{name: [plain(each) for each in getattr(self, name)] for name in lists},
            "unread": self.unread,
        }

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.nodes} nodes, {len(self.findings)} finding{'s' * (len(self.findings) != 1)}"]
        lines += [f"  {each}" for each in self.findings]
        for name in ("held", "external", "host", "foreign", "possible"):
            found: list[Allocation] = getattr(self, name)
            if found:
                lines.append(f"  {name}: {len(found)}, {bytes_of(sum(each.bytes for each in found))}")
        lines += [f"  not read: {kind} (node {'.'.join(map(str, node))}): {reason}" for node, kind, reason in self.unread]
        return "\n".join(lines)

    __repr__ = __str__


def _id_at(address: int) -> int:
    """The driver's id of what lies there; 0: unknown, also where the driver cannot say. Torch's allocator says what is free."""
    try:
        told = _audit.pointed(address)
    except _registry.DriverError:
        return 0
    return told[3] if told is not None else 0


class _Owners:
    """What a capture retains, and where that lies."""

    def __init__(self, capture: int | None) -> None:
        self.owners: tuple[Any, ...] = ()
        self.alive = False  # a graph that retained nothing has no list to tell by
        self.born: Any = None
        self._began = ""  # what was done where it was born
        for number, _, managed, _, owners, _, birth in _registry.lists() if capture is not None else ():
            if number == capture:
                self.owners, self.alive, self.born = owners, True, birth
                self._began = "captured" if managed else "retained"
        self._ranges: list[tuple[int, int, int]] | None = None
        self._now: dict[int, dict[int, int]] = {}  # by owner: one may have the memory of many nodes

    def holding(self, address: int, size: int) -> tuple[int, int, str] | None:
        """(number, address that it has, words) of the first owner with memory in that range."""
        if self._ranges is None:
            self._ranges, end = [], 0
            for start, less, at in sorted((a, -n, at) for at, owner in enumerate(self.owners) for a, n in memory_of(owner)):
                if start - less > end:  # else a part of one before: a view
                    end = start - less
                    self._ranges.append((start, at, -less))
        # So their ends are in order, too: of those that begin before, the last reaches farthest.
        number = bisect_left(self._ranges, (address,))
        for start, at, bytes in self._ranges[max(number - 1, 0) : number + 1]:
            if start < address + size and address < start + bytes:
                where = f", {self._began} at {self.born[1]}:{self.born[2]}" if self.born else ""
                return at, start, f"owner {at}, {name_of(self.owners[at])}{where}"
        return None

    def moved(self, at: int, address: int) -> tuple[str, str] | None:
        """What to tell of an owner that had memory at that address, if neither it nor another has it any more."""
        if at >= len(self.owners):
            return None  # another list of the same capture
        if at not in self._now:
            self._now[at] = dict(memory_of(self.owners[at]))
        ranges = self._now[at]
        if address in ranges or self.holding(address, 1) is not None:
            return None
        there = ", ".join(f"{start:#x}" for start in ranges) or "nowhere"
        return "moved", f"owner {at}, {name_of(self.owners[at])}, is at {there} now"


class _Witness:
    """What is known of the past: what was freed since the capture began, and what was alive at its begin."""

    def __init__(self, events: Iterable[Event], alive: Ranges | None) -> None:
        self._frees = [(each.address, each.size) for each in events if each.action != "alloc"]
        self._touched = Ranges(_merged(sorted(self._frees)))
        self._alive = alive

    def freed(self, values: Iterable[int]) -> tuple[int, int] | None:
        """(address, bytes) of what was freed and had one of these addresses: the smallest, a block and not its segment."""
        for value in values:
            if self._touched.find(value) is not None:
                return min((each for each in self._frees if each[0] <= value < each[0] + each[1]), key=lambda each: each[1])
        return None

    def alive(self, values: Iterable[int]) -> tuple[int, int] | None:
        """(address, bytes) of what was in use at the begin and had one of these addresses."""
        for value in values:
            number = self._alive.find(value) if self._alive is not None else None
            if self._alive is not None and number is not None:
                return self._alive.starts[number], self._alive.ends[number] - self._alive.starts[number]
        return None


def _merged(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Sorted (address, bytes), with those that overlap or touch made one."""
    start = end = 0
    for address, size in ranges:
        if address > end:
            if end:
                yield start, end - start
            start = address
        end = max(end, address + size)
    if end:
        yield start, end - start
