"""What `arena.workspace` is held against: vLLM's own module where it can be imported (installed, or a source tree that
ARENA_VLLM_TREE names), and a model of how it serves and grows, for negative controls anywhere.
Tests and benchmarks import it."""

import functools
import importlib
import math
import os
import sys

import torch

VERSION = "0.33"


@functools.cache
def module():
    """vLLM's workspace module, or None; `why` says why. Importing vLLM takes seconds, so nobody does before this is asked."""
    tree = os.environ.get("ARENA_VLLM_TREE")
    if tree and tree not in sys.path:
        sys.path.append(tree)
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    try:
        found = importlib.import_module("vllm.v1.worker.workspace")
    except Exception as error:  # a tree without its dependencies fails in many ways
        why.append(f"vLLM cannot be imported ({type(error).__name__}: {error}); ARENA_VLLM_TREE names a source tree of it")
        return None
    if not hasattr(found.WorkspaceManager, "get_persistent_resource"):
        why.append(f"vLLM's workspace module is not that of {VERSION}")
        return None
    return found


why = []


class Model:
    """A slot as vLLM serves and grows it: no memory of requests, none of graphs, and the old block is let go of first."""

    def __init__(self, device="cpu"):
        self.device, self.block = device, None

    def get_simultaneous(self, *specs):
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
        starts = [sum(-(-size // 256) * 256 for size in sizes[:place]) for place in range(len(sizes) + 1)]
        if self.block is None or self.block.numel() < starts[-1]:
            self.block = None
            self.block = torch.empty(starts[-1], dtype=torch.uint8, device=self.device)
        return [
            self.block[start : start + size].view(dtype).reshape(shape)
            for start, size, (shape, dtype) in zip(starts, sizes, specs, strict=False)
        ]
