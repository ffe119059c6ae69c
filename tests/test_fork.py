"""What a process promises at a fork: a child works like a new process where the driver was not asked before, and otherwise
retains and releases nothing; its parent goes on. Each scenario runs in a Python of its own, on the simulated driver and, where
an installed one can be brought into that state, on that too."""

import shutil
import subprocess

import processes
import pytest
from processes import Run

simulated_face = processes.simulated_face  # a fixture


# An installed driver that nobody has initialised: every call but the look-up of calls says so.
UNINITIALISED = """
#include <stdint.h>
static int refuses(void) { return 3; }
int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *found) {
    (void)symbol, (void)version, (void)flags, (void)found;
    *function = (void *)refuses;
    return 0;
}
"""

FORK = """
import warnings
# From Python 3.12 on it is told at each such fork, which is what we are here for.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

def forked(child, expect=0):
    "Runs `child` in a forked process that then ends as usual; here, waits for it."
    pid = os.fork()
    if pid:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == expect, status
        return
    signal.alarm(8)  # a child that hangs ends, and the parent says so
    child()
    sys.exit(0)

def untouchable():
    "What a child promises whose parent had used the driver."
    assert arena.retain(object(), stream) is False
    assert arena.capture_id(stream) is None
    assert arena.reclaim() == 0
    assert arena.reclaim(0.01) == 0
    now = arena.stats()
    assert (now.lists, now.owners, now.dead) == (0, 0, 0), now
    assert now.leaked == now.retained - now.released, now
    assert sums_up(now), now
    with arena.collect() as owners:
        assert arena.retain("scoped", stream) is True
        with arena.suspend():
            assert arena.retain("suspended", stream) is False
    assert owners == ["scoped"]
    for call in (lambda: begin(stream), driver_version):
        try:
            call()
        except arena.DriverError as error:
            assert "forked" in str(error)
        else:
            raise AssertionError("no error")
    assert arena.stats().leaked == now.leaked

from arena._registry import driver_version
"""


def test_a_child_forked_before_the_driver_was_asked_works_like_a_new_process(face):
    run = Run(
        face,
        FORK
        + """
def child():
    global cuda
    cuda = opened()
    alive = weakref.ref(owner := Owner("child's"))
    graph = captured(cuda.Stream(), owner)
    del owner
    assert alive() is not None
    graph.destroy()
    assert until(lambda: alive() is None)  # its own thread's work: nobody reclaims
    assert sums_up(arena.stats()) and arena.stats().leaked == 0
    captured(cuda.Stream(), Owner("child's last")).destroy()

assert arena.retain(object(), 0) is False  # CUDA is not initialised: not an answer yet
forked(child)
cuda = opened()
captured(cuda.Stream(), Owner("parent's")).destroy()
forked(lambda: None)
""",
        opens=False,
    )
    assert run.ended() == {"child's", "child's last", "parent's"}


def test_a_child_retains_and_releases_nothing_and_the_parent_goes_on(face):
    run = Run(
        face,
        FORK
        + """
stream = cuda.Stream()
captured(stream, Owner("before")).destroy()
assert arena.reclaim(5) in (0, 1) and until(lambda: arena.stats().released == 1)
graph = captured(stream, *[Owner(n) for n in range(10)])

def child():
    assert arena.stats().leaked == 10
    untouchable()

forked(child)
assert arena.stats().owners == 10 and arena.stats().leaked == 0
graph.destroy()
arena.reclaim(5)
assert until(lambda: arena.stats().released == 11)
assert captured(stream, Owner("later")) is not None
""",
    )
    assert run.ended() == {"before", *map(str, range(10))}


def test_a_child_does_not_release_what_was_dead_at_the_fork(face):
    run = Run(
        face,
        FORK
        + """
stream = cuda.Stream()
graph = captured(stream, *[Owner(n) for n in range(10)])
other = captured(stream, *[Owner(n) for n in range(10, 20)])
hold = Hold()
graph.destroy()
assert arena.stats().dead == 10  # queued
other.destroy()                  # dead, and nobody has looked yet
forked(untouchable)
hold.end()
arena.reclaim(5)
assert until(lambda: arena.stats().released == 20)
""",
    )
    assert run.ended() == {*map(str, range(20))}


@pytest.mark.parametrize("managed", [False, True])
def test_a_child_of_a_capturing_parent_is_told_active_by_the_driver_and_still_retains_nothing(face, managed):
    """The driver's answer in the child is the control: without a flag of ours it would be believed."""
    run = Run(
        face,
        FORK
        + f"""
stream = cuda.Stream()
stream.begin_capture("relaxed")
capture = begin(stream) if {managed} else None
stream.kernel()
assert arena.retain(Owner("captured"), stream)
id = arena.capture_id(stream)

def child():
    assert cuda.query(stream)[:3] == (0, 1, id)
    untouchable()

forked(child)
assert arena.retain(Owner("later"), stream)
if capture:
    capture.seal()
graph = stream.end_capture()
if capture:
    capture.drop()
graph.destroy()
arena.reclaim(5)
""",
    )
    assert run.ended() == {"captured", "later"}


