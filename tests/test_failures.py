"""What holds when a step fails: a call that the driver refuses, memory that is not there, a thread that cannot be started, a
driver that is missing or lacks something. Each refusal is named, the graph keeps what it had, what was refused is not
retained, nothing is freed too early, nothing is lost, and the next attempt works. The simulated driver fails on demand; what
must happen before a driver or `malloc` is first asked runs in a subprocess.
"""

import os
import shutil
import subprocess
import weakref
from contextlib import contextmanager, suppress

import pytest
from conftest import run_python, stays, until
from heap import heap_bytes

import arena
from arena._registry import begin, driver_version
from arena.testing import simulated_driver

OUT_OF_MEMORY, REFUSED, DESTROYED = 2, 900, 709
TABLE = [
    "cuStreamGetCaptureInfo",
    "cuUserObjectCreate",
    "cuUserObjectRelease",
    "cuGraphRetainUserObject",
    "cuGraphReleaseUserObject",
    "cuThreadExchangeStreamCaptureMode",
    "cuCtxGetDevice",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuEventCreate",
    "cuEventDestroy",
    "cuEventRecord",
    "cuEventQuery",
    "cuDriverGetVersion",
    "cuGetErrorName",
]


class Owner:
    """Something that owns memory."""


def sums_up():
    now = arena.stats()
    return now.retained == now.owners + now.dead + now.released + now.leaked


class Open:
    """An open capture, plain or managed, that ends with the `with`."""

    def __init__(self, cuda, kind):
        self.stream = cuda.Stream()
        self.kind = kind

    def __enter__(self):
        self.stream.begin_capture("relaxed")
        self.managed = begin(self.stream) if self.kind == "managed" else None
        self.stream.kernel()
        return self

    def __exit__(self, *exc):
        if self.managed:
            self.managed.seal()
        self.graph = self.stream.end_capture()

    def drop(self):
        if self.managed:
            self.managed.drop()
        self.graph.destroy()


def calls_of_a_first_retain(cuda, kind, symbol):
    with Open(cuda, kind) as opened:
        before = cuda.calls(symbol)
        arena.retain(Owner(), opened.stream)
        made = cuda.calls(symbol) - before
    opened.drop()
    return made


@contextmanager
def refusing(cuda, symbol, code=OUT_OF_MEMORY):
    """Every call of that symbol fails in the body: a question may be asked twice before its refusal is believed."""
    times = 8 if symbol == "cuStreamGetCaptureInfo" else 1
    idle = cuda.Stream()
    for nth in range(1, times + 1):
        cuda.fail(symbol, nth, code)
    before = cuda.calls(symbol)
    yield
    assert cuda.calls(symbol) > before, f"{symbol} was not called"
    while cuda.calls(symbol) < before + times:
        cuda.query(idle)


# ---- retain ----


