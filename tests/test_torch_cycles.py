"""Owners that reach the graph that holds them, so that neither can be collected: they are counted, and debugging names the way.
Without a GPU, on what test_torch_graphs.py uses."""

import gc
import os
import weakref

import pytest
from conftest import run_python, stays

torch = pytest.importorskip("torch")

import managed_standins  # noqa: E402
from managed_standins import Owner, captured, capturing, gone, only_installed  # noqa: E402

import arena  # noqa: E402
import arena.torch  # noqa: E402

cuda, unmanaged, graphs = managed_standins.cuda, managed_standins.unmanaged, managed_standins.graphs  # fixtures


class Binding:
    """An owner that refers to things."""


@pytest.mark.parametrize("debug", [False, True])
def test_an_owner_that_refers_to_its_graph_is_counted_and_stays_until_the_graph_is_reset(
    cuda, graphs, debug, monkeypatch, caplog
):
    monkeypatch.setattr(arena.torch, "debug", debug)
    before = arena.stats().cycles
    graph, binding = graphs.CUDAGraph(), Binding()
    binding.graph = graph
    alive = weakref.ref(binding)
    with capturing(graph, cuda.Stream()):
        for owner in (Owner(), Owner(), Owner(), binding):
            arena.retain(owner)
    assert arena.stats().cycles == before + 1
    assert ("owner #3 Binding.graph -> CUDAGraph: neither can be collected" in caplog.text) == debug
    del graph, binding, owner
    gc.collect()
    arena.reclaim()
    assert stays(lambda: alive() is not None)
    alive().graph.reset()
    assert gone(alive)


@only_installed
def test_without_the_reference_nothing_is_counted_and_both_are_collected(cuda, graphs, monkeypatch, caplog):
    """The control."""
    monkeypatch.setattr(arena.torch, "debug", True)
    before = arena.stats().cycles
    binding = Binding()
    binding.other = graphs.CUDAGraph()
    binding.weak, binding.function, binding.kind = weakref.ref(binding.other), lambda: graphs, type(binding)
    binding.proxy = weakref.proxy(Owner())  # of something gone
    alive = weakref.ref(binding)
    graph = captured(graphs, cuda.Stream(), binding)
    assert arena.stats().cycles == before
    assert not caplog.text
    del graph, binding
    assert gone(alive)


@only_installed
@pytest.mark.parametrize("far", [2, 6, 30])
def test_debugging_finds_a_long_way_to_the_graph(cuda, graphs, monkeypatch, caplog, far):
    monkeypatch.setattr(arena.torch, "debug", True)
    before = arena.stats().cycles
    graph = graphs.CUDAGraph()
    owner = [graph]
    for _ in range(far - 1):
        owner = [0, owner]
    with capturing(graph, cuda.Stream()):
        arena.retain(owner)
    found = far <= arena.cycles.FARTHEST
    assert arena.stats().cycles == before + found
    assert ("list[1] -> list[0] -> CUDAGraph" in caplog.text) == found
    graph.reset()


@only_installed
@pytest.mark.parametrize("how", ["closure", "key", "method"])
def test_debugging_names_the_way_through_what_has_no_attributes(cuda, graphs, monkeypatch, caplog, how):
    monkeypatch.setattr(arena.torch, "debug", True)
    graph, binding = graphs.CUDAGraph(), Binding()
    if how == "closure":
        binding.run = lambda: graph
    elif how == "key":
        binding.table = {"decode": graph}
    else:
        binding.run = graph.replay
    with capturing(graph, cuda.Stream()):
        arena.retain(binding)
    way = {
        "closure": "Binding.run -> function -> tuple[0] -> cell -> CUDAGraph",
        "key": "Binding.table -> dict['decode'] -> CUDAGraph",
        "method": "Binding.run -> method -> CUDAGraph",
    }[how]
    assert f"owner #0 {way}: " in caplog.text
    graph.reset()


@only_installed
def test_a_search_for_cycles_that_fails_fails_nothing(cuda, graphs, monkeypatch):
    def fails(graph, owner):
        raise MemoryError("no room")

    monkeypatch.setattr(arena.torch, "debug", True)
    monkeypatch.setattr(arena.cycles, "way_to", fails)
    alive = weakref.ref(owner := Owner())
    graph = captured(graphs, cuda.Stream(), owner)
    del owner
    assert graph.executable.owners == 0
    graph.reset()
    assert gone(alive)


def test_the_search_is_switched_on_by_the_environment_or_a_debug_build():
    asked = os.environ.get("ARENA_DEBUG", "0") not in ("", "0")
    assert arena.torch.debug == (asked or arena._registry.debug_level > 0)
    run = run_python("import arena.torch; print(arena.torch.debug)", timeout=60, env={"ARENA_DEBUG": "1"})
    assert run.stdout.strip() == "True", run.stderr
