"""What every test shares: the driver under test, the check that nothing was left, bounded waiting, subprocesses.

A test that asks for `cuda` runs twice, on the simulated driver and on the installed one (marker `gpu`); one that asks
for `simulated` or `real` says that it has one meaning only. `face` is the same choice by name, for tests that open the
driver in a subprocess with `run_python`.
"""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import real_driver

import arena

# What these assert is told like a test's own.
pytest.register_assert_rewrite("b12x_wheel", "managed_graphs", "managed_standins", "processes")

TESTS = Path(__file__).parent
SIMULATED = pytest.param("simulated")
REAL = pytest.param("real", marks=pytest.mark.gpu)


def until(predicate, seconds=5):
    """Waits until `predicate()` is true, at most that long; returns what it returned last."""
    deadline = time.monotonic() + seconds
    while not (answer := predicate()) and time.monotonic() < deadline:
        time.sleep(0.0005)
    return answer


def stays(predicate, seconds=0.05):
    """Whether `predicate()` is true now and at every look for that long: far longer than a driver's thread needs."""
    return not until(lambda: not predicate(), seconds)


@contextmanager
def refused(code):
    """The body ends with an error of the driver, of that status."""
    with pytest.raises(RuntimeError) as seen:
        yield
    assert getattr(seen.value, "code", None) == code, repr(seen.value)


def run_python(code, *, timeout, env=None):
    """Runs `code` in a Python of its own that can import `arena` and what lies in tests/. Too long is a failure."""
    roots = [str(TESTS), str(Path(arena.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, roots)), **(env or {})}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


@pytest.fixture(params=[SIMULATED, REAL])
def face(request):
    """The name of the driver under test."""
    if request.param == "real":
        there, reason = real_driver.available()
        if not there:
            pytest.skip(reason)
    return request.param


@pytest.fixture
def cuda(face):
    """The driver under test, opened for this test alone."""
    with real_driver.open_driver(face) as driver:
        yield driver


@pytest.fixture
def simulated():
    """The simulated driver: for what cannot be asked of a real one."""
    with real_driver.open_driver("simulated") as driver:
        yield driver


@pytest.fixture(params=[REAL])
def real(request):
    """The installed driver: for what only it can answer."""
    there, reason = real_driver.available()
    if not there:
        pytest.skip(reason)
    with real_driver.open_driver(request.param) as driver:
        yield driver


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


PASSED = pytest.StashKey[bool]()


@pytest.fixture(autouse=True)
def nothing_left(request):
    """After each test that passed, and after its driver was closed, every owner that it retained is accounted for."""
    before = arena.stats()
    yield
    if not request.node.stash.get(PASSED, False):
        return  # its own failure says more than what it left behind

    def settled():
        now = arena.stats()
        return now.owners <= before.owners and now.dead <= before.dead

    if not settled():
        arena.reclaim(5.0)
        until(settled, 1)
    after = arena.stats()
    assert after.owners <= before.owners, f"{after.owners - before.owners} owners are still held"
    assert after.dead <= before.dead, f"{after.dead - before.dead} owners are dead but not released"
    assert after.lists <= before.lists, f"{after.lists - before.lists} owner lists are left"
    assert after.retained == after.owners + after.dead + after.released + after.leaked
