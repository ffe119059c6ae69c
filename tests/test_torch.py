"""The registry under torch: the current stream found from C, and the main job on a real GPU - a captured graph whose custom op
drops its scratch. On a machine without a GPU only the CPU half runs."""

import gc
import threading
import weakref

import pytest
from conftest import run_python, stays, until

import arena

torch = pytest.importorskip("torch")

gpu = pytest.mark.gpu
SIZE = 1 << 20


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    torch.cuda.init()
    return "cuda"


def test_without_cuda_nothing_is_retained_and_cuda_stays_uninitialised():
    run = run_python(
        "import torch, arena\n"
        "assert arena.retain(torch.zeros(1)) is False and arena.capture_id() is None\n"
        "assert not torch.cuda.is_initialized()\n",
        timeout=60,
    )
    assert run.returncode == 0, run.stderr


def test_a_cpu_tensor_is_an_owner_that_is_not_compared():
    with arena.collect() as owners:
        arena.retain(torch.zeros(3))
        arena.retain(torch.zeros(3))
    assert len(owners) == 2


# ---- the main job ----


class Binding:
    """What an op library makes before the capture. Its scratch lies outside the graph's pool."""

    live = weakref.WeakValueDictionary()

    def __init__(self, key):
        self.scratch = torch.full((SIZE,), 2.0, device="cuda")
        Binding.live[key] = self


@torch.library.custom_op("arena_test::scale", mutates_args={"out"})
def scale(x: torch.Tensor, out: torch.Tensor, key: int, retain: bool) -> None:
    binding = Binding.live[key]
    if retain:
        assert arena.retain(binding.scratch) is torch.cuda.is_current_stream_capturing()
    torch.mul(x, binding.scratch, out=out)


def capture_drop_churn_replay(retain):
    """The value that a replay gives after the op's binding was dropped and its memory handed to somebody else."""
    x = torch.full((SIZE,), 3.0, device="cuda")
    out = torch.zeros_like(x)
    binding = Binding(1)
    scratch = weakref.ref(binding.scratch)
    torch.ops.arena_test.scale(x, out, 1, retain)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.arena_test.scale(x, out, 1, retain)
    del binding
    gc.collect()
    poison = [torch.full((SIZE,), float("nan"), device="cuda") for _ in range(16)]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    del poison
    return out[0].item(), graph, scratch


@gpu
def test_a_custom_op_that_drops_its_scratch_replays_right(device):
    value, graph, scratch = capture_drop_churn_replay(retain=True)
    assert value == 6.0
    assert scratch() is not None
    del graph
    arena.reclaim(5)
    assert until(lambda: scratch() is None)


@gpu
def test_without_retain_the_same_op_replays_somebody_elses_memory(device):
    """The negative control of the whole library."""
    value, graph, scratch = capture_drop_churn_replay(retain=False)
    assert scratch() is None
    assert value != 6.0
    del graph


# ---- the current stream ----


class Owner:
    """Something that owns memory."""


@gpu
def test_the_current_stream_is_torchs_on_every_thread(device):
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    y = torch.zeros(8, device="cuda")
    answers = []

    def work(enter):
        if enter:
            with torch.cuda.stream(side):
                answers.append(arena.retain(Owner()))
        else:
            answers.append(arena.retain(Owner()))

    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        main = torch.cuda.current_stream()
        y.add_(1)
        assert arena.retain(Owner())
        assert arena.capture_id() == arena.capture_id(main) == arena.capture_id(main.cuda_stream)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y.add_(1)
            assert arena.capture_id() == arena.capture_id(main)
        for enter in (True, False):
            thread = threading.Thread(target=work, args=(enter,))
            thread.start()
            thread.join()
        main.wait_stream(side)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert arena.retain(Owner()) is False
    assert answers == [True, False]  # a thread's stream is its own: without entering one it is on the default stream
    assert arena.retain(Owner()) is False
    del graph
    arena.reclaim(5)


@gpu
@pytest.mark.parametrize("how", ["reset", "del", "keep_graph", "instantiate twice", "recapture"])
def test_owners_go_with_torchs_graph(device, how):
    y = torch.zeros(8, device="cuda")
    owner = Owner()
    alive = weakref.ref(owner)
    graph = torch.cuda.CUDAGraph(keep_graph=True) if how in ("keep_graph", "instantiate twice") else torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.add_(1)
        assert arena.retain(owner)
    del owner
    if how == "instantiate twice":
        graph.instantiate()
        graph.instantiate()
    graph.replay()
    torch.cuda.synchronize()
    assert stays(lambda: alive() is not None)
    if how == "recapture":
        graph.reset()
        with torch.cuda.graph(graph):
            y.add_(1)
    elif how == "reset":
        graph.reset()
    else:
        del graph
    arena.reclaim(5)
    assert until(lambda: alive() is None)


