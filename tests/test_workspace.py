"""How requests are answered from slots, beside vLLM's way, on a CPU: the forms that they have, growth, what holds where memory
ends, sizes settled beforehand. vLLM's names and globals are in test_workspace_interface.py, what is kept of requests in
test_workspace_views.py, what graphs hold in test_workspace_graphs.py, real GPUs in test_workspace_gpu.py."""

import inspect
import itertools
import math
import os
import weakref
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

import slots  # noqa: E402
import stock  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from slots import CPU, KB, MOE, bf16, block_of, f32, grow, i32, serve_thrice, size_of, slot, storage, u8  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

import arena  # noqa: E402
from arena import workspace  # noqa: E402
from arena.workspace import WorkspaceManager  # noqa: E402

no_manager_left, manager = slots.no_manager_left, slots.manager  # fixtures


# ---- forms of arguments ----


@pytest.mark.parametrize("device", [torch.device("cpu"), "cpu", 0, "cuda:1", torch.device("meta")])
def test_the_device_is_given_to_torch_as_it_is(monkeypatch, device):
    empty, asked = torch.empty, []

    def recording(*args, device, **options):
        asked.append(device)
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", recording)
    manager = WorkspaceManager(device)
    manager.get_simultaneous(*MOE)
    manager.get_persistent("lock", (4,), i32)
    assert asked == [device, device]
    assert all(each is device for each in asked)


def test_a_meta_workspace_costs_no_memory():
    seen = serve_thrice(WorkspaceManager("meta"), ((1 << 50,), u8), ((7,), f32))
    assert all(each[0].is_meta and each[0].shape == (1 << 50,) and each[1].dtype == f32 for each in seen)


class Index:
    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def shape_forms():
    yield "tuple", (4, 8)
    yield "list", [4, 8]
    yield "torch.Size", torch.Size([4, 8])
    yield "range", range(4, 9, 4)
    yield "tensor", torch.tensor([4, 8])
    yield "indexes", (Index(4), Index(8))
    try:
        import numpy as np
    except ImportError:
        return
    yield "numpy ints", (np.int64(4), np.int32(8))
    yield "numpy array", np.array([4, 8])


@pytest.mark.parametrize("shape", [each[1] for each in shape_forms()], ids=[each[0] for each in shape_forms()])
def test_a_shape_is_any_sequence_of_ints(manager, shape):
    for first, second in serve_thrice(manager, (shape, f32), (shape, u8)):
        assert first.shape == second.shape == torch.Size([4, 8])
        assert second.data_ptr() - first.data_ptr() == 256


def test_a_pair_may_be_a_list(manager):
    assert [each[0].shape for each in serve_thrice(manager, [(2, 3), f32])] == [(2, 3)] * 3


DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_torch_is_served_like_a_view(manager, dtype):
    for before, view, after in serve_thrice(manager, ((3,), u8), ((5, 3), dtype), ((), i32)):
        expected = block_of(manager)[256 : 256 + 15 * dtype.itemsize].view(dtype).reshape(5, 3)
        assert (view.dtype, view.shape, view.stride(), view.data_ptr()) == (
            expected.dtype,
            expected.shape,
            expected.stride(),
            expected.data_ptr(),
        )
        assert (before.shape, after.shape, after.data_ptr() % 256) == ((3,), (), block_of(manager).data_ptr() % 256)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (0, 0), (1, 1, 1, 1, 1)])
def test_small_and_empty_shapes(manager, shape):
    grow(manager, KB)
    for view, next_ in serve_thrice(manager, (shape, f32), ((2,), f32)):
        assert (view.shape, view.is_contiguous(), view.numel()) == (shape, True, math.prod(shape))
        assert next_.data_ptr() == block_of(manager).data_ptr() + (256 if view.numel() else 0)


# ---- growth ----


def test_views_and_caches_drop_at_growth(manager):
    for rows in range(100):
        serve_thrice(manager, ((rows, 8), f32))
    old = StorageWeakRef(block_of(manager).untyped_storage())
    grow(manager, 2 * size_of(manager))
    assert old.expired()


