"""Managed torch graphs on a real GPU, patched in and subclassed: nothing is paid at replay, owners outlive what is in flight,
and nobody's capture breaks. Captures are in test_torch_captures_gpu.py. Without a GPU, test_torch_graphs.py makes the same
promises on the simulated driver."""

import gc
import itertools
import mmap
import os
import threading
import time
import weakref

import pytest
from conftest import run_python, stays, until

import arena

torch = pytest.importorskip("torch")

import managed_graphs  # noqa: E402
from managed_graphs import Owner, captured, gone, queued_behind, spin  # noqa: E402

import arena.torch  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

SIZE = 1 << 20

managed, installed = managed_graphs.managed, managed_graphs.installed  # fixtures


def test_as_many_launches_queue_as_without_owners(managed):
    with_owners, without = captured(managed, *[Owner() for _ in range(90)]), captured(managed)
    assert queued_behind(without) > 900
    assert queued_behind(with_owners) > 900


def test_held_by_the_executable_28_launches_queue():
    """The control: the tax that is not paid."""
    graph = captured((torch.cuda.CUDAGraph, torch.cuda.graph), Owner())
    assert queued_behind(graph) < 100


@pytest.mark.parametrize("how", ["reset", "del"])
def test_dropped_in_flight_owners_stay_and_the_call_returns_at_once(managed, how):
    alive = weakref.ref(owner := Owner())
    graph = captured(managed, owner, body=lambda: spin(50))
    del owner
    torch.cuda.synchronize()
    event = torch.cuda.Event()
    graph.replay()
    event.record()
    start = time.perf_counter()
    if how == "reset":
        graph.reset()
    else:
        del graph
    took = time.perf_counter() - start
    assert not event.query()
    assert alive() is not None
    assert took < 0.01
    while not event.query():
        assert alive() is not None
        time.sleep(0.001)
    assert gone(alive)


def replay_drop_overwrite(managed):
    """What a replay computes whose graph is dropped while it runs and whose scratch is then asked for by others."""
    graph_type, context = managed
    x, out = torch.full((SIZE,), 3.0, device="cuda"), torch.zeros(SIZE, device="cuda")
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):  # whose free blocks are handed out again at once, whatever the replay's stream is doing
        scratch = torch.full((SIZE,), 2.0, device="cuda")
    owner = weakref.ref(scratch)
    graph = graph_type()
    torch.cuda.synchronize()
    with context(graph):
        spin(60)
        torch.mul(x, scratch, out=out)
        assert arena.retain(scratch)
    del scratch
    graph.replay()
    graph.reset()
    with torch.cuda.stream(other):
        until(lambda: owner() is None, 0.03)
        poison = [torch.full((SIZE,), float("nan"), device="cuda") for _ in range(16)]
        other.synchronize()
    torch.cuda.synchronize()
    del poison
    return out[0].item()


def test_memory_of_a_dropped_graph_is_not_reused_before_its_replay_has_ended(managed):
    assert replay_drop_overwrite(managed) == 6.0


def test_without_the_fence_it_is_reused_during_the_replay(installed, monkeypatch):
    """The control. torch.cuda.CUDAGraph with the note of the replay left out."""
    original = torch.cuda.CUDAGraph.replay.__wrapped__
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", original)
    assert replay_drop_overwrite((torch.cuda.CUDAGraph, torch.cuda.graph)) != 6.0
    monkeypatch.undo()


def test_every_stream_of_a_replay_is_fenced(managed):
    alive = weakref.ref(owner := Owner())
    graph = captured(managed, owner)
    del owner
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        with torch.cuda.stream(stream):
            graph.replay()
            spin(40)
            graph.replay()
    graph.reset()
    assert alive() is not None
    for stream in streams:
        stream.synchronize()
    assert gone(alive)


def test_an_external_stream_may_be_destroyed_before_the_graph(managed):
    core = pytest.importorskip("cuda.core")
    here = core.Device()
    here.set_current()
    theirs = here.create_stream()
    external = torch.cuda.ExternalStream(int(theirs.handle))
    alive = weakref.ref(owner := Owner())
    graph = captured(managed, owner)
    del owner
    with torch.cuda.stream(external):
        graph.replay()
        graph.replay()
    external.synchronize()
    theirs.close()
    graph.reset()
    assert gone(alive)


@pytest.mark.parametrize("how", ["instantiate", "lazily"])
def test_a_kept_template_holds_the_owners(managed, how):
    alive = weakref.ref(owner := Owner())
    graph = captured(managed, owner, keep_graph=True)
    del owner
    if how == "instantiate":
        graph.instantiate()
        graph.instantiate()
    assert queued_behind(graph) > 900
    graph.reset()
    assert gone(alive)


