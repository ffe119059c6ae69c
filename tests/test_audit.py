"""Audits on the simulated driver: planted graphs whose nodes point into planted memory. What is found on a real GPU is in
test_audit_gpu.py."""

import contextlib
import gc
import subprocess
import sys
import threading
import time
import warnings
import weakref

import planted
import pytest
from planted import Allocator, Array

import arena
from arena import _audit, _registry, auditing, captures, memory, watching
from arena.memory import Ranges, bytes_of, memory_of, name_of


@pytest.fixture
def cuda(simulated):
    return simulated


@pytest.fixture
def torch_memory(cuda):
    return Allocator(cuda)


@pytest.fixture
def stream(cuda):
    return cuda.Stream()


def word(value):
    return value.to_bytes(8, "little")


def look(graph, source, **options):
    return arena.audit(graph, allocations=source, **options)


def states(seen):
    return {name: len(getattr(seen, name)) for name in ("findings", "held", "external", "host", "foreign", "possible")}


@contextlib.contextmanager
def audited(stream, source, pool=None):
    """What arena.torch does around a capture that it audits. Yields a namespace that has `.audit` afterwards."""

    class Graph:
        _arena_audit_mode = "collect"

        def pool(self):
            if pool is None:
                raise RuntimeError("no pool")
            return pool

        def replay(self):
            self.replays = getattr(self, "replays", 0) + 1

    graph = Graph()
    begun = watching.began(graph, lambda: source)
    with stream.capture() as capture:
        captures.note(capture.id, graph, "decode B=4")
        yield graph
        read = watching.ending(begun, stream)
    graph.template = capture.graph
    watching.ended(graph, read)
    watching.mode.collected.clear()
    graph.audit = graph._arena_audit


# ---- reading ----


def test_each_kind_of_node_is_read_with_the_right_place(cuda, stream, torch_memory):
    a, b = torch_memory.array(4096), torch_memory.array(4096)
    inner = cuda.Graph()
    inner.add_node("inner", a.address)
    with stream.capture() as capture:
        stream.kernel("mul", 7, a.address + 16, b"\1\0\0\0" * 3 + bytes(4) + word(b.address + 8))
        stream.copy(a.address, b.address, 64)
        stream.fill(b.address, 64)
    capture.graph.add_child(inner)
    capture.graph.add_conditional().add_node("body", b.address + 32)
    seen = look(capture.graph, torch_memory)
    uses = [use for each in seen.external for use in each.uses]
    places = {(use.kind, use.name, use.node, use.parameter, use.offset, use.address) for use in uses}
    assert places == {
        ("kernel", "mul", (0,), 1, 0, a.address + 16),
        ("kernel", "mul", (0,), 2, 16, b.address + 8),
        ("memcpy", "memcpy", (1,), 0, 0, a.address),
        ("memcpy", "memcpy", (1,), 1, 0, b.address),
        ("memset", "memset", (2,), 0, 0, b.address),
        ("kernel", "inner", (3, 0), 0, 0, a.address),
        ("kernel", "body", (4, 0), 0, 0, b.address + 32),
    }
    assert seen.nodes == 7
    assert seen.findings == seen.unread == []


def test_parameters_that_were_given_as_one_block_are_read_too(stream, torch_memory):
    a, b = torch_memory.array(512), torch_memory.array(512)
    with stream.capture() as capture:
        stream.kernel("add", b"\1\0\0\0", a.address, bytes(8) + word(b.address), packed=True)
    uses = [use for each in look(capture.graph, torch_memory).external for use in each.uses]
    assert sorted((use.parameter, use.offset, use.address) for use in uses) == [(1, 0, a.address), (2, 8, b.address)]


def test_a_graph_under_capture_and_an_empty_one_can_be_read(cuda, stream, torch_memory):
    a = torch_memory.array(512)
    with stream.capture() as capture:
        stream.kernel("mul", a.address)
        assert _audit.read(capture.graph.handle).names == ["mul"]
    assert len(_audit.read(cuda.Graph().handle)) == 0


def test_a_handle_that_is_none_is_told(cuda, torch_memory):
    with pytest.raises(arena.DriverError, match="cuGraphGetNodes failed for graph 0x10"):
        look(16, torch_memory)
    for wrong in ("0x10", None, 1.5, True, object()):
        with pytest.raises(TypeError, match="a graph is a torch"):
            look(wrong, torch_memory)
    with pytest.raises(TypeError, match="0 is not a graph handle"):
        look(0, torch_memory)


