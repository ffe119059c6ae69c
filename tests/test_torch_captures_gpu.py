"""Captures that torch's managed graphs make, on a real GPU: who takes part in them and keeps which owners, where they fail, are
nested, spread over threads, share a pool or have conditional bodies, and captures that others make: torch itself, autograd,
breakable graphs, other libraries. Without a GPU, test_torch_captures.py."""

import contextlib
import gc
import threading
import weakref

import pytest
from conftest import stays, until

import arena

torch = pytest.importorskip("torch")

import managed_graphs  # noqa: E402
from managed_graphs import Owner, captured, gone, queued_behind  # noqa: E402

import arena.torch  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

managed, installed = managed_graphs.managed, managed_graphs.installed  # fixtures


def test_a_pool_whose_owners_were_in_it_can_be_captured_into_again(managed):
    """A profiling capture, thrown away, and the real one in the same pool."""
    graph_type, context = managed
    pool = torch.cuda.graph_pool_handle()
    reserved = []
    for _ in range(4):
        graph = graph_type()
        with context(graph, pool=pool):
            inside = torch.zeros(8 << 20, device="cuda")
            arena.retain(inside)
            inside.add_(1)
        del inside
        graph.replay()
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
        graph.reset()
        del graph
    assert reserved[-1] <= reserved[0] + (4 << 20), reserved


def test_a_failed_capture_lets_go_and_the_next_starts_empty(managed):
    graph_type, context = managed
    alive = weakref.ref(owner := Owner())
    y = torch.zeros(8, device="cuda")
    graph = graph_type()
    with pytest.raises(RuntimeError):
        with context(graph):
            y.add_(1)
            arena.retain(owner)
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize()
    del owner, graph
    gc.collect()
    assert gone(alive)
    before = arena.stats().owners
    graph = captured(managed, Owner())
    assert arena.stats().owners == before + 1
    graph.reset()


def test_make_graphed_callables_is_managed(installed):
    kept = []

    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8, device="cuda"))

        def forward(self, x):
            owner = Owner()
            if arena.retain(owner):
                kept.append(weakref.ref(owner))
            return x * self.weight

    graphed = torch.cuda.make_graphed_callables(Scale(), (torch.ones(8, device="cuda", requires_grad=True),))
    assert kept
    assert all(each() is not None for each in kept)
    out = graphed(torch.full((8,), 2.0, device="cuda", requires_grad=True))
    out.sum().backward()
    torch.cuda.synchronize()
    del graphed, out
    gc.collect()
    assert until(lambda: all(each() is None for each in kept))


def test_retention_works_from_a_side_stream_and_a_worker_thread(managed):
    graph_type, context = managed
    y = torch.zeros(8, device="cuda")
    owners = [Owner() for _ in range(3)]
    alive = [weakref.ref(owner) for owner in owners]
    side = torch.cuda.Stream()
    graph = graph_type()

    def work():
        with torch.cuda.stream(side):
            assert arena.retain(owners[2])

    with context(graph, capture_error_mode="thread_local"):
        y.add_(1)
        main = torch.cuda.current_stream()
        assert arena.retain(owners[0])
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y.add_(1)
            assert arena.retain(owners[1])
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        main.wait_stream(side)
    owners.clear()
    assert queued_behind(graph) > 900
    assert all(each() is not None for each in alive)
    graph.reset()
    assert until(lambda: all(each() is None for each in alive))


def test_segments_of_a_breakable_graph_die_in_any_order(managed):
    shared = Owner()
    alive = weakref.ref(shared)
    own = [Owner() for _ in range(5)]
    owned = [weakref.ref(owner) for owner in own]
    segments = [captured(managed, shared, owner) for owner in own]
    del shared
    own.clear()
    for number in (3, 0, 4, 1):
        segments[number].reset()
        assert gone(owned[number])
        assert alive() is not None
    segments[2].reset()
    assert gone(alive)


