"""What audits cost on a GPU: a graph of 2,000 kernels among as many blocks of torch, and the history of its allocator."""

import time

import pytest

import arena

torch = pytest.importorskip("torch")

import arena.torch  # noqa: E402
from arena import _audit, memory  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]

LAYERS, NODES = 500, 2_000


def best(work, before=lambda: None, rounds=9):
    """Milliseconds of the fastest."""
    took = []
    for _ in range(rounds):
        before()
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return min(took) * 1e3


@pytest.fixture
def graph():
    """Four kernels a layer, a gemm among them; each reads a weight of its own."""
    x = torch.randn(64, 256, device="cuda")
    weights = [torch.randn(256, 256, device="cuda") for _ in range(LAYERS)]
    scales = [torch.randn(256, device="cuda") for _ in range(LAYERS)]

    def step():
        y = x
        for weight, scale in zip(weights, scales, strict=True):
            y = torch.tanh((y @ weight) * scale) + x
        return y

    step()
    torch.cuda.synchronize()
    made = arena.torch.CUDAGraph(keep_graph=True)
    with arena.torch.graph(made, audit="warn"):
        step()
    made.kept = x, weights, scales
    return made


def test_audit(graph, fact):
    nodes = _audit.read(graph.raw_cuda_graph())
    assert len(nodes) >= NODES
    reading = best(lambda: _audit.read(graph.raw_cuda_graph()))
    whole = best(lambda: arena.audit(graph))
    blocks = len(memory.allocator().blocks())
    told = f"{len(nodes)} nodes, {nodes.addresses} words, {blocks} blocks"
    fact("audit on a GPU", f"{told}: reading {reading:.1f} ms, all {whole:.1f} ms, {whole / len(nodes) * 1e3:.1f} µs a node")
    fact("audit on a GPU", "targets: 50 ms, 20 µs a node")


def test_check(graph, fact):
    seen = graph._arena_audit
    assert seen.check() == []
    quiet = best(seen.check)
    events = len(memory.allocator().events(0)[0])
    busy = best(seen.check, lambda: torch.empty(1 << 20, device="cuda"))
    assert seen.check() == []
    fact("check on a GPU", f"nothing freed {quiet:.3f} ms; after a free {busy:.2f} ms, {events} events kept (target 2 ms)")


def test_what_history_costs_an_allocation(fact):
    torch.zeros(1, device="cuda")

    def allocate():
        for _ in range(1000):
            torch.empty(1 << 12, device="cuda")

    torch.cuda.memory._record_memory_history(None)
    without = best(allocate)
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=memory.HISTORY)
    watched = best(allocate)
    fact("torch.empty and its free", f"{without * 1e3:.0f} ns; with the history that an audit keeps {watched * 1e3:.0f} ns")
