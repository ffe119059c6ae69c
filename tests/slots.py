"""A workspace on a CPU as its tests use it: how they ask, what of a slot they look at, and captures of the simulated driver
that hold its blocks. Its fixtures are taken by name: `manager = slots.manager`."""

import math
from contextlib import contextmanager

import pytest
import torch
from conftest import until
from torch.multiprocessing.reductions import StorageWeakRef

import arena
from arena import _workspace, workspace
from arena._registry import begin
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
def slot(ubatch, lane=0):
    with workspace.use_workspace_ubatch_id(ubatch), workspace.use_workspace_lane(lane):
        yield


# ---- under graphs of the simulated driver ----


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


def alive(manager, place=0):
    """The current block's memory, weakly."""
    return StorageWeakRef(block_of(manager, place).untyped_storage())


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
