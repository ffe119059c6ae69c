"""A workspace on a GPU as its tests use it: what of a slot they look at, and steps whose scratch is from it, captured by torch
under `arena.torch.install()`. Each `churn` hands freed memory to tensors full of NaN, so that whatever a graph lost shows in
what it computes. Its fixtures are taken by name."""

import gc
import math

import pytest
import torch
from conftest import until
from torch.multiprocessing.reductions import StorageWeakRef

import arena
import arena.torch
from arena import _workspace, workspace
from arena.workspace import WorkspaceManager

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
