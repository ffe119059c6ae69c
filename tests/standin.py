"""torch's own `torch/cuda/graphs.py`, run over a stand-in for its C++ base class that drives the simulated driver: what is
patched is the real Python of that torch, without a GPU. Of the installed torch, or of another whose file is at hand."""

import contextlib
import importlib
import os
import threading
import types
from pathlib import Path

import torch

_here = threading.local()
driver = None  # the simulated one, set by the test: what graphs are made with


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


class _Handles:
    """What the C++ object owns: destroyed after the Python one was finalized, as its destructor does."""

    def __init__(self):
        self.executable = self.template = None

    def destroy(self):
        for name in ("executable", "template"):
            handle = getattr(self, name)
            setattr(self, name, None)
            if handle:
                handle.destroy()

    def __del__(self):
        with contextlib.suppress(Exception):  # the driver may have ended before
            self.destroy()


def _owned(name):
    return property(lambda self: getattr(self.handles, name), lambda self, value: setattr(self.handles, name, value))


class _CUDAGraph:
    """The C++ class: what it keeps, what it instantiates and destroys, and when."""

    executable, template = _owned("executable"), _owned("template")

    def __new__(cls, keep_graph=False):
        self = super().__new__(cls)
        self.handles = _Handles()
        self.keep, self.debug, self.stream, self.dumps = keep_graph, False, None, 0
        return self

    def capture_begin(self, pool=None, capture_error_mode="global"):
        if self.template or self.executable:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph.")
        self.stream, self.mode = current_stream(), capture_error_mode
        self.capturing = [driver.Graph()]
        self.stream.begin_capture(capture_error_mode, into=self.capturing[0])

    def _end_capture(self):
        if current_stream() is not self.stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        self.template = self.stream.end_capture()

    def capture_end(self):
        self._end_capture()
        if not self.keep:
            _CUDAGraph.instantiate(self)
            if not self.debug:
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
        self.handles.destroy()

    def pool(self):
        return (0, 1)

    def pools(self):
        return [(0, 1)]

    def enable_debug_mode(self):
        self.debug = True

    def debug_dump(self, path):
        if self.debug or self.keep:
            assert self.template.handle
            self.dumps += 1
            if not self.keep:
                self.template.destroy()
                self.template = None

    def raw_cuda_graph(self):
        if not self.keep or not self.template:
            raise RuntimeError("the raw graph is accessible only with keep_graph=true")
        return self.template.handle


class _CUDAGraph212(_CUDAGraph):
    """From torch 2.12 on there are conditional bodies, each captured on a stream of its own, current meanwhile."""

    def begin_capture_to_if_node(self, pred):
        body = self.capturing[-1].add_conditional()
        stream = driver.Stream()
        stream.begin_capture(self.mode, into=body)
        scope = current(stream)
        scope.__enter__()
        self.capturing.append(body)
        self.__dict__.setdefault("bodies", []).append((stream, scope))

    def end_capture_to_conditional_node(self):
        stream, scope = self.bodies.pop()
        self.capturing.pop()
        scope.__exit__(None, None, None)
        try:
            stream.end_capture()
        finally:
            stream.destroy()


class _CUDAGraph214(_CUDAGraph212):
    """From torch 2.14 on the end comes in two halves, and Python instantiates in between. Bodies may be loops, too."""

    def capture_end_pre(self):
        self._end_capture()

    def capture_end_post(self):
        if not self.keep:
            self.template.destroy()
            self.template = None

    def enable_debug_mode(self):
        self.keep = True

    def begin_capture_to_while_node(self, pred):
        _CUDAGraph212.begin_capture_to_if_node(self, pred)

    @property
    def _has_graph_exec(self):
        return self.executable is not None


def graphs(path=None, version=torch.__version__):
    """The classes of a torch's graphs.py, over the stand-in: of the installed one, or of the file at `path`, of that version.
    ARENA_TORCH_GRAPHS names another file in place of the installed one's."""
    path = Path(path or os.environ.get("ARENA_TORCH_GRAPHS") or torch.cuda.graphs.__file__)
    module = types.ModuleType("standin_graphs")
    module.__file__, module.__package__ = str(path), "torch.cuda"
    source = path.read_text()
    later = tuple(map(int, version.split(".")[:2])) >= (2, 12)
    base = _CUDAGraph214 if "def capture_end_pre" in source else _CUDAGraph212 if later else _CUDAGraph
    names = {"_CUDAGraph": base, "_CudaStreamBase": object}
    with contextlib.suppress(ImportError):  # 2.12 on
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
