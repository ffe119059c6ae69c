"""The workspace under real graphs: values stay right after growth, churn and poison, and the old block's bytes come back when
its last graph dies. Managed by `arena.torch.install()`; the bookkeeping without a GPU is in test_workspace_graphs.py and
test_workspace_growth.py. Each `churn` hands freed memory to tensors full of NaN, so that whatever a graph lost shows in what it
computes."""

import contextlib
import gc
import itertools
import math
import threading

import pytest
from conftest import until

import arena

torch = pytest.importorskip("torch")

import stock  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

import arena.torch  # noqa: E402
from arena import _workspace, workspace  # noqa: E402
from arena.workspace import WorkspaceManager  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

MB = 1 << 20
f32, u8 = torch.float32, torch.uint8


@pytest.fixture(params=[False, True], ids=["new", "reuse"])
def manager(request):
    return WorkspaceManager(torch.device("cuda"), reuse_views=request.param)


@pytest.fixture(autouse=True)
def installed():
    _workspace.managers.clear()  # those that a failed test has left: a capture would retain their blocks, too
    arena.torch.install()
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()
    arena.torch.uninstall()
    workspace.reset_workspace_manager()
    gc.collect()
    arena.reclaim(5)
    torch.cuda.empty_cache()


def block_of(manager, place=0):
    return manager._current_workspaces[place]


def alive(manager, place=0):
    return StorageWeakRef(block_of(manager, place).untyped_storage())


def grow(manager, nbytes):
    return manager.get_simultaneous(((nbytes,), u8))[0]