def test_a_node_that_cannot_be_read_is_listed_and_the_rest_is_read(cuda, stream, torch_memory):
    a = torch_memory.array(512)
    with stream.capture() as capture:
        stream.kernel("first", a.address)
        stream.kernel("second", a.address)
    cuda.fail("cuGraphKernelNodeGetParams", 1, 999)
    seen = look(capture.graph, torch_memory)
    assert seen.unread == [((0,), "kernel", "cuGraphKernelNodeGetParams: 999")]
    assert [use.name for use in seen.external[0].uses] == ["second"]
    assert "not read: kernel (node 0)" in str(seen)


@pytest.mark.parametrize("nth", [1, 2], ids=["the first", "a later one"])
def test_a_kernel_whose_parameters_the_driver_does_not_tell_is_listed(cuda, stream, torch_memory, nth):
    a = torch_memory.array(512)
    with stream.capture() as capture:
        stream.kernel("add", 7, a.address)
    cuda.fail("cuFuncGetParamInfo", nth, 999)
    assert look(capture.graph, torch_memory).unread == [((0,), "kernel", "cuFuncGetParamInfo: 999")]
    assert look(capture.graph, torch_memory).unread == []  # the control


def test_a_graph_whose_nodes_the_driver_refuses_is_an_error(cuda, stream, torch_memory):
    with stream.capture() as capture:
        stream.kernel()
    cuda.fail("cuGraphGetNodes", 2, 999)
    with pytest.raises(arena.DriverError, match=r"cuGraphGetNodes failed .* 999"):
        look(capture.graph, torch_memory)


# ---- sorting ----


def test_allocations_are_sorted_by_who_keeps_them(cuda, stream, torch_memory):
    weight, scratch, pooled = torch_memory.array(4096), torch_memory.array(2048), torch_memory.array(512, pool=(1, 7))
    other = torch_memory.array(512, pool=(1, 8))
    pinned, vmm = cuda.plant(4096, host=True), cuda.plant(1 << 20)
    with stream.capture() as capture:
        arena.retain(scratch)
        stream.kernel("gemm", weight.address, scratch.address + 8, pooled.address, other.address, pinned, vmm + 4096)
        stream.copy(weight.address, 0x5555_0000_1000, 8, from_host=True)
    seen = look(capture.graph, torch_memory, pool=(1, 7))
    assert states(seen) == {"findings": 0, "held": 2, "external": 2, "host": 2, "foreign": 1, "possible": 0}
    held = {each.address: each.by for each in seen.held}
    assert held[pooled.address] == "in the graph's own pool"
    assert held[scratch.address].startswith("owner 0, planted.Array, retained at ")
    assert f"{__file__}:" in held[scratch.address]
    assert [(each.address, each.by) for each in seen.external] == [
        (weight.address, "torch's memory"),
        (other.address, "pool 1.8"),
    ]
    assert {each.by for each in seen.host} == {"page-locked host memory", "pageable host memory, or no memory at all"}
    assert seen.foreign[0].address == vmm
    assert seen.foreign[0].uses[0].parameter == 5
    assert list(seen.by_segment()) == [(weight.address, "gemm"), (other.address, "gemm")]


def test_a_pointer_into_freed_memory_is_a_finding_with_its_place(stream, torch_memory):
    dropped, kept = torch_memory.array(32 << 20), torch_memory.array(512)
    with stream.capture() as capture:
        stream.kernel("warmup", kept.address)
        stream.kernel("add", kept.address, dropped.address + 64)
    dropped.free()
    seen = look(capture.graph, torch_memory)
    [finding] = seen.findings
    assert (finding.what, finding.address, finding.bytes) == ("freed", dropped.address, 32 << 20)
    [use] = finding.uses
    assert (use.name, use.node, use.parameter, use.address) == ("add", (1,), 1, dropped.address + 64)
    assert "kernel add (node 1), parameter 1" in str(finding)
    assert "32 MiB" in str(finding)


def test_retained_it_is_not_one(stream, torch_memory):
    """The control: what the library does about it."""
    scratch = torch_memory.array(32 << 20)
    alive = weakref.ref(scratch)
    with stream.capture() as capture:
        stream.kernel("add", scratch.address)
        arena.retain(scratch)
    del scratch
    seen = look(capture.graph, torch_memory)
    assert alive() is not None
    assert (seen.findings, len(seen.held)) == ([], 1)


