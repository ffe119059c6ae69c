"""Growth of a slot whose block captured graphs use, on the simulated driver with tensors of the CPU: each block lives exactly
as long as its last graph or view. The numbers are those of public bug reports, with KiB in the place of MiB; controls show what
a slot that knows nothing of graphs does. The same on a real GPU is in test_workspace_growth_gpu.py."""

import inspect
import itertools
import math
import re
import weakref
from contextlib import nullcontext

import pytest
from conftest import stays, until

torch = pytest.importorskip("torch")

import slots  # noqa: E402
import stock  # noqa: E402
from slots import CPU, KB, Memory, alive, block_of, capture, f32, gone, grow, retained, retired, slot, u8  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

import arena  # noqa: E402
from arena import workspace  # noqa: E402
from arena._registry import begin  # noqa: E402
from arena.workspace import WorkspaceManager  # noqa: E402

cuda, managed, manager = slots.cuda, slots.managed, slots.manager  # fixtures


# ---- growth ----


def test_a_block_goes_with_its_last_graph(cuda, manager, managed):
    graphs = []
    for _ in range(3):
        with capture(cuda, managed=managed) as open_:
            grow(manager, 4 * KB)
        graphs.append(open_.graph)
    old = alive(manager)
    grow(manager, 8 * KB)
    for each in graphs[:2]:
        each.drop()
        assert stays(lambda: not old.expired(), 0.02)
    graphs[2].drop()
    assert gone(old)


def test_the_control_frees_it_under_the_graphs(cuda):
    model = stock.Model()
    with capture(cuda) as open_:
        model.get_simultaneous(((4 * KB,), u8))
    old = StorageWeakRef(model.block.untyped_storage())
    model.get_simultaneous(((8 * KB,), u8))
    assert old.expired()
    open_.graph.drop()


def test_a_block_that_a_view_holds_goes_with_the_view(cuda, manager):
    """B7: held by a view is told from held by a graph, each with who asked for the block."""
    view = grow(manager, 64 * KB)
    old = alive(manager)
    grow(manager, 128 * KB)
    assert retired(manager) == (0, 64 * KB)
    (_, _, nbytes, site) = manager._current_workspaces.parts[0].retired[0]
    line = inspect.getsourcelines(grow)[1] + 1
    assert (nbytes, site) == (64 * KB, f"slots.py:{line}:grow")
    del view
    assert old.expired()
    assert retired(manager) == (0, 0)
    with capture(cuda) as open_:
        grow(manager, KB)
    grow(manager, 256 * KB)
    assert retired(manager) == (128 * KB, 0)
    open_.graph.drop()
    assert until(lambda: retired(manager) == (0, 0))


def test_what_nobody_holds_is_freed_first_and_what_a_graph_holds_is_not_counted_twice(cuda, manager, monkeypatch):
    memory = Memory(monkeypatch)
    grow(manager, 64 * KB)
    grow(manager, 128 * KB)
    assert memory.peak == 128 * KB
    with capture(cuda) as open_:
        grow(manager, KB)
    grow(manager, 256 * KB)
    assert memory.peak == (128 + 256) * KB
    open_.graph.drop()
    assert until(lambda: memory.live() == 256 * KB)


def test_a_block_whose_last_graph_is_dead_does_not_stand_beside_the_larger_one(cuda, manager, monkeypatch):
    memory = Memory(monkeypatch)
    with capture(cuda, managed=False) as open_:
        grow(manager, 64 * KB)
    keep = cuda.Stream()
    keep.begin_capture("relaxed")
    held = begin(keep)  # an open managed capture: the reclaimer's thread waits
    open_.graph.executable.destroy()
    assert until(lambda: arena.stats().dead)
    held.seal()
    grow(manager, 128 * KB)
    assert memory.peak == 128 * KB
    keep.end_capture().destroy()
    held.drop()


def test_growing_inside_a_capture_gives_nothing_back_to_the_driver(cuda, manager, managed, monkeypatch):
    """It would break the capture."""
    calls = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: calls.append(arena.capture_id()))
    grow(manager, KB)
    with capture(cuda, managed=managed) as open_:
        grow(manager, 2 * KB)
        grow(manager, 4 * KB)
    grow(manager, 8 * KB)
    assert calls == [None, None]
    open_.graph.drop()


