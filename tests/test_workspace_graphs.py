"""What captured graphs hold of the workspace, on the simulated driver with tensors of the CPU: each block exactly as long as
its last graph or view. The numbers are those of public bug reports, with KiB in the place of MiB; controls show what a slot
that knows nothing of graphs does. The same on a real GPU is in test_workspace_gpu.py."""

import gc
import inspect
import itertools
import math
import re
import threading
import weakref
from contextlib import contextmanager, nullcontext

import pytest
from conftest import run_python, stays, until

torch = pytest.importorskip("torch")

import stock  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

import arena  # noqa: E402
from arena import _workspace, workspace  # noqa: E402
from arena._registry import begin  # noqa: E402
from arena.workspace import WorkspaceManager  # noqa: E402

CPU = torch.device("cpu")
KB = 1024
f32, u8 = torch.float32, torch.uint8
MOE = (((32, 128), torch.bfloat16), ((32, 64), torch.bfloat16))


class Captured:
    """An executable and what holds its owners, dropped together like torch's wrapper."""

    def __init__(self, executable, held):
        self.executable, self.held = executable, held

    def drop(self):
        self.executable.destroy()
        if self.held is not None:
            self.held.drop()
        arena.reclaim()


class Capturing:
    id = None
    graph = None


@contextmanager
def capture(cuda, *, managed=True, stream=None, into=None):
    """Yields a Capturing whose `graph` is set at the end."""
    stream = stream or cuda.Stream()
    open_ = Capturing()
    with stream:
        stream.begin_capture("relaxed", into=into)
        held = begin(stream) if managed else None
        open_.id = arena.capture_id(stream)
        stream.kernel()
        yield open_
        if held is not None:
            held.seal()
        template = stream.end_capture()
    executable = template.instantiate()
    if held is not None:
        held.hold()
    if into is None:
        template.destroy()
    open_.graph = Captured(executable, held)


@pytest.fixture
def cuda(simulated):
    _workspace.managers.clear()  # those that a failed test has left: a capture would retain their blocks, too
    return simulated


@pytest.fixture(params=[True, False], ids=["managed", "unmanaged"])
def managed(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["new", "reuse"])
def manager(request):
    return WorkspaceManager(CPU, reuse_views=request.param)


def block_of(manager, place=0):
    return manager._current_workspaces[place]


def alive(manager, place=0):
    """The current block's memory, weakly."""
    return StorageWeakRef(block_of(manager, place).untyped_storage())


def grow(manager, nbytes):
    return manager.get_simultaneous(((nbytes,), u8))[0]


def gone(*references):
    return until(lambda: all(each.expired() for each in references))


def retired(manager, place=0):
    """Bytes of former blocks that live: (held by graphs, held by views alone)."""
    by_graph = by_view = 0
    for storage, block, nbytes, _ in manager._current_workspaces.parts[place].retired:
        if storage.expired():
            continue
        if block() is not None:
            by_graph += nbytes
        else:
            by_view += nbytes
    return by_graph, by_view


def retained():
    return arena.stats().retained


@contextmanager
def slot(ubatch, lane=0):
    with workspace.use_workspace_ubatch_id(ubatch), workspace.use_workspace_lane(lane):
        yield


class Memory:
    """Counts what torch.empty gave and what of it lives; `limit` bytes are all there is."""

    def __init__(self, monkeypatch, limit=math.inf):
        self.given, self.peak, self.limit, empty = [], 0, limit, torch.empty

        def counting(*args, **options):
            size = args[0] if isinstance(args[0], tuple) else args
            if self.live() + math.prod(size) > self.limit:
                raise RuntimeError("out of memory")
            tensor = empty(*args, **options)
            self.given.append((StorageWeakRef(tensor.untyped_storage()), tensor.numel() * tensor.element_size()))
            self.peak = max(self.peak, self.live())
            return tensor

        monkeypatch.setattr(torch, "empty", counting)

    def live(self):
        self.given = [each for each in self.given if not each[0].expired()]
        return sum(nbytes for _, nbytes in self.given)

    def blocks(self):
        self.live()
        return sorted(nbytes for _, nbytes in self.given)


