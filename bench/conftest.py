"""Benchmarks: each beside its floor in the same run, because these machines are shared and only ratios last. Prints the table
of ratios last. The benchmark that says `floor=True` is what the others of its group are divided by."""

import pytest

import arena
from arena.testing import simulated_driver

CALLS = 10_000  # per round, in one loop: a benchmark's own call costs more than what is measured here


@pytest.fixture
def cuda():
    with simulated_driver() as driver:
        yield driver


@pytest.fixture
def measure(benchmark):
    """measure(group, work, setup, calls, floor): times `work(*setup())` over many rounds, per call."""

    def run(group, work, setup, *, calls=CALLS, floor=False, rounds=60, target=None, teardown=None):
        benchmark.group = group
        benchmark.extra_info.update(calls=calls, floor=floor, target=target)
        benchmark.pedantic(work, setup=lambda: (setup(), {}), rounds=rounds, warmup_rounds=3, teardown=teardown)

    return run


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter, config):
    yield  # pytest-benchmark's own tables come first
    tell(terminalreporter, config)


def tell(terminalreporter, config):
    session = getattr(config, "_benchmarksession", None)
    rows = [each for each in session.benchmarks if each.stats.rounds] if session else []
    facts = FACTS.get(config, [])
    if not rows and not facts:
        return
    out = terminalreporter
    out.section("per call and ratio, minima of one run")
    floors = {each.group: each for each in rows if each.extra_info.get("floor")}
    for group in dict.fromkeys(each.group for each in rows):
        out.write_line(group)
        for each in (row for row in rows if row.group == group):
            nanoseconds = each.stats.min / each.extra_info["calls"] * 1e9
            text = f"  {each.name.removeprefix('test_'):<44}{nanoseconds:>10.1f} ns"
            if each.extra_info["floor"]:
                text += "   floor"
            elif group in floors:
                floor = floors[group]
                text += f"{nanoseconds / (floor.stats.min / floor.extra_info['calls'] * 1e9):>7.2f} ×"
            if each.extra_info["target"]:
                text += f"   (target {each.extra_info['target']})"
            out.write_line(text)
    for label, text in facts:
        out.write_line(f"{label}: {text}")


FACTS = {}


@pytest.fixture
def fact(request):
    """fact(label, text): a line of the closing table, for what is measured in C."""
    return lambda label, text: FACTS.setdefault(request.config, []).append((label, text))


@pytest.fixture(autouse=True)
def released():
    yield
    arena.reclaim(5)