@pytest.mark.parametrize("kind", ["plain", "managed"])
@pytest.mark.parametrize("code", [OUT_OF_MEMORY, REFUSED])
@pytest.mark.parametrize("symbol", ["cuStreamGetCaptureInfo", "cuUserObjectCreate", "cuGraphRetainUserObject"])
def test_a_refused_first_retain_is_named_and_leaves_nothing(simulated, symbol, code, kind):
    name = {OUT_OF_MEMORY: "CUDA_ERROR_OUT_OF_MEMORY", REFUSED: "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}[code]
    with Open(simulated, kind) as opened:
        before = arena.stats()
        alive = weakref.ref(owner := Owner())
        with refusing(simulated, symbol, code), pytest.raises(arena.DriverError) as raised:
            arena.retain(owner, opened.stream)
        assert str(raised.value) == f"{symbol} failed on stream {opened.stream.handle:#x}: {code} ({name})"
        del owner, raised
        assert alive() is None
        assert arena.stats().retained == before.retained
        assert arena.stats().lists == before.lists
        assert sums_up()
        alive = weakref.ref(owner := Owner())
        assert arena.retain(owner, opened.stream)
        del owner
        assert arena.stats().lists == before.lists + 1
    assert alive() is not None
    opened.drop()
    assert until(lambda: alive() is None)


@pytest.mark.parametrize("kind", ["plain", "managed"])
def test_whichever_question_of_a_first_retain_fails_it_is_retained_or_the_graph_is_clean(simulated, kind):
    """The last is the one that is asked once the graph holds the object: then the object is taken back."""
    asked = calls_of_a_first_retain(simulated, kind, "cuStreamGetCaptureInfo")
    assert asked >= 2
    errors = []
    for nth in range(1, asked + 1):
        with Open(simulated, kind) as opened:
            alive = weakref.ref(owner := Owner())
            simulated.fail("cuStreamGetCaptureInfo", nth)
            errors.append(None)
            try:
                assert arena.retain(owner, opened.stream)
            except (arena.DriverError, arena.CaptureError) as error:
                errors[-1] = str(error)
            del owner
            assert (alive() is None) == bool(errors[-1]), errors
        if errors[-1]:
            assert opened.graph.owners == 0
            executable = opened.graph.instantiate()
            assert executable.owners == 0
            executable.destroy()
        assert sums_up()
        opened.drop()
        assert until(lambda: arena.reclaim(1) == 0 and arena.stats().dead == 0)
    assert "ended while an owner was being retained" in errors[-1]


@pytest.mark.parametrize("kind", ["plain", "managed"])
def test_a_refused_later_retain_leaves_what_the_graph_had(simulated, kind):
    with Open(simulated, kind) as opened:
        kept = [weakref.ref(owner := Owner())]
        assert arena.retain(owner, opened.stream)
        for _ in range(20):
            refused = weakref.ref(owner := Owner())
            asked = simulated.Stream() if kind == "managed" else opened.stream  # it is not asked about the managed one
            with refusing(simulated, "cuStreamGetCaptureInfo"), pytest.raises(arena.DriverError):
                arena.retain(owner, asked)
            kept.append(weakref.ref(owner := Owner()))
            assert refused() is None
            assert arena.retain(owner, opened.stream)
        del owner
        assert all(each() is not None for each in kept)
        assert arena.stats().owners == len(kept)
        assert sums_up()
    opened.drop()
    assert until(lambda: all(each() is None for each in kept))


def test_of_several_owners_a_refusal_takes_none(simulated):
    owners = [Owner() for _ in range(3)]
    alive = [weakref.ref(each) for each in owners]
    binding = type("Binding", (), {"__cuda_owners__": lambda self: iter(owners)})()
    before = arena.stats().retained
    with Open(simulated, "plain") as opened:
        simulated.fail("cuGraphRetainUserObject")
        with pytest.raises(arena.DriverError, match="cuGraphRetainUserObject failed on stream"):
            arena.retain(binding, opened.stream)
        assert arena.stats().retained == before
        assert arena.retain(binding, opened.stream)
        assert arena.stats().retained == before + 3
        owners.clear()
        assert all(each() is not None for each in alive)
    opened.drop()
    assert until(lambda: all(each() is None for each in alive))


def test_when_giving_back_fails_too_the_owner_is_still_not_retained(simulated):
    for symbols in (("cuGraphRetainUserObject", "cuUserObjectRelease"), ("re-ask", "cuGraphReleaseUserObject")):
        asked = calls_of_a_first_retain(simulated, "plain", "cuStreamGetCaptureInfo")
        with Open(simulated, "plain") as opened:
            alive = weakref.ref(owner := Owner())
            before = arena.stats().retained
            for symbol in symbols:
                if symbol == "re-ask":
                    simulated.fail("cuStreamGetCaptureInfo", asked)
                else:
                    simulated.fail(symbol)
            with pytest.raises((arena.DriverError, arena.CaptureError)):
                arena.retain(owner, opened.stream)
            del owner
            assert alive() is None
            assert arena.stats().retained == before
            assert arena.retain(Owner(), opened.stream)
        opened.drop()


@pytest.mark.parametrize("code", [201, 3, 4, 100, 906])
def test_an_answer_that_means_not_capturing_is_no_error(simulated, code):
    with Open(simulated, "plain") as opened:
        for ask in (lambda: arena.retain(Owner(), opened.stream), lambda: arena.capture_id(opened.stream)):
            with refusing(simulated, "cuStreamGetCaptureInfo", code):
                assert not ask()
            assert ask()
    opened.drop()


def test_a_code_without_a_name_is_still_told(simulated):
    stream = simulated.Stream()
    with refusing(simulated, "cuStreamGetCaptureInfo", 12345):
        with pytest.raises(arena.DriverError, match=r"cuStreamGetCaptureInfo failed .*: 12345 \(unknown error\)"):
            arena.capture_id(stream)
    with refusing(simulated, "cuStreamGetCaptureInfo"), refusing(simulated, "cuGetErrorName"):
        with pytest.raises(arena.DriverError, match=r": 2 \(unknown error\)"):
            arena.retain(Owner(), stream)


def test_a_context_that_cannot_be_asked_means_that_the_owners_go_without_one(simulated):
    alive = weakref.ref(owner := Owner())
    with Open(simulated, "plain") as opened:
        simulated.fail("cuCtxGetCurrent")
        assert arena.retain(owner, opened.stream)
    del owner
    assert alive() is not None
    opened.drop()
    assert until(lambda: alive() is None)


def test_a_device_that_cannot_be_asked_means_no_stream(simulated):
    with Open(simulated, "plain") as opened, opened.stream:
        simulated.fail("cuCtxGetDevice", 1, 3)
        assert arena.retain(Owner()) is False
        assert arena.retain(Owner()) is True
    opened.drop()


def test_a_version_that_cannot_be_asked_is_an_error(simulated):
    simulated.fail("cuDriverGetVersion", 1, 999)
    with pytest.raises(arena.DriverError, match=r"^cuDriverGetVersion failed: 999"):
        driver_version()
    assert driver_version() == 13000


@pytest.mark.parametrize("kind", ["plain", "managed"])
@pytest.mark.parametrize("symbol", ["cuUserObjectCreate", "cuGraphRetainUserObject", "re-ask"])
def test_two_thousand_refusals_leave_no_memory(simulated, symbol, kind):
    """A list is 130 bytes and more, so that a leak of one each would be 260 KB. The simulator's record takes 48."""
    nth = 1
    if symbol == "re-ask":
        symbol, nth = "cuStreamGetCaptureInfo", calls_of_a_first_retain(simulated, kind, "cuStreamGetCaptureInfo")

    def refuse(times):
        for _ in range(times):
            with Open(simulated, kind) as opened:
                simulated.fail(symbol, nth)
                with suppress(arena.DriverError, arena.CaptureError):
                    assert not arena.retain(Owner(), opened.stream)
            opened.drop()
        arena.reclaim(1)

    refuse(50)
    before = heap_bytes()
    refuse(2000)
    assert heap_bytes() - before < 160_000
    assert arena.stats().dead == 0


# ---- managed captures ----


def test_begin_that_the_driver_refuses_leaves_no_list_and_no_open_capture(simulated):
    stream = simulated.Stream()
    alive = weakref.ref(owner := Owner())
    with stream.capture("relaxed") as capture:
        with refusing(simulated, "cuStreamGetCaptureInfo"):
            with pytest.raises(arena.DriverError, match="cuStreamGetCaptureInfo failed on stream"):
                begin(stream)
        assert arena.retain(owner, stream)  # as in any capture whose begin was not seen
    del owner
    assert alive() is not None
    capture.graph.destroy()
    assert until(lambda: alive() is None)  # no managed capture keeps the thread from releasing


def test_a_seal_that_the_driver_refuses_leaves_the_owners_to_the_executable(simulated):
    """It is not clean then, but exact: the owners go when both the executable and the capture are gone."""
    alive = weakref.ref(owner := Owner())
    with Open(simulated, "managed") as opened:
        arena.retain(owner, opened.stream)
        simulated.fail("cuGraphReleaseUserObject")
    del owner
    executable = opened.graph.instantiate()
    assert executable.owners == 1
    opened.drop()
    assert stays(lambda: alive() is not None, 0.02)
    executable.destroy()
    assert until(lambda: alive() is None)


def test_a_template_that_refuses_to_hold_is_an_error_and_ours_still_holds(simulated):
    alive = weakref.ref(owner := Owner())
    with Open(simulated, "managed") as opened:
        arena.retain(owner, opened.stream)
    del owner
    simulated.fail("cuGraphRetainUserObject")
    with pytest.raises(arena.DriverError, match=r"^cuGraphRetainUserObject failed: 2 \(CUDA_ERROR_OUT_OF_MEMORY\)$"):
        opened.managed.hold(opened.graph.handle)
    assert opened.graph.owners == 0
    assert alive() is not None
    opened.managed.hold(opened.graph.handle)
    assert opened.graph.owners == 1
    opened.drop()
    assert until(lambda: alive() is None)


# ---- fences ----


class InFlight:
    """A managed graph that was replayed, dropped and destroyed while its replay still runs."""

    def __init__(self, cuda):
        self.cuda = cuda
        self.alive = weakref.ref(owner := Owner())
        with Open(cuda, "managed") as opened:
            assert arena.retain(owner, opened.stream)
        del owner
        self.gate = cuda.Event()
        self.opened = opened
        self.executable = opened.graph.instantiate()
        self.executable.launch(opened.stream, until=self.gate)
        opened.managed.hold()

    def drop(self):
        self.opened.managed.note(self.opened.stream.handle)
        self.opened.drop()
        self.executable.destroy()

    def is_kept(self):
        for _ in range(5):
            arena.reclaim(0.002)
        return self.alive() is not None

    def finish(self):
        self.gate.set()
        self.opened.stream.synchronize()


@pytest.mark.parametrize("times", [1, 5])
@pytest.mark.parametrize("code", [OUT_OF_MEMORY, REFUSED])
@pytest.mark.parametrize(
    "symbol", ["cuEventCreate", "cuEventRecord", "cuEventQuery", "cuCtxPushCurrent", "cuStreamGetCaptureInfo"]
)
def test_a_fence_that_the_driver_refuses_is_neither_passed_nor_lost(simulated, symbol, code, times):
    flight = InFlight(simulated)
    for nth in range(1, times + 1):
        simulated.fail(symbol, nth, code)
    flight.drop()
    assert flight.is_kept()
    flight.finish()
    assert until(lambda: flight.alive() is None)


@pytest.mark.parametrize("symbol", ["cuEventQuery", "cuCtxPushCurrent"])
def test_a_fence_whose_context_was_destroyed_is_passed(simulated, symbol):
    """The control: such an answer ends the wait, so the test above would see it end too early."""
    flight = InFlight(simulated)
    for nth in range(1, 6):
        simulated.fail(symbol, nth, DESTROYED)
    flight.drop()
    assert until(lambda: flight.alive() is None)
    flight.finish()


def test_a_replay_in_a_context_that_cannot_be_asked_is_still_waited_for(simulated):
    flight = InFlight(simulated)
    simulated.fail("cuCtxGetCurrent")
    flight.drop()
    assert flight.is_kept()
    flight.finish()
    assert until(lambda: flight.alive() is None)


def test_a_replay_without_a_current_context_is_waited_for_and_not_lost():
    """The stream knows its context, so that the event can be made in it, whatever thread makes it. In a process of its own:
    were it lost, the driver could not be closed."""
    done = run_python(
        """
import os, weakref, arena
from arena._registry import begin
from arena.testing import simulated_driver
from conftest import until
class Owner: pass
cuda = (driver := simulated_driver()).__enter__()
alive = weakref.ref(owner := Owner())
with cuda.device(1):
    stream, gate = cuda.Stream(), cuda.Event()
    stream.begin_capture("relaxed")
    capture = begin(stream)
    stream.kernel()
    assert arena.retain(owner, stream)
    del owner
    capture.seal()
    graph = stream.end_capture()
    executable = graph.instantiate()
    executable.launch(stream, until=gate)
with cuda.no_context():
    capture.note(stream.handle)
capture.drop()
graph.destroy()
executable.destroy()
print("kept" if not until(lambda: alive() is None, 0.05) else "early")
gate.set()
print("gone" if until(lambda: alive() is None, 2) else "lost", flush=True)
os._exit(0)
""",
        timeout=10,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["kept", "gone"], "")


# ---- release ----


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, DESTROYED])
@pytest.mark.parametrize("symbol", ["cuCtxPushCurrent", "cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode"])
def test_owners_go_though_the_driver_refuses_on_the_way_out(simulated, symbol, code):
    alive = []
    with Open(simulated, "managed") as hold:  # keeps the thread from going first
        for device in (0, 1):
            with simulated.device(device), Open(simulated, "plain") as opened:
                for _ in range(3):
                    alive.append(weakref.ref(owner := Owner()))
                    assert arena.retain(owner, opened.stream)
            opened.drop()
        del owner
        for nth in (1, 2, 3, 4):
            simulated.fail(symbol, nth, code)
    arena.reclaim(5)
    assert until(lambda: all(each() is None for each in alive))
    hold.drop()


