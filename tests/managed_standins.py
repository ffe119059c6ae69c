"""torch's graphs without a GPU, managed in every way there is: the Python of the installed torch, and of each other generation,
over the stand-in, patched or subclassed, and what tests do with them. Its fixtures are taken by name."""

import contextlib
import functools

import generations
import pytest
import standin
import torch
from conftest import until

import arena
import arena.torch


class Owner:
    """Something that owns memory."""


@pytest.fixture
def cuda(simulated, monkeypatch):
    monkeypatch.setattr(standin, "driver", simulated)
    return simulated


INSTALLED = torch.__version__.split("+")[0]
OTHERS = [each for each in generations.GENERATIONS if not INSTALLED.startswith(f"{each}.")]
PATCHED = [f"{INSTALLED} installed", *(f"{each} patched" for each in OTHERS)]
only_patched = pytest.mark.parametrize("unmanaged", PATCHED, indirect=True)
WAYS = [f"{INSTALLED} subclassed", *PATCHED]
only_installed = pytest.mark.parametrize("unmanaged", WAYS[:2], indirect=True)  # torch's own Python has no part in it
BODIES = [
    (way, kind)
    for kind, since in (("if", (2, 12)), ("while", (2, 14)))
    for way in WAYS
    if tuple(map(int, way.split()[0].split("."))) >= since
]
with_bodies = pytest.mark.parametrize(("unmanaged", "kind"), BODIES, indirect=["unmanaged"])


@pytest.fixture(params=WAYS)
def unmanaged(request, tmp_path_factory):
    """Makes a module: a torch's graphs.py over the stand-in, as it is."""
    generation = request.param.split()[0]
    if generation == INSTALLED:
        return standin.graphs
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("torch-graphs") if cache else tmp_path_factory.getbasetemp()
    return functools.partial(standin.graphs, *generations.fetched(generation, folder))


@pytest.fixture
def graphs(request, unmanaged, monkeypatch):
    """The same, managed: patched as install() patches the real one, or subclassed."""
    module = unmanaged()
    monkeypatch.setattr(arena.torch, "current_stream", lambda device: (standin.current_stream().handle, EXTERNAL[0]))
    monkeypatch.setattr(torch._C, "_CUDAGraph", module.CUDAGraph.__base__, raising=False)
    EXTERNAL[0] = False
    assert not arena.torch.installed()
    if "subclassed" in request.node.callspec.id:
        base = module.CUDAGraph
        module.CUDAGraph = type("CUDAGraph", (base,), {"_arena_capture": None})
        arena.torch.manage(module.CUDAGraph, base)
    else:
        arena.torch.patch(module.CUDAGraph, None)
    yield module
    arena.torch.uninstall()


EXTERNAL = [False]


@contextlib.contextmanager
def capturing(graph, stream, mode="relaxed"):
    with standin.current(stream):
        graph.capture_begin(capture_error_mode=mode)
        stream.kernel()
        yield
        graph.capture_end()


def captured(graphs, stream, *owners, keep=False):
    graph = graphs.CUDAGraph(keep_graph=keep)
    with capturing(graph, stream):
        for owner in owners:
            assert arena.retain(owner)
    return graph


def gone(reference):
    return until(lambda: reference() is None)
