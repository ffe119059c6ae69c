"""Scratch for kernels that come one after another, a drop-in for vLLM's `vllm.v1.worker.workspace`: the same names,
signatures, results, exceptions and messages as in 0.33.

One block for each (ubatch, lane), handed out in views; it grows on request until it is locked. What a captured graph was
served stays until that graph dies, without being asked. The request path, in `arena._workspace`, is compiled; this file holds
growth, locking and the module's functions. Any thread may call any of it. Needs torch; neither CUDA nor vLLM.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar

import torch

from arena import _registry, _workspace
from arena._registry import collect, suspend

__all__ = [
    "WorkspaceManager",
    "collect_cuda_graph_capture_resources",
    "current_preallocated_workspace",
    "current_workspace_manager",
    "init_workspace_manager",
    "is_workspace_manager_initialized",
    "lock_workspace",
    "reset_workspace_manager",
    "retain_cuda_graph_capture_resource",
    "suspend_cuda_graph_capture_resources",
    "unlock_workspace",
    "use_preallocated_workspace",
    "use_workspace_lane",
    "use_workspace_ubatch_id",
]

logger = logging.getLogger("arena.workspace")
T = TypeVar("T")
Spec = tuple[Sequence[int], torch.dtype]

_MB = 1024**2

# All of these are looked up at each call: callers and their tests replace them.
_manager: WorkspaceManager | None = None
_workspace_lane: ContextVar[int] = ContextVar("arena_workspace_lane", default=0)
_preallocated_workspace: ContextVar[torch.Tensor | None] = ContextVar("arena_preallocated_workspace", default=None)
dbo_current_ubatch_id: Callable[[], int] = _workspace.dbo_current_ubatch_id


def asked_for(variable: str, choice: bool | None) -> bool:
    """An option: what the caller chose, else what the environment says."""
    return choice if choice is not None else os.environ.get(variable, "0") not in ("", "0")


def watch_if_asked(manager: Any) -> None:
    """A new manager is watched where the environment says so: see `arena.overlaps`, which imports this module."""
    if "ARENA_WATCH" in os.environ or "ARENA_POISON" in os.environ:
        importlib.import_module("arena.overlaps").from_environment(manager)


class Reserving:
    """Worst cases, declared before anything is captured."""

    _num_lanes: int
    _num_ubatches: int
    _locked: bool
    _current_workspaces: list[torch.Tensor | None]
    get_simultaneous: Callable[..., list[torch.Tensor]]
    _workspace_size_bytes: Callable[[torch.Tensor | None], int]

    def reserve_all(self, *shapes_and_dtypes: Spec) -> None:
        """Every slot gets room for this request, and for the largest slot there is.

        Raises:
            AssertionError: The workspace is locked and a slot is too small; nothing was changed.
        """
        sizes = [self._workspace_size_bytes(each) for each in self._current_workspaces]
        largest = max(sizes, default=0)
        self._reserve([max(_workspace.bytes_needed(shapes_and_dtypes), largest)] * len(sizes), "reserve_all")

    def reserve_by_lane(self) -> None:
        """Every ubatch's slot of a lane gets the size of the lane's largest; lanes stay independent.

        Raises:
            AssertionError: The workspace is locked and a slot is too small; nothing was changed.
        """
        sizes = [self._workspace_size_bytes(each) for each in self._current_workspaces]
        lanes = [max(sizes[lane :: self._num_lanes], default=0) for lane in range(self._num_lanes)]
        self._reserve(lanes * self._num_ubatches, "reserve_by_lane")

    def _reserve(self, sizes: list[int], operation: str) -> None:
        small = [
            place
            for place, workspace in enumerate(self._current_workspaces)
            if self._workspace_size_bytes(workspace) < sizes[place]
        ]
        if self._locked and small:
            raise AssertionError(f"Workspace is locked but {operation} requires larger capacity in slot(s) {small}.")
        for place in small:
            ubatch, lane = divmod(place, self._num_lanes)
            with use_workspace_ubatch_id(ubatch), use_workspace_lane(lane):
                self.get_simultaneous(((sizes[place],), torch.uint8))


class Growing(Reserving):
    """What is rare: growth, locking, resources made for the first time. `_workspace.Requests` stands in front of it."""

    _device: torch.device
    _get_workspace_id: Callable[[], int]
    _persistent_resources: list[dict[Hashable, object]]
    reuse_views: bool
    strict: bool

    def __init__(
        self,
        device: torch.device,
        num_ubatches: int | None = None,
        num_lanes: int = 1,
        alloc_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        *,
        reuse_views: bool | None = None,
        strict: bool | None = None,
    ) -> None:
        if num_lanes < 1:
            raise ValueError(f"num_lanes must be at least one, got {num_lanes}.")
        self._device = device
        self._alloc_context = alloc_context
        self._num_ubatches = num_ubatches if num_ubatches is not None else 1
        self._num_lanes = num_lanes
        self._current_workspaces = [None] * (self._num_ubatches * num_lanes)
        self._persistent_resources = [{} for _ in self._current_workspaces]
        self._locked = False
        self.reuse_views = asked_for("ARENA_REUSE_VIEWS", reuse_views)
        self.strict = asked_for("ARENA_STRICT", strict)
        watch_if_asked(self)

    @staticmethod
    def _workspace_size_bytes(workspace: torch.Tensor | None) -> int:
        return 0 if workspace is None else workspace.numel() * workspace.element_size()

    def lock(self) -> None:
        """From now on a request for more than a slot has, and one for a new persistent resource, is an AssertionError."""
        self._locked = True
        self._log_sizes("locked")

    def unlock(self) -> None:
        """Slots may grow again, and persistent resources may be made."""
        self._locked = False
        self._log_sizes("unlocked")

    def is_locked(self) -> bool:
        """Whether the workspace is locked."""
        return self._locked

    def _log_sizes(self, what: str) -> None:
        if debugging():
            sizes = [self._workspace_size_bytes(each) / _MB for each in self._current_workspaces if each is not None]
            logger.info("[WORKSPACE DEBUG] Workspace %s. Current sizes: %s", what, sizes)

    def get_persistent_resource(self, key: Hashable, factory: Callable[[], T]) -> T:
        resources: dict[Hashable, Any] = self._persistent_resources[self._get_workspace_id()]
        if key not in resources:
            if self._locked:
                raise AssertionError(
                    f"Workspace is locked but {key!r} was not allocated during warmup for the current ubatch and lane."
                )
            resources[key] = factory()
        found: T = resources[key]
        return found

    def get_persistent(
        self, key: Hashable, shape: tuple[int, ...], dtype: torch.dtype, *, zero_init: bool = False
    ) -> torch.Tensor:
        make = torch.zeros if zero_init else torch.empty
        workspace = self.get_persistent_resource((torch.Tensor, key), lambda: make(shape, dtype=dtype, device=self._device))
        if workspace.shape != shape or workspace.dtype != dtype:
            raise ValueError(
                f"Persistent workspace {key!r} has shape={workspace.shape}, dtype={workspace.dtype}; "
                f"requested shape={shape}, dtype={dtype}."
            )
        return workspace

    def _ensure_workspace_size(self, required_bytes: int) -> torch.Tensor:
        """The current slot's block, replaced by a larger one where it is too small."""
        place = self._get_workspace_id()
        workspace = self._current_workspaces[place]
        size = self._workspace_size_bytes(workspace)
        if workspace is not None and size >= required_bytes:
            return workspace
        if self._locked:
            raise AssertionError(
                f"Workspace is locked but allocation from '{caller()}' requires {required_bytes / _MB:.2f} MB, "
                f"current size is {size / _MB:.2f} MB. Workspace growth is not allowed after locking."
            )
        # What nobody else holds is freed before the larger one is allocated, and its segment given back: no double peak.
        # Only this slot: another may be in use.
        del workspace
        self._current_workspaces[place] = None
        if not _registry.capture_open():  # to give memory back would break the capture
            try:
                torch.accelerator.empty_cache()  # looked up each time: capture code replaces it
            except RuntimeError:
                if torch.accelerator.is_available():
                    raise
        with self._alloc_context():
            grown = torch.empty((required_bytes,), dtype=torch.uint8, device=self._device)
        self._current_workspaces[place] = grown
        if debugging():
            logger.info(
                "[WORKSPACE DEBUG] Resized workspace from '%s': %.2f MB -> %.2f MB (ubatch %d, lane %d)",
                caller(),
                size / _MB,
                required_bytes / _MB,
                *divmod(place, self._num_lanes),
            )
        return grown