def test_a_refused_change_of_mode_does_not_leave_the_thread_relaxed(simulated):
    """Relaxed for good, it would not be told of what breaks its captures."""
    with Open(simulated, "managed") as hold:
        with Open(simulated, "plain") as opened:
            assert arena.retain(Owner(), opened.stream)
        opened.drop()
        before = arena.stats().released
        simulated.fail("cuThreadExchangeStreamCaptureMode")
        hold.managed.seal()
        arena.reclaim(5)
        assert arena.stats().released == before + 1
    hold.drop()
    stream = simulated.Stream()
    with pytest.raises(simulated.Error), stream.capture("global"):
        assert simulated.call("cuMemAlloc") == 900


# ---- every call, each in its turn ----


class Life:
    """Everything that the registry asks a driver for, once: a plain and a managed capture, a replay of each in flight, the end.

    kept == owners that were retained and must not go before `finish()`.
    """

    def __init__(self, cuda):
        self.cuda = cuda
        self.streams = [cuda.Stream() for _ in range(3)]
        self.gates = [cuda.Event() for _ in range(2)]  # made before anything fails
        self.kept = []

    def retain(self, stream, count):
        for _ in range(count):
            reference = weakref.ref(owner := Owner())
            try:
                retained = arena.retain(owner, stream)
            except (arena.DriverError, arena.CaptureError):
                retained = False
            del owner
            assert (reference() is not None) == retained
            if retained:
                self.kept.append(reference)
            assert sums_up()

    def run(self):
        plain, managed, other = self.streams
        with plain.capture("relaxed") as capture:
            plain.kernel()
            self.retain(plain, 3)
        first = capture.graph.instantiate()
        capture.graph.destroy()
        first.launch(plain, until=self.gates[0])
        first.destroy()

        with suppress(arena.DriverError):
            driver_version()
        managed.begin_capture("relaxed")
        try:
            owner = begin(managed)
        except arena.DriverError:
            owner = None
        managed.kernel()
        self.retain(managed, 3)
        if owner:
            owner.seal()
        graph = managed.end_capture()
        second = graph.instantiate()
        if owner:
            with suppress(arena.DriverError):
                owner.hold(graph.handle)
        second.launch(managed, until=self.gates[1])
        if owner:
            owner.note(managed.handle)
            owner.note(other.handle)
            owner.drop()
        graph.destroy()
        second.destroy()
        for _ in range(5):
            arena.reclaim(0.001)
        self.early = [each for each in self.kept if each() is None]

    def finish(self):
        for gate in self.gates:
            gate.set()
        return until(lambda: all(each() is None for each in self.kept) and arena.reclaim(0.1) == 0)


