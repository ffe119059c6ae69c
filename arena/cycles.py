"""How an owner reaches its own graph: the references from one to the other, told as a way. Neither can be collected then, since
no collector sees what a graph holds. `arena.torch` asks at the end of a capture, on the thread that ends it.
"""

from __future__ import annotations

import gc
import types
from typing import Any

FARTHEST, MOST = 8, 10_000  # references from an owner, and objects looked at for it
NOT_FOLLOWED: tuple[type, ...] = (types.ModuleType, types.FrameType, types.CodeType, type, str, bytes, int, float)


def way_to(graph: Any, owner: Any) -> str | None:
    """How `owner` reaches `graph`, as "Binding.plan -> Plan.graph -> CUDAGraph"; None if it does not."""
    steps: dict[int, tuple[Any, Any]] = {id(owner): (owner, None)}  # what was seen, and from where; kept alive, for its id
    level = [owner]
    for _ in range(FARTHEST + 1):
        after = []
        for each in level:
            if each is graph:
                return told_way(steps, graph)
            for referent in referents(each):
                # By its type: a proxy that is asked for its class asks what may be gone.
                if id(referent) not in steps and not issubclass(type(referent), NOT_FOLLOWED) and len(steps) < MOST:
                    steps[id(referent)] = referent, each
                    after.append(referent)
        level = after
    return None


def referents(thing: Any) -> list[Any]:
    if isinstance(thing, types.FunctionType):  # not its globals: through them everything reaches everything
        return [thing.__closure__, thing.__defaults__, thing.__kwdefaults__]
    return gc.get_referents(thing)


def told_way(steps: dict[int, tuple[Any, Any]], last: Any) -> str:
    said: list[str] = []
    each, source = steps[id(last)]
    while source is not None:
        holder = source
        if isinstance(source, dict):  # of an instance: its owner says more
            above = steps[id(source)][1]
            holder = above if getattr(above, "__dict__", None) is source else source
        said.append(f"{type(holder).__name__}{step(holder, each)}")
        each, source = steps[id(holder)]
    return " -> ".join([*reversed(said), type(last).__name__])


def step(holder: Any, held: Any) -> str:
    """By what name `holder` refers to `held`, where it has one."""
    if isinstance(holder, dict):
        return next((f"[{key!r}]" for key, value in holder.items() if value is held), "")
    if isinstance(holder, list | tuple):
        return next((f"[{number}]" for number, value in enumerate(holder) if value is held), "")
    names = getattr(holder, "__dict__", {})
    return next((f".{name}" for name, value in names.items() if value is held), "")
