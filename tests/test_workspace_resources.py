"""Persistent resources of the workspace, on a CPU: made once for each slot, refused where they are not what is asked for, and
told apart by their keys. What graphs hold of them is in test_workspace_graphs.py."""

import itertools
import weakref

import pytest

torch = pytest.importorskip("torch")

import slots  # noqa: E402
from slots import CPU, f32, i32  # noqa: E402

from arena import workspace  # noqa: E402
from arena.workspace import WorkspaceManager  # noqa: E402

no_manager_left, manager = slots.no_manager_left, slots.manager  # fixtures


def test_a_resource_is_made_once_for_each_slot():
    manager = WorkspaceManager(CPU, 2, 2)
    made = []

    def factory():
        made.append(object())
        return made[-1]

    found = []
    for ubatch, lane in itertools.product((0, 1), (0, 1)):
        with workspace.use_workspace_ubatch_id(ubatch), workspace.use_workspace_lane(lane):
            found += [manager.get_persistent_resource("key", factory) for _ in range(3)]
    assert len(made) == 4
    assert found == [each for each in made for _ in range(3)]


def test_resources_may_be_anything_and_keys_are_compared_as_a_dict_does():
    manager = WorkspaceManager(CPU)
    assert manager.get_persistent_resource(("a", 1), lambda: None) is None
    assert manager.get_persistent_resource(("a", 1.0), lambda: 1 / 0) is None
    assert manager.get_persistent_resource(key=("a", True), factory=lambda: 1 / 0) is None
    with pytest.raises(ZeroDivisionError):
        manager.get_persistent_resource("b", lambda: 1 / 0)
    assert manager.get_persistent_resource("b", lambda: 2) == 2
    with pytest.raises(TypeError, match="unhashable"):
        manager.get_persistent_resource([], object)
    with pytest.raises(TypeError):
        manager.get_persistent_resource("b")


def test_a_locked_workspace_makes_no_resource():
    manager = WorkspaceManager(CPU)
    there = manager.get_persistent_resource("there", object)
    tensor = manager.get_persistent("t", (4,), i32)
    manager.lock()
    for _ in range(2):
        assert manager.get_persistent_resource("there", object) is there
        assert manager.get_persistent("t", (4,), i32) is tensor
        with pytest.raises(AssertionError, match="Workspace is locked but 'new' was not allocated during warmup"):
            manager.get_persistent_resource("new", object)
        with pytest.raises(AssertionError, match="for the current ubatch and lane"):
            manager.get_persistent("new", (4,), i32)
    manager.unlock()
    assert manager.get_persistent("new", (4,), i32).shape == (4,)


def test_a_persistent_tensor_is_zeroed_when_it_is_made_only():
    manager = WorkspaceManager(CPU)
    tensor = manager.get_persistent("locks", (64,), i32, zero_init=True)
    assert not tensor.any()
    tensor.fill_(5)
    for _ in range(3):
        assert manager.get_persistent("locks", (64,), i32, zero_init=True) is tensor
        assert manager.get_persistent("locks", shape=(64,), dtype=i32) is tensor
    assert (tensor == 5).all()


def test_a_persistent_tensor_of_another_shape_or_dtype_is_refused_each_time():
    manager = WorkspaceManager(CPU)
    for _ in range(3):
        tensor = manager.get_persistent("k", (4, 2), f32)
    for shape, dtype in (((4,), f32), ((2, 4), f32), ((4, 2), i32), ((), f32), ((4, 2**70), f32)):
        for _ in range(2):
            with pytest.raises(ValueError, match="Persistent workspace 'k' has shape="):
                manager.get_persistent("k", shape, dtype)
    assert manager.get_persistent("k", torch.Size([4, 2]), f32) is tensor
    with pytest.raises(ValueError, match="requested shape="):
        manager.get_persistent("k", [4, 2], f32)  # a list is not equal to a shape, there as here


def test_a_persistent_tensor_seen_before_is_looked_at_again():
    manager = WorkspaceManager(CPU)
    for _ in range(3):
        tensor = manager.get_persistent("k", (4, 2), f32)
    tensor.resize_(3)
    for _ in range(2):
        with pytest.raises(ValueError, match="Persistent workspace"):
            manager.get_persistent("k", (4, 2), f32)
    assert manager.get_persistent("k", (3,), f32) is tensor


def test_a_persistent_tensor_that_was_replaced_is_not_served():
    manager = WorkspaceManager(CPU)
    for _ in range(3):
        old = weakref.ref(manager.get_persistent("k", (4,), f32))
    manager._persistent_resources[0].clear()
    new = manager.get_persistent("k", (4,), f32)
    assert new is manager.get_persistent("k", (4,), f32)
    assert new is not old()
    new = None
    manager._persistent_resources[0][(torch.Tensor, "k")] = theirs = torch.zeros(4)
    assert all(manager.get_persistent("k", (4,), f32) is theirs for _ in range(3))


def test_many_persistent_tensors_are_told_apart():
    manager = WorkspaceManager(CPU)
    made = {(kind, number): manager.get_persistent((kind, number), (number,), f32) for kind in "ab" for number in range(64)}
    for _ in range(3):
        for (kind, number), tensor in made.items():
            assert manager.get_persistent((kind, number), (number,), f32) is tensor


def test_get_persistent_refuses_unknown_arguments_each_time():
    manager = WorkspaceManager(CPU)
    for _ in range(3):
        for bad in (
            lambda: manager.get_persistent("k", (4,), f32, zero=True),
            lambda: manager.get_persistent("k", (4,), f32, key="k"),
            lambda: manager.get_persistent("k", (4,), f32, True),
            lambda: manager.get_persistent("k", (4,)),
        ):
            with pytest.raises(TypeError):
                bad()
        manager.get_persistent("k", (4,), f32)
