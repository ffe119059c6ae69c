"""torch's graphs, managed: their executables are clean, so a replay costs what it costs without owners, and owners that a
graph held are released only when its last replay has finished.

`install()` patches the methods of `torch.cuda.CUDAGraph` and `torch.cuda.graph` in place, which reaches every holder of
graphs; `CUDAGraph` and `graph` here are subclasses that do the same for those who want no patching. Any thread may call any
of it. No failure of ours fails a capture or a replay: what cannot be managed stays held by the executable, exact but taxed.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]

from arena import _registry, captures, cycles, dynamo, watching

__all__ = ["CUDAGraph", "graph", "install", "installed", "uninstall"]

log = logging.getLogger("arena")

Original = Callable[..., Any]

debug = _registry.debug_level > 0 or os.environ.get("ARENA_DEBUG", "0") not in ("", "0")
"""Whether the end of each capture looks for owners that reach their own graph by whatever way, and warns of each with that
way. Else only what an owner refers to directly is looked at, and counted in `arena.stats().cycles`."""


# ---- what a managed graph does around torch's own methods; `_arena_capture` is its ManagedCapture, or None ----


def new(kind: type, original: Original, *args: Any, **kwargs: Any) -> Any:
    """`__new__`: torch does not tell later whether the template is kept."""
    self = original(kind, *args, **kwargs)
    self._arena_keep = bool(args[0] if args else kwargs.get("keep_graph", False))
    return self


def capture_begin(self: Any, original: Original, *args: Any, **kwargs: Any) -> None:
    # A pool with live blocks cannot be captured into again: what is dead goes first.
    if _registry.pending():
        _registry.reclaim()
    begun = watching.began(self)
    taken(self, "_arena_audit_begun")  # of a capture that failed
    if begun is not None:
        self._arena_audit_begun = begun
    original(self, *args, **kwargs)
    watching.forget(self)
    before, self._arena_capture = self._arena_capture, None
    if before is not None:
        before.drop()
    self._arena_capture = managed_here(self)


def taken(self: Any, name: str) -> Any:
    """An attribute, taken off; None if there is none. Asking for the `__dict__` would have Python make one for each graph."""
    value = getattr(self, name, None)
    if value is not None:
        delattr(self, name)
    return value


def managed_here(graph: Any = None) -> _registry.ManagedCapture | None:
    """Of the capture that the current stream has just begun."""
    try:
        held = _registry.begin()
        captures.note(held.id, graph)
        return held
    except Exception:
        _registry.watched(False)
        log.warning("this capture is not managed: its executable will hold the owners itself", exc_info=True)
        return None


def capture_end(self: Any, original: Original) -> None:
    """Also torch 2.14's capture_end_pre(), after which it instantiates."""
    held = self._arena_capture
    read = watching.ending(taken(self, "_arena_audit_begun"))
    if held is not None:
        held.seal()
        if not held.holds:
            self._arena_capture = held = None
    try:
        original(self)
    except BaseException:
        if held is not None and not held.capturing:  # else (the wrong stream, the wrong thread) it may be ended yet
            self._arena_capture = None
            held.drop()
        raise
    if hasattr(self, "capture_end_post"):
        if read is not None:
            self._arena_audit_read = read
        return
    if held is not None:
        hold(self, held)
    watching.ended(self, read)


def capture_end_post(self: Any, original: Original) -> None:
    original(self)
    if self._arena_capture is not None:
        hold(self, self._arena_capture)
    watching.ended(self, taken(self, "_arena_audit_read"))


def begin_body(self: Any, original: Original, *args: Any, **kwargs: Any) -> None:
    """A conditional body (torch 2.12 on) is a capture of its own, into a graph and on a stream of its own."""
    original(self, *args, **kwargs)
    held = self._arena_capture
    if held is not None:
        held.bodies = [*(held.bodies or ()), managed_here()]


def end_body(self: Any, original: Original) -> None:
    """What was retained in the body belongs to the capture around it from here on: nothing is left in the body's graph."""
    held = self._arena_capture
    if held is not None and held.bodies:
        body, outer = held.bodies.pop(), next(filter(None, reversed(held.bodies)), held)
        if body is not None:
            try:
                body.join(outer)
            except Exception:
                log.warning("the owners of a conditional body stay with it: the executable will hold them", exc_info=True)
            body.drop()
    original(self)


def hold(self: Any, held: _registry.ManagedCapture) -> None:
    """The capture has ended: a kept template holds the owners too, so that what is made from it by hand does."""
    captures.ended(held.id, self)
    template = 0
    look_for_cycles(self, held)
    # torch 2.14 says itself whether the template is kept, by enable_debug_mode() too.
    keep = getattr(self, "_keep_graph", getattr(self, "_arena_keep", None))
    if keep is not False:  # None: made before install(); torch refuses the handle of a template that is not kept
        try:
            template = self.raw_cuda_graph()
        except RuntimeError:
            template = 0
    hold_by(held, template)
    held.lazy = bool(template) and not getattr(self, "_has_graph_exec", False)