@pytest.mark.parametrize("owners", [0, 1])
@pytest.mark.parametrize("how", ["reset", "collected"])
def test_a_graph_that_goes_during_anothers_global_capture_does_not_break_it(installed, owners, how):
    classes = torch.cuda.CUDAGraph, torch.cuda.graph
    graph = [captured(classes, *[Owner() for _ in range(owners)])]
    graph[0].replay()
    torch.cuda.synchronize()
    y = torch.zeros(8, device="cuda")

    def drop():
        if how == "reset":
            graph[0].reset()
        graph.clear()
        gc.collect()

    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other, capture_error_mode="global"):
        y.add_(1)
        thread = threading.Thread(target=drop)
        thread.start()
        thread.join()
        y.add_(1)
    other.replay()
    torch.cuda.synchronize()
    assert y[0].item() == 2.0


def test_without_install_it_breaks_it():
    classes = torch.cuda.CUDAGraph, torch.cuda.graph
    graph = captured(classes)
    y = torch.zeros(8, device="cuda")
    other = torch.cuda.CUDAGraph()
    with pytest.raises(Exception, match=r"captur|invalidat"):
        with torch.cuda.graph(other, capture_error_mode="global"):
            y.add_(1)
            graph.reset()
            y.add_(1)


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_cycles_of_capture_replay_and_drop_keep_memory_flat(managed):
    graph_type, _ = managed
    stream = torch.cuda.Stream()
    y = torch.zeros(8, device="cuda")

    def cycle():
        owners = [torch.empty(1024, device="cuda") for _ in range(10)]
        graph = graph_type()
        with torch.cuda.stream(stream):  # torch.cuda.graph would synchronize and empty the cache each time
            graph.capture_begin()
            y.add_(1)
            for owner in owners:
                arena.retain(owner)
            graph.capture_end()
            graph.replay()

    def settled():
        torch.cuda.synchronize()
        arena.reclaim(5)
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "used": -torch.cuda.mem_get_info()[0],
            "resident": resident(),
        }

    torch.cuda.synchronize()
    for _ in range(100):
        cycle()
    before = settled()
    start = time.perf_counter()
    for number in range(10_000):
        cycle()
        if number % 1000 == 999:
            torch.cuda.synchronize()
    after = settled()
    grown = {name: after[name] - before[name] for name in before}
    print(f"10,000 cycles in {time.perf_counter() - start:.1f} s; grown by {grown} bytes")
    assert grown["allocated"] <= 1 << 16, grown
    assert grown["reserved"] <= 4 << 20, grown
    assert grown["used"] <= 16 << 20, grown
    assert grown["resident"] <= 32 << 20, grown  # 10,000 graphs of which each kept 4 KB: 40 MB
    assert arena.stats().owners == 0


def test_graphs_that_are_kept_are_seen_to_take_memory(managed):
    """The control."""
    before = resident(), torch.cuda.memory_allocated()
    kept = []
    for _ in range(64):
        fresh = mmap.mmap(-1, 1 << 20)  # not from malloc, which may have room to spare
        fresh[:] = bytes(1 << 20)
        kept.append(captured(managed, torch.empty(1024, device="cuda"), fresh))
        del fresh
    assert torch.cuda.memory_allocated() - before[1] >= 64 * 4096
    assert resident() - before[0] > 48 << 20
    for graph in kept:
        graph.reset()


def test_a_clean_graph_keeps_less_than_a_kilobyte_of_the_host_beside_its_owners():
    """What 500 managed graphs with one owner take more than 500 without owners or management, Python's and the driver's
    memory included. The control: what 100 more owners cost is seen, and is their entries."""
    run = run_python(
        """
import arena, arena.torch, torch
from heap import heap_bytes

owner, y = object(), torch.zeros(8, device="cuda")
stream, pool, keep = torch.cuda.Stream(), torch.cuda.graph_pool_handle(), []

def per_graph(kind, owners, count=500):
    kept = [None] * count
    with torch.cuda.stream(stream):
        for number in range(-50, count):
            if number == 0:
                torch.cuda.synchronize()
                before = heap_bytes()
            graph = kind()
            graph.capture_begin(pool=pool)
            y.add_(1)
            for _ in range(owners):
                arena.retain(owner)
            graph.capture_end()
            graph.replay()
            if number < 0:
                keep.append(graph)
            else:
                kept[number] = graph
    torch.cuda.synchronize()
    taken = heap_bytes() - before
    keep.extend(kept)
    return taken / count

per_graph(torch.cuda.CUDAGraph, 0)
plain = min(per_graph(torch.cuda.CUDAGraph, 0) for _ in range(3))
one = min(per_graph(arena.torch.CUDAGraph, 1) for _ in range(3))
more = min(per_graph(arena.torch.CUDAGraph, 101) for _ in range(3))
print(plain, one - plain - 16, more - one)
""",
        timeout=100,
        env={"PYTHONMALLOC": "malloc"},
    )
    assert run.returncode == 0, run.stderr
    plain, one, hundred = map(float, run.stdout.split())
    print(f"a plain graph takes {plain:.0f} bytes, a managed one {one:.0f} more beside its owner, 100 owners {hundred:.0f}")
    assert 0 < one < 1024, run.stdout
    assert 1000 <= hundred <= 2800, run.stdout


