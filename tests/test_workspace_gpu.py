"""The workspace under real graphs: values stay right though others would have dropped what a graph uses, on whatever streams
and threads it was captured and replayed. What becomes of a block when its slot grows is in test_workspace_growth_gpu.py, the
bookkeeping without a GPU in test_workspace_graphs.py."""

import contextlib
import gc
import itertools
import math
import threading

import pytest

import arena

torch = pytest.importorskip("torch")

import slots_gpu  # noqa: E402
from slots_gpu import MB, ReadsOnly, Step, alive, churn, f32, floats, gone, grow  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

import arena.torch  # noqa: E402
from arena import workspace  # noqa: E402
from arena.workspace import WorkspaceManager  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

manager, installed = slots_gpu.manager, slots_gpu.installed  # fixtures


# ---- A3, A16, A17: owners that others would have dropped ----


def test_what_a_bounded_cache_forgot_is_right_in_the_graph(manager):
    """A3: 4 keys captured, then 100 others through a cache of 8."""

    class Bounded:
        def __init__(self):
            self.buffers = {}

        def get(self, key):
            if key not in self.buffers:
                self.buffers[key] = torch.full((MB // 4,), float(key + 1), device="cuda")
            self.buffers[key] = self.buffers.pop(key)
            while len(self.buffers) > 8:
                del self.buffers[next(iter(self.buffers))]
            return self.buffers[key]

    cache = manager.get_persistent_resource("lru", Bounded)
    references = [StorageWeakRef(cache.get(key).untyped_storage()) for key in range(4)]
    out = torch.zeros(MB // 4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out.zero_()
        for key in range(4):
            out.add_(manager.get_persistent_resource("lru", Bounded).get(key))
    for key in range(4, 104):
        cache.get(key)
    others = churn(MB)
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 1 + 2 + 3 + 4).all()
    assert len(others) == 64
    del graph
    assert gone(*references)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_block_made_inside_the_first_graph_serves_the_others_after_it(order):
    """A16: the block lies in the private pool of the first graph, which may go first."""
    manager = WorkspaceManager(torch.device("cuda"))
    steps = []
    for _ in range(3):
        steps.append(Step(lambda nbytes: floats(manager, nbytes), 32 * MB, warm=False))
    old = alive(manager)
    others = []
    for place, number in enumerate(order):
        steps[number] = None
        gc.collect()
        arena.reclaim(5)
        others += churn(8 * MB, 8)
        assert all(each.right(place + 1) for each in filter(None, steps))
    assert floats(manager, 32 * MB).fill_(5)[-1].item() == 5  # the slot's block is valid with no graph at all
    assert all(each.isnan().all() for each in others)
    grow(manager, 64 * MB)
    assert gone(old)


def test_with_graphs_of_one_pool_a_reset_leaves_the_block_whole(manager):
    pool = torch.cuda.graph_pool_handle()
    steps = [Step(lambda nbytes: floats(manager, nbytes), 8 * MB, warm=False, pool=pool) for _ in range(3)]
    steps[0].graph.reset()
    others = churn(8 * MB, 8)
    assert all(each.right() for each in steps[1:])
    view = floats(manager, 8 * MB).fill_(2)
    assert (view == 2).all()
    assert all(each.isnan().all() for each in others)
    steps.clear()


@torch.library.custom_op("arena_test_workspace_gpu::through_scratch", mutates_args={"out"})
def through_scratch(x: torch.Tensor, out: torch.Tensor) -> None:
    scratch = workspace.current_workspace_manager().get_simultaneous((tuple(x.shape), x.dtype))[0]
    torch.mul(x, 2, out=scratch)
    torch.add(scratch, 1, out=out)


def test_a_custom_op_needs_no_graph_in_its_hands():
    """A17: three graphs of one step; the slot grows, and each holds what it used."""
    workspace.init_workspace_manager(torch.device("cuda"))
    manager = workspace.current_workspace_manager()
    segments, blocks = [], []
    for size in (1, 2, 4):
        x, out = torch.full((size * MB // 4,), 3.0, device="cuda"), torch.zeros(size * MB // 4, device="cuda")
        torch.ops.arena_test_workspace_gpu.through_scratch(x, out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.ops.arena_test_workspace_gpu.through_scratch(x, out)
        segments.append((graph, x, out))
        blocks.append(alive(manager))
    others = churn(MB)
    for graph, _, out in segments:
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert (out == 7).all()
    assert all(each.isnan().all() for each in others)
    segments[1] = None
    del graph
    assert gone(blocks[1])
    assert not blocks[0].expired()
    segments.clear()
    assert gone(blocks[0])


def test_a_resource_that_rebinds_its_tensors_is_read_as_it_was(manager):
    class Scratch:
        def reserve(self, value):
            self.rows = torch.full((MB // 4,), value, device="cuda")

    scratch = Scratch()
    scratch.reserve(3.0)
    assert manager.get_persistent_resource("moe", lambda: scratch) is scratch
    step = ReadsOnly(scratch.rows)
    first = StorageWeakRef(scratch.rows.untyped_storage())
    scratch.reserve(5.0)
    others = churn(MB)
    assert step.value() == 6.0
    assert others
    del step
    assert gone(first)


# ---- captures, streams, threads ----


def test_dbo_threads_of_one_capture_hold_the_block_of_each_ubatch():
    manager = WorkspaceManager(torch.device("cuda"), 2)
    outs = [torch.zeros(MB // 4, device="cuda") for _ in range(2)]
    sides = [torch.cuda.Stream() for _ in range(2)]
    for ubatch in (0, 1):
        with workspace.use_workspace_ubatch_id(ubatch):
            floats(manager, MB)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    failed = []

    def work(ubatch):
        try:
            with torch.cuda.stream(sides[ubatch]), workspace.use_workspace_ubatch_id(ubatch):
                for _ in range(5):
                    scratch = floats(manager, MB)
                    scratch.fill_(ubatch + 1.0)
                    outs[ubatch].copy_(scratch)
        except BaseException as error:
            failed.append(error)

    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        main = torch.cuda.current_stream()
        for ubatch in (0, 1):
            sides[ubatch].wait_stream(main)
            thread = threading.Thread(target=work, args=(ubatch,))
            thread.start()
            thread.join()
            main.wait_stream(sides[ubatch])
    assert not failed, failed
    old = [alive(manager, place) for place in (0, 1)]
    for ubatch in (0, 1):
        with workspace.use_workspace_ubatch_id(ubatch):
            grow(manager, 8 * MB)
    others = churn(MB)
    graph.replay()
    torch.cuda.synchronize()
    assert [each.unique().tolist() for each in outs] == [[1.0], [2.0]]
    assert all(each.isnan().all() for each in others)
    del graph
    assert gone(*old)


def test_a_slot_warmed_on_one_stream_serves_a_capture_on_another(manager):
    """B13."""
    with torch.cuda.stream(torch.cuda.Stream()):
        warm = grow(manager, 4 * MB).data_ptr()
    manager.lock()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        view = grow(manager, 4 * MB)
        view.zero_()
    assert view.data_ptr() == warm


def test_unlock_grow_and_capture_again_keeps_old_graphs_right(manager):
    """B14."""
    before = Step(lambda nbytes: floats(manager, nbytes), 8 * MB)
    small = alive(manager)
    manager.lock()
    with pytest.raises(AssertionError, match="Workspace is locked"):
        grow(manager, 20 * MB)
    manager.unlock()
    after = Step(lambda nbytes: floats(manager, nbytes), 20 * MB)
    manager.lock()
    others = churn(4 * MB, 16)
    assert before.right(5)
    assert after.right(6)
    assert all(each.isnan().all() for each in others)
    del before
    assert gone(small)
    assert after.right(7)


def test_dropped_in_flight_the_block_stays_until_the_replay_has_ended(manager):
    x, out = torch.full((MB,), 3.0, device="cuda"), torch.zeros(MB, device="cuda")
    floats(manager, 4 * MB)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scratch = floats(manager, 4 * MB)
        torch.mul(x, 2, out=scratch)
        torch.cuda._sleep(1_000_000_000)  # half a second: longer than a collection in a large process
        out.copy_(scratch)
    del scratch
    old = alive(manager)
    manager._current_workspaces[0] = None
    graph.replay()
    del graph
    gc.collect()
    assert not old.expired()
    with torch.cuda.stream(torch.cuda.Stream()):
        others = [torch.full((MB,), math.nan, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    assert (out == 6).all()
    assert len(others) == 8
    assert gone(old)


def test_two_graphs_of_one_slot_and_one_of_another_are_told_apart():
    """A9: cleared while two of three slots are in graphs."""
    manager = WorkspaceManager(torch.device("cuda"), 3)
    steps, memory = [], []
    for ubatch in range(3):
        with workspace.use_workspace_ubatch_id(ubatch):
            floats(manager, 8 * MB)
    for ubatch in range(3):
        with workspace.use_workspace_ubatch_id(ubatch):
            memory.append(alive(manager, ubatch))
    unmanaged_begin = arena._registry.begin_hooks[:]
    arena._registry.begin_hooks.clear()  # or each capture would hold all three
    try:
        for ubatch in range(2):
            with workspace.use_workspace_ubatch_id(ubatch):
                steps.append(Step(lambda nbytes: floats(manager, nbytes), 8 * MB))
    finally:
        arena._registry.begin_hooks[:] = unmanaged_begin
    manager._current_workspaces = [None] * 3
    assert [each.expired() for each in memory] == [False, False, True]
    others = churn(8 * MB, 4)
    assert all(each.right() for each in steps)
    assert all(each.isnan().all() for each in others)
    del steps[1]
    assert gone(memory[1])
    assert not memory[0].expired()
    steps.clear()
    assert gone(memory[0])


def test_nothing_is_retained_outside_captures_and_an_int_names_the_device():
    before = arena.stats().retained
    for device in (0, "cuda", "cuda:0", torch.device("cuda", 0)):
        manager = WorkspaceManager(device)
        for size in (1, 2, 2, 2):
            assert floats(manager, size * MB).device == torch.device("cuda", 0)
        assert manager.get_persistent("k", (4,), f32, zero_init=True).device.type == "cuda"
    assert arena.stats().retained == before


def test_a_capture_that_fails_leaves_the_workspace_usable(manager):
    floats(manager, MB)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError):
        with torch.cuda.graph(graph):
            floats(manager, MB).fill_(1)
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize()
            floats(manager, MB)
    del graph
    gc.collect()
    assert Step(lambda nbytes: floats(manager, nbytes), 2 * MB).right()