# ---- what a capture retains ----


def test_a_block_is_retained_once_per_capture(cuda, manager, managed):
    for _ in range(3):
        manager.get_simultaneous(*MOE)
    for captures in range(3):
        before = retained()
        with capture(cuda, managed=managed) as open_:
            for views in range(100):
                manager.get_simultaneous(*MOE)
                manager.get_simultaneous(((views,), u8))
            assert retained() - before == 1, captures
        open_.graph.drop()


def test_nothing_is_retained_outside_captures(cuda, manager):
    before = retained()
    stream, other = cuda.Stream(), cuda.Stream()
    other.begin_capture("relaxed")  # somebody's, on a stream that is not current
    with stream:
        for size in (1, 2, 4, 4, 4):
            grow(manager, size * KB)
            manager.get_persistent("k", (4,), f32)
            manager.get_persistent_resource("r", object)
    grow(manager, 8 * KB)
    other.end_capture().destroy()
    assert retained() == before


@pytest.mark.parametrize("what", ["seen", "new", "no bytes", "persistent", "resource"])
def test_outside_a_capture_the_driver_is_asked_at_most_once(cuda, manager, what):
    grow(manager, 64 * KB)
    sizes = itertools.count(1)
    ask = {
        "seen": lambda: manager.get_simultaneous(*MOE),
        "new": lambda: manager.get_simultaneous(((next(sizes),), u8)),
        "no bytes": lambda: manager.get_simultaneous(((0,), u8)),
        "persistent": lambda: manager.get_persistent("k", (4,), f32),
        "resource": lambda: manager.get_persistent_resource("k", object),
    }[what]
    for _ in range(3):
        ask()
    for stream in (cuda.Stream(), nullcontext()):
        with stream:
            for _ in range(5):
                before = {name: cuda.calls(name) for name in ASKED}
                ask()
                assert all(cuda.calls(name) - before[name] <= 1 for name in ASKED), {
                    name: cuda.calls(name) - before[name] for name in ASKED
                }


ASKED = ("cuStreamGetCaptureInfo", "cuCtxGetDevice", "current_stream", "current_device")


def test_inside_a_managed_capture_the_driver_is_not_asked(cuda, manager):
    grow(manager, 64 * KB)
    for _ in range(3):
        manager.get_simultaneous(*MOE)
    with capture(cuda) as open_:
        manager.get_simultaneous(*MOE)
        before = cuda.calls("cuStreamGetCaptureInfo")
        for _ in range(10):
            manager.get_simultaneous(*MOE)
        assert cuda.calls("cuStreamGetCaptureInfo") == before
    open_.graph.drop()


def test_two_captures_at_once_each_hold_the_block(cuda, manager, managed):
    old = None
    with capture(cuda, managed=managed) as one:
        with capture(cuda, managed=managed) as two:
            for _ in range(3):
                manager.get_simultaneous(*MOE)
            with_inner = retained()
        for _ in range(3):
            manager.get_simultaneous(*MOE)
        assert retained() - with_inner == 1
        old = alive(manager)
    grow(manager, 64 * KB)
    one.graph.drop()
    assert stays(lambda: not old.expired())
    two.graph.drop()
    assert gone(old)


def test_dbo_threads_of_one_capture_hold_the_block_of_each_ubatch(cuda, managed):
    manager = WorkspaceManager(CPU, 2)
    for ubatch in (0, 1):
        with slot(ubatch):
            grow(manager, (ubatch + 1) * 4 * KB)
    old = [alive(manager, 0), alive(manager, 1)]
    main = cuda.Stream()
    sides = [cuda.Stream(), cuda.Stream()]
    before = retained()
    with capture(cuda, managed=managed, stream=main) as open_:

        def work(ubatch):
            with sides[ubatch], slot(ubatch):
                for _ in range(5):
                    grow(manager, 2 * KB)
                    sides[ubatch].kernel()

        threads = [threading.Thread(target=work, args=(ubatch,)) for ubatch in (0, 1)]
        for ubatch, thread in enumerate(threads):
            sides[ubatch].wait(main)
            thread.start()
        for ubatch, thread in enumerate(threads):
            thread.join()
            main.wait(sides[ubatch])
        assert retained() - before == 2
    for ubatch in (0, 1):
        with slot(ubatch):
            grow(manager, 64 * KB)
    assert stays(lambda: not any(each.expired() for each in old))
    open_.graph.drop()
    assert gone(*old)


