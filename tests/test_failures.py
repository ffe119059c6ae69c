"""What holds when the driver refuses a call, whichever and whenever. Each refusal is named, the graph keeps what it had, what
was refused is not retained, nothing is freed too early, nothing is lost, and the next attempt works. The simulated driver fails
on demand. What holds where memory, a thread or the driver itself is not there is in test_failures_absent.py."""

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