def test_what_nobody_holds_is_freed_before_the_larger_block_is_allocated(monkeypatch, manager):
    serve_thrice(manager, ((64 * KB,), u8))
    old = StorageWeakRef(block_of(manager).untyped_storage())
    empty, freed = torch.empty, []
    monkeypatch.setattr(torch, "empty", lambda *args, **options: (freed.append(old.expired()), empty(*args, **options))[1])
    grow(manager, 128 * KB)
    assert freed == [True]


def test_blocks_are_allocated_in_the_callers_context(manager):
    entered = []

    @contextmanager
    def pool():
        entered.append("in")
        yield
        entered.append("out")

    manager = WorkspaceManager(CPU, alloc_context=pool)
    assert entered == []
    serve_thrice(manager, *MOE)
    assert entered == ["in", "out"]


def test_what_asks_while_old_views_go_gets_views_of_the_new_block():
    """A finalizer of a view that runs in the middle of a growth asks the same slot, and makes it grow itself."""
    manager = WorkspaceManager(CPU, reuse_views=True)
    requests = [((size,), torch.float32) for size in range(4, 40)]
    right = []

    def ask():
        for _ in range(2):
            manager.get_simultaneous(((64,), torch.float32))
        for request in requests:
            (view,) = manager.get_simultaneous(request)
            block = manager._current_workspaces.parts[0].current
            right.append(view.untyped_storage().data_ptr() == block.storage.data_ptr())

    with torch.no_grad():
        for request in requests * 2:
            manager.get_simultaneous(request)
        weakref.finalize(manager.get_simultaneous(requests[0])[0], ask)
        manager.get_simultaneous(((1000,), torch.float32))
        assert right == [True] * len(requests)
        for request in requests:  # and so does who asks when all is done
            (view,) = manager.get_simultaneous(request)
            assert view.untyped_storage().data_ptr() == manager._current_workspaces[0].untyped_storage().data_ptr()


def test_only_the_current_slot_grows():
    manager = WorkspaceManager(CPU, 2, 2)
    for lane in (0, 1):
        for ubatch in (0, 1):
            with workspace.use_workspace_lane(lane), workspace.use_workspace_ubatch_id(ubatch):
                grow(manager, KB)
    before = [block_of(manager, place) for place in range(4)]
    with workspace.use_workspace_lane(1):
        grow(manager, 4 * KB)
    after = [block_of(manager, place) for place in range(4)]
    assert [a is b for a, b in zip(after, before, strict=True)] == [True, False, True, True]


def test_slots_may_be_set_and_read_like_a_list(manager):
    """What vLLM's own code and tests do with `_current_workspaces`."""
    serve_thrice(manager, *MOE)
    theirs = torch.zeros(64 * KB, dtype=u8)
    manager._current_workspaces[0] = theirs
    for views in serve_thrice(manager, *MOE):
        assert storage(views[0]) == storage(theirs)
    manager._current_workspaces[0] = None
    assert manager.available_bytes() == 0
    assert storage(manager.get_simultaneous(*MOE)[0]) != storage(theirs)
    manager._current_workspaces = [None]
    assert manager._current_workspaces == [None]
    assert manager.available_bytes() == 0


# ---- better than vLLM's ----


def test_a_request_for_no_bytes_needs_no_block(manager):
    for views in serve_thrice(manager, ((0,), f32), ((4, 0), bf16)):
        assert [(each.shape, each.dtype) for each in views] == [((0,), f32), ((4, 0), bf16)]
    assert block_of(manager) is None
    assert manager.get_simultaneous() == []


def test_vllms_own_fails_on_it(monkeypatch):
    theirs = stock.module()
    if theirs is None:
        pytest.skip(stock.why[0])
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    with pytest.raises(TypeError):
        theirs.WorkspaceManager(CPU).get_simultaneous(((0,), f32))


class OutOfMemory(RuntimeError):
    pass


