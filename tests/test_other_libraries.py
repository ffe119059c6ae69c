"""What to retain for other op libraries: FlashInfer, DeepGEMM, Triton, CuPy, Numba. One example each, with its control.

Marked `gpu`, the real library computes into memory that its owner dropped. FlashInfer and DeepGEMM are not where these tests
run: their part is made in their manner, of the same kinds of objects, and its lifetimes are checked on the simulated driver.
"""

import gc
import weakref
from functools import partial

import pytest
from conftest import until

import arena

torch = pytest.importorskip("torch")

SIZE = 1 << 20


@pytest.fixture
def cuda(simulated):
    return simulated


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    torch.cuda.init()
    return "cuda"


def gone(*references):
    gc.collect()
    return until(lambda: arena.reclaim(0.01) is not None and all(each() is None for each in references))


def captured(cuda, body):
    """An executable of `body`'s one kernel; its template is gone."""
    stream = cuda.Stream()
    with stream.capture() as capture:
        stream.kernel()
        body()
    executable = capture.graph.instantiate()
    capture.graph.destroy()
    gc.collect()
    return executable


# ---- FlashInfer: a wrapper whose plan() exchanges what its run() reads ----


class DecodeWrapper:
    """In the manner of FlashInfer's wrappers: the workspace is its caller's, plan() makes or exchanges index buffers."""

    def __init__(self, workspace):
        self._float_workspace_buffer = workspace
        self._int_workspace_buffer = torch.zeros(8, dtype=torch.uint8)

    def plan(self, indptr):
        self._paged_kv_indptr_buf = indptr.clone()

    def buffers(self):
        return [each for each in vars(self).values() if isinstance(each, torch.Tensor)]

    def run(self, retain):
        for each in retain(self):
            arena.retain(each)


@pytest.mark.parametrize("what", ["its buffers", "the wrapper", "nothing"])
def test_of_a_flashinfer_wrapper_the_buffers_are_retained_that_its_run_used(cuda, what):
    wrapper = DecodeWrapper(torch.zeros(8))
    wrapper.plan(torch.arange(3))
    workspace, indptr = (weakref.ref(each) for each in (wrapper._float_workspace_buffer, wrapper._paged_kv_indptr_buf))
    retain = {"its buffers": DecodeWrapper.buffers, "the wrapper": lambda each: [each], "nothing": lambda each: []}[what]
    executable = captured(cuda, partial(wrapper.run, retain))
    wrapper.plan(torch.arange(5))  # for the next batch: the graph still reads the buffer of this one
    gc.collect()
    assert (indptr() is not None) is (what == "its buffers")  # the control: the wrapper as a whole is not enough
    del wrapper
    gc.collect()
    assert (workspace() is not None) is (what != "nothing")
    executable.destroy()
    assert gone(workspace, indptr)


# ---- DeepGEMM: all tensors are the caller's, operands come with their scales ----


def gemm(lhs, rhs, out, retain):
    """In the manner of DeepGEMM: (values, scales) pairs, nothing allocated, nothing kept."""
    if retain:
        arena.retain((lhs, rhs))  # a tuple is one owner, and holds all that is in it
    return out


@pytest.mark.parametrize("retain", [True, False])
def test_of_a_gemm_on_callers_tensors_the_operands_made_outside_are_retained(cuda, retain):
    lhs, rhs = ((torch.zeros(4), torch.zeros(1)) for _ in range(2))
    alive = [weakref.ref(each) for each in (*lhs, *rhs)]
    out = torch.zeros(4)
    executable = captured(cuda, partial(gemm, lhs, rhs, out, retain))
    del lhs, rhs
    gc.collect()
    assert all((each() is not None) is retain for each in alive)
    executable.destroy()
    assert gone(*alive)


# ---- Triton ----


@pytest.fixture
def times_table(device):
    """A Triton kernel: out = x * table."""
    triton = pytest.importorskip("triton")
    import triton_times

    def run(x, table, out):
        triton_times.times[(triton.cdiv(SIZE, 1024),)](x, table, out, SIZE, BLOCK=1024)

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("retain", [True, False])
def test_of_a_triton_launch_the_tensors_made_outside_are_retained(times_table, retain):
    x, out, table = (torch.full((SIZE,), value, device="cuda") for value in (3.0, 0.0, 2.0))
    alive = weakref.ref(table.untyped_storage())
    times_table(x, table, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        times_table(x, table, out)
        if retain:
            arena.retain(table)
    del table
    gc.collect()
    poison = [torch.full((SIZE,), float("nan"), device="cuda") for _ in range(8)]
    graph.replay()
    torch.cuda.synchronize()
    assert (out[0].item() == 6.0) is retain
    del poison, graph
    if retain:
        assert gone(alive)


# ---- CuPy ----


@pytest.mark.gpu
@pytest.mark.parametrize("retain", [True, False])
def test_of_a_cupy_kernel_the_arrays_are_retained(device, retain):
    cupy = pytest.importorskip("cupy")
    x, table = cupy.full(SIZE, 3.0, dtype="f4"), cupy.full(SIZE, 2.0, dtype="f4")
    out = cupy.zeros(SIZE, dtype="f4")
    cupy.multiply(x, table, out=out)  # compiled before the capture
    cupy.cuda.Device().synchronize()
    alive = weakref.ref(table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            cupy.multiply(x, table, out=out)
        if retain:
            assert arena.retain(table)
    del table
    gc.collect()
    assert (alive() is not None) is retain
    poison = [cupy.full(SIZE, cupy.nan, dtype="f4") for _ in range(8)]
    cupy.cuda.Device().synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert (float(out[0]) == 6.0) is retain
    del poison, graph
    assert gone(alive)


# ---- Numba ----


@pytest.mark.gpu
@pytest.mark.parametrize("retain", [True, False])
def test_of_a_numba_kernel_the_device_arrays_are_retained(device, retain, monkeypatch):
    numpy = pytest.importorskip("numpy")
    monkeypatch.setattr(numpy, "row_stack", numpy.vstack, raising=False)  # a name that numba still looks for, gone from numpy
    numba_cuda = pytest.importorskip("numba.cuda")
    if not numba_cuda.is_available():
        pytest.skip("numba sees no GPU")

    @numba_cuda.jit
    def times(x, table, out):
        index = numba_cuda.grid(1)
        if index < out.size:
            out[index] = x[index] * table[index]

    x, table, out = (numba_cuda.to_device(numpy.full(SIZE, value, dtype="f4")) for value in (3.0, 2.0, 0.0))
    times[SIZE // 256, 256](x, table, out)  # compiled before the capture
    numba_cuda.synchronize()
    alive = weakref.ref(table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        stream = numba_cuda.external_stream(torch.cuda.current_stream().cuda_stream)
        times[SIZE // 256, 256, stream](x, table, out)
        if retain:
            assert arena.retain(table)
    del table
    gc.collect()
    assert (alive() is not None) is retain  # not replayed without: numba returns its memory to the driver, so it would fault
    if retain:
        out.copy_to_device(numpy.zeros(SIZE, dtype="f4"))
        graph.replay()
        torch.cuda.synchronize()
        assert out.copy_to_host()[0] == 6.0
    del graph
    assert gone(alive)
