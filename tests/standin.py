"""torch's own `torch/cuda/graphs.py`, run over a stand-in for its C++ base class that drives the simulated driver: what is
patched is the real Python of that torch, without a GPU."""

import contextlib
import importlib
import os
import threading
import types
from pathlib import Path

import torch

_here = threading.local()


@contextlib.contextmanager
def current(stream):
    """Makes a simulated stream the current one, for the driver and for the stand-in."""
    before = getattr(_here, "stream", None)
    with stream:
        _here.stream = stream
        try:
            yield stream
        finally:
            _here.stream = before


def current_stream():
    return _here.stream


class _CUDAGraph:
    """The C++ class: what it keeps, what it instantiates and destroys, and when."""

    def __new__(cls, keep_graph=False):
        self = super().__new__(cls)
        self.keep, self.template, self.executable, self.stream = keep_graph, None, None, None
        return self

    def capture_begin(self, pool=None, capture_error_mode="global"):
        if self.template or self.executable:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph.")
        self.stream = current_stream()
        self.stream.begin_capture(capture_error_mode)

    def capture_end(self):
        self.template = self.stream.end_capture()
        if not self.keep:
            _CUDAGraph.instantiate(self)
            self.template.destroy()
            self.template = None

    def instantiate(self):
        if self.executable:
            self.executable.destroy()
        self.executable = self.template.instantiate()

    def replay(self):
        if not self.executable:
            _CUDAGraph.instantiate(self)
        self.executable.launch(current_stream(), until=self.__dict__.pop("gate", None))

    def reset(self):
        for name in ("executable", "template"):
            handle = getattr(self, name)
            setattr(self, name, None)
            if handle:
                handle.destroy()

    def raw_cuda_graph(self):
        if not self.keep or not self.template:
            raise RuntimeError("the raw graph is accessible only with keep_graph=true")
        return self.template.handle

    def __del__(self):
        with contextlib.suppress(Exception):  # the driver may have ended before
            _CUDAGraph.reset(self)


class _CUDAGraph214(_CUDAGraph):
    """From torch 2.14 on the end comes in two halves, and Python instantiates in between."""

    def capture_end_pre(self):
        self.template = self.stream.end_capture()

    def capture_end_post(self):
        if not self.keep:
            self.template.destroy()
            self.template = None

    @property
    def _has_graph_exec(self):
        return self.executable is not None


def graphs():
    """The classes of this torch's graphs.py, over the stand-in; or of the file that ARENA_TORCH_GRAPHS names, of another."""
    path = Path(os.environ.get("ARENA_TORCH_GRAPHS") or torch.cuda.graphs.__file__)
    module = types.ModuleType("standin_graphs")
    module.__file__, module.__package__ = str(path), "torch.cuda"
    source = path.read_text()
    names = {"_CUDAGraph": _CUDAGraph214 if "def capture_end_pre" in source else _CUDAGraph, "_CudaStreamBase": object}
    annotations = importlib.import_module("torch.cuda._graph_annotations")
    if not hasattr(annotations, "maybe_stamp_capture_graph_id"):  # 2.14's, where this torch is older
        annotations.maybe_stamp_capture_graph_id = lambda graph: None
    before = {name: torch._C.__dict__.get(name) for name in names}
    try:
        torch._C.__dict__.update(names)
        exec(compile(source, str(path), "exec"), module.__dict__)
    finally:
        for name, value in before.items():
            if value is None:
                del torch._C.__dict__[name]
            else:
                torch._C.__dict__[name] = value
    return module