def hold_by(held: _registry.ManagedCapture, template: int) -> None:
    try:
        held.hold(template)
    except Exception:
        log.warning("the template does not hold the owners: clones and executables made by hand do not either", exc_info=True)


def instantiate(self: Any, original: Original) -> None:
    held = self._arena_capture
    if held is None:
        original(self)
        return
    template = held.template
    held.seal()
    try:
        original(self)
    finally:
        if template:
            hold_by(held, template)
    held.lazy = False


def reset(self: Any, original: Original) -> None:
    held, self._arena_capture = self._arena_capture, None
    watching.forget(self)
    mode = _registry.enter_relaxed()  # or the destruction of the executable breaks every global-mode capture
    try:
        original(self)
    finally:
        _registry.leave_relaxed(mode)
        if held is not None:
            held.drop()
    if held is not None:
        _registry.reclaim()


def leave(self: Any, original: Original, *exc: Any) -> Any:
    """`torch.cuda.graph.__exit__`: what an audit found is raised once torch has put all back, and not over the body's error."""
    result = original(self, *exc)
    if not any(exc):
        watching.tell_if_raising(self.cuda_graph)
    return result


def finalize(self: Any, original: Original | None) -> None:
    """`__del__`: what the C++ destructor would do right after, but in relaxed mode."""
    try:
        held, self._arena_capture = self._arena_capture, None
        if original is not None:
            original(self)
        retained = getattr(self, "_retained", None)
        if retained is not None:
            retained.fire()  # torch 2.14 promises this before the graph's own resources go
        mode = _registry.enter_relaxed()
        try:
            torch._C._CUDAGraph.reset(self)
        finally:
            _registry.leave_relaxed(mode)
            if held is not None:
                held.drop()
    except Exception:
        log.debug("a graph was not finalized in relaxed mode", exc_info=True)


def look_for_cycles(self: Any, held: _registry.ManagedCapture) -> None:
    try:
        if not debug:
            held.count_cycles(self)
            return
        for number, owner in enumerate(held.owners):
            way = cycles.way_to(self, owner)
            if way is not None:
                _registry.count_cycle()
                log.warning("owner #%d %s: neither can be collected; reset() the graph to let both go", number, way)
    except Exception:
        log.debug("cycles were not looked for", exc_info=True)


def enter(self: Any, original: Original) -> Any:
    """`torch.cuda.graph.__enter__`, which empties torch's cache: blocks of dead owners go before that."""
    if _registry.pending():
        torch.cuda.synchronize()
        _registry.reclaim()
    return original(self)


# What torch's replay() names where it does nothing but ask its tracker, if it has one, and call the C++ method (up to 2.13).
SHIM = {"_tracker", "check_alive", "pool", "super", "replay"}


def replaying(original: Original) -> Original:
    """`replay`, the one method on the hot path: no call that is not needed, torch's own shim included."""
    names = set(getattr(getattr(original, "__code__", None), "co_names", ()))
    launch = bare = getattr(torch._C._CUDAGraph, "replay", original) if names and names <= SHIM else original
    if bare is not original and "_tracker" in names:

        def launch(self: Any) -> Any:
            return bare(self) if self._tracker is None else original(self)

    @functools.wraps(original)
    def replay(self: Any) -> Any:
        held = self._arena_capture
        if held is not None and held.replayed() == 0:
            return launch(self)
        return slowly(self, held)

    def slowly(self: Any, held: _registry.ManagedCapture | None) -> Any:
        """The same for what is not managed, for another stream than the last time, and where torch does more."""
        if held is None:
            return original(self)
        external = held.replayed()
        if external is None:
            if held.lazy:
                self.instantiate()
            external = note(self, held)
        if not external:
            return original(self)
        failed = True
        try:
            result = original(self)
            failed = False
            return result
        finally:
            held.launched(failed)

    return replay


_unfenced: list[_registry.ManagedCapture] = []  # whose replays could not be noted: nobody can say when they may let go


def note(self: Any, held: _registry.ManagedCapture) -> int:
    """A replay on a stream that is new to the graph. If it cannot be noted it happens all the same, and the owners stay."""
    try:
        return held.note(*current_stream(held.device))
    except Exception:
        log.warning("a replay could not be noted: the owners of its graph are never released", exc_info=True)
        _unfenced.append(held)
        self._arena_capture = None
        return 0


def current_stream(device: int) -> tuple[int, bool]:
    """torch's current stream of a device: its handle, and whether torch did not make it (its id is an address: even, not 0)."""
    stream = torch.cuda.current_stream(device)
    return stream.cuda_stream, stream.stream_id != 0 and not stream.stream_id & 1


def managed(name: str, original: Original | None) -> Original:
    """torch's method with ours around it."""
    if name == "replay":
        assert original is not None
        return replaying(original)
    around = AROUND[name]

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, original, *args, **kwargs)

    return functools.wraps(original)(method) if original is not None else method


AROUND: dict[str, Callable[..., Any]] = {
    "__new__": new,
    "capture_begin": capture_begin,
    "capture_end": capture_end,
    "capture_end_pre": capture_end,
    "capture_end_post": capture_end_post,
    "begin_capture_to_if_node": begin_body,
    "begin_capture_to_while_node": begin_body,
    "end_capture_to_conditional_node": end_body,
    "instantiate": instantiate,
    "reset": reset,
    "__del__": finalize,
    "__enter__": enter,
    "__exit__": leave,
}