@contextmanager
def memory_ends(monkeypatch, above):
    """torch.empty refuses more than that many bytes."""
    empty = torch.empty

    def limited(*args, **options):
        if math.prod(args[0] if isinstance(args[0], tuple) else args) > above:
            raise OutOfMemory("out of memory")
        return empty(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", limited)
        yield


@pytest.mark.parametrize("held", [False, True], ids=["unheld", "held by a view"])
def test_a_failed_growth_leaves_the_slot_what_it_was(monkeypatch, manager, held):
    view = serve_thrice(manager, ((8 * KB,), u8))[-1][0]
    address = view.data_ptr()
    if not held:
        view = None
    for _ in range(2):
        with memory_ends(monkeypatch, 8 * KB), pytest.raises(OutOfMemory, match="out of memory"):
            grow(manager, 16 * KB)
        assert size_of(manager) == manager.available_bytes() == 8 * KB
    served = [each[0] for each in serve_thrice(manager, ((8 * KB,), u8))]
    assert {each.data_ptr() for each in served} == {block_of(manager).data_ptr()}
    if held:
        assert block_of(manager).data_ptr() == address
        view.fill_(7)
        assert served[0][123] == 7
    assert grow(manager, 16 * KB).numel() == 16 * KB


def test_vllms_way_leaves_the_slot_empty(monkeypatch):
    """The control."""
    model = stock.Model()
    model.get_simultaneous(((8 * KB,), u8))
    with memory_ends(monkeypatch, 8 * KB), pytest.raises(OutOfMemory):
        model.get_simultaneous(((16 * KB,), u8))
    assert model.block is None


def test_an_allocation_context_that_fails_leaves_the_slot_what_it_was(manager):
    fail = [False]

    @contextmanager
    def pool():
        if fail[0]:
            fail[0] = False
            raise OutOfMemory("no room in the pool")
        yield

    manager = WorkspaceManager(CPU, alloc_context=pool)
    grow(manager, 8 * KB)
    fail[0] = True
    with pytest.raises(OutOfMemory, match="no room in the pool"):
        grow(manager, 16 * KB)
    assert size_of(manager) == 8 * KB
    assert grow(manager, 16 * KB).numel() == 16 * KB


def test_the_fresh_block_after_a_failed_growth_is_from_the_callers_context_too(monkeypatch):
    entered = []

    @contextmanager
    def pool():
        entered.append(1)
        yield

    manager = WorkspaceManager(CPU, alloc_context=pool)
    grow(manager, 8 * KB)
    with memory_ends(monkeypatch, 8 * KB), pytest.raises(OutOfMemory):
        grow(manager, 16 * KB)
    assert size_of(manager) == 8 * KB
    assert len(entered) == 3  # made, not grown, made again


def test_when_even_the_old_size_is_gone_the_slot_is_empty_and_says_so(monkeypatch, manager, caplog):
    grow(manager, 8 * KB)
    with memory_ends(monkeypatch, 0), pytest.raises(OutOfMemory):
        grow(manager, 16 * KB)
    assert block_of(manager) is None
    assert "8192 bytes is empty" in caplog.text
    assert grow(manager, KB).numel() == KB


def test_a_failing_empty_cache_leaves_the_slot_what_it_was(monkeypatch, manager):
    grow(manager, 8 * KB)

    def broken():
        raise OutOfMemory("cache")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "empty_cache", broken)
    with pytest.raises(OutOfMemory, match="cache"):
        grow(manager, 16 * KB)
    assert size_of(manager) == 8 * KB


def test_initialising_again_leaves_views_what_they_are(caplog):
    workspace.init_workspace_manager(CPU)
    view = grow(workspace.current_workspace_manager(), KB).fill_(3)
    old = weakref.ref(workspace.current_workspace_manager())
    workspace.init_workspace_manager("cpu", 2)
    assert "WorkspaceManager already initialized on device cpu, reinitializing on device cpu" in caplog.text
    assert old() is None
    other = grow(workspace.current_workspace_manager(), KB).fill_(9)
    assert (view == 3).all()
    assert (other == 9).all()


@pytest.mark.parametrize(
    "shape",
    [(-1,), (4, -1), (-1, -1), (-(2**70),), (2**62, 4), (2**63,), (2**70,), (2**32, 2**32), (2**63 - 1,)],
)
def test_negative_and_overflowing_sizes_are_value_errors(manager, shape):
    serve_thrice(manager, *MOE)
    address = block_of(manager).data_ptr()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"negative size|more bytes than an address space") as seen:
            manager.get_simultaneous(((4,), f32), (shape, f32))
        assert str(shape) in str(seen.value)
    with pytest.raises(ValueError, match=r"negative size|more bytes"):
        manager.reserve_all((shape, f32))
    assert block_of(manager).data_ptr() == address