def test_numbers_that_look_like_pointers_are_never_findings(cuda, stream, torch_memory):
    a, free = torch_memory.array(512), torch_memory.array(512)
    free.free()
    beside = a.address + (1 << 30)  # nobody's, and close to what is somebody's
    large = bytes(72) + word(free.address)  # in a struct that may have stale words in it
    with stream.capture() as capture:
        stream.kernel("mul", a.address, beside, 1 << 33, (1 << 64) - 1, large)
    seen = look(capture.graph, torch_memory)
    assert states(seen) == {"findings": 0, "held": 0, "external": 1, "host": 0, "foreign": 0, "possible": 2}
    assert {each.by for each in seen.possible} == {"a free block of torch's memory", "no memory that the driver knows"}


def test_a_struct_with_a_witness_is_a_finding(stream, torch_memory):
    """The control: the same word, where it is known that the block was in use when the capture began."""
    scratch = torch_memory.array(512)
    with audited(stream, torch_memory) as graph:
        stream.kernel("gemm", bytes(72) + word(scratch.address + 8))
        scratch.free()
    [finding] = graph.audit.findings
    assert (finding.what, finding.address, finding.bytes) == ("freed", scratch.address, 512)
    assert (finding.uses[0].parameter, finding.uses[0].offset) == (0, 72)


def test_a_struct_has_its_witness_without_history_too(cuda, stream):
    blind = Allocator(cuda, watched=False)
    scratch, stale = blind.array(512), blind.array(1024)
    stale.free()
    with audited(stream, blind) as graph:
        stream.kernel("gemm", bytes(72) + word(scratch.address) + word(stale.address))
        scratch.free()
    assert [(each.what, each.address) for each in graph.audit.findings] == [("freed", scratch.address)]
    assert [each.address for each in graph.audit.possible] == [stale.address]


def test_an_audited_capture_has_its_allocator_keep_history(stream, torch_memory, monkeypatch):
    watched = []
    monkeypatch.setattr(torch_memory, "watch", lambda: watched.append(True))
    with audited(stream, torch_memory):
        assert watched == [True]


def test_stale_words_of_a_struct_stay_possible_under_an_audit_too(stream, torch_memory):
    stale = torch_memory.array(512)
    stale.free()
    with audited(stream, torch_memory) as graph:
        stream.kernel("gemm", bytes(72) + word(stale.address))
    assert states(graph.audit) == {"findings": 0, "held": 0, "external": 0, "host": 0, "foreign": 0, "possible": 1}


def test_a_block_that_went_during_the_capture_and_was_handed_out_again_is_found(stream, torch_memory):
    scratch = torch_memory.array(512)
    with audited(stream, torch_memory) as graph:
        stream.kernel("add", scratch.address)
        scratch.free()
        again = torch_memory.array(512)
    assert again.address == scratch.address
    assert [each.what for each in graph.audit.findings] == ["handed out again"]


def test_what_the_graph_retains_is_held_though_others_had_its_bytes_during_the_capture(stream, torch_memory):
    before = torch_memory.array(512)
    with audited(stream, torch_memory) as graph:
        before.free()
        scratch = torch_memory.array(512)
        arena.retain(scratch, stream)
        stream.kernel("add", scratch.address)
    assert scratch.address == before.address
    assert (graph.audit.findings, [each.address for each in graph.audit.held]) == ([], [scratch.address])
    assert graph.audit.check() == []
    scratch.free()
    assert [each.what for each in graph.audit.check()] == ["freed"]


def test_a_segment_that_went_back_to_the_driver_during_the_capture_is_found(stream, torch_memory):
    scratch = torch_memory.array(512)
    with audited(stream, torch_memory) as graph:
        stream.kernel("add", scratch.address)
        scratch.free()
        torch_memory.empty_cache()
    assert [(each.what, each.bytes) for each in graph.audit.findings] == [("freed", 512)]


def test_a_segment_that_the_driver_gave_to_another_library_during_the_capture_is_found(cuda, stream, torch_memory):
    scratch, kept = torch_memory.array(512), torch_memory.array(1024)
    with audited(stream, torch_memory) as graph:
        stream.kernel("add", scratch.address, kept.address)
        scratch.free()
        torch_memory.empty_cache()
        theirs = cuda.plant(512), cuda.plant(4096)
        stream.kernel("mul", theirs[1])
    assert theirs[0] == scratch.address
    assert [(each.what, each.address) for each in graph.audit.findings] == [("handed out again", scratch.address)]
    assert [each.address for each in graph.audit.foreign] == [theirs[1]]


