"""What the workspace keeps of requests, on a CPU: one seen before is served fast, and yet none is served from what another one
left behind: a changed view, a fake tensor, a history, another mode, a block that another thread has let go of. Controls show
what a cache that knows nothing of these does."""

import gc
import itertools
import random
import sys
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")

import slots  # noqa: E402
import stock  # noqa: E402
from slots import CPU, KB, MOE, bf16, block_of, f32, grow, i32, serve_thrice, size_of, storage, u8  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

import arena  # noqa: E402
from arena.workspace import WorkspaceManager  # noqa: E402

no_manager_left, manager = slots.no_manager_left, slots.manager  # fixtures


def test_views_are_new_objects_by_default():
    manager = WorkspaceManager(CPU)
    seen = [each[0] for each in serve_thrice(manager, *MOE) + serve_thrice(manager, *MOE)]
    assert len({id(each) for each in seen}) == 6
    assert len({each.data_ptr() for each in seen}) == 1
    seen[0].marked = True
    assert not any(hasattr(each, "marked") for each in seen[1:])


def test_views_are_the_same_objects_where_the_caller_asks_for_it(monkeypatch):
    for manager in (WorkspaceManager(CPU, reuse_views=True), from_environment(monkeypatch)):
        with torch.no_grad():
            manager.get_simultaneous(*MOE)  # once is not kept: many requests never come again
            first, *others = serve_thrice(manager, *MOE)
        assert all(a is b for each in others for a, b in zip(first, each, strict=True))


def from_environment(monkeypatch):
    monkeypatch.setenv("ARENA_REUSE_VIEWS", "1")
    return WorkspaceManager(CPU)


def test_what_the_caller_chose_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("ARENA_REUSE_VIEWS", "1")
    assert not WorkspaceManager(CPU, reuse_views=False).reuse_views
    monkeypatch.setenv("ARENA_REUSE_VIEWS", "0")
    assert not WorkspaceManager(CPU).reuse_views


class Naive:
    """The control: views kept by request, and nothing else."""

    def __init__(self):
        self.model, self.kept = stock.Model(), {}

    def get_simultaneous(self, *specs):
        if specs not in self.kept:
            self.kept[specs] = self.model.get_simultaneous(*specs)
        return list(self.kept[specs])


CHANGES = {
    "set_ to other memory": lambda view: view.set_(torch.zeros(32, 128, dtype=bf16)),
    "set_ to another offset": lambda view: view.set_(view.untyped_storage(), 128, view.shape, view.stride()),
    "resize_ smaller": lambda view: view.resize_(4, 4),
    "resize_ larger": lambda view: view.resize_(1024, 1024),
    ".data = other": lambda view: setattr(view, "data", torch.ones(32, 128, dtype=bf16)),
    ".data = other shape": lambda view: setattr(view, "data", torch.ones(2, dtype=bf16)),
    "transpose_": lambda view: view.t_(),
    "unsqueeze_": lambda view: view.unsqueeze_(0),
    "as_strided_": lambda view: view.as_strided_((128, 32), (32, 1)),
}


def described(view):
    return view.shape, view.stride(), view.dtype, view.data_ptr(), view.untyped_storage().data_ptr()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_view_is_never_served_to_the_next_caller(manager, change):
    if change == "resize_ larger" and arena._registry.debug_level and not manager.reuse_views:
        pytest.skip("a debug build says that the block itself was resized")
    with torch.no_grad():
        right = [described(each) for each in serve_thrice(manager, *MOE)[-1]]
        for _ in range(3):
            CHANGES[change](manager.get_simultaneous(*MOE)[0])
            for views in serve_thrice(manager, *MOE):
                # resize_ beyond the storage enlarges the block itself, and may move it
                if change == "resize_ larger":
                    right = [described(each) for each in stock_views(block_of(manager), *MOE)]
                assert [described(each) for each in views] == right


def stock_views(block, *specs):
    model = stock.Model()
    model.block = block
    return model.get_simultaneous(*specs)


@pytest.mark.parametrize("change", CHANGES)
def test_a_naive_cache_serves_it(change):
    """The control."""
    naive = Naive()
    with torch.no_grad():
        right = [described(each) for each in naive.get_simultaneous(*MOE)]
        CHANGES[change](naive.get_simultaneous(*MOE)[0])
        assert [described(each) for each in naive.get_simultaneous(*MOE)] != right


