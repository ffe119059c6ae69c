"""vLLM's plugin: the compiled request path in front of vLLM's own workspace manager, and managed torch graphs.

Off unless `ARENA_VLLM=1`, so that being installed changes no engine. vLLM calls `register()` (entry point
`vllm.general_plugins`) in each of its processes, before workers are made and forked. It never raises: on anything that it does
not know it says why, and changes nothing.
"""

from __future__ import annotations

import logging
import os
from contextvars import ContextVar
from types import ModuleType
from typing import Any

__all__ = ["register"]

log = logging.getLogger("vllm.arena")  # vLLM shows what its own loggers say, and of others only warnings

NEEDED = ("get_simultaneous", "_ensure_workspace_size", "_get_workspace_id", "get_persistent", "get_persistent_resource")
# What 0.33's _get_workspace_id names: nothing else decides which slot it is.
OWN_IDS = {"_workspace_lane", "get", "_num_lanes", "RuntimeError", "dbo_current_ubatch_id"}
ADDED = (
    "collect_cuda_graph_capture_resources",
    "current_preallocated_workspace",
    "retain_cuda_graph_capture_resource",
    "suspend_cuda_graph_capture_resources",
    "use_preallocated_workspace",
    "use_workspace_ubatch_id",
)


def register() -> None:
    """Puts arena to work in this vLLM process, if `ARENA_VLLM=1`. Twice is once. Never raises."""
    if os.environ.get("ARENA_VLLM", "0") in ("", "0"):
        return
    try:
        log.info("arena: %s", install())
    except Exception as error:
        log.warning("arena changes nothing in this vLLM: %s", error, exc_info=not isinstance(error, NotKnown))


class NotKnown(RuntimeError):
    """This vLLM is not what we know how to extend."""


def install() -> str:
    """Rebinds the class in vLLM's workspace module and patches torch's graphs; returns what was done."""
    import torch
    import vllm.v1.worker.workspace as stock  # type: ignore[import-not-found, unused-ignore]

    done = f"{replace_manager(stock)} in {stock.__name__}"
    if torch.version.hip is None and torch.version.cuda is not None:
        import arena.torch

        arena.torch.install()
        return f"{done}; torch's CUDA graphs are managed"
    return f"{done}; no CUDA here: nothing is retained"


def replace_manager(stock: ModuleType) -> str:
    """A manager with our request path and vLLM's everything else, in the place of vLLM's.

    Raises:
        NotKnown: vLLM's module is not as in 0.33.
    """
    from arena import workspace

    before: Any = getattr(stock, "WorkspaceManager", None)
    if before is None or issubclass(before, workspace.Reserving):
        if before is None:
            raise NotKnown(f"{stock.__name__} has no WorkspaceManager")
        return "WorkspaceManager was replaced before"
    missing = [name for name in NEEDED if not callable(getattr(before, name, None))]
    if missing:
        raise NotKnown(f"vLLM {version()}: its WorkspaceManager has no {', '.join(missing)}; 0.33's is needed")
    lane, ubatch = getattr(stock, "_workspace_lane", None), getattr(stock, "dbo_current_ubatch_id", None)
    for name, there in (("_workspace_lane", isinstance(lane, ContextVar)), ("dbo_current_ubatch_id", callable(ubatch))):
        if not there:
            raise NotKnown(f"vLLM {version()}: {stock.__name__} has no {name}; 0.33's is needed")
    if getattr(stock, "_manager", None) is not None:
        raise NotKnown("the workspace manager was made before the plugin was loaded")
    stock.WorkspaceManager = manager_over(before, vars(stock))  # type: ignore[attr-defined]
    added = [name for name in ADDED if not hasattr(stock, name)]
    for name in added:
        setattr(stock, name, getattr(workspace, name))
    return f"WorkspaceManager replaced, {len(added)} names added"


def manager_over(before: Any, names: dict[str, Any]) -> type:
    from arena import _workspace, workspace

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        before.__init__(self, *args, **kwargs)
        self.reuse_views = workspace.asked_for("ARENA_REUSE_VIEWS", None)
        self.strict = workspace.asked_for("ARENA_STRICT", None)
        workspace.watch_if_asked(self)

    own_ids = set(before._get_workspace_id.__code__.co_names) == OWN_IDS
    body = {"__init__": __init__, "__doc__": before.__doc__, "__module__": __name__, "namespace": names, "own_ids": own_ids}
    return type("WorkspaceManager", (_workspace.Requests, before, workspace.Reserving), body)


def version() -> str:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as of

    try:
        return of("vllm")
    except PackageNotFoundError:
        return "(of unknown version)"
