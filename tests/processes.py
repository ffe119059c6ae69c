"""What a Python of its own does and how it ended, for tests of what a process promises at its edges. Each has ten seconds to
end in. Owners write a line when they are finalized, so that "at most once" can be counted after the process is gone. Its
fixture is taken by name."""

import time
from collections import Counter

import pytest
from conftest import run_python

# The driver is never closed: a process that ends has no time for that. An extra reference keeps it from being collected.
PREAMBLE = """
import atexit, ctypes, os, signal, sys, threading, time, weakref
import arena
from arena._registry import begin
from real_driver import open_driver

FACE = {face!r}

class Owner:
    "Writes its name, on a line of its own, when it is finalized."
    def __init__(self, name):
        self.name = name
    def __del__(self, write=os.write):
        write(1, f"{{self.name}}\\n".encode())

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def until(predicate, seconds=5):
    deadline = time.monotonic() + seconds
    while not (answer := predicate()) and time.monotonic() < deadline:
        time.sleep(0.0005)
    return answer

def opened():
    driver = open_driver(FACE)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(driver))
    cuda = driver.__enter__()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(cuda))
    return cuda

def captured(stream, *owners, mode="relaxed"):
    with stream.capture(mode) as capture:
        stream.kernel()
        for owner in owners:
            assert arena.retain(owner, stream)
    return capture.graph

class Hold:
    "An open managed capture: what dies meanwhile waits."
    def __init__(self):
        self.stream = cuda.Stream()
        self.stream.begin_capture("relaxed")
        self.capture = begin(self.stream)
    def end(self):
        self.capture.seal()
        graph = self.stream.end_capture()
        self.capture.drop()
        graph.destroy()

def sums_up(now):
    return now.retained == now.owners + now.dead + now.released + now.leaked
"""
OPEN = "cuda = opened()\n"


class Run:
    """A process that ended: what its owners wrote, and how long it took."""

    def __init__(self, face, code, *, opens=True, env=None):
        start = time.monotonic()
        source = PREAMBLE.format(face=face) + (OPEN if opens else "") + code
        self.done = run_python(source, timeout=10, env=env)
        self.seconds = time.monotonic() - start
        self.lines = Counter(self.done.stdout.split("\n")[:-1])

    def ended(self, returncode=0):
        """It ended so, said nothing else, and finalized no owner twice."""
        assert self.done.returncode == returncode, self.done.stdout + self.done.stderr
        assert self.done.stderr == ""
        assert [line for line, count in self.lines.items() if count > 1] == []
        return set(self.lines)


@pytest.fixture
def simulated_face():
    """For what cannot be asked of an installed driver, or would only be slower there."""
    return "simulated"