def test_a_child_may_finish_what_it_inherited_of_a_managed_capture(face):
    """As an exception that unwinds in the child does: nothing is released, nothing hangs."""
    run = Run(
        face,
        FORK
        + """
stream = cuda.Stream()
stream.begin_capture("relaxed")
capture = begin(stream)
stream.kernel()
assert arena.retain(Owner("captured"), stream)

def child():
    global capture
    try:
        capture.seal()
        capture.hold()
        capture.note(stream.handle)
    except arena.DriverError:
        pass
    capture.drop()
    del capture
    untouchable()

forked(child)
capture.seal()
graph = stream.end_capture()
capture.hold()
capture.drop()
graph.destroy()
arena.reclaim(5)
""",
    )
    assert run.ended() == {"captured"}


def test_fork_beside_threads_that_retain_and_reclaim(face):
    run = Run(
        face,
        FORK
        + """
stop = False
def work(label):
    with cuda.device(0), cuda.thread_mode("relaxed"):
        mine = cuda.Stream()
        number = 0
        while not stop:
            captured(mine, *[Owner(f"{label} {number} {n}") for n in range(10)]).destroy()
            number += 1
            arena.reclaim(0.0005)

stream = cuda.Stream()
assert arena.retain(object(), stream) is False
threads = [threading.Thread(target=work, args=(label,)) for label in "abc"]
for thread in threads:
    thread.start()
assert until(lambda: arena.stats().retained > 100)

def child():
    untouchable()
    os._exit(5)

for _ in range(10):
    forked(child, expect=5)
stop = True
for thread in threads:
    thread.join()
arena.reclaim(5)
now = arena.stats()
assert until(lambda: arena.stats().released == now.retained)
say("released", now.retained)
""",
    )
    lines = run.ended()
    assert f"released {len(lines) - 1}" in lines


def test_fork_in_a_thread(face):
    run = Run(
        face,
        FORK
        + """
stream = cuda.Stream()
graph = captured(stream, Owner("parent's"))

def child():
    untouchable()
    os._exit(5)

thread = threading.Thread(target=forked, args=(child, 5))
thread.start()
thread.join()
graph.destroy()
""",
    )
    assert run.ended() == {"parent's"}


def test_children_of_children(face):
    run = Run(
        face,
        FORK
        + """
stream = cuda.Stream()
graph = captured(stream, Owner("parent's"))

def child():
    untouchable()
    forked(untouchable)

forked(child)
graph.destroy()
""",
    )
    assert run.ended() == {"parent's"}


def test_multiprocessing_by_fork(face):
    run = Run(
        face,
        FORK
        + """
import multiprocessing

def child(send):
    untouchable()
    now = arena.stats()
    send.send((now.owners, now.leaked))

stream = cuda.Stream()
graph = captured(stream, Owner("parent's"))
context = multiprocessing.get_context("fork")
receive, send = context.Pipe(False)
process = context.Process(target=child, args=(send,))
process.start()
assert receive.recv() == (0, 1)
process.join()
assert process.exitcode == 0
graph.destroy()
""",
    )
    assert run.ended() == {"parent's"}


@pytest.mark.parametrize("released_by", ["reclaim", "thread"])
def test_an_owner_that_forks_while_it_goes(face, released_by):
    """The child comes back out of the release: its sums are right, it releases nothing more, and it ends."""
    run = Run(
        face,
        FORK
        + f"""
class Forks:
    def __del__(self):
        global child
        child = os.fork()
        say("child" if child == 0 else "parent")
        if child == 0:
            signal.alarm(8)

if {released_by == "reclaim"}:
    import _thread
    def refused(*what):
        raise RuntimeError("no more threads")
    _thread.start_new_thread = refused
child = None
stream = cuda.Stream()
captured(stream, Forks(), Owner("next")).destroy()
if {released_by == "reclaim"}:
    arena.reclaim(5)
if child == 0:
    untouchable()
    sys.exit(0)
assert until(lambda: child is not None)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert until(lambda: arena.stats().released == 2)
""",
    )
    assert run.ended() == {"parent", "child", "next"}


def test_a_child_of_a_process_that_was_done_with_the_driver_is_like_new_and_ends_at_once(simulated_face):
    """The simulated driver was closed again before the fork, so the child may open one; its thread is its own."""
    run = Run(
        simulated_face,
        FORK
        + """
with open_driver(FACE) as cuda:
    captured(cuda.Stream(), Owner("parent's")).destroy()

def child():
    with open_driver(FACE) as cuda:
        alive = weakref.ref(owner := Owner("child's"))
        graph = captured(cuda.Stream(), owner)
        del owner
        graph.destroy()
        assert until(lambda: alive() is None)

start = time.monotonic()
forked(child)
assert time.monotonic() - start < 1.5, time.monotonic() - start
""",
        opens=False,
    )
    assert run.ended() == {"parent's", "child's"}


def test_a_child_of_a_process_that_only_looked_for_a_driver_may_open_the_simulated_one(tmp_path, simulated_face):
    """There is an installed driver here, planted, that was asked and answered before the fork."""
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    (tmp_path / "driver.c").write_text(UNINITIALISED)
    command = ["gcc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"]
    subprocess.run(command, check=True, capture_output=True)
    run = Run(
        simulated_face,
        FORK
        + """
def child():
    with open_driver(FACE) as cuda:
        alive = weakref.ref(owner := Owner("child's"))
        graph = captured(cuda.Stream(), owner)
        del owner
        graph.destroy()
        assert until(lambda: alive() is None)
    assert arena.retain(object(), 5) is False

assert arena.retain(object(), 5) is False
forked(child)
""",
        opens=False,
        env={"LD_LIBRARY_PATH": str(tmp_path)},
    )
    assert run.ended() == {"child's"}