def test_a_breakable_graphs_owner_lives_with_the_segment_that_retained_it(installed):
    """Each segment is a graph and a break is not capturing: nothing more is needed."""
    breakable = pytest.importorskip("breakable_cuda_graphs")
    x, between, out = (torch.zeros(1024, device="cuda") for _ in range(3))
    x.fill_(3.0)
    alive, eager = {}, []

    def op(name, *, capturing=True):
        owner = Owner()
        alive[name] = weakref.ref(owner)
        assert arena.retain(owner) is capturing

    @breakable.no_graph
    def a_break(source):
        op("eager", capturing=False)
        eager.append(alive["eager"]() is None)
        between.copy_(source * 10)

    graph = breakable.BreakableCUDAGraph()
    with breakable.breakable_graph(graph):
        op("first")
        crosses = x * 2
        arena.retain(crosses)  # a value that crosses a break is retained by the segment that produced it
        alive["crosses"] = weakref.ref(crosses)
        a_break(crosses)
        del crosses
        op("second")
        between.add_(1)
        a_break(between)
        op("third")
        out.copy_(between)
    for number in range(1, 4):
        x.fill_(number)
        graph.replay()
        torch.cuda.synchronize()
        assert out[0].item() == (number * 20 + 1) * 10
    assert all(eager)
    segments = [each for each in graph._segments if isinstance(each, torch.cuda.CUDAGraph)]
    assert len(segments) == 3
    assert all(queued_behind(each) > 900 for each in segments)
    for number, name in ((1, "second"), (0, "first"), (2, "third")):
        assert alive[name]() is not None
        segments[number].reset()
        assert gone(alive[name])
    assert alive["crosses"]() is None


def test_cudagraph_trees_are_managed(installed):
    """torch.compile(mode="reduce-overhead") captures with torch.cuda.CUDAGraph too."""
    kept = []

    @torch.library.custom_op("arena_test::noted", mutates_args=())
    def noted(x: torch.Tensor) -> torch.Tensor:
        owner = Owner()
        if arena.retain(owner):
            kept.append(weakref.ref(owner))
        return x + 1

    noted.register_fake(torch.empty_like)
    compiled = torch.compile(lambda x: noted(x) * 2, mode="reduce-overhead")
    x = torch.ones(1024, device="cuda")
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        assert compiled(x)[0].item() == 4.0
    assert kept
    assert kept[-1]() is not None
    del compiled
    torch.compiler.reset()
    gc.collect()
    arena.reclaim(5)
    assert until(lambda: all(each() is None for each in kept))


@pytest.mark.parametrize("library", ["cupy", "cuda.bindings"])
def test_captures_of_other_libraries_are_held_by_the_executable(installed, library):
    pytest.importorskip(library)
    alive = weakref.ref(owner := Owner())
    torch.cuda.init()
    if library == "cupy":
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        y = cupy.zeros(8)
        with stream:
            y += 1
            stream.begin_capture()
            y += 1
            assert arena.retain(owner, stream)
            graph = stream.end_capture()
        release = [graph]
        del graph
    else:
        from cuda.bindings import driver

        check = lambda result: result[1] if len(result) > 1 else None  # noqa: E731
        torch.zeros(1, device="cuda")
        stream = check(driver.cuStreamCreate(1))
        driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        assert arena.retain(owner, stream)
        graph = check(driver.cuStreamEndCapture(stream))
        executable = check(driver.cuGraphInstantiate(graph, 0))
        driver.cuGraphDestroy(graph)

        class Executable:
            def __del__(self):
                driver.cuGraphExecDestroy(executable)

        release = [Executable()]
    del owner
    assert stays(lambda: alive() is not None)
    release.clear()
    gc.collect()
    arena.reclaim(5)
    assert gone(alive)