class WorkspaceManager(_workspace.Requests, Growing):
    """Scratch and persistent resources by (ubatch, lane).

    Args:
        device: Where blocks are: a `torch.device`, a string or an index.
        num_ubatches: Ubatches that may run side by side; None: one.
        num_lanes: Independent users of each ubatch (a target and its draft model, say).
        alloc_context: Makes the context in which a block is allocated.
        reuse_views: A request seen twice gets the very same tensor objects from then on: no torch operation at all. A
            caller must then not keep state on a tensor object. Only where gradients are off. None: `ARENA_REUSE_VIEWS`.
        strict: Growing inside a capture, or growing a slot whose block a living graph uses, is a RuntimeError. None:
            `ARENA_STRICT`.

    Raises:
        ValueError: `num_lanes` is less than one.
    """

    namespace = globals()
    own_ids = True


def debugging() -> bool:
    return os.environ.get("VLLM_DEBUG_WORKSPACE", "0") not in ("", "0")


def caller() -> str:
    """The first Python frame outside this package, as "file:line:function"."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("arena."):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "unknown"


# ---- which slot ----


@contextmanager
def use_workspace_lane(lane: int) -> Iterator[None]:
    """Requests inside are served from that lane. A thread started inside begins at lane 0.

    Raises:
        ValueError: `lane` is negative.
    """
    if lane < 0:
        raise ValueError(f"Workspace lane must be non-negative, got {lane}.")
    token = _workspace_lane.set(lane)
    try:
        yield
    finally:
        _workspace_lane.reset(token)


@contextmanager
def use_workspace_ubatch_id(ubatch: int) -> Iterator[None]:
    """Requests inside are served from that ubatch, whatever the thread works on.

    Raises:
        ValueError: `ubatch` is negative.
    """
    if ubatch < 0:
        raise ValueError(f"Workspace ubatch id must be non-negative, got {ubatch}.")
    token = _workspace.workspace_ubatch_id.set(ubatch)
    try:
        yield
    finally:
        _workspace.workspace_ubatch_id.reset(token)


@contextmanager
def use_preallocated_workspace(scratch: torch.Tensor | None) -> Iterator[None]:
    """Names scratch that the caller has reserved, for operations inside that look for it. Nothing is allocated."""
    token = _preallocated_workspace.set(scratch)
    try:
        yield
    finally:
        _preallocated_workspace.reset(token)


def current_preallocated_workspace() -> torch.Tensor | None:
    """The scratch that `use_preallocated_workspace` named last in this context, or None."""
    return _preallocated_workspace.get()


# ---- what a capture uses ----


def collect_cuda_graph_capture_resources() -> AbstractContextManager[list[Any]]:
    """`arena.collect()`: a list of what is retained inside, whether or not a capture is open."""
    return collect()


def suspend_cuda_graph_capture_resources() -> AbstractContextManager[None]:
    """`arena.suspend()`: outer lists get nothing of what is retained inside."""
    return suspend()


def retain_cuda_graph_capture_resource(resource: Any) -> bool:
    """`arena.retain(resource)`: whether a list or a capture took it."""
    return _registry.retain(resource)


# ---- the process's manager ----


def is_workspace_manager_initialized() -> bool:
    """Whether there is one."""
    return _manager is not None


def current_workspace_manager() -> WorkspaceManager:
    """The process's manager.

    Raises:
        AssertionError: There is none yet.
    """
    assert _manager is not None, (
        "WorkspaceManager not initialized. Call init_workspace_manager() with a device before using workspace functions."
    )
    return _manager


def init_workspace_manager(
    device: torch.device,
    num_ubatches: int | None = None,
    num_lanes: int = 1,
    alloc_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    reuse_views: bool | None = None,
    strict: bool | None = None,
) -> None:
    """Makes the process's manager; the arguments are `WorkspaceManager`'s. One that was there is let go of, with a warning:
    views and graphs keep what they use of it."""
    global _manager
    if _manager is not None:
        logger.warning(
            "WorkspaceManager already initialized on device %s, reinitializing on device %s", _manager._device, device
        )
    _manager = WorkspaceManager(device, num_ubatches, num_lanes, alloc_context, reuse_views=reuse_views, strict=strict)


def lock_workspace() -> None:
    """`current_workspace_manager().lock()`."""
    current_workspace_manager().lock()


def unlock_workspace() -> None:
    """`current_workspace_manager().unlock()`."""
    current_workspace_manager().unlock()


def reset_workspace_manager() -> None:
    """There is no manager any more; views and graphs keep what they use."""
    global _manager
    _manager = None
