"""What is known of each capture beyond its owners: a name, where it was begun, its memory pool. The registry knows where each
began, and the pool while owners live; what is kept here beside that are the names that were given, and what audits saw. Read by
audits and reports. With the GIL."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

from arena import _registry
from arena.memory import now

MOST = 65_536  # captures that are remembered


@dataclass(slots=True)
class Noted:
    """One capture."""

    name: str
    """Given, or where it was begun and its id."""
    began: int
    """Microseconds since 1970."""
    pool: tuple[int, int] | None = None


_noted: dict[int, Noted] = {}  # of the named and the audited


def note(capture: int, graph: Any = None, name: str | None = None) -> None:
    """A capture has begun."""
    name = name or getattr(graph, "_arena_name", None)
    if name:
        birth = _registry.born(capture)
        _remember(capture, Noted(name, int(birth[0] * 1e6) if birth else now(), pool_of(graph)))
    else:
        _noted.pop(capture, None)  # of an earlier capture into the same graph


def keep(capture: int) -> None:
    """What is known now stays known when the owners are gone: of a capture that is audited, and may have none."""
    known = of(capture)
    if known is not None:
        _remember(capture, known)


def ended(capture: int, graph: Any) -> None:
    """A capture has ended: torch names a graph's pool only now."""
    pool = pool_of(graph)
    if pool is not None:
        with contextlib.suppress(TypeError, OverflowError):  # not torch's kind of id
            _registry.set_pool(capture, pool)


def pool_of(graph: Any) -> tuple[int, int] | None:
    """The id of a torch graph's memory pool, if it can tell."""
    try:
        first, second = graph.pool()
    except Exception:
        return None
    return first, second


def of(capture: int | None, birth: tuple[float, str, int, str] | None = None) -> Noted | None:
    """What is known of a capture, from its begin or from its first owner. `birth`: what `born()` says, if that is at hand."""
    if capture is None:
        return None
    pool = _registry.pool_of(capture)
    noted = _noted.get(capture)
    if noted is not None:
        return replace(noted, pool=pool or noted.pool)
    birth = birth or _registry.born(capture)
    if birth is None:
        return None
    seconds, file, line, function = birth
    return Noted(f"{_short(file)}:{line} ({function}) #{capture}", int(seconds * 1e6), pool)


def _remember(capture: int, known: Noted) -> None:
    if len(_noted) >= MOST:
        for old in list(_noted)[: MOST // 2]:
            del _noted[old]
    _noted[capture] = known


def _short(file: str) -> str:
    return "/".join(file.rsplit("/", 2)[-2:])
