"""What is known of each capture beyond its owners: a name, where it was begun, its memory pool. arena.torch notes the captures
that it sees begin; of all others the registry knows where they retained first. Read by audits and reports. With the GIL."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arena import _registry
from arena.memory import now

MOST = 65_536  # captures that are remembered

OURS = str(Path(__file__).parent)


@dataclass(slots=True)
class Noted:
    """One capture."""

    name: str
    """Given, or where it was begun and its id."""
    began: int
    """Microseconds since 1970."""
    pool: tuple[int, int] | None = None


_noted: dict[int, Noted] = {}


def note(capture: int, graph: Any = None, name: str | None = None) -> None:
    """A capture has begun."""
    name = name or getattr(graph, "_arena_name", None) or f"{_call_site()} #{capture}"
    if len(_noted) >= MOST:
        for old in list(_noted)[: MOST // 2]:
            del _noted[old]
    _noted[capture] = Noted(name, now(), pool_of(graph))


def ended(capture: int, graph: Any) -> None:
    """A noted capture has ended: torch names a graph's pool only now."""
    if capture in _noted:
        _noted[capture].pool = pool_of(graph)


def pool_of(graph: Any) -> tuple[int, int] | None:
    """The id of a torch graph's memory pool, if it can tell."""
    try:
        first, second = graph.pool()
    except Exception:
        return None
    return first, second


def of(capture: int | None) -> Noted | None:
    """What is known of a capture, from its begin or from its first owner."""
    if capture is None:
        return None
    if capture not in _noted:
        birth = _registry.born(capture)
        if birth is None:
            return None
        seconds, file, line, function = birth
        return Noted(f"{_short(file)}:{line} ({function}) #{capture}", int(seconds * 1e6))
    return _noted[capture]


def _call_site() -> str:
    """The innermost frame that is neither ours nor torch's."""
    frame = sys._getframe(1)
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    inner = (OURS, str(Path(torch).parent)) if torch else (OURS,)
    skipped = ("contextlib.py",)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(inner) or frame.f_code.co_filename.endswith(skipped)
    ):
        frame = frame.f_back
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})"


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:])
