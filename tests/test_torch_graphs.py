"""Managed torch graphs without a GPU: the Python of the installed torch, and of each other generation, over a stand-in for its
C++ class, on the simulated driver. How owners live and go with the graph, its executable stays clean, and management comes and
goes. Captures are in test_torch_captures.py, the same promises on a real GPU in test_torch_managed.py."""

import contextlib
import gc
import inspect
import itertools
import os
import weakref

import pytest
from conftest import run_python, stays, until
from heap import heap_bytes

torch = pytest.importorskip("torch")

import managed_standins  # noqa: E402
import standin  # noqa: E402
from managed_standins import EXTERNAL, Owner, captured, capturing, gone, only_installed, only_patched  # noqa: E402

import arena  # noqa: E402
import arena.torch  # noqa: E402

cuda, unmanaged, graphs = managed_standins.cuda, managed_standins.unmanaged, managed_standins.graphs  # fixtures


def test_the_executable_is_clean_and_the_owner_lives_with_the_graph(cuda, graphs):
    alive = weakref.ref(owner := Owner())
    stream = cuda.Stream()
    graph = captured(graphs, stream, owner)
    del owner
    assert graph.executable.owners == 0
    with standin.current(stream):
        graph.replay()
    stream.synchronize()
    assert stays(lambda: alive() is not None)
    del graph
    assert gone(alive)


@only_patched
def test_without_management_the_executable_is_taxed(cuda, unmanaged):
    """The control: torch's own methods, and an owner retained during the capture."""
    stream = cuda.Stream()
    graph = captured(unmanaged(), stream, Owner())
    assert graph.executable.owners == 1
    graph.reset()


def test_dropped_in_flight_the_owner_stays_until_the_replay_has_ended(cuda, graphs):
    for how in ("reset", "del"):
        alive = weakref.ref(owner := Owner())
        stream, gate = cuda.Stream(), cuda.Event()
        graph = captured(graphs, stream, owner)
        del owner
        with standin.current(stream):
            graph.gate = gate
            graph.replay()
        if how == "reset":
            graph.reset()
        else:
            del graph
        assert stays(lambda alive=alive: alive() is not None), how
        gate.set()
        assert gone(alive), how


def test_reset_releases_at_once_what_is_not_in_flight(cuda, graphs):
    alive = weakref.ref(owner := Owner())
    stream = cuda.Stream()
    graph = captured(graphs, stream, owner)
    del owner
    with standin.current(stream):
        graph.replay()
    stream.synchronize()
    graph.reset()
    assert alive() is None


def test_every_stream_of_a_replay_is_fenced(cuda, graphs):
    alive = weakref.ref(owner := Owner())
    graph = captured(graphs, cuda.Stream(), owner)
    del owner
    gates = []
    for _ in range(3):
        stream, gate = cuda.Stream(), cuda.Event()
        gates.append(gate)
        with standin.current(stream):
            graph.gate = gate
            graph.replay()
            graph.replay()
    graph.reset()
    for gate in gates:
        assert stays(lambda: alive() is not None, 0.02)
        gate.set()
    assert gone(alive)


def test_an_external_stream_may_be_gone_when_the_graph_goes(cuda, graphs):
    EXTERNAL[0] = True
    alive = weakref.ref(owner := Owner())
    graph = captured(graphs, cuda.Stream(), owner)
    del owner
    stream, gate = cuda.Stream(), cuda.Event()
    with standin.current(stream):
        graph.replay()
        graph.gate = gate
        graph.replay()
    gate.set()
    stream.synchronize()
    stream.destroy()
    graph.reset()
    assert gone(alive)


def test_an_external_stream_is_still_waited_for(cuda, graphs):
    EXTERNAL[0] = True
    alive = weakref.ref(owner := Owner())
    graph = captured(graphs, cuda.Stream(), owner)
    del owner
    stream, gate = cuda.Stream(), cuda.Event()
    with standin.current(stream):
        graph.replay()
        stream.synchronize()
        graph.gate = gate
        graph.replay()
    graph.reset()
    assert stays(lambda: alive() is not None)
    gate.set()
    assert gone(alive)


