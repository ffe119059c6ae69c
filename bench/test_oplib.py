"""What an op library pays per call, timed in C: `retain` through arena.h and through `cimport`, an opaque owner without the
GIL, the gate. Beside the driver's own question in the same run; on the simulated driver, and on a real one where torch sees a
GPU."""

import ctypes

import native
import pytest

import arena
from arena import _registry, _simulator

OWNER = object()
OWNERS = 1_000  # of one graph: more than any real one has, and few enough to come from warm memory
ROUNDS = 200
CALLS = 1_000_000  # of the gate


class Simulated:
    """Captures that begin and end, and the address of cuStreamGetCaptureInfo."""

    def __init__(self, cuda):
        self.stream = cuda.Stream()
        self.question = ctypes.cast(_simulator.table_address(), ctypes.POINTER(ctypes.c_void_p))[0]
        self.handle = self.stream.handle

    def begin(self):
        self.stream.begin_capture("relaxed")

    def end(self):
        self.stream.end_capture().destroy()


class Real:
    """The same of torch's graphs."""

    def __init__(self, torch):
        self.torch = torch
        self.question = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2, ctypes.c_void_p).value
        self.y = torch.zeros(8, device="cuda")
        self.stream = torch.cuda.Stream()
        self.handle = self.stream.cuda_stream

    def begin(self):
        self.graph = self.torch.cuda.CUDAGraph()
        self.context = self.torch.cuda.stream(self.stream)
        self.context.__enter__()
        self.graph.capture_begin()
        self.y.add_(1)

    def end(self):
        self.graph.capture_end()
        self.context.__exit__(None, None, None)
        self.graph.reset()


@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.gpu)])
def captures(request):
    if request.param == "simulated":
        return Simulated(request.getfixturevalue("cuda"))
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return Real(torch)


@pytest.fixture
def ops():
    module = native.load(native.c_extension("op_client"))
    module.import_arena()
    return module


def nanoseconds(seconds):
    return sorted(seconds)[len(seconds) // 2] * 1e9


@pytest.mark.parametrize("label", ["not capturing", "capturing"])
def test_a_call_above_the_drivers_question(captures, ops, fact, label):
    cimport = native.extension("cimport_client")
    calls = {
        "arena_retain": lambda: ops.cost("retain", captures.handle, OWNERS, OWNER),
        "retain_on (cimport)": lambda: cimport.seconds_per_retain(OWNER, captures.handle, OWNERS),
        "arena_retain_opaque, without the GIL": lambda: ops.cost("opaque", captures.handle, OWNERS, 0),
        "arena_capturing": lambda: ops.cost("capturing", captures.handle, OWNERS, 0),
    }
    took = {name: [] for name in calls}
    asked = []
    for _ in range(ROUNDS):
        for name, call in calls.items():
            if label == "capturing":
                captures.begin()
                arena.retain(OWNER, captures.handle)
            asked.append(ops.cost("question", captures.handle, OWNERS, captures.question))
            took[name].append(call())
            if label == "capturing":
                captures.end()
                arena.reclaim(5)
                ops.take_log()
    driver = "real driver, " if isinstance(captures, Real) else ""
    for name, each in took.items():
        fact(f"{name} from C, {driver}{label}", native.above(nanoseconds(each), nanoseconds(asked), 10))


@pytest.mark.parametrize("promise", [False, True], ids=["maybe", "exact"])  # in this order: a promise stays with its library
def test_the_gate(ops, fact, promise):
    """Nothing captures. A turn of a loop with it, and of an empty one: a processor does much of both at once."""
    _registry.watched(True)
    try:
        if promise:
            ops.only_torch()
        assert ops.maybe_capturing() is not promise
        gates, loops = ([ops.cost(what, 0, CALLS, 0) for _ in range(15)] for what in ("gate", "loop"))
    finally:
        _registry.watched(False)
    answer = "no" if promise else "maybe"
    gate, loop = nanoseconds(gates), nanoseconds(loops)
    fact(f"arena_maybe_capturing() that says {answer}", f"{gate:.2f} ns a turn, an empty one {loop:.2f} (target ≤ 2 above it)")