def methods_of(graph_type: type) -> list[str]:
    ends = ["capture_end_pre", "capture_end_post"] if hasattr(graph_type, "capture_end_pre") else ["capture_end"]
    bodies = [name for name, around in AROUND.items() if around in (begin_body, end_body) and hasattr(graph_type, name)]
    return ["__new__", "capture_begin", *ends, *bodies, "instantiate", "replay", "reset", "__del__"]


# ---- in place ----

_lock = threading.Lock()
_replaced: list[tuple[type, str, Any]] = []  # (class, name, what its __dict__ had or MISSING)
MISSING = object()


def install() -> None:
    """Patches `torch.cuda.CUDAGraph` and `torch.cuda.graph`, for graphs captured from now on. Twice is once."""
    with _lock:
        if not _replaced:
            patch(torch.cuda.CUDAGraph, torch.cuda.graph)
            _registry.watched(not capturing())


def uninstall() -> None:
    """Puts torch's own methods back. Graphs that were captured managed keep their owners, and let them go when they die.

    Raises:
        RuntimeError: Somebody patched the same methods after us; nothing was changed.
    """
    with _lock:
        for kind, name, _ in _replaced:
            if not getattr(vars(kind).get(name), "_arena", name == "_arena_capture"):
                raise RuntimeError(f"{kind.__name__}.{name} was patched by others since: remove that first")
        _registry.watched(False)
        while _replaced:
            kind, name, before = _replaced.pop()
            if name == "_arena_capture":
                continue  # living graphs may still be asked for theirs
            if before is MISSING:
                delattr(kind, name)
            else:
                setattr(kind, name, before)


def capturing() -> bool:
    """Whether the current stream is in a capture that was begun before `install()`."""
    try:
        return _registry.capture_id() is not None
    except RuntimeError:  # invalidated, or a driver that is too old
        return True


def installed() -> bool:
    """Whether `install()` is in force."""
    return bool(_replaced)


def patch(graph_type: type, context_type: type | None) -> None:
    replace(graph_type, "_arena_capture", None)
    for name in methods_of(graph_type):
        method = managed(name, getattr(graph_type, name, None))
        replace(graph_type, name, staticmethod(method) if name == "__new__" else method)
    if context_type is not None:
        for name in ("__enter__", "__exit__"):
            replace(context_type, name, managed(name, getattr(context_type, name)))


def replace(kind: type, name: str, value: Any) -> None:
    if value is not None:
        value._arena = True
    _replaced.append((kind, name, vars(kind).get(name, MISSING)))
    setattr(kind, name, value)


# ---- without patching ----


def inherited(name: str, base: type) -> Original:
    """The managed method of a subclass: around the base's own, or simply that one where `install()` manages it already."""
    own: Original | None = getattr(base, name, None)
    ours = managed(name, own)
    if name in ("replay", "__new__"):
        return ours  # the hot one, and what may be done twice

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        now = getattr(base, name, None)
        return ours(self, *args, **kwargs) if now is own or now is None else now(self, *args, **kwargs)

    return functools.wraps(own)(method) if own is not None else method


def manage(kind: type, base: type) -> None:
    """Gives the subclass `kind` of torch's `base` its managed methods."""
    for name in methods_of(base):
        method = inherited(name, base)
        setattr(kind, name, staticmethod(method) if name == "__new__" else method)


class CUDAGraph(torch.cuda.CUDAGraph):  # type: ignore[misc, unused-ignore]
    """`torch.cuda.CUDAGraph` with a clean executable and owners that outlive its last replay."""

    _arena_capture: _registry.ManagedCapture | None = None


manage(CUDAGraph, torch.cuda.CUDAGraph)


class graph(torch.cuda.graph):  # type: ignore[misc, unused-ignore]
    """`torch.cuda.graph` that releases dead owners before torch empties its cache.

    Args:
        cuda_graph, and all that `torch.cuda.graph` takes: As there.
        audit: "warn" or "raise": the graph is audited as its capture ends, and checked before its first replays and now and
            then after; findings are an `arena.AuditWarning`, or an `arena.AuditError`. None: as ARENA_AUDIT says.
        name: The graph's, in audits and reports.
    """

    def __init__(self, cuda_graph: Any, *args: Any, audit: str | None = None, name: str | None = None, **kwargs: Any) -> None:
        if audit not in (None, "warn", "raise"):
            raise ValueError(f"audit is {audit!r}, not 'warn', 'raise' or None")
        if (audit or name) and not (installed() or isinstance(cuda_graph, CUDAGraph)):
            raise TypeError(f"audit and name need an arena.torch.CUDAGraph, or install(); got {type(cuda_graph).__name__}")
        super().__init__(cuda_graph, *args, **kwargs)
        cuda_graph._arena_audit_mode, cuda_graph._arena_name = audit, name


for _name in ("__enter__", "__exit__"):
    setattr(graph, _name, inherited(_name, torch.cuda.graph))

dynamo.teach()
