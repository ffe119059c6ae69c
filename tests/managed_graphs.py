"""torch's graphs on a real GPU, managed in both ways, and what tests do with them. Its fixtures are taken by name."""

import time

import pytest
import torch
from conftest import until

import arena
import arena.torch


class Owner:
    """Something that owns memory."""


@pytest.fixture(params=["install", "subclass"])
def managed(request):
    """(CUDAGraph, graph) of torch with `install()`, or of arena.torch without."""
    torch.cuda.synchronize()
    if request.param == "subclass":
        yield arena.torch.CUDAGraph, arena.torch.graph
        return
    arena.torch.install()
    yield torch.cuda.CUDAGraph, torch.cuda.graph
    arena.torch.uninstall()


@pytest.fixture
def installed():
    arena.torch.install()
    yield
    arena.torch.uninstall()


def spin(milliseconds):
    """Keeps the current stream busy for about that long."""
    torch.cuda._sleep(int(milliseconds * 1.9e6))


def captured(classes, *owners, body=None, **options):
    graph_type, context = classes
    graph = graph_type(**{key: options.pop(key) for key in ("keep_graph",) if key in options})
    y = torch.zeros(8, device="cuda")
    with context(graph, **options):
        y.add_(1)
        if body:
            body()
        for owner in owners:
            assert arena.retain(owner)
    return graph


def gone(reference):
    return until(lambda: reference() is None)


def queued_behind(graph, limit=1000):
    """How many launches can be queued behind 150 ms of work before the host has to wait."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.replay()
        torch.cuda.synchronize()
        spin(150)
        deadline = time.perf_counter() + 0.1
        for count in range(1, limit + 1):  # noqa: B007
            before = time.perf_counter()
            graph.replay()
            if time.perf_counter() - before > 5e-3 or time.perf_counter() > deadline:
                break
        torch.cuda.synchronize()
    return count
