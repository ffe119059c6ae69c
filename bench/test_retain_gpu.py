"""What `retain` costs under torch on a real driver: absolute times, of the machine that the results name."""

import ctypes
from itertools import repeat

import native
import pytest

import arena

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

GROUP = "retain under torch"
OWNER = object()
CALLS = 10_000  # a round: what `measure` divides by
OWNERS = 1_000  # of one graph, from C: more than any real one has, and few enough to come from warm memory


def append_loop(append):
    for _ in repeat(None, CALLS):
        append(OWNER)


def retain_loop(retain):
    for _ in repeat(None, CALLS):
        retain(OWNER)


def retain_on_loop(retain, stream):
    for _ in repeat(None, CALLS):
        retain(OWNER, stream)


@pytest.fixture
def capturing():
    """One capture around all rounds: what it retained goes afterwards."""
    y = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.add_(1)
        arena.retain(OWNER)
        yield torch.cuda.current_stream().cuda_stream
    del graph
    arena.reclaim(5)


@pytest.fixture
def idle():
    torch.cuda.init()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.zeros(8, device="cuda")
        yield stream.cuda_stream


def test_list_append(measure):
    measure(GROUP, append_loop, lambda: ([].append,), floor=True)


def test_eager(measure, idle):
    measure(GROUP, retain_loop, lambda: (arena.retain,), target="≤ 110 ns")


def test_eager_stream_given(measure, idle):
    measure(GROUP, retain_on_loop, lambda: (arena.retain, idle))


def test_captured(measure, capturing):
    measure(GROUP, retain_loop, lambda: (arena.retain,), target="≤ 110 ns")


def test_captured_stream_given(measure, capturing):
    measure(GROUP, retain_on_loop, lambda: (arena.retain, capturing))


def test_from_c(fact):
    client = native.extension("cimport_client")
    query = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2, ctypes.c_void_p).value
    y = torch.zeros(8, device="cuda")
    side = torch.cuda.Stream().cuda_stream
    for label in ("not capturing", "capturing"):
        retains, queries = [], []
        for _ in range(100):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y.add_(1)
                arena.retain(OWNER)
                stream = torch.cuda.current_stream().cuda_stream if label == "capturing" else side
                queries.append(client.seconds_per_query(query, stream, OWNERS))
                retains.append(client.seconds_per_retain(OWNER, stream, OWNERS))
            del graph
            arena.reclaim(5)
        retain, ask = (sorted(each)[50] * 1e9 for each in (retains, queries))
        fact(f"retain_on from C, real driver, {label}", native.above(retain, ask))


def test_ten_thousand_owners_released(measure):
    class Owner:
        __slots__ = ("a",)

    y = torch.zeros(8, device="cuda")
    hold = torch.cuda.CUDAGraph()

    def setup():
        from arena._registry import begin

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y.add_(1)
            for _ in repeat(None, CALLS):
                arena.retain(Owner())
        # An open managed capture keeps the reclaimer's thread waiting, so that all of it is released by us.
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            hold.capture_begin(capture_error_mode="relaxed")
            held = begin(stream)
            y.add_(1)
            graph.reset()
            while arena.stats().dead < CALLS:
                pass
            hold.capture_end()
        hold.reset()
        return (held,)

    def work(held):
        held.seal()
        assert arena.reclaim() == CALLS

    measure("release of 10,000 owners, real driver", work, setup, rounds=20)


def test_ten_thousand_owners_in_a_list(measure):
    class Owner:
        __slots__ = ("a",)

    measure(
        "release of 10,000 owners, real driver",
        lambda owners: owners.clear(),
        lambda: ([Owner() for _ in range(CALLS)],),
        rounds=20,
        floor=True,
    )
