"""What a process promises at its edges: exit in any state, signals, fork. Each scenario runs in a Python of its own, with ten
seconds to end in, on the simulated driver and, where an installed one can be brought into that state, on that too. Owners
write a line when they are finalized, so that "at most once" can be counted after the process is gone.
"""

import shutil
import signal
import subprocess
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


# ---- exit ----


def test_exit_with_a_living_graph_leaks_its_owners_in_silence(face):
    run = Run(face, "graph = captured(cuda.Stream(), Owner('kept'))\nexecutable = graph.instantiate()")
    assert run.ended() == set()


def test_an_owner_whose_graph_is_gone_is_finalized_before_the_exit(face):
    """The control of the test above: the line is there to be seen."""
    run = Run(face, "captured(cuda.Stream(), Owner('gone')).destroy()")
    assert run.ended() == {"gone"}


def test_exit_with_a_launch_in_flight(face):
    run = Run(
        face,
        """
stream = cuda.Stream()
graph = captured(stream, Owner("flying"))
executable = graph.instantiate()
graph.destroy()
executable.launch(stream, seconds=0.3)
executable.destroy()
""",
    )
    assert run.ended() <= {"flying"}


def test_exit_with_a_fence_that_has_not_passed(face):
    run = Run(
        face,
        """
stream = cuda.Stream()
stream.begin_capture("relaxed")
capture = begin(stream)
stream.kernel()
assert arena.retain(Owner("fenced"), stream)
capture.seal()
graph = stream.end_capture()
executable = graph.instantiate()
executable.launch(stream, seconds=1)
capture.note(stream.handle)
capture.drop()
""",
    )
    assert run.ended() == set()


def test_exit_with_dead_owners_behind_an_open_managed_capture(face):
    run = Run(
        face,
        """
graph = captured(cuda.Stream(), *[Owner(f"dead {n}") for n in range(100)])
hold = Hold()
graph.destroy()
assert arena.reclaim(0.01) == 0 and arena.stats().dead == 100
""",
    )
    assert run.ended() == set()


def test_exit_while_threads_are_inside_retain(face):
    run = Run(
        face,
        """
def work(label):
    with cuda.device(0), cuda.thread_mode("relaxed"):
        stream = cuda.Stream()
        number = 0
        while True:
            captured(stream, *[Owner(f"{label} {number} {n}") for n in range(20)]).destroy()
            number += 1

for label in "abcd":
    threading.Thread(target=work, args=(label,), daemon=True).start()
assert until(lambda: arena.stats().retained > 1000)
""",
    )
    assert len(run.ended()) > 0


def test_exit_with_many_slow_owners_takes_a_bounded_time(simulated_face):
    """All of them would take half a minute; those that were not reached are left to the process's end."""
    run = Run(
        simulated_face,
        """
class Slow:
    def __init__(self, name):
        self.name = name
    def __del__(self, sleep=time.sleep, say=say):
        say(self.name)
        sleep(0.01)

graph = captured(cuda.Stream(), *[Slow(n) for n in range(3_000)])
hold = Hold()
graph.destroy()
hold.end()
""",
    )
    assert set() < run.ended() < {str(n) for n in range(3_000)}
    assert run.seconds < 8


def test_exit_while_threads_wait_in_reclaim(face):
    run = Run(
        face,
        """
graph = captured(cuda.Stream(), Owner("dead"))
hold = Hold()
graph.destroy()
for _ in range(4):
    threading.Thread(target=arena.reclaim, args=(60,), daemon=True).start()
time.sleep(0.02)
""",
    )
    assert run.ended() == set()


def test_ten_thousand_deaths_right_before_the_exit_are_all_released(face):
    run = Run(
        face,
        """
stream = cuda.Stream()
graphs = [captured(stream, Owner(n)) for n in range(10_000)]
hold = Hold()
for graph in graphs:
    graph.destroy()
assert arena.stats().dead == 10_000
hold.end()
""",
    )
    assert run.ended() == {str(n) for n in range(10_000)}