@pytest.mark.parametrize("how", ["alive", "in flight", "dropped in flight"])
def test_exit_with_managed_graphs_is_quick_and_quiet(how):
    run = run_python(
        f"""
import arena, arena.torch, torch
arena.torch.install()
how = {how!r}
y = torch.zeros(8, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y.add_(1); torch.cuda._sleep(200_000_000); arena.retain(torch.zeros(1 << 20, device="cuda"))
graph.replay()
if how == "alive": torch.cuda.synchronize()
if how == "dropped in flight": graph.reset()
""",
        timeout=60,
    )
    assert (run.returncode, run.stderr) == (0, ""), run.stderr


# ---- the rest of what a managed graph must do ----


def test_an_external_stream_is_waited_for(managed):
    core = pytest.importorskip("cuda.core")
    here = core.Device()
    here.set_current()
    theirs = here.create_stream()
    external = torch.cuda.ExternalStream(int(theirs.handle))
    alive = weakref.ref(owner := Owner())
    graph = captured(managed, owner, body=lambda: spin(50))
    del owner
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    with torch.cuda.stream(external):
        graph.replay()
        done.record()
    start = time.perf_counter()
    graph.reset()
    took = time.perf_counter() - start
    assert took < 0.01, took
    assert not done.query()
    while not done.query():
        assert alive() is not None
        time.sleep(0.001)
    assert gone(alive)
    theirs.close()


@pytest.mark.parametrize("how", ["reset", "del"])
def test_a_stream_that_is_capturing_when_the_graph_goes_is_left_alone_until_it_has_done(managed, how):
    graph_type, _ = managed
    stream = torch.cuda.Stream()
    y = torch.zeros(8, device="cuda")
    alive = weakref.ref(owner := Owner())
    graph = captured(managed, owner, body=lambda: spin(20))
    del owner
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.replay()
    other = graph_type()
    with torch.cuda.stream(stream):
        other.capture_begin(capture_error_mode="global")
        y.add_(1)
        if how == "reset":
            graph.reset()
        else:
            del graph
        assert stays(lambda: alive() is not None)  # past the end of the replay: nothing can tell that here
        y.add_(1)
        other.capture_end()
    assert gone(alive)
    other.replay()
    torch.cuda.synchronize()
    assert y[0].item() == 2.0


def test_a_kept_template_that_is_dumped_still_holds_the_owners(tmp_path):
    """In a process of its own: torch's debug mode is the whole process's, and for good."""
    pytest.importorskip("cuda.bindings.driver")
    ended = run_python(
        f"""
import weakref, torch, arena.torch
import test_torch_managed as here
from cuda.bindings import driver

for classes in ((arena.torch.CUDAGraph, arena.torch.graph), (torch.cuda.CUDAGraph, torch.cuda.graph)):
    if classes[0] is torch.cuda.CUDAGraph:
        arena.torch.install()
    alive = weakref.ref(owner := here.Owner())
    graph = here.captured(classes, owner, keep_graph=True)
    del owner
    graph.enable_debug_mode()
    graph.debug_dump({str(tmp_path / "graph.dot")!r})
    code, clone = driver.cuGraphClone(graph.raw_cuda_graph())
    assert not code
    graph.instantiate()
    assert here.queued_behind(graph) > 900
    graph.reset()
    assert here.stays(lambda: alive() is not None)
    driver.cuGraphDestroy(clone)
    assert here.gone(alive)
""",
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    assert "digraph" in (tmp_path / "graph.dot").read_text()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_graphs_that_share_owners_may_go_in_every_order(managed, order):
    held = [(0, 1), (0, 1, 2, 2), (0, 2)]
    owners = [Owner() for _ in range(3)]
    alive = [weakref.ref(each) for each in owners]
    living = [captured(managed, *(owners[number] for number in numbers)) for numbers in held]
    for graph in living:
        graph.replay()
    del graph
    owners.clear()
    torch.cuda.synchronize()
    for step, number in enumerate(order):
        if step == 1:
            living[number].reset()
        living[number] = None
        needed = {each for graph, numbers in zip(living, held, strict=True) if graph for each in numbers}
        assert until(lambda needed=needed: {each for each in range(3) if alive[each]()} == needed), (order, step)
        assert stays(lambda needed=needed: {each for each in range(3) if alive[each]()} == needed, 0.005), (order, step)


def test_an_owner_that_refers_to_its_graph_is_counted_and_stays_until_the_graph_is_reset(managed):
    graph_type, context = managed
    before = arena.stats().cycles
    owner, y = Owner(), torch.zeros(8, device="cuda")
    owner.graph = graph_type()
    alive = weakref.ref(owner)
    with context(owner.graph):
        y.add_(1)
        arena.retain(owner)
    assert arena.stats().cycles == before + 1
    del owner
    gc.collect()
    arena.reclaim(1)
    assert stays(lambda: alive() is not None)
    alive().graph.reset()
    assert gone(alive)


def test_doctor_says_whether_torchs_graphs_are_managed(capsys):
    from arena.__main__ import doctor

    doctor()
    assert "not managed in this process" in capsys.readouterr().out
    arena.torch.install()
    try:
        doctor()
    finally:
        arena.torch.uninstall()
    assert "are managed in this process" in capsys.readouterr().out
