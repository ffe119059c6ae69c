"""What captured graphs hold of the workspace, on the simulated driver with tensors of the CPU: what a capture retains of slots
and resources, unasked, once and no more, and what is said where it cannot. What becomes of a block when its slot grows is in
test_workspace_growth.py, the same on a real GPU in test_workspace_gpu.py."""

import gc
import itertools
import threading
from contextlib import nullcontext

import pytest
from conftest import run_python, stays, until

torch = pytest.importorskip("torch")

import slots  # noqa: E402
from slots import CPU, KB, MOE, alive, capture, f32, gone, grow, retained, retired, slot, u8  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

import arena  # noqa: E402
from arena.workspace import WorkspaceManager  # noqa: E402

cuda, managed, manager = slots.cuda, slots.managed, slots.manager  # fixtures


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