def test_an_owner_holds_its_part_of_anothers_allocation_and_no_more(cuda, stream, torch_memory):
    """As pools of other libraries hand out pieces of what the driver gave them."""
    chunk = cuda.plant(1 << 20)
    mine, theirs = Array(None, chunk, 512), Array(None, chunk + 512, 512)
    with stream.capture() as capture:
        arena.retain(mine)
        stream.kernel("add", theirs.address, mine.address + 8, theirs.address + 8)
    seen = look(capture.graph, torch_memory)
    assert [(each.by.split(",")[0], [use.parameter for use in each.uses]) for each in seen.held] == [("owner 0", [1])]
    assert [[use.parameter for use in each.uses] for each in seen.foreign] == [[0, 2]]
    cuda.unplant(chunk)
    assert sorted(each.uses[0].parameter for each in seen.check()) == [0, 1]


def test_behind_a_view_that_is_retained_too_the_whole_still_holds(cuda, stream, torch_memory):
    chunk = cuda.plant(1 << 20)
    with stream.capture() as capture:
        for each in (Array(None, chunk + 512, 512), Array(None, chunk, 4096)):
            arena.retain(each)
        stream.kernel("add", chunk + 600, chunk + 2048)
    assert states(look(capture.graph, torch_memory))["foreign"] == 0
    assert [each.by.split(",")[0] for each in look(capture.graph, torch_memory).held] == ["owner 1"]


def test_a_free_block_of_a_pool_may_be_the_graphs_own_where_its_pool_is_unknown(stream, torch_memory):
    block = torch_memory.array(512, pool=(1, 3))
    with stream.capture() as capture:
        stream.kernel("add", block.address)
    block.free()
    assert states(look(capture.graph, torch_memory))["possible"] == 1
    assert states(look(capture.graph, torch_memory, pool=(1, 3)))["held"] == 1
    assert states(look(capture.graph, torch_memory, pool=(1, 4)))["findings"] == 1  # another's: nobody keeps it for this graph


def test_torchs_shared_memory_is_no_graphs_own_pool_and_the_largest_comes_first(stream, torch_memory):
    small, large = torch_memory.array(512), torch_memory.array(4096)
    seen = look(captured_over(stream, small, large.address), torch_memory, pool=memory.SHARED_POOL)
    assert ([each.address for each in seen.external], seen.held) == ([large.address, small.address], [])


def test_each_of_many_owners_holds_its_own(stream, torch_memory):
    arrays = [torch_memory.array(512 * (1 + number % 3)) for number in range(60)]
    with stream.capture() as capture:
        for each in arrays[::2]:
            arena.retain(each)
        for each in arrays:
            stream.kernel("add", each.address + 256)
    seen = look(capture.graph, torch_memory)
    assert sorted(each.address for each in seen.held) == sorted(each.address for each in arrays[::2])
    assert sorted(each.address for each in seen.external) == sorted(each.address for each in arrays[1::2])
    assert {each.by.split(",")[0] for each in seen.held} == {f"owner {number}" for number in range(30)}


def test_another_graphs_owners_do_not_hold_for_this_one(stream, torch_memory):
    scratch = torch_memory.array(512)
    with stream.capture() as first:
        stream.kernel("add", scratch.address)
        arena.retain(scratch)
    with stream.capture() as second:
        stream.kernel("add", scratch.address)
        arena.retain(torch_memory.array(512))
    assert [each.address for each in look(first.graph, torch_memory).held] == [scratch.address]
    assert [each.address for each in look(second.graph, torch_memory).external] == [scratch.address]


# ---- checking ----


def captured_over(stream, array, *more):
    with stream.capture() as capture:
        stream.kernel("add", array.address, *more)
    return capture.graph


def test_a_check_finds_what_was_freed_since(stream, torch_memory):
    scratch = torch_memory.array(512)
    seen = look(captured_over(stream, scratch), torch_memory)
    assert seen.check() == []
    scratch.free()
    [finding] = seen.check()
    assert (finding.what, finding.uses[0].name, finding.uses[0].parameter) == ("freed", "add", 0)
    assert seen.check() == [finding]


def test_without_a_look_that_counts_frees_it_would_be_missed(stream, torch_memory, monkeypatch):
    """The control: an allocator that says that nothing was ever freed."""
    scratch = torch_memory.array(512)
    monkeypatch.setattr(torch_memory, "freed", lambda: 0)
    seen = look(captured_over(stream, scratch), torch_memory)
    scratch.free()
    assert seen.check() == []


@pytest.mark.parametrize("size", [512, 1024], ids=["the same size", "another size"])
def test_a_check_finds_what_was_handed_out_again(stream, torch_memory, size):
    scratch, filler = torch_memory.array(512), torch_memory.array(512)
    seen = look(captured_over(stream, scratch), torch_memory)
    scratch.free()
    if size == 512:
        assert torch_memory.array(512).address == scratch.address
    else:  # free neighbours are joined, and the whole handed out
        filler.free()
        del torch_memory.pieces[filler.address]
        torch_memory.pieces[scratch.address] = memory.Block(scratch.address, 1024, True, (0, 0), scratch.address, 1000)
    [finding] = seen.check()
    assert finding.what == "handed out again"