def test_the_life_that_the_next_test_disturbs_meets_every_symbol(simulated):
    life = Life(simulated)
    before = {symbol: simulated.calls(symbol) for symbol in TABLE}
    life.run()
    assert life.early == []
    assert life.finish()
    assert len(life.kept) == 6
    never = [symbol for symbol in TABLE if simulated.calls(symbol) == before[symbol]]
    assert never == ["cuGetErrorName"]  # nothing fails


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, REFUSED])
@pytest.mark.parametrize("symbol", [symbol for symbol in TABLE if symbol != "cuUserObjectRelease"])
def test_whatever_call_fails_nothing_goes_early_and_nothing_is_lost(symbol, code):
    for nth in range(1, 13):
        before = arena.stats()
        with simulated_driver() as cuda:
            life = Life(cuda)
            calls = cuda.calls(symbol)
            cuda.fail(symbol, nth, code)
            life.run()
            met = cuda.calls(symbol) - calls >= nth
            assert life.early == [], f"call {nth} of {symbol}: {len(life.early)} of {len(life.kept)} went early"
            assert life.finish(), f"call {nth} of {symbol}"
            after = arena.stats()
            assert (after.owners, after.lists, after.dead) == (before.owners, before.lists, 0), f"call {nth} of {symbol}"
        with simulated_driver() as cuda, Open(cuda, "plain") as opened:
            assert arena.retain(Owner(), opened.stream)
        if not met:
            break


