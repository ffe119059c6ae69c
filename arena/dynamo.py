"""`retain` under `torch.compile`: inside code that Dynamo traces, `arena.retain(...)` is False and does nothing.

What Dynamo records are tensor operations. A call that is none would run once, while tracing, and be missing from the compiled
code ever after, so a traced `retain` could only pretend. Call it where code runs at each capture: in the body of a custom op,
which is not traced. Imported by `arena.torch`; it does not load Dynamo, which takes seconds, but waits until somebody does.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence

import torch  # type: ignore[import-not-found, unused-ignore]

from arena import _registry

__all__ = ["teach"]

DYNAMO = "torch._dynamo"


def traced(owner: object, stream: object = None) -> bool:
    return False


def teach() -> None:
    """Tells Dynamo now, or as soon as it is loaded. Twice is once."""
    if DYNAMO in sys.modules:
        torch.compiler.substitute_in_graph(_registry.retain)(traced)
    elif not any(isinstance(each, WhenLoaded) for each in sys.meta_path):
        sys.meta_path.insert(0, WhenLoaded())


class WhenLoaded(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it sees that Dynamo is looked for, and steps aside."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = ThenTeach(spec.loader)
        return spec


class ThenTeach(importlib.abc.Loader):
    """The module's own loader, and one step after it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self.loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self.loader
        teach()
