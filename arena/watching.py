"""Audits at each capture and at replays, for code that asked for them once: `arena.torch.graph(..., audit=...)`, ARENA_AUDIT,
`python -m arena audit`. arena.torch calls `began`, `ending` and `ended` around each capture, on the thread that captures; of
graphs that are audited, `replay` is put in front of the class's. No failure here fails a capture or a replay.
"""

from __future__ import annotations

import itertools
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from arena import _audit, _registry, captures
from arena.auditing import Audit, AuditError, AuditWarning, Finding
from arena.memory import Allocator, Ranges, allocator, now

log = logging.getLogger("arena")


@dataclass(slots=True)
class Mode:
    """What happens to graphs of which nobody said it themselves."""

    action: str | None = None
    """"warn", "raise", "collect" (keep for later), or None: nothing."""
    first: int = 3
    """Replays that are each checked, before the graph's first."""
    every: int = 100
    """After those, one replay in so many."""
    collected: list[tuple[weakref.ref[Any], Audit]] = field(default_factory=list)
    """The audits of "collect", each with its graph: once that is gone, what it used may go too."""

    @classmethod
    def parse(cls, text: str) -> Mode:
        """From ARENA_AUDIT: "warn", "raise", or with the number of replays between checks, "warn:1000"."""
        action, _, every = text.partition(":")
        if action not in ("warn", "raise") or (every and not (every.isdecimal() and int(every) > 0)):
            raise ValueError(f"ARENA_AUDIT is {text!r}, not 'warn' or 'raise', perhaps with ':' and a number of replays")
        return cls(action, every=int(every)) if every else cls(action)


def _from_environment() -> Mode:
    text = os.environ.get("ARENA_AUDIT", "")
    if not text:
        return Mode()
    try:
        return Mode.parse(text)
    except ValueError as error:
        log.warning("%s: nothing is audited", error)
        return Mode()


mode = _from_environment()


def action_for(graph: Any) -> str | None:
    return getattr(graph, "_arena_audit_mode", None) or mode.action


def began(graph: Any, source: Callable[[], Allocator] | None = None) -> Any:
    """A capture is about to begin. What it returns goes to `ending`; None: it is not audited."""
    if action_for(graph) is None:
        return None
    try:
        there = (source or allocator)()
        there.watch()
        return there, now(), Ranges((each.address, each.size) for each in there.blocks() if each.used)
    except Exception:
        log.warning("this capture is not audited", exc_info=True)
        return None


def forget(graph: Any) -> None:
    """What was captured and audited is gone: the graph was reset, or is captured again."""
    if getattr(graph, "_arena_audit", None) is not None:
        del graph._arena_audit
        for name in ("replay", "_arena_audit_untold"):
            vars(graph).pop(name, None)


def ending(started: Any, stream: Any = None) -> Any:
    """The capture is about to end: its graph is read while it is still there."""
    if started is None:
        return None
    relaxed = _registry.enter_relaxed()
    try:
        here = _registry.capture_of(stream)
        if here is None:
            log.warning("this capture is not audited: the current stream at its end is not one of its own")
            return None
        captures.keep(here[0])
        return (*started, here[0], _audit.read(here[1]))
    except Exception:
        log.warning("this capture is not audited", exc_info=True)
        return None
    finally:
        _registry.leave_relaxed(relaxed)


def ended(graph: Any, read: Any) -> None:
    """The capture has ended: sorts what was read, and has the graph's replays checked."""
    if read is None:
        return
    source, since, alive, capture, nodes = read
    relaxed = _registry.enter_relaxed()
    try:
        seen = Audit(nodes, capture=capture, pool=captures.pool_of(graph), since=since, alive=alive, source=source)
        graph._arena_audit = seen
        _watch_replays(graph, seen)
    except Exception:
        log.warning("this capture is not audited", exc_info=True)
        return
    finally:
        _registry.leave_relaxed(relaxed)
    if "collect" in (mode.action, action_for(graph)):  # what a graph was told itself does not hide it from who collects
        mode.collected.append((weakref.ref(graph), seen))
    if action_for(graph) == "warn":
        try:
            tell(graph, seen)
        except Exception:  # a filter makes errors of warnings; an error here would leave torch's context half ended
            graph._arena_audit_untold = True


def tell(graph: Any, seen: Audit) -> None:
    """Findings, as the graph's mode wants them told.

    Raises:
        AuditError: The mode is "raise".
    """
    if not seen.findings:
        return
    action = action_for(graph)
    if action == "raise":
        raise AuditError(str(seen))
    if action == "warn":
        warnings.warn(str(seen), AuditWarning, stacklevel=3)


def tell_if_raising(graph: Any) -> None:
    """After the capture's context has ended: raises what an exception inside `capture_end` would have left half done."""
    seen = getattr(graph, "_arena_audit", None)
    if seen is not None and (vars(graph).pop("_arena_audit_untold", False) or action_for(graph) == "raise"):
        tell(graph, seen)


def checks(first: int, every: int) -> Iterator[bool]:
    """For each replay, whether it is checked. No generator: two threads that replay at once may not both be in one."""

    def checked(number: int) -> bool:
        return number < first or (number - first + 1) % every == 0

    return map(checked, itertools.count())


def _watch_replays(graph: Any, seen: Audit) -> None:
    """Only this graph's `replay` is in front of the class's: others pay nothing. It does not hold the graph."""
    due, known = checks(mode.first, mode.every), weakref.ref(graph)
    told: set[Finding] = set()

    def replay() -> Any:
        alive = known()
        assert alive is not None  # whoever calls this has it
        if next(due):
            try:
                seen.check()
            except Exception:
                log.warning("a graph was not checked", exc_info=True)
            if not told.issuperset(seen.findings) or action_for(alive) == "raise":
                told.update(seen.findings)
                tell(alive, seen)
        return type(alive).replay(alive)

    graph.replay = replay