def test_sizes_that_overflow_only_together_are_value_errors(manager):
    with pytest.raises(ValueError, match="more bytes"):
        manager.get_simultaneous(((2**62,), u8), ((2**62,), u8))


@pytest.mark.parametrize(
    "spec",
    [
        5,
        None,
        (),
        ((4,),),
        ((4,), f32, 1),
        (4, f32),
        ("44", f32),
        ((4.0,), f32),
        ((None,), f32),
        ((4,), "float32"),
        ((4,), float),
        (f32, (4,)),
        "ab",
    ],
    ids=repr,
)
def test_what_is_no_request_is_a_type_error(manager, spec):
    serve_thrice(manager, *MOE)
    with pytest.raises(TypeError, match="a workspace request is made of"):
        manager.get_simultaneous(spec)
    with pytest.raises(TypeError, match="a workspace request is made of"):
        manager.get_simultaneous(((4,), f32), spec)
    with pytest.raises(TypeError):
        manager.get_simultaneous(shapes_and_dtypes=())


def test_the_request_that_made_a_slot_as_large_as_it_is_can_be_asked():
    """B16: needs 1, 112 and 3 MiB; who asked for 112?"""
    manager = WorkspaceManager("meta")

    def the_largest():
        manager.get_simultaneous(((112, KB, KB), u8))

    grow(manager, KB * KB)
    the_largest()
    grow(manager, 3 * KB * KB)
    (slot,) = manager._current_workspaces.parts
    nbytes, specs, site = slot.high
    line = inspect.getsourcelines(the_largest)[1] + 1
    assert (nbytes, specs) == (112 * KB * KB, (((112, KB, KB), u8),))
    assert site == f"test_workspace.py:{line}:the_largest"


# ---- right sizing ----


def sizes(manager):
    return [size_of(manager, place) for place in range(len(manager._current_workspaces))]


def test_the_same_room_for_every_ubatch_of_a_lane():
    """B1: only (0, 0) was warmed; the other ubatch asks after the lock."""
    manager = WorkspaceManager(CPU, 2, 2)
    view = grow(manager, 12 * KB).fill_(3)
    with slot(1, 0), pytest.raises(AssertionError, match=r"current size is 0\.00 MB"):
        manager.lock()
        grow(manager, 12 * KB)
    manager.unlock()
    manager.reserve_by_lane()
    manager.lock()
    assert sizes(manager) == [12 * KB, 0, 12 * KB, 0]
    assert len({block_of(manager, place).data_ptr() for place in (0, 2)}) == 2
    assert storage(view) == storage(block_of(manager, 0))
    assert (view == 3).all()
    with slot(1, 0):
        assert grow(manager, 12 * KB).numel() == 12 * KB


def test_lanes_keep_their_own_sizes():
    """B11: 1024 and 170 MiB in two ubatches, not four times the larger."""
    mb = KB * KB
    manager = WorkspaceManager("meta", 2, 2)
    with slot(0, 0):
        grow(manager, 1024 * mb)
    with slot(1, 1):
        grow(manager, 170 * mb)
    manager.reserve_by_lane()
    assert sizes(manager) == [1024 * mb, 170 * mb] * 2
    manager.lock()
    with slot(0, 1), pytest.raises(AssertionError, match=r"requires 171\.00 MB, current size is 170\.00 MB"):
        grow(manager, 171 * mb)


def test_all_slots_get_room_for_the_worst_case():
    """B4: declared by three operations before the warm-up; one allocation of the largest for each slot."""
    made = []

    @contextmanager
    def counted():
        made.append(1)
        yield

    manager = WorkspaceManager(CPU, 2, 2, counted)
    manager.reserve_all(((30 * KB,), u8), ((4,), f32))
    assert sizes(manager) == [30 * KB + 256] * 4
    manager.reserve_all(((1,), u8))
    assert len(made) == 4
    manager.lock()
    manager.reserve_all(((30 * KB,), u8))
    with pytest.raises(AssertionError, match=r"reserve_all requires larger capacity in slot\(s\) \[0, 1, 2, 3\]"):
        manager.reserve_all(((31 * KB,), u8))
    assert sizes(manager) == [30 * KB + 256] * 4