@pytest.mark.parametrize(
    ("registered", "expected"),
    [("after the first retain", {"owner"}), ("before the first retain", set()), ("before, and reclaims", {"owner"})],
)
def test_a_graph_that_is_destroyed_in_atexit(face, registered, expected):
    """Handlers run in reverse: one registered first runs when the thread has gone, and what dies then is left."""
    run = Run(
        face,
        f"""
def end():
    graph.destroy()
    if {registered == "before, and reclaims"}:
        assert arena.reclaim(1) == 1
stream = cuda.Stream()
if {registered.startswith("before")}:
    atexit.register(end)
    graph = captured(stream, Owner("owner"))
else:
    graph = captured(stream, Owner("owner"))
    atexit.register(end)
""",
    )
    assert run.ended() == expected


@pytest.mark.parametrize(
    "action", ["arena.reclaim()", "arena.reclaim(5)", "time.sleep(0.2)", "arena.stats()", "other.destroy()"]
)
def test_an_owner_that_acts_while_the_process_ends(face, action):
    run = Run(
        face,
        f"""
class Last:
    def __del__(self):
        {action}
        say("acted")
other = captured(cuda.Stream(), Owner("other"))
graph = captured(cuda.Stream(), Last(), Owner("after"))
hold = Hold()
graph.destroy()
hold.end()
""",
    )
    assert {"acted", "after"} <= run.ended() <= {"acted", "after", "other"}
    assert run.seconds < 5


def test_an_owner_that_is_slow_in_the_thread_is_waited_for_a_bounded_time(simulated_face):
    run = Run(
        simulated_face,
        """
begun = threading.Event()
class Slow:
    def __del__(self, sleep=time.sleep, say=say):
        say("begins")
        begun.set()
        sleep(0.3)
        say("ends")
captured(cuda.Stream(), Slow()).destroy()
assert begun.wait(5)
""",
    )
    assert run.ended() == {"begins", "ends"}
    stuck = Run(
        simulated_face,
        """
begun = threading.Event()
class Stuck:
    def __del__(self):
        say("begins")
        begun.set()
        time.sleep(60)
captured(cuda.Stream(), Stuck()).destroy()
assert begun.wait(5)
""",
    )
    assert stuck.ended() == {"begins"}
    assert stuck.seconds < 6


def test_os_exit_finalizes_nobody(face):
    run = Run(
        face,
        """
graph = captured(cuda.Stream(), Owner("alive"))
other = captured(cuda.Stream(), Owner("dead"))
hold = Hold()
other.destroy()
os._exit(7)
""",
    )
    assert run.ended(7) == set()


def test_sys_exit_inside_a_capture(face):
    run = Run(
        face,
        """
stream = cuda.Stream()
with stream.capture():
    stream.kernel()
    arena.retain(Owner("captured"), stream)
    sys.exit(3)
""",
    )
    assert run.ended(3) == set()


@pytest.mark.parametrize("managed", [False, True])
def test_an_unhandled_exception_inside_a_capture_is_all_that_is_told(face, managed):
    run = Run(
        face,
        f"""
stream = cuda.Stream()
with stream.capture("relaxed"):
    capture = begin(stream) if {managed} else None
    stream.kernel()
    arena.retain(Owner("captured"), stream)
    raise KeyError("unhandled")
""",
    )
    assert run.done.returncode == 1
    assert run.done.stderr.count("Traceback") == 1
    assert run.done.stderr.endswith("KeyError: 'unhandled'\n")
    assert max(run.lines.values(), default=0) <= 1


def test_exit_with_open_scopes_and_half_done_managed_captures(face):
    run = Run(
        face,
        """
scope = arena.collect()
owners = scope.__enter__()
stream = cuda.Stream()
stream.begin_capture("relaxed")
capture = begin(stream)
stream.kernel()
arena.retain(Owner("held"), stream)
other = cuda.Stream()
other.begin_capture("relaxed")
sealed = begin(other)
other.kernel()
arena.retain(Owner("held too"), other)
sealed.seal()
""",
    )
    assert run.ended() <= {"held", "held too"}