@gpu
def test_an_exception_in_the_capture_leaves_the_owner_to_the_graph(device):
    y = torch.zeros(8, device="cuda")
    owner = Owner()
    alive = weakref.ref(owner)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="op failed"), torch.cuda.graph(graph):
        y.add_(1)
        arena.retain(owner)
        raise ValueError("op failed")
    del owner
    assert stays(lambda: alive() is not None)
    graph.reset()
    arena.reclaim(5)
    assert until(lambda: alive() is None)


@gpu
def test_an_invalidated_torch_capture_takes_nothing_and_leaks_nothing(device):
    y = torch.zeros(8, device="cuda")
    early, late = Owner(), Owner()
    alive = [weakref.ref(early), weakref.ref(late)]
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(Exception) as raised, torch.cuda.graph(graph):  # noqa: PT011
        y.add_(1)
        arena.retain(early)
        with pytest.raises(RuntimeError):
            torch.cuda.synchronize()
        with pytest.raises(arena.CaptureError, match="invalidated"):
            arena.retain(late)
    assert raised.value is not None
    del early, late, raised
    gc.collect()
    assert until(lambda: all(each() is None for each in alive))


@gpu
def test_owners_may_be_cuda_tensors_that_free_memory_during_somebodys_capture(device):
    """The reclaimer's thread frees device memory while a global-mode capture is open: relaxed mode keeps it whole."""
    y = torch.zeros(8, device="cuda")
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    owner = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    alive = weakref.ref(owner)
    with torch.cuda.graph(first):
        y.add_(1)
        arena.retain(owner)
    del owner
    with torch.cuda.graph(second, capture_error_mode="relaxed"):
        y.add_(1)
        del first
        assert until(lambda: alive() is None)
        y.add_(1)
    second.replay()
    torch.cuda.synchronize()


@gpu
def test_a_backward_thread_of_autograd_retains_into_the_capture(device):
    seen = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            seen.append((threading.get_ident(), arena.retain(Owner()), arena.capture_id()))
            return 2 * ctx.saved_tensors[0] * grad

    x = torch.ones(8, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        Square.apply(x).sum().backward()
    torch.cuda.synchronize()
    seen.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        capture = arena.capture_id()
        Square.apply(x).sum().backward()
    assert [each[1:] for each in seen] == [(True, capture)]
    del graph
    x.grad = None
    arena.reclaim(5)


@gpu
def test_streams_of_other_libraries_are_taken_as_they_are(device):
    core = pytest.importorskip("cuda.core")
    here = core.Device()
    here.set_current()
    stream = here.create_stream()
    owner = Owner()
    alive = weakref.ref(owner)
    builder = stream.create_graph_builder() if hasattr(stream, "create_graph_builder") else here.create_graph_builder()
    builder.begin_building()
    assert arena.retain(owner, builder.stream)
    del owner
    graph = builder.end_building().complete()
    builder.close()
    assert stays(lambda: alive() is not None)
    graph.close()
    arena.reclaim(5)
    assert until(lambda: alive() is None)
    stream.close()
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        arena.retain(Owner(), stream)


@gpu
@pytest.mark.parametrize("how", ["graph alive", "launch in flight", "graph deleted", "capture open", "os._exit"])
def test_exit_is_quick_and_quiet_in_every_state(device, how):
    run = run_python(
        f"""
import arena, os, torch
how = {how!r}
y = torch.zeros(1 << 24, device="cuda")
class Owner:
    def __init__(self): self.tensor = torch.zeros(1 << 20, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _ in range(200): y.add_(1)
    assert arena.retain(Owner())
graph.replay()
if how != "launch in flight": torch.cuda.synchronize()
if how == "graph deleted": del graph
if how == "capture open":
    other = torch.cuda.CUDAGraph(); stream = torch.cuda.Stream(); torch.cuda.synchronize()
    torch.cuda.set_stream(stream); other.capture_begin(); y.add_(1); assert arena.retain(Owner())
if how == "os._exit": os._exit(0)
""",
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert "Fatal" not in run.stderr


@gpu
def test_a_child_forked_before_cuda_was_used_works_like_a_new_process(device):
    run = run_python(
        """
import arena, os, torch
assert arena.retain(object()) is False  # asked, and CUDA is not initialised
child = os.fork()
if child == 0:
    y = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.add_(1)
        assert arena.retain([1])
    del graph
    assert arena.reclaim(5) + arena.stats().released >= 1
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
""",
        timeout=60,
    )
    assert run.returncode == 0, run.stderr


@gpu
def test_a_child_forked_during_a_capture_retains_and_releases_nothing(device):
    run = run_python(
        """
import arena, os, torch
y = torch.zeros(8, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="relaxed"):
    y.add_(1)
    stream = torch.cuda.current_stream().cuda_stream
    assert arena.retain([1], stream)
    child = os.fork()
    if child == 0:
        assert arena.retain([2], stream) is False and arena.capture_id(stream) is None and arena.reclaim(1) == 0
        now = arena.stats()
        assert (now.owners, now.leaked) == (0, now.retained)
        os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert arena.stats().owners == 1
del graph
arena.reclaim(5)
assert arena.stats().owners == 0
""",
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