def test_out_of_memory_with_a_graph_on_the_block_keeps_the_very_block(cuda, manager, monkeypatch):
    with capture(cuda) as open_:
        view = grow(manager, 64 * KB)
    address = view.data_ptr()
    view = None
    memory = Memory(monkeypatch, limit=0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            grow(manager, 128 * KB)
        assert block_of(manager).data_ptr() == address
        assert block_of(manager).numel() == 64 * KB
    assert grow(manager, 64 * KB).data_ptr() == address
    assert view is None
    memory.limit = math.inf
    old = alive(manager)
    grow(manager, 128 * KB)
    assert not old.expired()
    open_.graph.drop()
    assert gone(old)


def test_after_out_of_memory_the_block_is_retained_by_new_captures(cuda, manager, monkeypatch):
    grow(manager, 64 * KB)
    memory = Memory(monkeypatch, limit=64 * KB)
    with pytest.raises(RuntimeError, match="out of memory"):
        grow(manager, 128 * KB)
    with capture(cuda, managed=False) as open_:
        grow(manager, KB)
    old = alive(manager)
    memory.limit = math.inf
    grow(manager, 128 * KB)
    assert stays(lambda: not old.expired())
    open_.graph.drop()
    assert gone(old)


def test_initialising_again_leaves_graphs_what_they_use(cuda, managed):
    workspace.init_workspace_manager(CPU)
    manager = workspace.current_workspace_manager()
    with capture(cuda, managed=managed) as open_:
        grow(manager, 4 * KB)
        tensor = StorageWeakRef(manager.get_persistent("k", (4,), f32).untyped_storage())
    old = alive(manager)
    reference = weakref.ref(manager)
    manager = None
    workspace.init_workspace_manager(CPU)
    assert reference() is None
    assert manager is None
    assert stays(lambda: not old.expired() and not tensor.expired())
    open_.graph.drop()
    assert gone(old, tensor)
    workspace.reset_workspace_manager()


def test_many_growing_slots_never_need_more_than_their_sizes_and_what_is_held(cuda, monkeypatch):
    """2 ubatches × 4 lanes × 64 growing requests each; every eighth is captured, and every sixteenth view is kept a while."""
    memory = Memory(monkeypatch)
    manager = WorkspaceManager(CPU, 2, 4)
    graphs, views, allowed = [], [], []

    def held():
        blocks = {}
        for _, _, storage, nbytes in graphs + views:
            blocks[storage.cdata] = nbytes
        for place in range(8):
            block = block_of(manager, place)
            if block is not None:
                blocks[block.untyped_storage()._cdata] = block.numel()
        return sum(blocks.values())

    for step in range(1, 65):
        for place in range(8):
            ubatch, lane = divmod(place, 4)
            with slot(ubatch, lane):
                memory.peak = 0
                if step % 8 == place:
                    with capture(cuda) as open_:
                        grow(manager, step * KB)
                    block = block_of(manager, place)
                    graphs.append((step, open_.graph, alive(manager, place), block.numel()))
                else:
                    view = grow(manager, step * KB)
                    if step % 16 == place:
                        views.append((step, view, alive(manager, place), view.numel()))
                    view = None
                block = None
                # A managed capture also holds what the other slots had when it began.
                bound = held() + sum(memory_of_captures(graphs, manager))
                assert memory.peak <= bound
                allowed.append(bound)
        views = [each for each in views if each[0] > step - 4]
        for each in [each for each in graphs if each[0] <= step - 4]:
            each[1].drop()
            graphs.remove(each)
    for each in graphs:
        each[1].drop()
    graphs.clear()
    views.clear()
    arena.reclaim(5)
    assert until(lambda: memory.live() == 8 * 64 * KB)
    assert len(allowed) == 512


def memory_of_captures(graphs, manager):
    """Bytes of retired blocks that graphs hold: those which the captures found current when they began."""
    return [retired(manager, place)[0] for place in range(8)] if graphs else [0]


def test_without_captures_they_need_their_sizes_alone(monkeypatch):
    memory = Memory(monkeypatch)
    manager = WorkspaceManager(CPU, 2, 4)
    for step in range(1, 65):
        for place in range(8):
            with slot(*divmod(place, 4)):
                grow(manager, step * KB)
                assert memory.live() == sum(
                    block_of(manager, each).numel() for each in range(8) if block_of(manager, each) is not None
                )
    assert memory.peak == 8 * 64 * KB


# ---- strict ----


def test_strict_refuses_to_grow_inside_a_capture(cuda, managed):
    manager = WorkspaceManager(CPU, strict=True)
    grow(manager, 4 * KB)
    with capture(cuda, managed=managed) as open_:
        assert grow(manager, 4 * KB).numel() == 4 * KB
        with pytest.raises(RuntimeError) as seen:
            grow(manager, 8 * KB)
        line = inspect.getsourcelines(grow)[1] + 1
        where = r"tests/slots\.py:\d+ \(\w+\)"  # the capture's name: where it began
        assert re.fullmatch(
            f"strict workspace: the workspace would grow from 4096 to 8192 bytes for 'slots.py:{line}:grow' "
            rf"inside capture {open_.id} \({where} #{open_.id}\); size it before",
            str(seen.value),
        )
        assert block_of(manager).numel() == 4 * KB
    open_.graph.drop()


def test_strict_refuses_to_grow_under_living_graphs_and_names_them(cuda, managed):
    manager = WorkspaceManager(CPU, strict=True)
    grow(manager, 4 * KB)
    ids, graphs = [], []
    for _ in range(2):
        with capture(cuda, managed=managed) as open_:
            grow(manager, KB)
        ids.append(open_.id)
        graphs.append(open_.graph)
    address = block_of(manager).data_ptr()
    with pytest.raises(RuntimeError, match=r"strict workspace: .* from 4096 to 8192 bytes for .*:grow'") as seen:
        grow(manager, 8 * KB)
    assert all(str(each) in str(seen.value) for each in ids)
    assert block_of(manager).data_ptr() == address
    for each in graphs:
        each.drop()
    assert until(lambda: arena.stats().owners == 0)
    assert grow(manager, 8 * KB).numel() == 8 * KB


def test_strict_does_not_mind_views_nor_dead_graphs_that_wait(cuda):
    manager = WorkspaceManager(CPU, strict=True)
    view = grow(manager, 4 * KB)
    grow(manager, 8 * KB)
    assert view.numel() == 4 * KB
    with capture(cuda, managed=False) as open_:
        grow(manager, KB)
    keep = cuda.Stream()
    keep.begin_capture("relaxed")
    held = begin(keep)
    open_.graph.executable.destroy()
    assert until(lambda: arena.stats().dead)
    held.seal()
    grow(manager, 16 * KB)
    keep.end_capture().destroy()
    held.drop()


def test_strict_by_the_environment(cuda, monkeypatch):
    monkeypatch.setenv("ARENA_STRICT", "1")
    assert WorkspaceManager(CPU).strict
    assert not WorkspaceManager(CPU, strict=False).strict


def test_a_locked_strict_workspace_says_what_a_locked_one_says(cuda):
    manager = WorkspaceManager(CPU, strict=True)
    grow(manager, KB)
    manager.lock()
    with capture(cuda) as open_:
        with pytest.raises(AssertionError, match="Workspace is locked"):
            grow(manager, 4 * KB)
    open_.graph.drop()


# ---- public bug reports ----


def test_a_graph_survives_the_growth_of_its_slot(cuda, manager, managed):
    """A1: 32 grown to 64."""
    with capture(cuda, managed=managed) as open_:
        view = grow(manager, 32 * KB).fill_(1)
    address = view.data_ptr()
    view = None
    old = alive(manager)
    grow(manager, 64 * KB)
    others = [torch.full((8 * KB,), math.nan) for _ in range(64)]
    assert not any(each.data_ptr() <= address < each.data_ptr() + 32 * KB for each in others)
    assert retired(manager) == (32 * KB, 0)
    assert view is None
    open_.graph.drop()
    assert gone(old)
    assert retired(manager) == (0, 0)


def test_ascending_captures_each_keep_their_own_block(cuda, manager, managed, monkeypatch):
    """A2: B in 1, 2, 4 … 64."""
    memory = Memory(monkeypatch)
    graphs = {}
    for size in (1, 2, 4, 8, 16, 32, 64):
        with capture(cuda, managed=managed) as open_:
            grow(manager, size * KB)
        graphs[size] = open_.graph
    assert memory.blocks() == [size * KB for size in (1, 2, 4, 8, 16, 32, 64)]
    graphs.pop(4).drop()
    if managed:
        # The capture of 8 found the block of 4 current when it began.
        assert stays(lambda: 4 * KB in memory.blocks(), 0.02)
        graphs.pop(8).drop()
    assert until(lambda: 4 * KB not in memory.blocks())
    for each in graphs.values():
        each.drop()
    assert until(lambda: memory.blocks() == [64 * KB])


def test_a_bounded_cache_forgets_what_a_graph_keeps(cuda, managed):
    """A3: 4 keys used in a capture, then 100 others through a cache of 8."""
    made = weakref.WeakSet()

    class Bounded:
        def __init__(self):
            self.buffers = {}

        def get(self, key):
            if key not in self.buffers:
                self.buffers[key] = torch.full((KB,), float(key))
                made.add(self.buffers[key].untyped_storage())
            self.buffers[key] = self.buffers.pop(key)
            while len(self.buffers) > 8:
                del self.buffers[next(iter(self.buffers))]
            return self.buffers[key]

    live = []

    def buffers_alive():
        return sum(not each.expired() for each in live)

    manager = WorkspaceManager(CPU)
    cache = manager.get_persistent_resource("lru", Bounded)
    for key in range(4):
        live.append(StorageWeakRef(cache.get(key).untyped_storage()))
    with capture(cuda, managed=managed) as open_:
        for key in range(4):
            manager.get_persistent_resource("lru", Bounded).get(key)
    for key in range(4, 104):
        live.append(StorageWeakRef(cache.get(key).untyped_storage()))
    assert [each.expired() for each in live[:4]] == [False] * 4
    assert buffers_alive() == 8 + 4
    fixed = manager.get_persistent("captured", (KB,), f32)
    assert manager.get_persistent("captured", (KB,), f32) is fixed
    open_.graph.drop()
    assert until(lambda: buffers_alive() == 8)


def test_the_address_that_a_graph_has_stays_and_new_callers_get_the_new_one(cuda, manager, managed):
    """A8: 1 grown to 4."""
    with capture(cuda, managed=managed) as open_:
        captured = grow(manager, KB).data_ptr()
    small = alive(manager)
    large = grow(manager, 4 * KB)
    assert captured != large.data_ptr()
    assert not small.expired()
    again = torch.UntypedStorage._new_with_weak_ptr(small.cdata)
    assert again.data_ptr() == captured
    del again
    open_.graph.drop()
    assert gone(small)


def test_clearing_frees_what_no_graph_uses(cuda):
    """A9: 3 slots, 2 of them in graphs."""
    manager = WorkspaceManager(CPU, 3)
    graphs, memory = [], []
    for ubatch in range(3):
        with slot(ubatch):
            with capture(cuda, managed=False) if ubatch < 2 else nullcontext() as open_:
                grow(manager, (ubatch + 1) * KB)
            memory.append(alive(manager, ubatch))
            if open_:
                graphs.append(open_.graph)
    manager._current_workspaces = [None] * 3
    assert [each.expired() for each in memory] == [False, False, True]
    graphs[1].drop()
    assert gone(memory[1])
    assert not memory[0].expired()
    graphs[0].drop()
    assert gone(memory[0])


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_block_made_inside_the_first_of_three_graphs_goes_with_the_last(cuda, manager, order):
    """A16."""
    graphs = []
    for _ in range(3):
        with capture(cuda) as open_:
            grow(manager, 32 * KB)
        graphs.append(open_.graph)
    old = alive(manager)
    grow(manager, 64 * KB)
    for number in order[:2]:
        graphs[number].drop()
        assert not old.expired()
    graphs[order[2]].drop()
    assert gone(old)


def test_growing_in_steps_strands_nothing(cuda, manager, managed, monkeypatch):
    """A18: 1 to 64 in 64 steps, captured at the first: 64 + 1, not 2080."""
    memory = Memory(monkeypatch)
    with capture(cuda, managed=managed) as open_:
        grow(manager, KB)
    for step in range(2, 65):
        grow(manager, step * KB)
        assert memory.blocks() == [KB, step * KB]
    open_.graph.drop()
    assert until(lambda: memory.blocks() == [64 * KB])


def test_keeping_every_block_strands_them(monkeypatch):
    """The control."""
    memory, model, kept = Memory(monkeypatch), stock.Model(), []
    for step in range(1, 65):
        model.get_simultaneous(((step * KB,), u8))
        kept.append(model.block)
    assert memory.live() == 2080 * KB


NEEDS = {64: 10, 32: 8, 16: 24, 8: 6}


def test_a_planned_capture_pass_uses_one_block(cuda, managed):
    """B5."""
    manager = WorkspaceManager(CPU, strict=True)
    for need in NEEDS.values():
        grow(manager, need * KB)
    graphs, addresses = [], set()
    for need in NEEDS.values():
        with capture(cuda, managed=managed) as open_:
            addresses.add(grow(manager, need * KB).data_ptr())
        graphs.append(open_.graph)
    assert addresses == {block_of(manager).data_ptr()}
    assert block_of(manager).numel() == 24 * KB
    for each in graphs:
        each.drop()


def test_without_the_plan_strict_refuses_where_a_smaller_batch_needs_more(cuda, managed):
    manager = WorkspaceManager(CPU, strict=True)
    grow(manager, NEEDS[64] * KB)
    refused, graphs = [], []
    for batch, need in NEEDS.items():
        with capture(cuda, managed=managed) as open_:
            try:
                grow(manager, need * KB)
            except RuntimeError as error:
                refused.append((batch, str(error)))
        graphs.append(open_.graph)
    assert [batch for batch, _ in refused] == [16]
    assert "from 10240 to 24576 bytes" in refused[0][1]
    for each in graphs:
        each.drop()


def test_a_lane_that_grows_leaves_the_captured_lane_alone(cuda, managed):
    """B10."""
    manager = WorkspaceManager(CPU, 1, 2)
    with capture(cuda, managed=managed) as open_:
        captured = grow(manager, 16 * KB).data_ptr()
    with slot(0, 1):
        grow(manager, 32 * KB)
    assert grow(manager, 16 * KB).data_ptr() == captured
    assert retired(manager, 0) == (0, 0)
    open_.graph.drop()


def test_a_slot_is_not_the_streams(cuda, manager, managed):
    """B13: warmed on one stream, locked, captured on another."""
    with cuda.Stream():
        warm = grow(manager, 4 * KB).data_ptr()
    manager.lock()
    with capture(cuda, managed=managed) as open_:
        assert grow(manager, 4 * KB).data_ptr() == warm
    open_.graph.drop()


def test_unlock_grow_and_capture_again_keeps_old_graphs_whole(cuda, manager, managed):
    """B14: 8 locked, grown to 20, captured again, the old graphs dropped."""
    with capture(cuda, managed=managed) as before:
        grow(manager, 8 * KB)
    manager.lock()
    small = alive(manager)
    manager.unlock()
    grow(manager, 20 * KB)
    with capture(cuda, managed=managed) as after:
        grow(manager, 20 * KB)
    manager.lock()
    assert not small.expired()
    before.graph.drop()
    assert gone(small)
    assert retired(manager) == (0, 0)
    assert block_of(manager).numel() == 20 * KB
    after.graph.drop()


def test_headroom_keeps_the_address(cuda, manager, managed):
    """B14's other way: enough reserved before, then 16, 24 and 16."""
    manager.reserve_all(((24 * KB,), u8))
    graphs, addresses = [], set()
    for need in (16, 24, 16):
        with capture(cuda, managed=managed) as open_:
            addresses.add(grow(manager, need * KB).data_ptr())
        graphs.append(open_.graph)
    assert len(addresses) == 1
    for each in graphs:
        each.drop()


def test_an_operation_called_80_times_in_one_capture_needs_one_block(cuda, manager, managed, monkeypatch):
    """B18: 176 a call."""
    memory = Memory(monkeypatch)
    before = retained()
    with capture(cuda, managed=managed) as open_:
        for _ in range(80):
            grow(manager, 176 * KB)
    assert memory.blocks() == [176 * KB]
    assert memory.peak == 176 * KB
    assert retained() - before == 1
    open_.graph.drop()