def test_a_release_that_the_driver_refuses_keeps_the_owner():
    """Lost, but never early: all that can be done. In a process of its own, since a driver with owners is not closed."""
    done = run_python(
        """
import os, weakref, arena
from arena._registry import begin
from arena.testing import simulated_driver
class Owner: pass
cuda = (driver := simulated_driver()).__enter__()
stream = cuda.Stream()
stream.begin_capture("relaxed")
capture = begin(stream)
stream.kernel()
alive = weakref.ref(owner := Owner())
arena.retain(owner, stream)
del owner
capture.seal()
graph = stream.end_capture()
graph.destroy()
cuda.fail("cuUserObjectRelease")
capture.drop()
arena.reclaim(0.02)
now = arena.stats()
print(alive() is not None, now.owners, now.dead, now.lists, flush=True)
os._exit(0)
""",
        timeout=10,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True 1 0 1\n", "")


# ---- memory ----

SHIM = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>

/* The `left`th allocation that code between `low` and `high` asks for fails. */
static volatile uintptr_t low, high;
static volatile long left;
static volatile int met;

void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);

void shim_arm(uintptr_t from, uintptr_t to, long nth) { low = from, high = to, met = 0, left = nth; }
int shim_disarm(void) { left = 0; return met; }

static int fails(void *caller) {
    if (!left || (uintptr_t)caller < low || (uintptr_t)caller >= high || --left) return 0;
    errno = ENOMEM;
    return met = 1;
}
void *malloc(size_t size) { return fails(__builtin_return_address(0)) ? NULL : __libc_malloc(size); }
void *calloc(size_t count, size_t size) { return fails(__builtin_return_address(0)) ? NULL : __libc_calloc(count, size); }
void *realloc(void *old, size_t size) { return fails(__builtin_return_address(0)) ? NULL : __libc_realloc(old, size); }
"""

WITHOUT_MEMORY = """
import ctypes, os, sys, weakref
import arena
import arena._registry as registry
from arena.testing import simulated_driver

