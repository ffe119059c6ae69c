"""Captures that torch's managed graphs make, without a GPU, as in test_torch_graphs.py: who takes part in them and keeps which
owners, where they fail, are abandoned or repeated, nested, spread over threads, or have conditional bodies. The same promises
on a real GPU are in test_torch_captures_gpu.py."""

import contextlib
import gc
import threading
import weakref

import pytest
from conftest import stays, until

torch = pytest.importorskip("torch")

import managed_standins  # noqa: E402
import standin  # noqa: E402
from managed_standins import Owner, captured, capturing, gone, only_installed, with_bodies  # noqa: E402

import arena  # noqa: E402
import arena.torch  # noqa: E402

cuda, unmanaged, graphs = managed_standins.cuda, managed_standins.unmanaged, managed_standins.graphs  # fixtures


# ---- failing, nested, repeated ----


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


def test_an_end_on_the_wrong_stream_may_be_repeated_on_the_right_one(cuda, graphs):
    alive = weakref.ref(owner := Owner())
    stream = cuda.Stream()
    graph = graphs.CUDAGraph()
    with capturing(graph, stream):
        assert arena.retain(owner)
        del owner
        with standin.current(cuda.Stream()), pytest.raises(RuntimeError, match="same stream"):
            graph.capture_end()
        assert stays(lambda: alive() is not None, 0.02)
    assert graph.executable.owners == 0
    assert stays(lambda: alive() is not None, 0.02)
    graph.reset()
    assert gone(alive)


def test_an_exception_in_the_capture_leaves_the_owners_to_the_graph(cuda, graphs):
    alive = weakref.ref(owner := Owner())
    stream = cuda.Stream()
    graph = graphs.CUDAGraph()
    with standin.current(stream):
        graph.capture_begin(capture_error_mode="relaxed")
        with pytest.raises(ValueError, match="op failed"):
            try:
                assert arena.retain(owner)
                raise ValueError("op failed")
            finally:
                graph.capture_end()  # as torch.cuda.graph does
    del owner
    assert graph.executable.owners == 0
    assert stays(lambda: alive() is not None, 0.02)
    graph.reset()
    assert gone(alive)


@only_installed
def test_a_capture_that_ends_unjoined_lets_its_owners_go(cuda, graphs):
    owners = [Owner(), Owner()]
    alive = [weakref.ref(each) for each in owners]
    stream, side = cuda.Stream(), cuda.Stream()
    graph = graphs.CUDAGraph()
    with pytest.raises(cuda.Error) as seen:
        with capturing(graph, stream):
            arena.retain(owners[0])
            side.wait(stream)
            side.kernel()
            arena.retain(owners[1], side)
    assert seen.value.code == 904
    owners.clear()
    assert until(lambda: all(each() is None for each in alive))
    graph = captured(graphs, stream, Owner())
    assert arena.stats().owners == 1
    graph.reset()


@only_installed
def test_a_raw_capture_nested_on_the_same_thread_keeps_its_own_owners(cuda, graphs):
    owners = [Owner() for _ in range(3)]
    alive = [weakref.ref(each) for each in owners]
    graph = graphs.CUDAGraph()
    other = cuda.Stream()
    with capturing(graph, cuda.Stream()):
        assert arena.retain(owners[0])
        with other.capture("relaxed") as raw:
            other.kernel()
            assert arena.retain(owners[1], other)
            with standin.current(other):
                assert arena.retain(owners[1])
        assert arena.retain(owners[2])
    owners.clear()
    graph.reset()
    assert until(lambda: [each() is None for each in alive] == [True, False, True])
    raw.graph.destroy()
    assert gone(alive[1])


@only_installed
def test_a_managed_capture_nested_in_another_leaves_the_outer_one_its_shortcut(cuda, graphs):
    owners = [Owner() for _ in range(3)]
    alive = [weakref.ref(each) for each in owners]
    stream = cuda.Stream()
    graph = graphs.CUDAGraph()
    with capturing(graph, stream):
        assert arena.retain(owners[0])
        inner = captured(graphs, cuda.Stream(), owners[1])
        assert arena.retain(owners[2])
        before = cuda.calls("cuStreamGetCaptureInfo")
        assert arena.retain(owners[2])
        assert cuda.calls("cuStreamGetCaptureInfo") == before
    owners.clear()
    graph.reset()
    assert until(lambda: [each() is None for each in alive] == [True, False, True])
    inner.reset()
    assert gone(alive[1])


@only_installed
def test_threads_take_part_in_a_capture_and_are_gone_before_it_ends(cuda, graphs):
    owners = [Owner() for _ in range(4)]
    alive = [weakref.ref(each) for each in owners]
    stream = cuda.Stream()
    graph = graphs.CUDAGraph()

    def work(owner, joined):
        with cuda.device(0), standin.current(joined):
            assert arena.retain(owner)
            answers.append(threading.get_ident())

    answers = []
    with capturing(graph, stream):
        side = cuda.Stream()
        side.wait(stream)
        side.kernel()
        for owner, joined in zip(owners, (stream, side, stream, side), strict=True):
            thread = threading.Thread(target=work, args=(owner, joined))
            thread.start()
            thread.join()
        stream.wait(side)
        del owner, thread
    owners.clear()
    assert len(answers) == 4
    assert graph.executable.owners == 0
    assert stays(lambda: all(each() is not None for each in alive), 0.02)
    graph.reset()
    assert until(lambda: all(each() is None for each in alive))