def test_a_fake_tensor_is_never_kept(manager):
    """Neither in the slot, nor as a view, nor as what views are made from."""
    real = grow(manager, 64 * KB).data_ptr()
    for dtype, known in itertools.product((f32, bf16, u8), (0, 2)):
        spec = ((8 + known, 4), dtype)
        for _ in range(known):
            manager.get_simultaneous(spec)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert all(isinstance(each[0], FakeTensor) for each in serve_thrice(manager, spec))
        for views in serve_thrice(manager, spec):
            assert (type(views[0]), views[0].data_ptr()) == (torch.Tensor, real)


def test_a_request_under_a_fake_mode_does_not_fill_the_slot(manager):
    with FakeTensorMode():
        assert all(isinstance(each, FakeTensor) for views in serve_thrice(manager, *MOE) for each in views)
    assert block_of(manager) is None
    for views in serve_thrice(manager, *MOE):
        assert [type(each) for each in views] == [torch.Tensor, torch.Tensor]


def test_vllms_way_fills_the_slot_with_it():
    """The control."""
    model = stock.Model()
    with FakeTensorMode():
        model.get_simultaneous(*MOE)
    assert isinstance(model.block, FakeTensor)


def test_grad_and_inference_modes_do_not_share_views(manager):
    modes = {
        "grad": torch.enable_grad,
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
    }
    kept = {}
    for name, mode in itertools.chain(modes.items(), modes.items()):
        with mode():
            views = [each[0] for each in serve_thrice(manager, *MOE)]
            like = stock_views(block_of(manager), *MOE)[0]
            for view in views:
                assert (view.is_inference(), view.requires_grad) == (like.is_inference(), like.requires_grad)
            kept.setdefault(name, set()).update(id(each) for each in views if manager.reuse_views)
            kept.setdefault("objects", []).extend(views)
    assert not kept["no_grad"] & kept["inference"]
    if manager.reuse_views:
        assert len(kept["no_grad"]) == len(kept["inference"]) == 2  # the first time, and from the second on
        assert len(kept["grad"]) == 6  # where gradients are recorded nothing is handed out twice


def test_a_history_is_not_served_to_the_next_caller(manager):
    weight = torch.ones(4, requires_grad=True)
    for _ in range(4):
        view = manager.get_simultaneous(((4,), f32))[0]
        assert not view.requires_grad
        assert view.grad_fn is None
        view.copy_(weight * 2)


def test_a_view_made_in_inference_mode_is_usable_outside(manager):
    """A block allocated in either mode is served in both."""
    with torch.inference_mode():
        serve_thrice(manager, *MOE)
    for views in serve_thrice(manager, *MOE):
        views[0].detach()
    with torch.inference_mode():
        for views in serve_thrice(manager, *MOE):
            views[0].fill_(2)


def test_a_working_set_of_64_requests_is_never_looked_up_anew():
    manager = WorkspaceManager(CPU, reuse_views=True)
    grow(manager, 64 * KB)
    requests = [(((rows, 8), f32), ((rows,), i32)) for rows in range(1, 65)]
    with torch.inference_mode():
        for _ in range(2):
            first = [manager.get_simultaneous(*each) for each in requests]
        for seed in range(20):
            order = list(range(64))
            random.Random(seed).shuffle(order)
            for place in order:
                again = manager.get_simultaneous(*requests[place])
                assert all(a is b for a, b in zip(again, first[place], strict=True))


def test_what_is_kept_is_bounded():
    manager = WorkspaceManager(CPU, reuse_views=True)
    grow(manager, 64 * KB)
    seen = []
    with torch.inference_mode():
        for rows in range(1000):
            seen.append(weakref.ref(serve_thrice(manager, ((rows,), u8))[-1][0]))
            seen = [each for each in seen if each() is not None]
            assert len(seen) <= 257, rows
    assert len(seen) > 64
    grow(manager, 128 * KB)
    assert not any(each() for each in seen)


def test_default_views_are_kept_from_the_second_time_on_and_bounded():
    manager = WorkspaceManager(CPU)
    grow(manager, 64 * KB)
    gc.collect()

    def tensors():
        return sum(type(each) is torch.Tensor for each in gc.get_objects())

    before = tensors()
    for rows in range(1000):
        manager.get_simultaneous(((rows,), u8))
    assert tensors() - before < 8
    for rows in range(1000):
        serve_thrice(manager, ((rows,), u8))
    assert tensors() - before < 300