class Owner:
    pass

with open("/proc/self/maps") as maps:
    spans = [line.split()[0].split("-") for line in maps if registry.__file__ in line]
LOW, HIGH = int(spans[0][0], 16), int(spans[-1][1], 16)
libc = ctypes.CDLL(None)
arm, disarm = libc.shim_arm, libc.shim_disarm
arm.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_long]

def attempt(nth, action):
    "Runs it with the nth allocation failing: (whether one did fail, what it returned or raised)."
    arm(LOW, HIGH, nth)
    try:
        answer = action()
    except Exception as error:
        answer = error
    return bool(disarm()), answer

def sums_up():
    now = arena.stats()
    return now.retained == now.owners + now.dead + now.released + now.leaked

driver = simulated_driver()
cuda = driver.__enter__()
stream = cuda.Stream()
"""


def compiled(folder, source, name):
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    file, target = folder / f"{name}.c", folder / name
    file.write_text(source)
    command = ["gcc", "-O1", "-Wall", "-fno-builtin", "-fno-optimize-sibling-calls", "-shared", "-fPIC", "-o", target, file]
    subprocess.run([*command, "-ldl"], check=True, capture_output=True, text=True)
    return target


@pytest.fixture(scope="module")
def without_memory(tmp_path_factory):
    """Runs code in a process whose allocations can be made to fail."""
    if "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the sanitizer has malloc for itself")
    shim = compiled(tmp_path_factory.mktemp("shim"), SHIM, "libshim.so")

    def run(code):
        done = run_python(WITHOUT_MEMORY + code, timeout=10, env={"LD_PRELOAD": str(shim)})
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        return done.stdout.split()

    return run


@pytest.mark.parametrize("owners", [1, 10])
def test_memory_that_fails_in_a_first_retain_is_a_memory_error_and_loses_nothing(without_memory, owners):
    met = without_memory(
        f"""
class Binding:
    def __init__(self):
        self.owners = [Owner() for _ in range({owners})]
    def __cuda_owners__(self):
        return self.owners

failures = 0
for nth in range(1, 20):
    binding = Binding()
    alive = [weakref.ref(each) for each in binding.owners]
    before = arena.stats()
    with stream.capture("relaxed") as capture:
        met, answer = attempt(nth, lambda: arena.retain(binding, stream))
        del binding
        assert sums_up()
        if not met:
            assert answer is True
            break
        failures += 1
        assert isinstance(answer, MemoryError), answer
        assert "capture" in str(answer)
        assert all(each() is None for each in alive)
        assert arena.stats().retained == before.retained
        assert capture.graph.owners == 0
        assert arena.retain(Owner(), stream) or nth < 3
    capture.graph.destroy()
    arena.reclaim(1)
else:
    raise AssertionError("it never succeeded")