def test_without_history_the_same_size_at_the_same_place_cannot_be_told(cuda, stream):
    """The control, and the limit that the documentation names: unless a look fell between, or the segment is another."""
    blind = Allocator(cuda, watched=False)
    scratch = blind.array(512)
    seen = look(captured_over(stream, scratch), blind)
    assert not seen.exact
    scratch.free()
    again = blind.array(512)
    assert seen.check() == []
    again.free()
    assert [each.what for each in seen.check()] == ["freed"]
    blind.array(512)
    assert [each.what for each in seen.check()] == ["handed out again"]


def test_frees_that_a_clock_has_placed_before_the_last_look_are_not_missed(stream, torch_memory, monkeypatch):
    scratch, other = torch_memory.array(512), torch_memory.array(512)
    with audited(stream, torch_memory) as graph:
        stream.kernel("add", scratch.address)
    assert graph.audit.exact
    other.free()
    assert (graph.audit.check(), graph.audit.exact) == ([], True)  # the control: clocks that agree
    monkeypatch.setattr(planted, "now", lambda: memory.now() - 10_000_000)
    torch_memory.clock = 0
    scratch.free()
    assert [each.what for each in graph.audit.check()] == ["freed"]
    assert not graph.audit.exact


@pytest.mark.parametrize("managed", [True, False])
def test_a_capture_whose_begin_was_not_seen_is_not_exact(stream, torch_memory, managed):
    scratch, other = torch_memory.array(512), torch_memory.array(1024)
    stream.begin_capture("relaxed")
    held = _registry.begin(stream) if managed else None
    stream.kernel("add", scratch.address)
    scratch.free()
    assert torch_memory.array(512).address == scratch.address  # before the first owner
    time.sleep(0.001)
    arena.retain(other, stream)
    if held:
        held.seal()
    graph = stream.end_capture()
    if held:
        held.hold(graph.handle)
    seen = look(graph, torch_memory)
    assert ([each.what for each in seen.findings], seen.exact) == ((["handed out again"], True) if managed else ([], False))


def test_without_history_a_new_segment_at_the_same_place_is_told_by_the_driver(cuda, stream):
    blind = Allocator(cuda, watched=False)
    scratch = blind.array(512)
    seen = look(captured_over(stream, scratch), blind)
    scratch.free()
    blind.empty_cache()
    assert blind.array(512).address == scratch.address
    assert [each.what for each in seen.check()] == ["handed out again"]


def test_a_check_finds_a_segment_that_went_back_to_the_driver(stream, torch_memory):
    scratch = torch_memory.array(512)
    seen = look(captured_over(stream, scratch), torch_memory)
    scratch.free()
    torch_memory.empty_cache()
    [finding] = seen.check()
    assert (finding.what, finding.detail) == ("freed", "its memory went back to the driver")


def test_without_history_another_size_at_the_same_place_is_told_by_the_blocks(cuda, stream):
    blind = Allocator(cuda, watched=False)
    scratch = blind.array(1024)
    seen = look(captured_over(stream, scratch), blind)
    scratch.free()
    blind.pieces[scratch.address] = memory.Block(scratch.address, 512, True, (0, 0), scratch.address, 512)
    assert [each.what for each in seen.check()] == ["handed out again"]


def test_memory_of_others_that_the_driver_gave_away_between_two_looks_is_found(cuda, stream, torch_memory):
    theirs = cuda.plant(4096)
    with stream.capture() as capture:
        stream.kernel("add", theirs)
    seen = look(capture.graph, torch_memory)
    cuda.unplant(theirs)
    assert cuda.plant(4096) == theirs
    assert [each.what for each in seen.check()] == ["handed out again"]


def test_a_check_finds_memory_of_others_that_was_freed_or_handed_out_again(cuda, stream, torch_memory):
    theirs, pinned = cuda.plant(4096), cuda.plant(4096, host=True)
    with stream.capture() as capture:
        stream.kernel("add", theirs, pinned)
    seen = look(capture.graph, torch_memory)
    assert seen.check() == []
    cuda.unplant(theirs)
    assert [each.what for each in seen.check()] == ["freed"]
    assert cuda.plant(4096) == theirs
    assert [each.what for each in seen.check()] == ["handed out again"]
    cuda.unplant(pinned)
    assert sorted(each.what for each in seen.check()) == ["freed", "handed out again"]