def test_a_second_capture_into_the_same_graph_holds_the_block_too(cuda, manager):
    """It has the id of the first, and a list of its own."""
    grow(manager, 4 * KB)
    manager.get_persistent("k", (4,), f32)
    target = cuda.Graph()
    captures = []
    for _ in range(2):
        with capture(cuda, into=target) as open_:
            grow(manager, KB)
            manager.get_persistent("k", (4,), f32)
        captures.append(open_)
    assert captures[0].id == captures[1].id
    old = alive(manager)
    tensor = StorageWeakRef(manager.get_persistent("k", (4,), f32).untyped_storage())
    grow(manager, 8 * KB)
    manager._persistent_resources = [{}]
    manager._current_workspaces = list(manager._current_workspaces)  # with the slots goes what they remember
    captures[0].graph.drop()
    assert stays(lambda: not old.expired() and not tensor.expired())
    captures[1].graph.drop()
    target.destroy()
    assert gone(old, tensor)


def test_views_taken_before_a_managed_capture_are_covered(cuda, manager):
    view = grow(manager, 4 * KB)
    old = alive(manager)
    with capture(cuda) as open_:
        pass  # a kernel reads `view`; nobody asks the workspace
    view = None
    grow(manager, 64 * KB)
    assert view is None
    assert retired(manager) == (4 * KB, 0)
    assert stays(lambda: not old.expired())
    open_.graph.drop()
    assert gone(old)
    assert retired(manager) == (0, 0)


def test_a_resource_that_cannot_be_walked_costs_the_others_nothing(cuda, caplog):
    class Bad:
        def __cuda_owners__(self):
            raise RuntimeError("not now")

    managers = [WorkspaceManager(CPU) for _ in range(2)]
    tensors = []
    for each in managers:
        each.get_persistent_resource("bad", Bad)
        tensors.append(StorageWeakRef(each.get_persistent("k", (4,), f32).untyped_storage()))
    with capture(cuda) as open_:
        pass
    assert "not now" in caplog.text
    for each in managers:
        each._persistent_resources = [{}]
    gc.collect()
    assert not any(each.expired() for each in tensors)
    open_.graph.drop()
    assert until(lambda: all(each.expired() for each in tensors))