def floats(manager, nbytes):
    return manager.get_simultaneous(((nbytes // 4,), f32))[0]


def gone(*references):
    arena.reclaim(5)
    return until(lambda: all(each.expired() for each in references))


def retired(manager, place=0):
    return sum(each[2] for each in manager._current_workspaces.parts[place].retired if not each[0].expired())


def churn(nbytes, count=64):
    """Memory that was freed belongs to somebody else from now on, and is full of NaN."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return [torch.full((nbytes // 4,), math.nan, device="cuda") for _ in range(count)]


class Step:
    """One captured step: scratch = x + 1, out = scratch × 2, with scratch from the workspace."""

    def __init__(self, get, nbytes, *, warm=True, **options):
        self.x = torch.zeros(nbytes // 4, device="cuda")
        self.out = torch.zeros(nbytes // 4, device="cuda")
        self.nbytes = nbytes
        if warm:
            self.run(get)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, **options):
            self.run(get)

    def run(self, get):
        scratch = get(self.nbytes)
        torch.add(self.x, 1, out=scratch)
        torch.mul(scratch, 2, out=self.out)

    def right(self, number=3.0):
        """Whether a replay computes what it should, everywhere."""
        self.x.fill_(number)
        self.out.zero_()
        self.graph.replay()
        torch.cuda.synchronize()
        return bool((self.out == (number + 1) * 2).all())


class ReadsOnly:
    """A step whose scratch was filled before it was captured: what a replay reads must still be there."""

    def __init__(self, scratch):
        self.out = torch.zeros_like(scratch)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            torch.mul(scratch, 2, out=self.out)

    def value(self):
        self.out.zero_()
        self.graph.replay()
        torch.cuda.synchronize()
        return self.out[0].item()


# ---- A1, A2, A18: growth under graphs ----


def test_a_graph_is_right_after_its_slot_grew_and_harms_nobody(manager):
    """A1: 32 MiB grown to 64, then 64 tensors of NaN where the old block would have been."""
    step = Step(lambda nbytes: floats(manager, nbytes), 32 * MB)
    old = alive(manager)
    address = block_of(manager).data_ptr()
    grow(manager, 64 * MB)
    others = churn(MB // 2)
    others += churn(32 * MB, 4)
    assert not any(each.data_ptr() <= address < each.data_ptr() + each.nbytes for each in others)
    for number in range(10):
        assert step.right(number)
    assert all(each.isnan().all() for each in others)
    assert retired(manager) == 32 * MB
    del step
    assert gone(old)
    assert retired(manager) == 0


def test_vllms_way_writes_into_somebody_elses_memory():
    """The control of A1."""
    model = stock.Model("cuda")
    step = Step(lambda nbytes: model.get_simultaneous(((nbytes // 4,), f32))[0], 32 * MB)
    address = model.block.data_ptr()
    model.block = None
    model.get_simultaneous(((64 * MB,), u8))
    # No empty_cache() here: an unmapped address would fault, and end every test after this one.
    others = [torch.full((8 * MB,), math.nan, device="cuda") for _ in range(4)]
    hit = [each for each in others if each.data_ptr() == address]
    assert hit, "the freed block was not handed out again: this control controls nothing"
    step.right()
    assert not all(each.isnan().all() for each in others)


def test_ascending_captures_each_keep_their_block_until_their_graph_dies(manager):
    """A2: B = 1 … 64 MiB from one slot, replayed in ascending order."""
    sizes = [1, 2, 4, 8, 16, 32, 64]
    steps, blocks = {}, {}
    for size in sizes:
        steps[size] = Step(lambda nbytes: floats(manager, nbytes), size * MB)
        blocks[size] = alive(manager)
    others = churn(MB)
    assert [steps[size].right(size) for size in sizes] == [True] * 7
    assert not any(each.expired() for each in blocks.values())
    # The capture of 8 began when the block of 4 was grown already: only the graph of 4 uses it.
    del steps[4]
    assert gone(blocks[4])
    assert [size for size in sizes if blocks[size].expired()] == [4]
    others += churn(MB)
    assert all(step.right(7) for step in steps.values())
    assert all(each.isnan().all() for each in others)
    steps.clear()
    assert gone(*(blocks[size] for size in sizes[:-1]))


def test_growth_in_steps_strands_nothing(manager):
    """A18: captured at 1 MiB only, grown to 64 in 64 steps."""
    torch.cuda.empty_cache()
    before = requested("current")
    step = Step(lambda nbytes: floats(manager, nbytes), MB)
    extra = step.x.nbytes + step.out.nbytes
    for size in range(2, 65):
        grow(manager, size * MB)
        assert requested("current") - before <= (size + 1) * MB + extra + ROUNDING
    assert step.right()
    del step
    gc.collect()
    arena.reclaim(5)
    assert until(lambda: requested("current") - before <= 64 * MB + ROUNDING)


def test_growth_inside_a_capture_leaves_both_blocks_to_the_graph(manager):
    x, out = torch.full((MB,), 3.0, device="cuda"), torch.zeros(MB, device="cuda")
    floats(manager, MB)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        small = floats(manager, MB)
        torch.mul(x[: MB // 4], 2, out=small)
        large = floats(manager, 4 * MB)  # grows, into the graph's own pool
        torch.add(x, 1, out=large)
        large[: MB // 4].add_(small)
        out.copy_(large)
    references = [StorageWeakRef(small.untyped_storage()), StorageWeakRef(large.untyped_storage())]
    del small, large
    grow(manager, 16 * MB)
    others = churn(MB)
    graph.replay()
    torch.cuda.synchronize()
    assert (out[: MB // 4] == 10).all()
    assert (out[MB // 4 :] == 4).all()
    assert all(each.isnan().all() for each in others)
    del graph
    assert gone(*references)


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


# ---- B7: views ----


def test_a_view_taken_before_the_capture_is_read_right_after_growth(manager):
    view = floats(manager, 32 * MB).fill_(3)
    step = ReadsOnly(view)
    old = alive(manager)
    del view
    grow(manager, 64 * MB)
    others = churn(32 * MB, 4)
    assert step.value() == 6.0
    assert all(each.isnan().all() for each in others)
    del step
    assert gone(old)


def test_vllms_way_reads_nan_there():
    """The control."""
    model = stock.Model("cuda")
    view = model.get_simultaneous(((8 * MB,), f32))[0].fill_(3)
    address = view.data_ptr()
    step = ReadsOnly(view)
    del view
    model.block = None
    others = [torch.full((8 * MB,), math.nan, device="cuda") for _ in range(4)]
    assert address in [each.data_ptr() for each in others], "this control controls nothing"
    assert math.isnan(step.value())


def test_a_block_that_only_a_view_holds_goes_with_it(manager):
    view = grow(manager, 64 * MB)
    old = alive(manager)
    allocated = torch.cuda.memory_allocated()
    grow(manager, 128 * MB)
    assert retired(manager) == 64 * MB
    assert torch.cuda.memory_allocated() - allocated == 128 * MB
    del view
    assert old.expired()
    assert torch.cuda.memory_allocated() - allocated == 64 * MB
    assert retired(manager) == 0


def test_what_nobody_holds_is_freed_before_the_larger_block_comes(manager):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    idle = torch.cuda.memory_reserved() - before
    for _ in range(3):
        grow(manager, 256 * MB)
    torch.cuda.reset_peak_memory_stats()
    grow(manager, 512 * MB)
    assert torch.cuda.max_memory_allocated() - before == 512 * MB
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - idle < 64 * MB  # the old segment was given back


# ---- running out ----


@pytest.mark.parametrize("held", ["nobody", "a view", "a graph"])
def test_running_out_of_memory_leaves_the_slot_what_it_was(manager, held):
    view = floats(manager, 64 * MB)
    step = Step(lambda nbytes: floats(manager, nbytes), 64 * MB) if held == "a graph" else None
    address = block_of(manager).data_ptr()
    if held != "a view":
        view = None
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            grow(manager, 1 << 44)
        assert block_of(manager).numel() == manager.available_bytes() == 64 * MB
        if held != "nobody":
            assert block_of(manager).data_ptr() == address
    assert (floats(manager, 64 * MB).fill_(2) == 2).all()
    assert view is None or (view == 2).all()
    if step is not None:
        assert step.right()
    assert grow(manager, 128 * MB).numel() == 128 * MB
    if step is not None:
        others = churn(64 * MB, 2)
        assert step.right()
        assert all(each.isnan().all() for each in others)


def test_a_limit_on_memory_is_torchs_error_too(manager):
    floats(manager, 64 * MB)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 128 * MB) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            grow(manager, 1024 * MB)
        assert manager.available_bytes() == 64 * MB
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert grow(manager, 1024 * MB).numel() == 1024 * MB


# ---- how much there is at most ----


def test_many_growing_slots_never_need_more_than_their_sizes_and_what_is_held():
    """2 ubatches × 4 lanes × 64 growing requests each; some are captured, some views are kept for a while."""
    gc.collect()
    torch.cuda.empty_cache()
    before = requested("current")
    manager = WorkspaceManager(torch.device("cuda"), 2, 4)
    steps, views, own = [], [], 0
    for step in range(1, 65):
        for place in range(8):
            with workspace.use_workspace_ubatch_id(place // 4), workspace.use_workspace_lane(place % 4):
                torch.cuda.reset_peak_memory_stats()
                view = grow(manager, step * MB)
                peak = requested("peak") - before
                bound = own + sum(size_of(manager, each) + retired(manager, each) for each in range(8))
                assert peak <= bound + ROUNDING, (step, place, peak / MB, bound / MB)
                if step % 16 == place + 8:
                    views.append(view)
                del view
                if step % 32 == place + 20:
                    steps.append(Step(lambda nbytes: floats(manager, nbytes), step * MB))
                    own += 2 * step * MB
        if step % 16 == 15:
            views.clear()
    assert len(steps) >= 8
    assert all(each.right() for each in steps)
    steps.clear()
    views.clear()
    gc.collect()
    arena.reclaim(5)
    left = requested("current") - before
    assert 0 <= left - 8 * 64 * MB <= ROUNDING, left / MB


# What else was asked for meanwhile. Less than any block here, so that one too many would show.
ROUNDING = MB // 2


def requested(which):
    """Bytes as they were asked for: torch may leave up to 1 MiB unsplit behind each block."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def size_of(manager, place):
    block = block_of(manager, place)
    return 0 if block is None else block.numel()


def test_without_holders_they_need_their_sizes_alone():
    gc.collect()
    torch.cuda.empty_cache()
    before = requested("current")
    manager = WorkspaceManager(torch.device("cuda"), 2, 4)
    torch.cuda.reset_peak_memory_stats()
    for step, place in itertools.product(range(2, 65, 2), range(8)):
        with workspace.use_workspace_ubatch_id(place // 4), workspace.use_workspace_lane(place % 4):
            grow(manager, step * MB)
    assert requested("peak") - before <= 8 * 64 * MB + ROUNDING
    assert requested("current") - before <= 8 * 64 * MB + ROUNDING


def test_an_operation_called_80_times_in_a_capture_needs_one_block(manager):
    """B18: 176 MiB a call."""
    step = Step(lambda nbytes: floats(manager, nbytes), 176 * MB)
    before = arena.stats().retained
    allocated = torch.cuda.memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(80):
            step.run(lambda nbytes: floats(manager, nbytes))
    assert torch.cuda.memory_allocated() - allocated < MB
    assert arena.stats().retained - before == 1
    step.graph = graph
    assert step.right()


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