@pytest.mark.parametrize("code", [700, 3], ids=["a context that is broken", "a forked child"])
def test_a_driver_that_cannot_say_has_freed_nothing(cuda, stream, torch_memory, code):
    theirs = cuda.plant(4096)
    with stream.capture() as capture:
        stream.kernel("add", theirs, torch_memory.array(512).address)
    seen = look(capture.graph, torch_memory)
    cuda.fail("cuPointerGetAttributes", 1, code)
    with pytest.raises(arena.DriverError, match=f"cuPointerGetAttributes failed for {theirs:#x}: {code}"):
        seen.check()
    assert seen.findings == seen.check() == []
    cuda.fail("cuPointerGetAttributes", 2, code)
    with pytest.raises(arena.DriverError):
        look(capture.graph, torch_memory)


def test_torchs_blocks_are_sorted_by_a_driver_that_cannot_say_their_ids(cuda, stream, torch_memory):
    graph = captured_over(stream, scratch := torch_memory.array(512))
    cuda.fail("cuPointerGetAttributes", 1, 201)
    seen = look(graph, torch_memory)
    scratch.free()
    cuda.fail("cuPointerGetAttributes", 1, 201)
    assert (states(seen)["external"], [each.what for each in seen.check()]) == (1, ["freed"])


def test_an_owner_that_has_other_memory_now_has_moved(stream, torch_memory):
    class Plan:
        def __init__(self):
            self.buffer = torch_memory.array(512)

    plan = Plan()
    kept = plan.buffer
    with stream.capture() as capture:
        arena.retain(plan)
        stream.kernel("add", plan.buffer.address)
    seen = look(capture.graph, torch_memory)
    assert seen.held[0].by.startswith("owner 0, ")
    assert seen.check() == []
    plan.buffer = torch_memory.array(512)
    [finding] = seen.check()
    assert (finding.what, finding.address) == ("moved", kept.address)
    assert f"{plan.buffer.address:#x}" in finding.detail


def test_what_one_owner_gave_up_and_another_has_is_held(stream, torch_memory):
    class Plan:
        def __init__(self):
            self.buffer = torch_memory.array(512)

    plan = Plan()
    with stream.capture() as capture:
        arena.retain(plan)
        arena.retain(plan.buffer)
        stream.kernel("add", plan.buffer.address)
    seen = look(capture.graph, torch_memory)
    plan.buffer = torch_memory.array(512)
    assert seen.check() == []


def test_an_owner_of_much_memory_is_searched_once_a_check(stream, torch_memory, monkeypatch):
    arrays = [torch_memory.array(512) for _ in range(20)]
    with stream.capture() as capture:
        arena.retain(arrays)
        for each in arrays:
            stream.kernel("add", each.address)
    seen = look(capture.graph, torch_memory)
    asked = []
    monkeypatch.setattr(auditing, "memory_of", lambda owner: asked.append(owner) or memory_of(owner))
    assert (len(seen.held), seen.check(), asked) == (20, [], [arrays])


def test_what_is_freed_elsewhere_is_no_finding(stream, torch_memory):
    scratch, other = torch_memory.array(512), torch_memory.array(512)
    seen = look(captured_over(stream, scratch), torch_memory)
    other.free()
    torch_memory.array(512)
    torch_memory.array(512)
    torch_memory.empty_cache()
    assert seen.check() == []


def test_what_a_dead_graph_used_may_go(stream, torch_memory):
    scratch, external = torch_memory.array(512), torch_memory.array(512)
    with stream.capture() as capture:
        arena.retain(scratch)
        stream.kernel("add", scratch.address, external.address)
    seen = look(capture.graph, torch_memory)
    executable = capture.graph.instantiate()
    capture.graph.destroy()
    external.free()
    assert [each.address for each in seen.check()] == [external.address]  # the control: an executable would read it
    executable.destroy()
    arena.reclaim(1)
    scratch.free()
    assert [each.address for each in seen.check()] == [external.address]


# ---- modes: what arena.torch does at captures and replays ----


def test_findings_are_told_at_the_capture_and_at_the_replay_that_first_sees_them(stream, torch_memory):
    early, late = torch_memory.array(512), torch_memory.array(1024)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with audited(stream, torch_memory) as graph:
            graph._arena_audit_mode = "warn"
            stream.kernel("add", early.address, late.address)
            early.free()
        assert [each.category for each in said] == [arena.AuditWarning]
        assert "kernel add (node 0), parameter 0" in str(said[0].message)
        graph.replay()
        late.free()
        graph.replay()
        graph.replay()
        assert len(said) == 3  # the first replay tells again what the capture told
        assert "parameter 1" in str(said[-1].message)
    assert graph.replays == 3