def test_a_request_too_long_to_keep_is_served_all_the_same(manager):
    specs = [((each,), u8) for each in range(1, 100)]
    for views in serve_thrice(manager, *specs):
        assert [each.numel() for each in views] == list(range(1, 100))
        assert [each.data_ptr() - views[0].data_ptr() for each in views] == [256 * place for place in range(99)]


class GrowsInside(TorchFunctionMode):
    """Runs `grow` in the middle of the first torch operation of that name, as another thread could."""

    def __init__(self, name, grow):
        super().__init__()
        self.name, self.grow = name, grow

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") == self.name and self.grow is not None:
            grow, self.grow = self.grow, None
            grow()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("seen", [0, 1, 2])
def test_views_made_while_the_slot_grew_are_not_kept_for_the_new_block(manager, seen):
    """torch gives the GIL up in each operation."""
    with torch.no_grad():
        manager.get_simultaneous(((64,), f32))
        for _ in range(seen):
            manager.get_simultaneous(*MOE)
        old = storage(manager.get_simultaneous(((64,), f32))[0])
        name = "detach" if seen and not manager.reuse_views else "as_strided"
        with GrowsInside(name, lambda: grow(manager, 256 * KB)) as mode:
            manager.get_simultaneous(*(MOE if seen else (((32,), f32),)))
        if mode.grow is None:
            assert storage(block_of(manager)) != old
        for spec in (MOE, (((32,), f32),), (((64,), f32),)):
            for views in serve_thrice(manager, *spec):
                assert {storage(each) for each in views} == {storage(block_of(manager))}


def test_a_request_that_fails_while_it_is_kept_leaves_nothing_behind():
    manager = WorkspaceManager(CPU)
    manager.get_simultaneous(*MOE)

    def fail():
        raise MemoryError("no memory for another view")

    with pytest.raises(MemoryError, match="another view"), GrowsInside("detach", fail):
        manager.get_simultaneous(*MOE)
    assert len(serve_thrice(manager, *MOE)) == 3
    block = StorageWeakRef(block_of(manager).untyped_storage())
    del manager
    assert block.expired()


def test_threads_that_grow_one_slot_get_what_they_asked_for(manager):
    """B17: 2 threads × 1000 rounds."""
    largest, wrong = [0, 0], []

    def work(number):
        rng = random.Random(number)
        for round_ in range(1000):
            nbytes = 256 * rng.randint(1, 2 + round_)
            largest[number] = max(largest[number], nbytes)
            try:
                view = grow(manager, nbytes)
                if view.numel() != nbytes or view.untyped_storage().nbytes() < nbytes:
                    wrong.append((nbytes, view.shape))
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert size_of(manager) == max(largest)
    assert manager.available_bytes() == max(largest)


def test_vllms_way_loses_the_larger_block():
    """The control: the larger block is there, and then the smaller one takes its place."""
    model = stock.Model()
    model.get_simultaneous(((KB,), u8))

    class Interrupted(stock.Model):
        """A thread that is slow between looking and setting."""

        @property
        def block(self):
            return model.block

        @block.setter
        def block(self, value):
            if value is not None:
                model.get_simultaneous(((64 * KB,), u8))
            model.block = value

    Interrupted.__init__ = lambda self: setattr(self, "device", "cpu")
    Interrupted().get_simultaneous(((4 * KB,), u8))
    assert model.block.numel() == 4 * KB


def test_requests_of_other_threads_beside_growth_are_served_from_one_block_each():
    manager = WorkspaceManager(CPU)
    grow(manager, 4 * KB)
    stop, wrong = threading.Event(), []

    def ask():
        while not stop.is_set():
            views = manager.get_simultaneous(((16,), f32), ((16,), i32))
            if storage(views[0]) != storage(views[1]) or views[1].data_ptr() - views[0].data_ptr() != 256:
                wrong.append(views)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for each in threads:
        each.start()
    for step in range(2, 300):
        grow(manager, step * 4 * KB)
    stop.set()
    for each in threads:
        each.join()
    assert not wrong
    for views in serve_thrice(manager, ((16,), f32), ((16,), i32)):
        assert {storage(each) for each in views} == {storage(block_of(manager))}
