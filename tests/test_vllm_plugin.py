"""The plugin against modules that look like vLLM's workspace module, or nearly: what it replaces, and what it refuses."""

import importlib.metadata
import logging
import sys
import types
from contextvars import ContextVar

import pytest
from conftest import run_python

torch = pytest.importorskip("torch", reason="the workspace needs torch")
arena_vllm = pytest.importorskip("arena.vllm")
_workspace = pytest.importorskip("arena._workspace")

NAME = "vllm.v1.worker.workspace"


class Manager:
    """As much of vLLM's manager as the plugin looks at."""

    def __init__(self, device, num_ubatches=None, num_lanes=1, alloc_context=None):
        self._device, self._num_lanes, self._locked = device, num_lanes, False
        self._num_ubatches = num_ubatches or 1
        self._current_workspaces = [None] * (self._num_ubatches * num_lanes)
        self._persistent_resources = [{} for _ in self._current_workspaces]
        self.grown = []

    @staticmethod
    def _workspace_size_bytes(workspace):
        return 0 if workspace is None else workspace.numel()

    def _get_workspace_id(self):
        lane = _workspace_lane.get()
        if lane >= self._num_lanes:
            raise RuntimeError(lane)
        return dbo_current_ubatch_id() * self._num_lanes + lane

    def get_simultaneous(self, *specs):
        raise AssertionError("the request path is ours")

    def _ensure_workspace_size(self, required_bytes):
        if self._locked:
            raise AssertionError("Workspace is locked")
        self.grown.append(required_bytes)
        place = self._get_workspace_id()
        self._current_workspaces[place] = torch.empty(required_bytes, dtype=torch.uint8)
        return self._current_workspaces[place]

    def get_persistent_resource(self, key, factory):
        return self._persistent_resources[self._get_workspace_id()].setdefault(key, factory())

    def get_persistent(self, key, shape, dtype, *, zero_init=False):
        return self.get_persistent_resource(key, lambda: torch.zeros(shape, dtype=dtype))

    def lock(self):
        self._locked = True

    def vllms_own(self):
        return "kept"


_workspace_lane = ContextVar("lane", default=0)


def dbo_current_ubatch_id():
    return 0


def module_like_vllms():
    module = types.ModuleType(NAME)
    vars(module).update(_manager=None, _workspace_lane=_workspace_lane, dbo_current_ubatch_id=dbo_current_ubatch_id)
    module.WorkspaceManager = type("WorkspaceManager", (Manager,), {})
    module.current_workspace_manager = lambda: module._manager
    return module


def as_vllm(module, put):
    """`module` can be imported by vLLM's name."""
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        package = types.ModuleType(name)
        package.__path__ = []
        put(name, package)
    put(NAME, module)
    package.workspace = module


@pytest.fixture
def stock(monkeypatch):
    module = module_like_vllms()
    as_vllm(module, lambda name, value: monkeypatch.setitem(sys.modules, name, value))
    monkeypatch.setenv("ARENA_VLLM", "1")
    return module


def said(caplog, text):
    return [record for record in caplog.records if record.name == "vllm.arena" and text in record.getMessage()]


@pytest.mark.parametrize("value", [None, "", "0"])
def test_without_the_variable_nothing_changes(stock, monkeypatch, caplog, value):
    monkeypatch.delenv("ARENA_VLLM")
    if value is not None:
        monkeypatch.setenv("ARENA_VLLM", value)
    before = dict(vars(stock))
    arena_vllm.register()
    assert vars(stock) == before
    assert not caplog.records


def test_the_class_is_rebound_and_the_rest_is_vllms(stock, caplog):
    caplog.set_level(logging.INFO, "vllm.arena")
    before = stock.WorkspaceManager
    arena_vllm.register()
    assert stock.WorkspaceManager is not before
    assert issubclass(stock.WorkspaceManager, before)
    assert issubclass(stock.WorkspaceManager, _workspace.Requests)
    (line,) = said(caplog, "WorkspaceManager replaced")
    assert line.levelno == logging.INFO
    assert NAME in line.getMessage()

    manager = stock.WorkspaceManager(torch.device("cpu"), num_lanes=2)
    (view,) = manager.get_simultaneous(((8,), torch.float32))
    assert view.shape == (8,)
    assert view.dtype == torch.float32
    assert manager.grown == [256]  # by vLLM's own growth
    assert manager.vllms_own() == "kept"
    manager.lock()
    with pytest.raises(AssertionError, match="Workspace is locked"):
        manager.get_simultaneous(((1024,), torch.float32))
    for name in arena_vllm.ADDED:
        assert callable(getattr(stock, name))