assert all(each() is not None for each in alive)
capture.graph.destroy()
arena.reclaim(5)
assert all(each() is None for each in alive)
now = arena.stats()
assert (now.owners, now.lists, now.dead) == (0, 0, 0), now
driver.__exit__(None, None, None)
print(failures)
"""
    )
    assert int(met[0]) >= 2  # the list, its entries; the index only while there is none


def test_memory_that_fails_for_the_index_is_a_memory_error_while_there_is_none(without_memory):
    met = without_memory(
        """
failures = 0
with stream.capture("relaxed") as capture:
    for nth in range(1, 20):
        alive = weakref.ref(owner := Owner())
        met, answer = attempt(nth, lambda: arena.retain(owner, stream))
        del owner
        if not met:
            break
        failures += 1
        assert isinstance(answer, MemoryError) and alive() is None
    assert answer is True and alive() is not None
capture.graph.destroy()
driver.__exit__(None, None, None)
print(failures)
"""
    )
    assert int(met[0]) == 3


def test_memory_that_fails_when_a_list_grows_loses_nothing(without_memory):
    met = without_memory(
        """
failures = 0
alive = []
with stream.capture("relaxed") as capture:
    for number in range(200):
        alive.append(weakref.ref(owner := Owner()))
        met, answer = attempt(1, lambda: arena.retain(owner, stream))
        if met and number:
            assert isinstance(answer, MemoryError) and f"owner {number + 1} of" in str(answer), answer
        if met:
            failures += 1
            assert arena.stats().owners == number
            assert arena.retain(owner, stream)
        else:
            assert answer is True
        assert arena.stats().owners == number + 1
del owner
assert all(each() is not None for each in alive)
capture.graph.destroy()
arena.reclaim(5)
assert all(each() is None for each in alive)
driver.__exit__(None, None, None)
print(failures)
"""
    )
    assert int(met[0]) >= 5


def test_an_index_that_cannot_grow_serves_on(without_memory):
    met = without_memory(
        """
failures = 0
graphs, alive = [], []
for number in range(300):
    alive.append(weakref.ref(owner := Owner()))
    with stream.capture("relaxed") as capture:
        # the list, its entries, then the index where it is full
        met, answer = attempt(3, lambda: arena.retain(owner, stream))
        if number == 0:
            assert isinstance(answer, MemoryError)
            assert arena.retain(owner, stream)
        else:
            failures += met
            assert answer is True
    graphs.append(capture.graph)
del owner
assert arena.stats().lists == 300
for number, graph in enumerate(graphs):
    assert alive[number]() is not None
    graph.destroy()
arena.reclaim(5)
assert all(each() is None for each in alive)
driver.__exit__(None, None, None)
print(failures)
"""
    )
    assert int(met[0]) > 200  # it is asked for again with each list


def test_memory_that_fails_in_begin_is_a_memory_error_and_the_capture_goes_on(without_memory):
    met = without_memory(
        """
failures = 0
for nth in range(1, 20):
    stream.begin_capture("relaxed")
    met, answer = attempt(nth, lambda: registry.begin(stream))
    stream.kernel()
    alive = weakref.ref(owner := Owner())
    assert arena.retain(owner, stream)
    del owner
    if met:
        failures += 1
        assert isinstance(answer, MemoryError), answer
    else:
        answer.seal()
    graph = stream.end_capture()
    assert alive() is not None
    if not met:
        answer.drop()
    graph.destroy()
    arena.reclaim(5)
    assert alive() is None
    if not met:
        break
assert not met
driver.__exit__(None, None, None)
print(failures)
"""
    )
    assert int(met[0]) >= 1


def test_a_seal_that_cannot_trim_its_list_seals_it_all_the_same(without_memory):
    met = without_memory(
        """
stream.begin_capture("relaxed")
capture = registry.begin(stream)
stream.kernel()
alive = weakref.ref(owner := Owner())
assert arena.retain(owner, stream)
del owner
met, answer = attempt(1, capture.seal)
assert answer is None, answer
try:
    arena.retain(Owner(), stream)
except arena.CaptureError:
    pass
else:
    raise AssertionError("it was not sealed")
graph = stream.end_capture()
graph.destroy()
assert alive() is not None
capture.drop()
arena.reclaim(5)
assert alive() is None
driver.__exit__(None, None, None)
print(int(met))
"""
    )
    assert met == ["1"]


def test_a_replay_that_there_is_no_memory_to_note_says_so_and_letting_go_needs_none(without_memory):
    went = without_memory(
        """