def test_a_backward_thread_of_autograd_retains_into_the_managed_capture(managed):
    graph_type, context = managed
    seen, alive = [], []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            owner = Owner()
            alive.append(weakref.ref(owner))
            seen.append((threading.get_ident(), arena.retain(owner), arena.capture_id()))
            return 2 * ctx.saved_tensors[0] * grad

    x = torch.ones(8, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        Square.apply(x).sum().backward()
    torch.cuda.synchronize()
    seen.clear()
    alive.clear()
    graph = graph_type()
    with context(graph, capture_error_mode="thread_local"):
        capture = arena.capture_id()
        Square.apply(x).sum().backward()
    assert [each[1:] for each in seen] == [(True, capture)], seen
    assert seen[0][0] != threading.get_ident(), "autograd ran the backward on this thread: nothing was tested"
    assert queued_behind(graph) > 900
    assert alive[0]() is not None
    graph.reset()
    assert gone(alive[0])
    x.grad = None


def test_two_captures_at_once_in_two_threads_do_not_mix(managed):
    graph_type, _ = managed
    both = threading.Barrier(2)
    results, errors = {}, []

    def work(name):
        try:
            stream = torch.cuda.Stream()
            y = torch.zeros(8, device="cuda")
            graph = graph_type()
            alive = weakref.ref(owner := Owner())
            torch.cuda.synchronize()
            both.wait(10)
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                both.wait(10)
                y.add_(1)
                for _ in range(100):
                    assert arena.retain(owner)
                both.wait(10)
                graph.capture_end()
            results[name] = graph, alive
        except BaseException as error:
            errors.append(error)
            both.abort()

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors, errors
    graph, alive = results.pop("a")
    other, other_alive = results.pop("b")
    assert queued_behind(graph) > 900
    graph.reset()
    assert gone(alive)
    assert other_alive() is not None
    other.reset()
    assert gone(other_alive)


def test_a_relaxed_capture_begun_in_one_thread_and_ended_in_another(managed):
    graph_type, _ = managed
    stream = torch.cuda.Stream()
    y = torch.zeros(8, device="cuda")
    alive = weakref.ref(owner := Owner())
    graph = graph_type()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="relaxed")
        y.add_(1)
        assert arena.retain(owner)
    del owner
    errors = []

    def end():
        try:
            with torch.cuda.stream(stream):
                graph.capture_end()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert not errors, errors
    with torch.cuda.stream(stream):
        assert arena.retain(Owner()) is False
    assert queued_behind(graph) > 900
    assert alive() is not None
    graph.reset()
    assert gone(alive)


def test_a_raw_capture_nested_on_the_same_thread_keeps_its_own_owners(managed):
    driver = pytest.importorskip("cuda.bindings.driver")
    graph_type, context = managed
    owners = [Owner() for _ in range(3)]
    alive = [weakref.ref(each) for each in owners]
    other = torch.cuda.Stream()
    y = torch.zeros(8, device="cuda")
    graph = graph_type()
    with context(graph, capture_error_mode="relaxed"):
        y.add_(1)
        assert arena.retain(owners[0])
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        assert not driver.cuStreamBeginCapture(other.cuda_stream, mode)[0]
        assert arena.retain(owners[1], other)
        code, raw = driver.cuStreamEndCapture(other.cuda_stream)
        assert not code
        assert arena.retain(owners[2])
    owners.clear()
    graph.reset()
    assert until(lambda: [each() is None for each in alive] == [True, False, True]), [each() for each in alive]
    driver.cuGraphDestroy(raw)
    assert gone(alive[1])


def test_an_end_on_the_wrong_stream_may_be_repeated_on_the_right_one(managed):
    graph_type, _ = managed
    stream = torch.cuda.Stream()
    y = torch.zeros(8, device="cuda")
    alive = weakref.ref(owner := Owner())
    graph = graph_type()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="relaxed")
        y.add_(1)
        assert arena.retain(owner)
        del owner
        with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError, match="same stream"):
            graph.capture_end()
        assert alive() is not None
        graph.capture_end()
    assert stays(lambda: alive() is not None, 0.02)
    assert queued_behind(graph) > 900
    graph.reset()
    assert gone(alive)


def test_owners_of_torchs_conditional_bodies_live_with_the_root_and_the_executable_is_clean(managed):
    graph_type, context = managed
    if not hasattr(torch.cuda.CUDAGraph, "begin_capture_to_if_node"):
        pytest.skip("this torch has no conditional bodies (2.12 on)")
    owners = [Owner() for _ in range(3)]
    alive = [weakref.ref(each) for each in owners]
    y, condition = torch.zeros(8, device="cuda"), torch.ones((), dtype=torch.bool, device="cuda")
    graph = graph_type()
    with context(graph):
        assert arena.retain(owners[0])
        graph.begin_capture_to_if_node(condition)
        y.add_(1)
        assert arena.retain(owners[1])
        graph.end_capture_to_conditional_node()
        assert arena.retain(owners[2])
    owners.clear()
    graph.replay()
    torch.cuda.synchronize()
    assert y[0].item() == 1.0
    assert queued_behind(graph) > 900
    assert all(each() is not None for each in alive)
    graph.reset()
    assert until(lambda: all(each() is None for each in alive))