@pytest.mark.parametrize("how", ["instantiate", "replay"])
def test_a_kept_template_holds_the_owners_and_every_executable_is_clean(cuda, graphs, how):
    alive = weakref.ref(owner := Owner())
    stream = cuda.Stream()
    graph = captured(graphs, stream, owner, keep=True)
    del owner
    assert graph.template.owners == 1
    for _ in range(2):
        if how == "instantiate":
            graph.instantiate()
        else:
            with standin.current(stream):
                graph.replay()
        assert graph.executable.owners == 0
        assert graph.template.owners == 1
    stream.synchronize()
    clone = graph.template.clone()
    by_hand = graph.template.instantiate()
    assert by_hand.owners == 1  # exact, and taxed
    graph.reset()
    assert stays(lambda: alive() is not None)
    clone.destroy()
    assert stays(lambda: alive() is not None)
    by_hand.destroy()
    assert gone(alive)


def test_a_graph_may_be_captured_again_after_a_reset(cuda, graphs):
    stream = cuda.Stream()
    first, second = Owner(), Owner()
    alive = [weakref.ref(first), weakref.ref(second)]
    graph = captured(graphs, stream, first)
    del first
    graph.reset()
    assert gone(alive[0])
    with capturing(graph, stream):
        assert arena.retain(second)
    del second
    assert graph.executable.owners == 0
    assert stays(lambda: alive[1]() is not None, 0.02)
    graph.reset()
    assert gone(alive[1])


def test_a_graph_without_owners_keeps_nothing(cuda, graphs):
    before = arena.stats()
    graph = captured(graphs, cuda.Stream())
    assert graph._arena_capture is None
    assert arena.stats().lists == before.lists
    graph.reset()


@pytest.mark.parametrize("owners", [0, 1])
@pytest.mark.parametrize("how", ["reset", "del"])
def test_a_graph_that_goes_during_a_global_capture_does_not_break_it(cuda, graphs, owners, how):
    stream, other = cuda.Stream(), cuda.Stream()
    graph = captured(graphs, stream, *[Owner() for _ in range(owners)])
    with other.capture("global") as capture:
        other.kernel()
        if how == "reset":
            graph.reset()
        else:
            del graph
            gc.collect()
    executable = capture.graph.instantiate()
    executable.destroy()
    capture.graph.destroy()


@only_patched
def test_without_management_it_does_break_it(cuda, unmanaged):
    """The control: cuGraphExecDestroy is refused in the middle of a global-mode capture, and breaks it."""
    stream, other = cuda.Stream(), cuda.Stream()
    graph = captured(unmanaged(), stream)
    with pytest.raises(cuda.Error):
        with other.capture("global"):
            other.kernel()
            with contextlib.suppress(cuda.Error):
                graph.reset()


def test_entering_a_capture_releases_what_is_dead(cuda, graphs):
    stream = cuda.Stream()
    graph = captured(graphs, stream, Owner())
    gate = cuda.Event()
    with standin.current(stream):
        graph.gate = gate
        graph.replay()
    graph.reset()
    gate.set()
    stream.synchronize()
    before = arena.stats()
    other = captured(graphs, stream)
    assert arena.stats().owners == 0, before
    other.reset()


def test_signatures_and_names_are_torchs(graphs, unmanaged):
    plain = unmanaged()
    for name in ("capture_begin", "capture_end", "instantiate", "replay", "reset"):
        ours, theirs = getattr(graphs.CUDAGraph, name), getattr(plain.CUDAGraph, name)
        assert ours is not theirs
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert ours.__doc__ == theirs.__doc__


@only_patched
def test_uninstall_puts_torchs_methods_back_and_living_graphs_keep_their_owners(cuda, graphs):
    alive = weakref.ref(owner := Owner())
    stream = cuda.Stream()
    graph = captured(graphs, stream, owner)
    del owner
    arena.torch.uninstall()
    assert not arena.torch.installed()
    assert not hasattr(graphs.CUDAGraph.replay, "_arena")
    assert alive() is not None
    graph.reset()
    assert stays(lambda: alive() is not None, 0.02)
    del graph
    assert gone(alive)


