"""What a process promises when it ends, in any state, and at signals. Each scenario runs in a Python of its own, on the
simulated driver and, where an installed one can be brought into that state, on that too. Forks are in test_fork.py."""

import signal

import processes
import pytest
from processes import Run

simulated_face = processes.simulated_face  # a fixture


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
