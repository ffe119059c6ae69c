"""What `retain` costs on the simulated driver, whose own question costs a few nanoseconds: the registry's share, beside a bound
`list.append`."""

import ctypes
from collections import deque
from itertools import repeat

import native
import pytest

import arena
from arena import _simulator

OWNER = object()
CALLS = 10_000  # a round: what `measure` divides by
OWNERS = 1_000  # of one graph, from C: more than any real one has, and few enough to come from warm memory


def append_loop(append):
    for _ in repeat(None, CALLS):
        append(OWNER)


def retain_loop(retain, stream):
    for _ in repeat(None, CALLS):
        retain(OWNER, stream)


def current_loop(retain):
    for _ in repeat(None, CALLS):
        retain(OWNER)


def fresh_append():
    return ([].append,)


@pytest.fixture
def capture(cuda):
    """A setup that begins a capture for each round, and a teardown that ends it."""
    stream = cuda.Stream()

    def setup():
        stream.begin_capture("relaxed")
        arena.retain(OWNER, stream.handle)  # the user object is made once a graph; see test_first_owner
        return arena.retain, stream.handle

    def teardown(*_):
        stream.end_capture().destroy()
        arena.reclaim()

    setup.stream = stream
    return setup, teardown


def test_list_append(measure):
    measure("retain(x, stream) from Python", append_loop, fresh_append, floor=True)


def test_eager(measure, cuda):
    stream = cuda.Stream().handle
    measure("retain(x, stream) from Python", retain_loop, lambda: (arena.retain, stream), target="≤ 1.5 ×")


def test_captured(measure, capture):
    setup, teardown = capture
    measure("retain(x, stream) from Python", retain_loop, setup, teardown=teardown, target="≤ 1.7 ×")


def test_captured_on_a_stream_object(measure, capture):
    setup, teardown = capture
    measure("retain(x, stream) from Python", retain_loop, lambda: (setup()[0], setup.stream), teardown=teardown)


def test_captured_on_the_current_stream(measure, capture, cuda):
    setup, teardown = capture
    with setup.stream:
        measure("retain(x, stream) from Python", current_loop, lambda: setup()[:1], teardown=teardown)


@pytest.mark.parametrize("count", [1000])
def test_first_owner(measure, cuda, count):
    """One capture after another: the user object, the list, its death and its release."""
    stream = cuda.Stream()

    def work():
        for _ in repeat(None, count):
            stream.begin_capture("relaxed")
            arena.retain(OWNER, stream.handle)
            stream.end_capture().destroy()

    measure("a capture with one owner", work, tuple, calls=count, rounds=20, teardown=lambda *_: arena.reclaim())


def test_empty_capture(measure, cuda):
    stream = cuda.Stream()

    def work():
        for _ in repeat(None, 1000):
            stream.begin_capture("relaxed")
            stream.end_capture().destroy()

    measure("a capture with one owner", work, tuple, calls=1000, rounds=20, floor=True)


# ---- release ----


class Owner:
    """Dies with a few words of memory, like most owners' Python half."""

    __slots__ = ("a",)


def clear_list(owners):
    owners.clear()


def reclaim_all(held):
    held.seal()
    assert arena.reclaim() == CALLS


def test_list_clear(measure):
    measure("release of 10,000 owners", clear_list, lambda: ([Owner() for _ in range(CALLS)],), floor=True)


def test_reclaim(measure, cuda):
    from arena._registry import begin

    stream = cuda.Stream()
    hold = cuda.Stream()

    def setup():
        with stream.capture("relaxed") as capture:
            deque((arena.retain(Owner(), stream.handle) for _ in range(CALLS)), maxlen=0)
        # The thread would release them first: an open managed capture keeps it waiting until we are ready.
        hold.begin_capture("relaxed")
        held = begin(hold)
        capture.graph.destroy()
        hold.end_capture().destroy()
        return (held,)

    measure("release of 10,000 owners", reclaim_all, setup, target="≤ 1.3 ×")


# ---- from C ----


def simulated_query():
    """The address of the simulator's cuStreamGetCaptureInfo: the first entry of the table."""
    return ctypes.cast(_simulator.table_address(), ctypes.POINTER(ctypes.c_void_p))[0]


def test_from_c(cuda, fact):
    client = native.extension("cimport_client")
    stream = cuda.Stream()
    query = simulated_query()
    for label in ("not capturing", "capturing"):
        retains, queries = [], []
        for _ in range(200):
            if label == "capturing":
                stream.begin_capture("relaxed")
                arena.retain(OWNER, stream.handle)
            queries.append(client.seconds_per_query(query, stream.handle, OWNERS))
            retains.append(client.seconds_per_retain(OWNER, stream.handle, OWNERS))
            if label == "capturing":
                stream.end_capture().destroy()
                arena.reclaim(5)
        retain, ask = (sorted(each)[100] * 1e9 for each in (retains, queries))
        fact(f"retain_on from C, {label}", native.above(retain, ask))


def test_destructor(fact):
    import subprocess
    from pathlib import Path

    program = native.program(Path(__file__).parent / "destructor.c", "destructor", "-O2")
    for line in subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines():
        fact(*line.split(": ", 1))