def test_reserving_makes_slots_as_large_as_the_largest_there_is():
    manager = WorkspaceManager(CPU, 1, 3)
    with slot(0, 2):
        grow(manager, 8 * KB)
    manager.reserve_all(((KB,), u8))
    assert sizes(manager) == [8 * KB] * 3


def test_trying_changes_nothing_where_it_does_not_fit():
    """B3."""
    manager = WorkspaceManager(CPU, 2)
    assert manager.try_get_simultaneous(((4 * KB,), u8))[0].numel() == 4 * KB
    with slot(1, 0):
        grow(manager, KB)
    manager.lock()
    before = [block_of(manager, place) for place in (0, 1)]
    assert manager.try_get_simultaneous(((4 * KB,), u8)) is not None
    assert manager.try_get_simultaneous(((4 * KB + 1,), u8)) is None
    with slot(1, 0):
        assert manager.available_bytes() == KB
        assert manager.try_get_simultaneous(((2 * KB,), u8)) is None
        assert manager.try_get_simultaneous(((KB,), u8))[0].numel() == KB
    assert all(block_of(manager, place) is before[place] for place in (0, 1))
    assert manager.available_bytes() == 4 * KB
    with pytest.raises(TypeError):
        manager.try_get_simultaneous(5)


def test_a_preallocated_workspace_is_only_named():
    scratch = torch.zeros(4)
    assert workspace.current_preallocated_workspace() is None
    with workspace.use_preallocated_workspace(scratch):
        assert workspace.current_preallocated_workspace() is scratch
        with workspace.use_preallocated_workspace(None):
            assert workspace.current_preallocated_workspace() is None
        assert workspace.current_preallocated_workspace() is scratch
    assert workspace.current_preallocated_workspace() is None


# ---- against a model ----

SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)
SPECS = st.lists(
    st.tuples(SHAPES, st.sampled_from([u8, torch.bool, bf16, f32, torch.float64, torch.complex64, torch.float8_e4m3fn])),
    max_size=6,
).map(tuple)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_random_requests_are_answered_as_vllm_answers_them(data):
    """Offsets, shapes, dtypes, strides, sizes of slots, and what overlaps what."""
    lanes = data.draw(st.integers(1, 2))
    manager = WorkspaceManager(CPU, 2, lanes, reuse_views=data.draw(st.booleans()))
    models = {place: stock.Model() for place in itertools.product(range(2), range(lanes))}
    pool = data.draw(st.lists(SPECS, min_size=1, max_size=4))
    for _ in range(data.draw(st.integers(1, 30))):
        ubatch, lane = data.draw(st.sampled_from(sorted(models)))
        specs = data.draw(st.sampled_from(pool))
        model = models[ubatch, lane]
        with slot(ubatch, lane), torch.inference_mode(data.draw(st.booleans())):
            ours = manager.get_simultaneous(*specs)
            if model.block is None and not any(math.prod(shape) for shape, _ in specs):
                assert [(each.shape, each.dtype) for each in ours] == [(torch.Size(shape), dtype) for shape, dtype in specs]
                continue
            theirs = model.get_simultaneous(*specs)
        block = block_of(manager, ubatch * lanes + lane)
        assert block.numel() == model.block.numel()
        assert len(ours) == len(theirs)
        for mine, their in zip(ours, theirs, strict=True):
            assert (mine.shape, mine.dtype, mine.stride()) == (their.shape, their.dtype, their.stride())
            assert mine.data_ptr() - block.data_ptr() == their.data_ptr() - model.block.data_ptr() or not mine.numel()
            assert storage(mine) == storage(block)
            assert type(mine) is torch.Tensor
        for number, each in enumerate(ours):
            if each.numel() and each.dim():
                each.view(u8).fill_(number)
        for number, each in enumerate(ours):
            if each.numel() and each.dim():
                assert (each.view(u8) == number).all()
    blocks = [each.data_ptr() for each in manager._current_workspaces if each is not None]
    assert len(set(blocks)) == len(blocks)


def test_it_works_with_the_environment_of_a_worker():
    """Made in a process that forks: the child's manager serves."""
    manager = WorkspaceManager(CPU)
    serve_thrice(manager, *MOE)
    child = os.fork()
    if child == 0:
        try:
            right = all(len(each) == 2 for each in serve_thrice(manager, *MOE))
            os._exit(7 if right and not arena.capture_id() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