@pytest.mark.parametrize(
    "environment", [{"PYTHONDEVMODE": "1", "PYTHONWARNINGS": "error"}, {"PYTHONFAULTHANDLER": "1"}], ids=["dev", "faulthandler"]
)
def test_nothing_is_said_in_development_mode_or_under_faulthandler(face, environment):
    run = Run(
        face,
        """
for round in range(3):
    stream = cuda.Stream()
    graph = captured(stream, *[Owner(f"{round} {n}") for n in range(50)])
    executable = graph.instantiate()
    executable.launch(stream)
    graph.destroy()
    executable.destroy()
    stream.synchronize()
    arena.reclaim(5)
graph = captured(cuda.Stream(), Owner("alive"))
with arena.collect(), arena.suspend():
    arena.retain(object(), stream)
""",
        env=environment,
    )
    assert run.ended() == {f"{round} {n}" for round in range(3) for n in range(50)}


# ---- signals ----


def test_sigterm_inside_a_capture_ends_the_process(face):
    run = Run(
        face,
        """
stream = cuda.Stream()
with stream.capture():
    stream.kernel()
    arena.retain(Owner("captured"), stream)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(9)
""",
    )
    assert run.ended(-signal.SIGTERM) == set()


def test_sigterm_with_a_handler_that_exits(face):
    run = Run(
        face,
        """
signal.signal(signal.SIGTERM, lambda *what: sys.exit(4))
dead = captured(cuda.Stream(), Owner("dead"))
stream = cuda.Stream()
with stream.capture("relaxed"):
    stream.kernel()
    arena.retain(Owner("captured"), stream)
    dead.destroy()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(9)
""",
    )
    assert run.ended(4) == {"dead"}


def test_an_interrupt_ends_reclaim_and_loses_nothing(face):
    run = Run(
        face,
        """
graph = captured(cuda.Stream(), Owner("dead"))
hold = Hold()
graph.destroy()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
start = time.monotonic()
try:
    arena.reclaim(8)
except KeyboardInterrupt:
    say("interrupted")
assert 0.05 < time.monotonic() - start < 4
assert arena.stats().dead == 1 and sums_up(arena.stats())
hold.end()
arena.reclaim(5)
assert arena.stats().released == 1 and arena.stats().dead == 0
""",
    )
    assert run.ended() == {"interrupted", "dead"}


def test_an_interrupt_that_nobody_catches_ends_the_process(face):
    run = Run(
        face,
        """
graph = captured(cuda.Stream(), Owner("dead"))
hold = Hold()
graph.destroy()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
arena.reclaim(8)
""",
    )
    assert run.done.returncode == -signal.SIGINT
    assert run.done.stderr.count("Traceback") == 1
    assert run.done.stderr.endswith("KeyboardInterrupt\n")
    assert set(run.lines) == set()


def test_signal_handlers_may_retain_reclaim_and_destroy_graphs(face):
    run = Run(
        face,
        """
handled = other = 0
def handler(*what):
    global handled
    handled += 1
    if arena.capture_id(stream) is not None:
        assert arena.retain(Owner(f"handler {handled}"), stream)
    arena.stats()
    arena.reclaim()
stream = cuda.Stream()
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
deadline = time.monotonic() + 5
while handled < 100 and time.monotonic() < deadline:
    captured(stream, *[Owner(f"{other} {n}") for n in range(20)]).destroy()
    other += 1
    arena.reclaim(0.001)
signal.setitimer(signal.ITIMER_REAL, 0)
assert handled >= 100
arena.reclaim(5)
now = arena.stats()
assert sums_up(now) and now.owners == now.dead == 0 and now.released == now.retained
say("released", now.released)
""",
    )
    lines = run.ended()
    assert f"released {len(lines) - 1}" in lines


# ---- fork ----

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


@pytest.fixture
def simulated_face():
    """For what cannot be asked of an installed driver, or would only be slower there."""
    return "simulated"