def test_slots_are_found_by_what_the_module_has_now(stock, monkeypatch):
    arena_vllm.register()
    manager = stock.WorkspaceManager(torch.device("cpu"), num_ubatches=2, num_lanes=2)
    assert manager._get_workspace_id() == 0
    monkeypatch.setattr(stock, "dbo_current_ubatch_id", lambda: 1)
    assert manager._get_workspace_id() == 2
    with stock.use_workspace_ubatch_id(0):
        assert manager._get_workspace_id() == 0
    token = _workspace_lane.set(1)
    try:
        assert manager._get_workspace_id() == 3
    finally:
        _workspace_lane.reset(token)


def test_another_way_to_find_slots_is_asked(stock):
    def last(self):
        return len(self._current_workspaces) - 1

    stock.WorkspaceManager = type("WorkspaceManager", (Manager,), {"_get_workspace_id": last})
    arena_vllm.register()
    manager = stock.WorkspaceManager(torch.device("cpu"), num_lanes=3)
    manager.get_simultaneous(((8,), torch.uint8))
    assert [workspace is not None for workspace in manager._current_workspaces] == [False, False, True]


def test_twice_is_once(stock):
    arena_vllm.register()
    ours = stock.WorkspaceManager
    arena_vllm.register()
    assert stock.WorkspaceManager is ours


@pytest.mark.parametrize("name", arena_vllm.NEEDED)
def test_a_manager_that_lacks_something_is_refused_by_name(stock, caplog, name):
    old = {key: value for key, value in vars(Manager).items() if key not in (name, "__dict__", "__weakref__")}
    stock.WorkspaceManager = before = type("WorkspaceManager", (), old)
    arena_vllm.register()
    assert stock.WorkspaceManager is before
    assert not any(hasattr(stock, added) for added in arena_vllm.ADDED)
    (line,) = said(caplog, name)
    assert "0.33" in line.getMessage()


@pytest.mark.parametrize("name", ["_workspace_lane", "dbo_current_ubatch_id"])
def test_a_module_that_lacks_something_is_refused_by_name(stock, caplog, name):
    before = stock.WorkspaceManager
    delattr(stock, name)
    arena_vllm.register()
    assert stock.WorkspaceManager is before
    assert said(caplog, name)


def test_a_manager_that_was_made_before_stays(stock, caplog):
    before = stock.WorkspaceManager
    stock._manager = before(torch.device("cpu"))
    arena_vllm.register()
    assert stock.WorkspaceManager is before
    assert said(caplog, "before the plugin")


@pytest.mark.parametrize("thing", [None, 7, "no class"])
def test_it_never_raises(stock, caplog, thing):
    stock.WorkspaceManager = thing
    arena_vllm.register()
    assert stock.WorkspaceManager is thing
    assert said(caplog, "changes nothing")


def test_without_vllm_it_says_so(monkeypatch, caplog):
    monkeypatch.setenv("ARENA_VLLM", "1")
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)  # not importable
    arena_vllm.register()
    assert said(caplog, "changes nothing")


def test_vllm_finds_it_by_its_entry_point():
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    (point,) = [each for each in points if each.name == "arena"]
    assert point.load() is arena_vllm.register


WORKER = """
import os, sys, types, torch, arena, arena.vllm
import test_vllm_plugin as plugin

os.environ["ARENA_VLLM"] = "1"
plugin.as_vllm(module := plugin.module_like_vllms(), sys.modules.__setitem__)
arena.vllm.register()
child = os.fork()
if child == 0:
    manager = module.WorkspaceManager(torch.device("cpu"))
    for _ in range(3):
        (view,) = manager.get_simultaneous(((4, 4), torch.bfloat16))
    with arena.collect() as owners:
        taken = arena.retain(view)
    os._exit(0 if taken and owners == [view] and isinstance(manager, plugin._workspace.Requests) else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_worker_forked_after_the_plugin_was_loaded_serves():
    ended = run_python(WORKER, timeout=60)
    assert ended.returncode == 0, ended.stderr
