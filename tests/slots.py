"""A workspace on a CPU as its tests use it: how they ask, and what of a slot they look at. Its fixtures are taken by name:
`manager = slots.manager`."""

from contextlib import contextmanager

import pytest
import torch

from arena import workspace
from arena.workspace import WorkspaceManager

CPU = torch.device("cpu")
KB = 1024
bf16, u8, i32, f32 = torch.bfloat16, torch.uint8, torch.int32, torch.float32
MOE = (((32, 128), bf16), ((32, 64), bf16))


@pytest.fixture(autouse=True)
def no_manager_left():
    workspace.reset_workspace_manager()
    yield
    workspace.reset_workspace_manager()


@pytest.fixture(params=[False, True], ids=["new", "reuse"])
def manager(request):
    """Both ways of serving what was seen before."""
    return WorkspaceManager(CPU, reuse_views=request.param)


def block_of(manager, place=0):
    return manager._current_workspaces[place]


def size_of(manager, place=0):
    block = block_of(manager, place)
    return 0 if block is None else block.numel()


def grow(manager, nbytes):
    return manager.get_simultaneous(((nbytes,), u8))[0]


def storage(tensor):
    return tensor.untyped_storage()._cdata


def serve_thrice(manager, *specs):
    """New, seen once, seen twice: the three ways through the request path."""
    return [manager.get_simultaneous(*specs) for _ in range(3)]


@contextmanager
def slot(ubatch, lane):
    with workspace.use_workspace_ubatch_id(ubatch), workspace.use_workspace_lane(lane):
        yield