# ---- conditional bodies (torch 2.12 on) ----


@contextlib.contextmanager
def body(graph, kind):
    getattr(graph, f"begin_capture_to_{kind}_node")(None)
    standin.current_stream().kernel()
    yield
    graph.end_capture_to_conditional_node()


def captured_with_bodies(graphs, stream, kind, *owners, keep=False):
    """Owners are retained before, inside, inside the inner, inside again, and behind the two bodies."""
    before, outer, inner, outer_again, behind = owners
    graph = graphs.CUDAGraph(keep_graph=keep)
    with capturing(graph, stream):
        if before:
            assert arena.retain(before)
        with body(graph, kind):
            assert arena.retain(outer)
            with body(graph, kind):
                assert arena.retain(inner)
            assert arena.retain(outer_again)
        if behind:
            assert arena.retain(behind)
    return graph


@with_bodies
@pytest.mark.parametrize("around", [True, False])
def test_owners_of_conditional_bodies_live_with_the_root_and_the_executable_is_clean(cuda, graphs, kind, around):
    before = arena.stats()
    owners = [Owner() for _ in range(5)]
    if not around:
        owners[0] = owners[4] = None
    alive = [weakref.ref(each) for each in owners if each]
    stream, gate = cuda.Stream(), cuda.Event()
    graph = captured_with_bodies(graphs, stream, kind, *owners)
    owners.clear()
    assert graph.executable.owners == 0
    assert arena.stats().owners - before.owners == len(alive)
    arena.reclaim()
    assert arena.stats().lists - before.lists == 1
    with standin.current(stream):
        graph.gate = gate
        graph.replay()
    graph.reset()
    assert stays(lambda: all(each() is not None for each in alive))
    gate.set()
    assert until(lambda: all(each() is None for each in alive))


@with_bodies
def test_without_management_a_body_taxes_the_executable(cuda, unmanaged, kind):
    """The control, and what a raw conditional body costs."""
    stream = cuda.Stream()
    graph = captured_with_bodies(unmanaged(), stream, kind, None, Owner(), Owner(), Owner(), None)
    assert graph.executable.owners == 2
    graph.reset()


@with_bodies
def test_a_kept_template_holds_the_owners_of_its_bodies_too(cuda, graphs, kind):
    alive = weakref.ref(owner := Owner())
    graph = captured_with_bodies(graphs, cuda.Stream(), kind, None, Owner(), owner, Owner(), None, keep=True)
    del owner
    assert graph.template.owners == 1
    for _ in range(2):
        graph.instantiate()
        assert graph.executable.owners == 0
    clone = graph.template.clone()
    graph.reset()
    assert stays(lambda: alive() is not None)
    clone.destroy()
    assert gone(alive)


@with_bodies
def test_retaining_in_a_body_asks_the_driver_no_more_than_around_it(cuda, graphs, kind):
    graph = graphs.CUDAGraph()
    with capturing(graph, cuda.Stream()):
        arena.retain(Owner())
        asked = []
        with body(graph, kind):
            arena.retain(Owner())
            before = cuda.calls("cuStreamGetCaptureInfo")
            arena.retain(Owner())
            asked.append(cuda.calls("cuStreamGetCaptureInfo") - before)
        arena.retain(Owner())
        before = cuda.calls("cuStreamGetCaptureInfo")
        arena.retain(Owner())
        asked.append(cuda.calls("cuStreamGetCaptureInfo") - before)
    assert asked == [0, 0]
    graph.reset()


@with_bodies
def test_a_body_that_cannot_hand_over_its_owners_keeps_them(cuda, graphs, caplog, kind):
    alive = weakref.ref(owner := Owner())
    graph = graphs.CUDAGraph()
    with capturing(graph, cuda.Stream()):
        with body(graph, kind):
            assert arena.retain(owner)
            cuda.fail("cuUserObjectCreate")
    del owner
    assert "the executable will hold them" in caplog.text
    assert graph.executable.owners == 1
    assert alive() is not None
    graph.reset()
    assert gone(alive)


@with_bodies
def test_a_failed_body_lets_its_owners_go(cuda, graphs, kind):
    alive = weakref.ref(owner := Owner())
    stream = cuda.Stream()
    graph = graphs.CUDAGraph()
    with pytest.raises(cuda.Error):
        with capturing(graph, stream):
            with body(graph, kind):
                arena.retain(owner)
                standin.current_stream().invalidate()
    del owner
    graph.reset()
    del graph
    with contextlib.suppress(cuda.Error):
        stream.end_capture().destroy()
    assert gone(alive)