def test_a_capture_that_is_not_torchs_holds_the_block_though_torchs_are_watched():
    """In a process of its own: once such a capture was met, the gate says maybe for good."""
    run = run_python(
        """
import torch, arena
from arena import _registry
from arena.testing import simulated_driver
from arena.workspace import WorkspaceManager

_registry.watched(True)
manager = WorkspaceManager(torch.device("cpu"))
with simulated_driver() as cuda:
    stream = cuda.Stream()
    with stream:
        stream.begin_capture("relaxed")
        stream.kernel()
        opened = _registry.capture_open()
        manager.get_simultaneous(((4,), torch.float32))
        graph = stream.end_capture()
    print(opened, arena.stats().owners)
    graph.destroy()
""",
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "True 1\n"


def test_without_the_hook_they_are_not(cuda, manager):
    """The control."""
    grow(manager, 4 * KB)
    old = alive(manager)
    hooks = arena._registry.begin_hooks[:]
    arena._registry.begin_hooks.clear()
    try:
        with capture(cuda) as open_:
            pass
    finally:
        arena._registry.begin_hooks[:] = hooks
    grow(manager, 64 * KB)
    assert old.expired()
    open_.graph.drop()


def test_every_slot_of_every_manager_is_covered_at_the_begin(cuda):
    managers = [WorkspaceManager(CPU, 2, 2) for _ in range(2)]
    for number, ubatch, lane in itertools.product((0, 1), (0, 1), (0, 1)):
        with slot(ubatch, lane):
            grow(managers[number], 4 * KB)
    old = [alive(each, place) for each in managers for place in range(4)]
    before = retained()
    with capture(cuda) as open_:
        assert retained() - before == 8
    managers.clear()
    gc.collect()
    assert stays(lambda: not any(each.expired() for each in old))
    open_.graph.drop()
    assert gone(*old)


def test_what_grows_inside_the_capture_is_covered_too(cuda, manager, managed):
    grow(manager, 4 * KB)
    with capture(cuda, managed=managed) as open_:
        small = alive(manager)
        if not managed:
            grow(manager, KB)
        grow(manager, 16 * KB)
        large = alive(manager)
    grow(manager, 64 * KB)
    assert retired(manager) == (20 * KB, 0)
    assert not small.expired()
    assert not large.expired()
    open_.graph.drop()
    assert gone(small, large)


class Scratch:
    """A resource that rebinds what it is made of, as vLLM's permutation scratch does."""

    def __init__(self, rows):
        self.reserve(rows)

    def reserve(self, rows):
        self.rows = torch.zeros(rows, 4)
        self.parts = {"sorted": [torch.zeros(rows)], "counts": (torch.zeros(rows), None)}

    def memory(self):
        tensors = [self.rows, *self.parts["sorted"], self.parts["counts"][0]]
        return [StorageWeakRef(each.untyped_storage()) for each in tensors]


@pytest.mark.parametrize("asked", ["before", "inside"])
def test_tensors_of_persistent_resources_are_covered_as_they_were(cuda, manager, managed, asked):
    if asked == "before" and not managed:
        pytest.skip("nobody says that this capture begins")
    scratch = manager.get_persistent_resource("moe", lambda: Scratch(4))
    with capture(cuda, managed=managed) as open_:
        if asked == "inside":
            for _ in range(3):
                assert manager.get_persistent_resource("moe", lambda: 1 / 0) is scratch
        first = scratch.memory()
        scratch.reserve(8)
        if asked == "inside":
            manager.get_persistent_resource("moe", lambda: 1 / 0)
        second = scratch.memory()
    scratch.reserve(16)
    assert stays(lambda: not any(each.expired() for each in first))
    assert any(each.expired() for each in second) is (asked == "before")
    open_.graph.drop()
    assert gone(*first, *second)


def test_retaining_such_an_object_alone_holds_nothing(cuda):
    """The control."""
    scratch = Scratch(4)
    first = scratch.memory()
    with capture(cuda) as open_:
        assert arena.retain(scratch)
    scratch.reserve(8)
    assert all(each.expired() for each in first)
    open_.graph.drop()


def test_a_persistent_tensor_is_retained_once_per_capture_and_lives_with_it(cuda, manager, managed):
    tensor = manager.get_persistent("locks", (64,), torch.int32, zero_init=True)
    memory = StorageWeakRef(tensor.untyped_storage())
    before = retained()
    with capture(cuda, managed=managed) as open_:
        for _ in range(20):
            manager.get_persistent("locks", (64,), torch.int32, zero_init=True)
        assert retained() - before <= 2  # the tensor, and its storage
    del tensor
    manager._persistent_resources = [{}]
    assert stays(lambda: not memory.expired())
    open_.graph.drop()
    assert gone(memory)


def test_captures_in_turn_each_retain_a_persistent_tensor_once(cuda, manager):
    one, other = cuda.Stream(), cuda.Stream()
    with capture(cuda, managed=False, stream=one) as first, capture(cuda, managed=False, stream=other) as second:
        before = retained()
        for _ in range(5):
            for stream in (one, other):
                with stream:
                    manager.get_persistent("k", (4,), f32)
        assert retained() == before + 4  # the tensor and its storage, in each
    first.graph.drop()
    second.graph.drop()


def test_what_one_capture_retains_is_not_taken_for_retained_by_another(cuda, manager):
    """Which begins, on another thread, while the first looks for the tensors of the same resource."""
    tensor = torch.zeros(4)
    alive = StorageWeakRef(tensor.untyped_storage())
    step = []

    class Resource:
        """Holds its tensor where only the walk finds it."""

        __slots__ = ("found",)

        def __cuda_owners__(self):
            return ()

    def found(self):
        if step:
            step.pop()()
        return tensor

    Resource.found = property(found)
    one, other = cuda.Stream(), cuda.Stream()

    def meanwhile():
        with other:
            manager.get_persistent_resource("another", object)

    def on_a_thread():
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()

    manager.get_persistent_resource("shared", Resource)
    with capture(cuda, managed=False, stream=one) as first, capture(cuda, managed=False, stream=other) as second:
        step.append(on_a_thread)
        for stream in (one, other):
            with stream:
                manager.get_persistent_resource("shared", None)
        assert not step
    first.graph.drop()
    manager._persistent_resources = [{}]
    Resource.found = tensor = None
    gc.collect()
    assert not alive.expired()
    second.graph.drop()
    assert until(alive.expired)


def test_a_block_served_while_another_thread_grew_the_slot_is_the_one_retained(cuda):
    """torch gives the GIL up in each operation: the views are of the old block, and so must be what is retained."""
    manager = WorkspaceManager(CPU)
    grow(manager, 4 * KB)
    for _ in range(3):
        manager.get_simultaneous(((64,), f32))
    old = alive(manager)

    class GrowsInside(TorchFunctionMode):
        done = False

        def __torch_function__(self, function, types, args=(), kwargs=None):
            if getattr(function, "__name__", "") == "detach" and not self.done:
                GrowsInside.done = True
                with cuda.Stream():  # another thread: its stream is not capturing
                    grow(manager, 64 * KB)
            return function(*args, **(kwargs or {}))

    with capture(cuda, managed=False) as open_, GrowsInside():
        view = manager.get_simultaneous(((64,), f32))[0]
    assert GrowsInside.done
    assert view.untyped_storage()._cdata == old.cdata
    view = None
    assert stays(lambda: not old.expired())
    open_.graph.drop()
    assert gone(old)


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
    assert (nbytes, site) == (64 * KB, f"test_workspace_graphs.py:{line}:grow")
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
        where = r"tests/test_workspace_graphs\.py:\d+ \(\w+\)"  # the capture's name: where it began
        assert re.fullmatch(
            f"strict workspace: the workspace would grow from 4096 to 8192 bytes for 'test_workspace_graphs.py:{line}:grow' "
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


# ---- failures fail nothing ----


def test_a_broken_capture_is_served_and_it_is_said(cuda, manager, caplog):
    grow(manager, 4 * KB)
    stream = cuda.Stream()
    with stream:
        stream.begin_capture("relaxed")
        stream.kernel()
        stream.invalidate()
        for _ in range(3):
            assert grow(manager, KB).numel() == KB
            assert manager.get_persistent("k", (4,), f32).numel() == 4
        with pytest.raises(arena.testing.Error):
            stream.end_capture()
    assert "does not retain" in caplog.text
    with capture(cuda) as open_:
        before = retained()
        grow(manager, KB)
    assert retained() == before  # at the begin
    open_.graph.drop()


@pytest.mark.parametrize("symbol", ["cuStreamGetCaptureInfo", "cuUserObjectCreate", "cuGraphRetainUserObject"])
def test_a_driver_call_that_fails_once_is_said_and_the_next_capture_is_covered(cuda, manager, symbol, caplog):
    grow(manager, 4 * KB)
    with capture(cuda, managed=False) as open_:
        cuda.fail(symbol)
        assert grow(manager, KB).numel() == KB
        assert "does not retain" in caplog.text
        assert grow(manager, KB).numel() == KB  # asks again
    with capture(cuda, managed=False) as second:
        grow(manager, KB)
    old = alive(manager)
    grow(manager, 8 * KB)
    open_.graph.drop()
    assert stays(lambda: not old.expired())
    second.graph.drop()
    assert gone(old)


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
