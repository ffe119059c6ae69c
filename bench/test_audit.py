"""What it costs to look: audits, checks and reports, on the simulated driver. Their Python and C are the same on a real one;
what its calls cost is in test_audit_gpu.py."""

import pytest
from planted import Allocator

import arena
from arena import _registry, captures, reporting

NODES = 2_000
GRAPHS, OWNERS = 100, 100  # of each


@pytest.fixture
def torch_memory(cuda, monkeypatch):
    planted = Allocator(cuda)
    monkeypatch.setattr(reporting, "allocator", lambda: planted)
    return planted


def big(cuda, source):
    """A decoder's worth of kernels: each reads a weight, an activation of the pool and a scratch, and has a large struct."""
    weights = [source.array(1 << 20) for _ in range(200)]
    pool = [source.array(1 << 16, (1, 1)) for _ in range(500)]
    graph = cuda.Graph()
    for number in range(NODES):
        struct = bytes(40) + pool[number % 500].address.to_bytes(8, "little") + bytes(200)
        graph.add_node(f"kernel {number % 20}", weights[number % 200].address, pool[number % 499].address, 7, struct)
    return graph


def test_audit(cuda, torch_memory, measure):
    graph = big(cuda, torch_memory)
    measure(
        "audit, per node",
        lambda: arena.audit(graph, pool=(1, 1), allocations=torch_memory),
        lambda: (),
        calls=NODES,
        target="≤ 20,000 ns",
    )


def test_check_where_nothing_was_freed(cuda, torch_memory, measure):
    seen = arena.audit(big(cuda, torch_memory), pool=(1, 1), allocations=torch_memory)
    measure("check of 2,000 nodes", seen.check, lambda: (), calls=1, target="≤ 2,000,000 ns")


def test_check_after_a_free(cuda, torch_memory, measure):
    seen = arena.audit(big(cuda, torch_memory), pool=(1, 1), allocations=torch_memory)
    measure("check of 2,000 nodes", seen.check, lambda: torch_memory.array(512).free() or (), calls=1, target="≤ 2,000,000 ns")


def test_check_where_plans_hold_it_all(cuda, torch_memory, measure):
    """90 plans of 20 arrays: the plans are searched again, each once."""

    class Plan:
        def __init__(self):
            self.parts = {number: torch_memory.array(512) for number in range(20)}

    plans, stream = [Plan() for _ in range(90)], cuda.Stream()
    with stream.capture() as capture:
        for plan in plans:
            arena.retain(plan)
            for each in plan.parts.values():
                stream.kernel("mhc", each.address)
    seen = arena.audit(capture.graph, allocations=torch_memory)
    assert len(seen.held) == 1_800
    measure("check of 1,800 nodes held by 90 plans", seen.check, lambda: (), calls=1)


@pytest.fixture
def many(cuda, torch_memory):
    """100 graphs of 100 owners; half of the owners are everybody's."""
    common = [torch_memory.array(1 << 20) for _ in range(OWNERS // 2)]
    stream, graphs = cuda.Stream(), []
    for number in range(GRAPHS):
        with stream.capture() as capture:
            captures.note(capture.id, None, f"graph {number}")
            for owner in common:
                arena.retain(owner)
            for _ in range(OWNERS // 2):
                arena.retain(torch_memory.array((number % 8 + 1) << 16))
        graphs.append(capture.graph)
    assert arena.stats().owners == GRAPHS * OWNERS
    return graphs


def forget():
    reporting._known.clear()
    reporting._summary = None
    return ()


def test_first_report_of_10000_owners(many, measure):
    measure("report of 10,000 owners", arena.report, forget, calls=1, target="≤ 50,000,000 ns")


def test_report_after_that(many, measure):
    arena.report()
    measure("report of 10,000 owners", arena.report, lambda: (), calls=1, target="≤ 5,000,000 ns")


def test_report_with_retired_blocks_and_after_many_deaths(many, cuda, torch_memory, monkeypatch, measure):
    retired = [(torch_memory.array(1 << 16).address, 1 << 16) for _ in range(64)]
    monkeypatch.setattr(reporting, "workspaces", [lambda: [reporting.SlotReport("slot", 1, 1, "", [], retired)]])
    run = capture_with(cuda, [object()])
    for _ in range(1_024):
        run()
    arena.reclaim(5)
    assert len(_registry.died()) == 1_024
    arena.report()
    measure("report of 10,000 owners", arena.report, lambda: (), calls=1, target="≤ 5,000,000 ns")


def test_report_after_one_more_graph(many, cuda, measure):
    """What is kept of the other graphs serves on."""
    stream = cuda.Stream()

    def one_more():
        with stream.capture():
            arena.retain(object())
        return ()

    arena.report()
    measure("report of 10,000 owners", arena.report, one_more, calls=1, rounds=20)


def capture_with(cuda, owners):
    stream = cuda.Stream()

    def run():
        with stream.capture() as capture:
            for owner in owners:
                arena.retain(owner)
        capture.graph.destroy()

    return run


@pytest.mark.parametrize("owners", [1, 100])
def test_what_is_always_on_for_each_capture(cuda, measure, owners):
    """Where a capture first retained is noted once for each, never for each owner: 100 owners cost no more above 1 than their
    retains do."""
    measure("a capture", capture_with(cuda, [object()] * owners), lambda: (), calls=1)


def test_what_the_note_of_a_birth_costs(cuda, measure):
    """The floor of the two above: what lists and times cost by themselves."""
    measure("lists()", _registry.lists, lambda: (), calls=1)
