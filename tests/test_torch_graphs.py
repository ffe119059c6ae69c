"""Managed torch graphs without a GPU: the Python of the installed torch over a stand-in for its C++ class, on the simulated
driver. The same promises on a real GPU are in test_torch_managed.py."""

import contextlib
import gc
import inspect
import threading
import weakref

import pytest
from conftest import stays, until

torch = pytest.importorskip("torch")

import standin  # noqa: E402

import arena  # noqa: E402
import arena.torch  # noqa: E402


class Owner:
    """Something that owns memory."""


@pytest.fixture
def cuda(simulated):
    return simulated


@pytest.fixture
def graphs(monkeypatch):
    """torch's graphs.py over the stand-in, patched as install() patches the real one."""
    module = standin.graphs()
    monkeypatch.setattr(arena.torch, "current_stream", lambda device: (standin.current_stream().handle, EXTERNAL[0]))
    monkeypatch.setattr(torch._C, "_CUDAGraph", standin._CUDAGraph, raising=False)
    EXTERNAL[0] = False
    assert not arena.torch.installed()
    arena.torch.patch(module.CUDAGraph, None)
    yield module
    arena.torch.uninstall()


EXTERNAL = [False]


@contextlib.contextmanager
def capturing(graph, stream, mode="relaxed"):
    with standin.current(stream):
        graph.capture_begin(capture_error_mode=mode)
        stream.kernel()
        yield
        graph.capture_end()


def captured(graphs, stream, *owners, keep=False):
    graph = graphs.CUDAGraph(keep_graph=keep)
    with capturing(graph, stream):
        for owner in owners:
            assert arena.retain(owner)
    return graph


def gone(reference):
    return until(lambda: reference() is None)


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


def test_without_management_the_executable_is_taxed(cuda):
    """The control: torch's own methods, and an owner retained during the capture."""
    stream = cuda.Stream()
    graph = captured(standin.graphs(), stream, Owner())
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


def test_a_failed_capture_lets_its_owners_go_and_the_next_starts_empty(cuda, graphs):
    alive = weakref.ref(owner := Owner())
    stream = cuda.Stream()
    graph = graphs.CUDAGraph()
    with pytest.raises(cuda.Error):
        with capturing(graph, stream):
            arena.retain(owner)
            stream.invalidate()
    del owner
    assert gone(alive)
    graph = captured(graphs, stream, Owner())
    assert arena.stats().owners == 1
    graph.reset()


def test_an_abandoned_capture_lets_its_owners_go(cuda, graphs):
    alive = weakref.ref(owner := Owner())
    stream = cuda.Stream()
    graph = graphs.CUDAGraph()
    with standin.current(stream):
        graph.capture_begin(capture_error_mode="relaxed")
        arena.retain(owner)
        del owner
        del graph
        gc.collect()
        stream.end_capture().destroy()
    assert gone(alive)


def test_a_capture_begun_in_one_thread_and_ended_in_another(cuda, graphs):
    alive = weakref.ref(owner := Owner())
    stream = cuda.Stream()
    graph = graphs.CUDAGraph()
    with standin.current(stream):
        graph.capture_begin(capture_error_mode="relaxed")
        arena.retain(owner)
    del owner

    def end():
        with standin.current(stream):
            graph.capture_end()

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert graph.executable.owners == 0
    assert alive() is not None
    graph.reset()
    assert gone(alive)


def test_two_captures_at_once_in_two_threads_do_not_mix(cuda, graphs):
    results = {}
    both = threading.Barrier(2)

    def work(name):
        stream = cuda.Stream()
        graph = graphs.CUDAGraph()
        alive = weakref.ref(owner := Owner())
        with capturing(graph, stream, "thread_local"):
            both.wait(5)
            for _ in range(100):
                assert arena.retain(owner)
            both.wait(5)
        results[name] = (graph, alive)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    graph, alive = results.pop("a")
    other, other_alive = results.pop("b")
    graph.reset()
    assert gone(alive)
    assert other_alive() is not None
    other.reset()
    assert gone(other_alive)


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


def test_without_management_it_does_break_it(cuda):
    """The control: cuGraphExecDestroy is refused in the middle of a global-mode capture, and breaks it."""
    stream, other = cuda.Stream(), cuda.Stream()
    graph = captured(standin.graphs(), stream)
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


def test_signatures_and_names_are_torchs(graphs):
    plain = standin.graphs()
    for name in ("capture_begin", "capture_end", "instantiate", "replay", "reset"):
        ours, theirs = getattr(graphs.CUDAGraph, name), getattr(plain.CUDAGraph, name)
        assert ours is not theirs
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert ours.__doc__ == theirs.__doc__


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