def test_raising_is_left_to_the_end_of_the_context_and_to_replays(stream, torch_memory):
    scratch = torch_memory.array(512)
    with audited(stream, torch_memory) as graph:
        graph._arena_audit_mode = "raise"
        stream.kernel("add", scratch.address)
        scratch.free()
    with pytest.raises(arena.AuditError, match=r"freed: .*kernel add"):
        watching.tell_if_raising(graph)
    with pytest.raises(arena.AuditError):
        graph.replay()
    assert not hasattr(graph, "replays")


def test_only_audited_graphs_pay_at_replay_and_none_is_kept_alive_by_it(stream, torch_memory):
    with audited(stream, torch_memory) as graph:
        stream.kernel()
    assert "replay" in vars(graph)
    alive = weakref.ref(graph)
    gc.disable()
    try:
        del graph
        assert alive() is None
    finally:
        gc.enable()


def test_checks_come_first_and_then_now_and_then():
    due = watching.checks(3, 4)
    assert [next(due) for _ in range(12)] == [1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0]


def test_threads_that_replay_at_once_each_get_an_answer():
    due, answers, interval = watching.checks(3, 10), [], sys.getswitchinterval()

    def replay():
        answers.append(sum(next(due) for _ in range(500_000)))

    threads = [threading.Thread(target=replay) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert (len(answers), sum(answers)) == (4, 3 + (2_000_000 - 3) // 10)


def test_an_audit_that_fails_takes_no_capture_and_no_replay_with_it(cuda, stream, torch_memory, monkeypatch, caplog):
    cuda.fail("cuGraphGetNodes", 1, 999)
    with pytest.raises(AttributeError):  # there is no audit to be had
        with audited(stream, torch_memory) as graph:
            stream.kernel()
    assert "not audited" in caplog.text
    with audited(stream, torch_memory) as graph:
        stream.kernel()
    monkeypatch.setattr(torch_memory, "freed", lambda: 1 / 0)
    graph.replay()
    assert graph.replays == 1
    assert "not checked" in caplog.text


@pytest.mark.parametrize(("text", "action", "every"), [("warn", "warn", 100), ("raise:7", "raise", 7)])
def test_the_mode_is_read_from_the_environment(monkeypatch, text, action, every):
    monkeypatch.setenv("ARENA_AUDIT", text)
    mode = watching._from_environment()
    assert (mode.action, mode.every) == (action, every)


@pytest.mark.parametrize("text", ["loud", "collect", "warn:0", "warn:often", ":5"])
def test_a_mode_that_is_none_is_told_and_audits_nothing(monkeypatch, caplog, text):
    monkeypatch.setenv("ARENA_AUDIT", text)
    assert watching._from_environment().action is None
    assert "ARENA_AUDIT is " in caplog.text


def test_without_a_mode_nothing_is_looked_at(torch_memory):
    class Graph:
        pass

    assert watching.began(Graph(), lambda: 1 / 0) is None
    assert watching.ending(None) is None


# ---- what an owner owns ----


def test_memory_is_found_where_owners_keep_it(torch_memory):
    a, b, c = (torch_memory.array(512) for _ in range(3))

    class Slotted:
        __slots__ = ("array", "empty")

        def __init__(self):
            self.array = c

    class Plan:
        def __init__(self):
            self.parts, self.more, self.self, self.name = {"x": [a, b]}, Slotted(), self, "plan"

    assert sorted(memory_of(Plan())) == sorted((each.address, 512) for each in (a, b, c))
    assert memory_of("text") == memory_of(5) == memory_of(object()) == []


def test_what_an_owner_refers_to_weakly_is_not_its_own(torch_memory):
    class Owner:
        pass

    theirs, owner = Owner(), Owner()
    theirs.array = torch_memory.array(512)
    owner.proxy, owner.reference = weakref.proxy(theirs), weakref.ref(theirs)
    assert memory_of(owner) == memory_of(owner.proxy) == []
    owner.strong = theirs
    assert memory_of(owner) == [(theirs.array.address, 512)]  # the control


def test_an_owner_with_parts_that_fail_owns_the_others(torch_memory):
    class Local:
        @property
        def __dict__(self):
            raise RuntimeError("out of its context")

    class Owner:
        pass

    owner, gone = Owner(), Owner()
    owner.dead, owner.local, owner.array = weakref.proxy(gone), Local(), torch_memory.array(512)
    del gone
    assert memory_of(owner) == [(owner.array.address, 512)]


def test_a_tensor_owns_its_whole_storage():
    torch = pytest.importorskip("torch")
    base = torch.zeros(1024)
    assert memory_of(base[100:200]) == [(base.untyped_storage().data_ptr(), 4096)] == memory_of(base.untyped_storage())
    assert name_of(base[100:200]) == "Tensor float32[100]"


@pytest.mark.parametrize(
    ("data", "shape", "strides", "extent"),
    [
        (1000, (4, 8), None, (1000, 128)),
        (1000, (4, 8), (64, 4), (1000, 3 * 64 + 7 * 4 + 4)),
        (1124, (32,), (-4,), (1000, 128)),
        (1000, (), (), (1000, 4)),
        (1000, (0, 8), (32, 4), (1000, 0)),
    ],
    ids=["dense", "strided", "backwards", "a number", "empty"],
)
def test_an_array_reaches_from_its_first_byte_to_its_last(data, shape, strides, extent):
    class Strided:
        __cuda_array_interface__ = {"data": (data, False), "shape": shape, "strides": strides, "typestr": "<f4", "version": 3}

    assert memory_of(Strided()) == ([extent] if extent[1] else [])


def test_a_tensor_without_memory_owns_none():
    torch = pytest.importorskip("torch")
    assert memory_of(torch.zeros(1024, device="meta")) == memory_of([torch.zeros(0), torch.zeros(8, device="meta")]) == []


def test_an_owner_that_cannot_be_asked_is_no_failure():
    class Broken:
        @property
        def __cuda_array_interface__(self):
            raise RuntimeError("freed")

    assert memory_of(Broken()) == []


def test_ranges_are_found_by_their_ends():
    ranges = Ranges([(100, 10), (50, 10), (100, 20)])
    assert [ranges.find(each) for each in (49, 50, 59, 60, 99, 100, 119, 120)] == [None, 0, 0, None, None, 1, 1, None]
    assert Ranges([]).find(5) is None


def test_bytes_are_told_short():
    assert [bytes_of(each) for each in (0, 512, 1536, 32 << 20, 5 << 40)] == ["0 B", "512 B", "1.5 KiB", "32 MiB", "5 TiB"]


def test_an_audit_is_plain_data_when_asked(stream, torch_memory):
    import json

    scratch = torch_memory.array(512)
    seen = look(captured_over(stream, scratch), torch_memory)
    scratch.free()
    seen.check()
    told = json.loads(json.dumps(seen.as_dict()))
    assert told["findings"][0]["uses"][0]["name"] == "add"
    assert told["nodes"] == 1


# ---- the command ----

SCRIPT = """
import sys
from planted import Allocator
import arena
from arena import watching
from arena.testing import simulated_driver
with simulated_driver() as cuda:
    source, stream = Allocator(cuda), cuda.Stream()
    scratch = source.array(512)
    class Graph:
        def pool(self): raise RuntimeError
        def replay(self): pass
    graph = Graph()
    if sys.argv[1] == "warns": graph._arena_audit_mode = "warn"  # as arena.torch.graph(audit="warn") does
    begun = watching.began(graph, lambda: source)
    with stream.capture() as capture:
        stream.kernel("add", scratch.address)
        read = watching.ending(begun, stream)
    watching.ended(graph, read)
    if sys.argv[1] in ("dropped", "warns"): scratch.free()
    if sys.argv[1] == "both gone": del graph; scratch.free()
    elif sys.argv[1] == "captured again":
        begun = watching.began(graph, lambda: source)
        with stream.capture() as capture:
            read = watching.ending(begun, stream)
        watching.ended(graph, read)
        scratch.free()
    else: graph.replay()
    if sys.argv[1] == "exits": sys.exit(3)
"""


CASES = {"dropped": 1, "warns": 1, "kept": 0, "both gone": 0, "captured again": 0, "exits": 3}


@pytest.mark.parametrize(("case", "code"), CASES.items(), ids=CASES)
def test_the_command_prints_the_findings_and_its_exit_code_says_so(tmp_path, case, code):
    from conftest import TESTS

    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", "-m", "arena", "audit", str(tmp_path / "script.py"), case]
    import os

    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    audited = "2 graphs" if case == "captured again" else "1 graph"
    assert f"{audited} audited, {int(case in ('dropped', 'warns'))} finding" in done.stderr
    assert ("freed: 0x" in done.stderr) == (case in ("dropped", "warns"))
    assert done.stdout == ""  # that is the script's


def test_arrays_here_are_what_an_owner_is():
    assert name_of(Array(None, 1, 1)) == "planted.Array"
