"""What owners cost at replay, capture and reset: managed graphs beside graphs without owners and beside graphs whose executable
holds the owners (what every library that attaches while capturing pays). All ratios are of one run; rounds alternate."""

import itertools
import json
import os
import statistics
import time
import weakref

import pytest

import arena

torch = pytest.importorskip("torch")

import arena.torch  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

OWNERS = 1530
PLAIN = torch.cuda.CUDAGraph, torch.cuda.graph
MANAGED = arena.torch.CUDAGraph, arena.torch.graph
WAYS = {"no owners": (PLAIN, 0), "held by the graph": (MANAGED, OWNERS), "held by the executable": (PLAIN, OWNERS)}


class Owner:
    """Something that owns memory."""


def capture(classes, kernels, owners, y):
    graph_type, context = classes
    graph = graph_type()
    with context(graph):
        for _ in range(kernels):
            y.add_(1)
        for _ in range(owners):
            arena.retain(Owner())
    return graph


def step(graphs, times):
    """Seconds per step of `graphs` in a row: (until the host is free again, until the device is)."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        for graph in graphs:
            graph.replay()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    return host / times, (time.perf_counter() - start) / times


def compare(segments, kernels, owners, times, rounds=30):
    """Median (host, whole) of each way, in microseconds; the ways take turns within each round."""
    y = torch.zeros(1024, device="cuda")
    torch.cuda.synchronize()
    graphs = {
        way: [capture(classes, kernels, -(-owners // segments) if count else 0, y) for _ in range(segments)]
        for way, (classes, count) in WAYS.items()
    }
    taken = {way: [] for way in WAYS}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for number in range(rounds + 3):
            for way, each in graphs.items():
                result = step(each, times)
                if number >= 3:
                    taken[way].append(result)
    graphs.clear()
    arena.reclaim(5)
    return {way: [statistics.median(column) * 1e6 for column in zip(*rows, strict=True)] for way, rows in taken.items()}


def told(results):
    floor = results["no owners"]
    return "; ".join(
        f"{way} {host:.1f} / {whole:.1f} µs ({host / floor[0]:.2f} / {whole / floor[1]:.3f} ×)"
        for way, (host, whole) in results.items()
    )


def test_back_to_back_replays(fact):
    results = compare(1, 200, OWNERS, times=20)
    fact("200 kernels, 1,530 owners, host / whole (target ≤ 1.05 / ≤ 1.01 ×)", told(results))


@pytest.mark.parametrize("kernels", [2, 8, 20])
def test_a_step_of_61_segments(fact, kernels):
    results = compare(61, kernels, 90, times=1)
    fact(f"61 segments × {kernels} kernels, 90 owners, host / whole (target ≤ 1.05 / ≤ 1.02 ×)", told(results))


def test_grid(fact):
    """For the plot: written as JSON to the file that ARENA_GRID names."""
    path = os.environ.get("ARENA_GRID")
    if not path:
        pytest.skip("ARENA_GRID does not name a file")
    rows = []
    for segments, kernels in itertools.product((1, 4, 16, 61), (2, 8, 32, 122, 488)):
        if segments * kernels <= 8000:
            results = compare(segments, kernels, 90, times=1, rounds=12)
            rows.append({"segments": segments, "kernels": kernels, "microseconds": results})
    with open(path, "w") as file:
        json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, file, indent=1)


def queued(graph, limit=1000):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.replay()
        torch.cuda.synchronize()
        torch.cuda._sleep(int(150 * 1.9e6))
        for count in range(1, limit + 1):  # noqa: B007
            before = time.perf_counter()
            graph.replay()
            if time.perf_counter() - before > 5e-3:
                break
        torch.cuda.synchronize()
    return count


def test_launches_that_queue_behind_150_ms(fact):
    y = torch.zeros(1024, device="cuda")
    for way, (classes, owners) in WAYS.items():
        fact(f"launches that queue behind 150 ms, {way}", str(queued(capture(classes, 1, owners, y))))


def test_capturing_17_graphs(fact):
    y = torch.zeros(1024, device="cuda")
    taken = {0: [], 90: []}
    for number, owners in itertools.product(range(23), (0, 90)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graphs = [capture(MANAGED if owners else PLAIN, 488, owners, y) for _ in range(17)]
        if number >= 3:
            taken[owners].append(time.perf_counter() - start)
        graphs.clear()
        arena.reclaim(5)
    without, beside = statistics.median(taken[0]), statistics.median(taken[90])
    fact(
        "capturing 17 graphs × 488 kernels with 1,530 owners (target ≤ 1.01 ×)",
        f"{beside / without:.3f} × {without * 1e3:.1f} ms",
    )


def test_reset_in_flight(fact):
    y = torch.zeros(1024, device="cuda")
    returned, released = [], []
    for _ in range(20):
        alive = weakref.ref(owner := Owner())
        graph_type, context = MANAGED
        graph = graph_type()
        with context(graph):
            torch.cuda._sleep(int(50 * 1.9e6))
            y.add_(1)
            arena.retain(owner)
        del owner
        torch.cuda.synchronize()
        graph.replay()
        start = time.perf_counter()
        graph.reset()
        returned.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        end = time.perf_counter()
        while alive() is not None:
            time.sleep(0.0001)
        released.append(time.perf_counter() - end)
    fact("reset with a 50 ms replay in flight returns after (target < 1 ms)", f"{statistics.median(returned) * 1e3:.3f} ms")
    fact("its owners go after the end of the replay (target < 5 ms)", f"{statistics.median(released) * 1e3:.3f} ms")


def test_retain_inside_a_managed_capture(measure):
    graph_type, _ = MANAGED
    graph = graph_type()
    stream = torch.cuda.Stream()
    y = torch.zeros(8, device="cuda")
    owner = Owner()
    torch.cuda.synchronize()

    def setup():  # a capture each round: a list that grows without end is not what a graph has
        graph.capture_begin(capture_error_mode="relaxed")
        y.add_(1)
        arena.retain(owner)
        return (arena.retain,)

    def retain_loop(retain):
        for _ in itertools.repeat(None, 10_000):
            retain(owner)

    def teardown(*_):
        graph.capture_end()
        graph.reset()

    with torch.cuda.stream(stream):
        measure("retain inside a managed capture", retain_loop, setup, teardown=teardown, target="≤ 2.5 ×")


def test_list_append(measure):
    def loop(append):
        for _ in itertools.repeat(None, 10_000):
            append(None)

    measure("retain inside a managed capture", loop, lambda: ([].append,), floor=True)