@only_patched
def test_uninstall_refuses_to_undo_a_patch_on_top_of_ours(graphs, monkeypatch):
    monkeypatch.setattr(graphs.CUDAGraph, "replay", lambda self: None)
    with pytest.raises(RuntimeError, match=r"CUDAGraph.replay was patched by others"):
        arena.torch.uninstall()
    assert arena.torch.installed()
    monkeypatch.undo()


def test_install_is_idempotent_and_reversible():
    before = {name: vars(torch.cuda.CUDAGraph).get(name) for name in arena.torch.methods_of(torch.cuda.CUDAGraph)}
    arena.torch.install()
    patched = {name: vars(torch.cuda.CUDAGraph)[name] for name in before}
    arena.torch.install()
    assert {name: vars(torch.cuda.CUDAGraph)[name] for name in before} == patched
    assert all(patched[name] is not before[name] for name in before)
    arena.torch.uninstall()
    arena.torch.uninstall()
    assert {name: vars(torch.cuda.CUDAGraph).get(name) for name in before} == before
    assert issubclass(arena.torch.CUDAGraph, torch.cuda.CUDAGraph)
    assert issubclass(arena.torch.graph, torch.cuda.graph)


def test_a_replay_that_cannot_be_noted_happens_and_its_owners_stay(cuda, graphs, monkeypatch):
    def fails(device):
        raise MemoryError("no room")

    alive = weakref.ref(owner := Owner())
    stream = cuda.Stream()
    graph = captured(graphs, stream, owner)
    del owner
    monkeypatch.setattr(arena.torch, "current_stream", fails)
    monkeypatch.setattr(arena.torch, "_unfenced", [])
    gate = cuda.Event()
    with standin.current(stream):
        graph.gate = gate
        graph.replay()
    assert not stream.query()
    graph.reset()
    assert stays(lambda: alive() is not None)
    gate.set()
    stream.synchronize()
    assert stays(lambda: alive() is not None, 0.02)
    arena.torch._unfenced.pop().drop()  # what nobody else does
    assert gone(alive)


def test_a_template_that_refuses_the_owners_does_not_fail_the_replay(cuda, graphs):
    alive = weakref.ref(owner := Owner())
    stream = cuda.Stream()
    graph = captured(graphs, stream, owner, keep=True)
    del owner
    cuda.fail("cuGraphRetainUserObject")
    with standin.current(stream):
        graph.replay()
    stream.synchronize()
    assert graph.executable.owners == 0
    assert graph.template.owners == 0
    assert alive() is not None
    graph.reset()
    assert gone(alive)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@only_installed
def test_graphs_that_share_owners_may_go_in_every_order(cuda, graphs, order):
    """Owner 0 is everybody's, owner 1 that of graphs 0 and 1, owner 2 that of graphs 1 and 2; a graph has one twice."""
    held = [(0, 1), (0, 1, 2, 2), (0, 2)]
    owners = [Owner() for _ in range(3)]
    alive = [weakref.ref(each) for each in owners]
    stream = cuda.Stream()
    living = [captured(graphs, stream, *(owners[number] for number in numbers)) for numbers in held]
    owners.clear()
    for step, number in enumerate(order):
        if step == 1:
            living[number].reset()
        living[number] = None
        needed = {each for graph, numbers in zip(living, held, strict=True) if graph for each in numbers}
        assert until(lambda needed=needed: {each for each in range(3) if alive[each]()} == needed)
        assert stays(lambda needed=needed: {each for each in range(3) if alive[each]()} == needed, 0.005)


@only_installed
def test_a_stream_that_is_capturing_when_the_graph_is_reset_is_left_alone_until_it_has_done(cuda, graphs):
    """An event recorded there would be swallowed by the capture, and its query would break it."""
    alive = weakref.ref(owner := Owner())
    stream = cuda.Stream()
    graph = captured(graphs, stream, owner)
    del owner
    gate = cuda.Event()
    with standin.current(stream):
        graph.gate = gate
        graph.replay()
    other = graphs.CUDAGraph()
    with capturing(other, stream, "global"):
        graph.reset()
        gate.set()
        assert stays(lambda: alive() is not None)
    assert gone(alive)
    with standin.current(stream):
        other.replay()
    stream.synchronize()
    other.reset()


# ---- the debug dump ----