stream.begin_capture("relaxed")
capture = registry.begin(stream)
stream.kernel()
alive = weakref.ref(owner := Owner())
assert arena.retain(owner, stream)
del owner
capture.seal()
graph = stream.end_capture()
graph.destroy()
met, answer = attempt(1, lambda: capture.note(stream.handle))
assert met and isinstance(answer, MemoryError), answer
capture.note(stream.handle)
met, answer = attempt(1, capture.drop)
assert not met and answer is None
arena.reclaim(1)
print(alive() is None, sums_up())
driver.__exit__(None, None, None)
"""
    )
    assert went == ["True", "True"]


# ---- the thread ----


def test_without_a_thread_retain_works_and_reclaim_releases():
    done = run_python(
        """
import _thread, weakref, arena
from arena.testing import simulated_driver

class Owner:
    pass

def refused(*arguments):
    raise RuntimeError("can't start new thread")

_thread.start_new_thread = refused
with simulated_driver() as cuda:
    stream = cuda.Stream()
    for _ in range(3):
        alive = weakref.ref(owner := Owner())
        with stream.capture() as capture:
            assert arena.retain(owner, stream)
        del owner
        capture.graph.destroy()
        assert alive() is not None
        assert arena.stats().dead == 1
        assert arena.reclaim() == 1
        assert alive() is None
    alive = weakref.ref(owner := Owner())
    with stream.capture() as capture:
        arena.retain(owner, stream)
    del owner
    capture.graph.destroy()
    assert alive() is not None
assert alive() is None
print(arena.stats().released)
""",
        timeout=10,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")


# ---- no driver, or not enough of one ----

INSTALLED = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
static int nothing(void) { return 0; }
#ifdef GET
int GET(const char *symbol, void **function, int version, uint64_t flags, int *found) {
    (void)version, (void)flags, (void)found;
    const char *missing = getenv("MISSING_SYMBOL");
    *function = missing && !strcmp(symbol, missing) ? NULL : (void *)nothing;
    return 0;
}
#else
int cuInit(unsigned flags) { return nothing() + (int)flags; }
#endif
"""

ASK = """
import arena
from arena._registry import driver_version
def told(call):
    try:
        return repr(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
print(told(lambda: arena.retain(object())))
print(told(lambda: arena.retain(object(), 5)))
print(told(lambda: arena.capture_id(5)))
print(told(driver_version))
print(told(arena.reclaim), arena.stats().retained)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Runs `ASK` where libcuda.so.1 is what `kind` says; what it printed."""

    def run(kind, **environment):
        folder = tmp_path_factory.mktemp("driver")
        if kind == "none":
            (folder / "libcuda.so.1").write_text("not a library")  # found before any that is one
        else:
            source = INSTALLED if kind == "old" else "#define GET cuGetProcAddress_v2\n" + INSTALLED
            compiled(folder, source, "libcuda.so.1")
        done = run_python(ASK, timeout=10, env={"LD_LIBRARY_PATH": str(folder), **environment})
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    return run


@pytest.mark.parametrize("missing", ["cuStreamGetCaptureInfo", "cuEventQuery", "cuGetErrorName"])
def test_a_driver_that_lacks_a_symbol_is_an_error_that_names_it(installed, missing):
    answers = installed("new", MISSING_SYMBOL=missing)
    for each in answers[:4]:
        assert each.startswith(f"DriverError: the CUDA driver has no {missing} at ABI version ")
    assert answers[4] == "0 0"


def test_a_driver_that_lacks_nothing_answers(installed):
    """The control: the same library without a gap."""
    assert installed("new") == ["False", "False", "None", "0", "0 0"]


def test_a_driver_that_is_too_old_is_an_error_that_says_so(installed):
    answers = installed("old")
    for each in answers[:4]:
        assert each.startswith("DriverError: the CUDA driver is too old: libcuda.so.1 has no cuGetProcAddress_v2")
    assert answers[4] == "0 0"


def test_without_a_driver_nothing_is_capturing_and_only_the_version_is_an_error(installed):
    answers = installed("none")
    assert answers[:3] == ["False", "False", "None"]
    assert answers[3].startswith("DriverError: no CUDA driver: ")
    assert "libcuda.so.1" in answers[3]
    assert answers[4] == "0 0"