def test_a_debug_dump_finds_the_template_and_the_executable_is_clean(cuda, graphs, monkeypatch):
    alive = weakref.ref(owner := Owner())
    stream = cuda.Stream()
    graph = graphs.CUDAGraph()
    graph.enable_debug_mode()
    with capturing(graph, stream):
        assert arena.retain(owner)
    del owner
    later = hasattr(graph, "capture_end_post")
    assert graph.template.owners == later  # up to 2.13 nobody is given its handle: nothing can be made from it
    if later:  # it is kept from then on, and dumped by calls that need a GPU
        graph.instantiate()
        assert graph.raw_cuda_graph() == graph.template.handle
    else:
        graph.debug_dump("nowhere")
        assert graph.dumps == 1
        assert graph.template is None
    assert graph.executable.owners == 0
    with standin.current(stream):
        graph.replay()
    stream.synchronize()
    assert alive() is not None
    graph.reset()
    assert gone(alive)


# ---- memory ----


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@only_installed
@pytest.mark.parametrize("kept", [False, True])
def test_ten_thousand_cycles_of_capture_replay_and_drop_keep_memory_flat(cuda, graphs, kept):
    """And the control: where the graphs are not dropped, it is seen to grow."""
    if "san" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the sanitizer has malloc for itself")
    stream = cuda.Stream()
    graphs_kept = []

    def cycle():
        graph = captured(graphs, stream, *[bytearray(1000) for _ in range(10)])
        with standin.current(stream):
            graph.replay()
        if kept:
            graphs_kept.append(graph)

    for _ in range(100):
        cycle()
    arena.reclaim(5)
    # Of the process, where what a driver maps shows, and of the heap, which may have had room for it from earlier tests.
    before = resident(), heap_bytes()
    for _ in range(5_000 if kept else 10_000):
        cycle()
    stream.synchronize()
    arena.reclaim(5)
    assert (max(resident() - before[0], heap_bytes() - before[1]) > 8 << 20) == kept
    assert bool(arena.stats().owners) == kept
    for graph in graphs_kept:
        graph.reset()


def test_a_clean_graph_keeps_less_than_a_kilobyte_beside_its_owners():
    """What 600 managed graphs with one owner take more than 600 of torch's own: the capture, its list and fence, and all that
    audits and reports know of it. The control: what 100 more owners cost is seen, and is their entries."""
    run = run_python(
        """
import arena, arena.torch, standin, torch
from arena.testing import simulated_driver
from heap import heap_bytes

owner = object()
arena.torch.current_stream = lambda device: (standin.current_stream().handle, False)

def per_graph(kind, owners, count=600):
    kept = [None] * count
    for number in range(-100, count):
        if number == 0:
            before = heap_bytes()
        graph = kind()
        graph.capture_begin(capture_error_mode="relaxed")
        for _ in range(owners):
            arena.retain(owner, stream)
        graph.capture_end()
        graph.replay()
        if number < 0:
            keep.append(graph)
        else:
            kept[number] = graph
    taken = heap_bytes() - before
    keep.extend(kept)
    return taken / count

with simulated_driver() as cuda:
    standin.driver, stream, keep = cuda, cuda.Stream(), []
    plain = standin.graphs().CUDAGraph
    torch._C._CUDAGraph = plain.__base__
    managed = type("CUDAGraph", (plain,), {"_arena_capture": None})
    arena.torch.manage(managed, plain)
    with standin.current(stream):
        per_graph(plain, 0)
        least = [min(per_graph(*each) for _ in range(3)) for each in ((plain, 0), (managed, 1), (managed, 101))]
    print(*least)
    keep.clear()
    arena.reclaim(5)
""",
        timeout=100,
        env={"PYTHONMALLOC": "malloc"},
    )
    assert run.returncode == 0, run.stderr
    if "san" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the sanitizer has malloc for itself")
    plain, one, more = map(float, run.stdout.split())
    print(f"{one - plain - 16:.0f} bytes a graph beside its owner, {more - one:.0f} for 100 owners more")
    assert 100 < one - plain - 16 < 768, run.stdout  # a kilobyte on a GPU, where Python makes each graph's attributes a place
    assert 100 * 15 < more - one <= 100 * 24, run.stdout
