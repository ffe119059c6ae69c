"""The registry's verbs for captures whose begin and end are seen: begin, seal, hold, replayed, drop. What torch's graphs
are patched with rests on these; here they are driven by hand."""

import os
import sys
import threading
import weakref

import pytest
from conftest import run_python, stays, until

import arena
from arena._registry import begin
from arena.testing import simulated_driver


class Owner:
    """Something that owns memory."""


def managed(stream, *owners, mode="relaxed"):
    """A clean template and the capture that holds its owners."""
    stream.begin_capture(mode)
    capture = begin(stream)
    stream.kernel()
    for owner in owners:
        assert arena.retain(owner, stream)
    capture.seal()
    graph = stream.end_capture()
    return graph, capture


def test_the_executable_is_clean_and_the_capture_holds_the_owners(simulated):
    alive = weakref.ref(owner := Owner())
    stream = simulated.Stream()
    graph, capture = managed(stream, owner)
    del owner
    executable = graph.instantiate()
    capture.hold()
    assert (graph.owners, executable.owners) == (0, 0)
    graph.destroy()
    assert alive() is not None
    capture.drop()
    assert until(lambda: alive() is None)
    executable.destroy()


def test_without_the_seal_the_executable_holds_the_object(simulated):
    """The control: what every library that attaches while capturing pays for at each replay."""
    stream = simulated.Stream()
    stream.begin_capture("relaxed")
    capture = begin(stream)
    stream.kernel()
    arena.retain(Owner(), stream)
    graph = stream.end_capture()
    executable = graph.instantiate()
    assert executable.owners == 1
    executable.destroy()
    graph.destroy()
    capture.drop()


def test_a_kept_template_holds_the_owners_for_its_clones(cuda):
    alive = weakref.ref(owner := Owner())
    graph, capture = managed(cuda.Stream(), owner)
    del owner
    executable = graph.instantiate()
    capture.hold(graph.handle)
    clone = graph.clone()
    graph.destroy()
    capture.drop()
    executable.destroy()
    assert stays(lambda: alive() is not None)
    clone.destroy()
    assert until(lambda: alive() is None)


def test_each_executable_of_a_kept_template_is_clean(simulated):
    graph, capture = managed(simulated.Stream(), Owner())
    executables = []
    for _ in range(3):
        capture.seal()
        executables.append(graph.instantiate())
        capture.hold(graph.handle)
        assert graph.owners == 1
    assert [each.owners for each in executables] == [0, 0, 0]
    for each in executables:
        each.destroy()
    capture.drop()
    graph.destroy()


def test_retain_after_the_seal_and_before_the_end_is_refused(cuda):
    stream = cuda.Stream()
    stream.begin_capture("relaxed")
    capture = begin(stream)
    stream.kernel()
    arena.retain(Owner(), stream)
    capture.seal()
    before = arena.stats().retained
    with pytest.raises(arena.CaptureError, match="sealed with 1 owners"):
        arena.retain(Owner(), stream)
    assert arena.stats().retained == before
    graph = stream.end_capture()
    capture.drop()
    graph.destroy()


def test_a_second_capture_into_the_same_graph_begins_a_list_of_its_own(simulated):
    stream = simulated.Stream()
    graph = simulated.Graph()
    alive = []
    captures = []
    for _ in range(2):
        stream.begin_capture("relaxed", into=graph)
        captures.append(begin(stream))
        stream.kernel()
        owner = Owner()
        alive.append(weakref.ref(owner))
        assert arena.retain(owner, stream)
        captures[-1].seal()
        stream.end_capture()
        captures[-1].hold()
    del owner
    assert captures[0].id == captures[1].id
    captures[0].drop()
    assert until(lambda: alive[0]() is None)
    assert alive[1]() is not None
    captures[1].drop()
    assert until(lambda: alive[1]() is None)
    graph.destroy()


def test_a_capture_without_owners_leaves_no_list(cuda):
    before = arena.stats()
    graph, capture = managed(cuda.Stream())
    capture.hold()
    capture.drop()
    graph.destroy()
    assert arena.stats().lists == before.lists
    assert arena.stats().retained == before.retained


def test_inside_a_managed_capture_the_driver_is_not_asked_again(simulated):
    stream = simulated.Stream()
    stream.begin_capture("relaxed")
    capture = begin(stream)
    arena.retain(Owner(), stream)
    asked = simulated.calls("cuStreamGetCaptureInfo")
    for _ in range(10):
        arena.retain(Owner(), stream)
    assert simulated.calls("cuStreamGetCaptureInfo") == asked
    other = simulated.Stream()
    assert arena.retain(Owner(), other) is False  # another stream is asked
    assert simulated.calls("cuStreamGetCaptureInfo") == asked + 1
    capture.seal()
    graph = stream.end_capture()
    capture.drop()
    graph.destroy()


def test_a_capture_begun_here_and_ended_in_another_thread_leaves_no_stale_answer(cuda):
    stream = cuda.Stream()
    stream.begin_capture("relaxed")
    capture = begin(stream)
    stream.kernel()
    arena.retain(Owner(), stream)
    graphs = []

    def end():
        with cuda.device(0):
            capture.seal()
            graphs.append(stream.end_capture())

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert arena.retain(Owner(), stream) is False
    alive = weakref.ref(owner := Owner())
    with stream.capture("relaxed") as raw:  # a raw capture on the same stream and thread
        stream.kernel()
        assert arena.retain(owner, stream)
    del owner
    capture.drop()
    graphs[0].destroy()
    assert stays(lambda: alive() is not None, 0.02)
    raw.graph.destroy()
    assert until(lambda: alive() is None)


def test_an_abandoned_capture_lets_its_owners_go(cuda):
    alive = weakref.ref(owner := Owner())
    stream = cuda.Stream()
    with pytest.raises(cuda.Error), stream.capture("relaxed"):
        capture = begin(stream)
        stream.kernel()
        arena.retain(owner, stream)
        stream.invalidate()
    del owner
    assert alive() is not None
    del capture
    assert until(lambda: alive() is None)
    with stream.capture("relaxed") as raw:
        stream.kernel()
        assert arena.retain(Owner(), stream)
    raw.graph.destroy()


@pytest.mark.parametrize("dropped", [True, False])
def test_a_managed_capture_ended_by_hand_is_to_be_dropped_before_a_raw_one_begins_there(cuda, dropped):
    """A limit: the driver is not asked inside a managed capture, and nobody saw this one end."""
    early, late = Owner(), Owner()
    stream = cuda.Stream()
    stream.begin_capture("relaxed")
    capture = begin(stream)
    stream.kernel()
    arena.retain(early, stream)
    stream.end_capture().destroy()  # behind the back of whoever holds `capture`
    if dropped:
        capture.drop()
    alive = weakref.ref(late)
    with stream.capture("relaxed") as raw:
        stream.kernel()
        assert arena.retain(late, stream)
    del late
    assert stays(lambda: alive() is not None, 0.02)
    raw.graph.destroy()
    if not dropped:
        assert stays(lambda: alive() is not None, 0.02)  # it went to the capture that was begun before
        capture.drop()
    assert until(lambda: alive() is None)


# ---- conditional bodies ----


def begin_body(cuda, graph):
    """A body of the graph under capture, captured on a stream of its own."""
    body, stream = graph.add_conditional(), cuda.Stream()
    stream.begin_capture("relaxed", into=body)
    stream.kernel()
    return stream


@pytest.mark.parametrize("joined", [True, False])
def test_a_body_that_joins_the_capture_around_it_hands_over_its_owners(simulated, joined):
    """And the control: a raw body, which is exact, but held by the executable."""
    owners = [Owner(), Owner()]
    alive = [weakref.ref(each) for each in owners]
    stream, graph = simulated.Stream(), simulated.Graph()
    stream.begin_capture("relaxed", into=graph)
    capture = begin(stream)
    stream.kernel()
    inside = begin_body(simulated, graph)
    if joined:
        body = begin(inside)
    assert arena.retain(owners[0], inside)
    if joined:
        body.join(capture)
        body.drop()
    inside.end_capture()
    inside.destroy()
    assert arena.retain(owners[1], stream)
    owners.clear()
    capture.seal()
    stream.end_capture()
    executable = graph.instantiate()
    capture.hold()
    graph.destroy()
    assert executable.owners == (not joined)
    capture.drop()
    assert until(lambda: alive[1]() is None)
    assert (alive[0]() is None) == joined
    executable.destroy()
    assert until(lambda: alive[0]() is None)


def test_a_body_of_a_captured_graph_is_exact_on_every_driver(cuda):
    """Its owner goes with the parent's executable, not with the body's capture."""
    alive = weakref.ref(owner := Owner())
    graph = cuda.Graph()
    inside = cuda.Stream()
    with inside.capture("relaxed", into=graph.add_conditional()):
        inside.kernel()
        assert arena.retain(owner, inside)
    del owner
    executable = graph.instantiate()
    assert stays(lambda: alive() is not None, 0.02)
    graph.destroy()
    assert stays(lambda: alive() is not None, 0.02)
    executable.destroy()
    assert until(lambda: alive() is None)


def test_a_body_does_not_join_itself_nor_a_capture_that_has_ended(simulated):
    alive = weakref.ref(owner := Owner())
    stream, graph = simulated.Stream(), simulated.Graph()
    stream.begin_capture("relaxed", into=graph)
    capture = begin(stream)
    inside = begin_body(simulated, graph)
    body = begin(inside)
    arena.retain(owner, inside)
    del owner
    with pytest.raises(ValueError, match="not a body of itself"):
        body.join(body)
    capture.seal()
    stream.end_capture()
    with pytest.raises(arena.CaptureError, match="ended before its conditional body"):
        body.join(capture)
    body.drop()
    inside.end_capture()
    assert stays(lambda: alive() is not None, 0.02)  # the body's graph holds it
    graph.destroy()
    capture.drop()
    assert until(lambda: alive() is None)


# ---- memory ----


def test_a_clean_graph_keeps_less_than_a_kilobyte_beside_its_owners():
    """Python's objects included. The control: what 100 more owners cost is seen, and is their entries."""
    run = run_python(
        """
import arena
from arena._registry import begin
from arena.testing import simulated_driver
from heap import heap_bytes

owner = object()

def per_graph(owners, count=600):
    kept = [None] * (count + 100)
    for number in range(count + 100):
        stream.begin_capture("relaxed")
        capture = begin(stream)
        for _ in range(owners):
            arena.retain(owner, stream)
        capture.seal()
        stream.end_capture().destroy()
        capture.hold()
        capture.note(stream.handle)
        if number == 100:
            before = heap_bytes()
        kept[number] = capture
    taken = heap_bytes() - before
    for each in kept:
        each.drop()
    arena.reclaim(5)
    return taken / count

with simulated_driver() as cuda:
    stream = cuda.Stream()
    per_graph(1)
    print(per_graph(1) - 16, per_graph(101) - 16)
""",
        timeout=60,
        env={"PYTHONMALLOC": "malloc"},
    )
    assert run.returncode == 0, run.stderr
    one, more = map(float, run.stdout.split())
    if "san" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the sanitizer has malloc for itself")
    print(f"{one:.0f} bytes a graph beside its owner")
    assert 100 < one < 1024
    assert 100 * 15 < more - one <= 100 * 24  # 16 each, but for what the registry itself happens to let go


def test_begin_needs_a_capture(cuda):
    with pytest.raises(arena.CaptureError, match="is not capturing"):
        begin(cuda.Stream())


def test_a_worker_without_a_scope_reaches_the_scope_of_the_thread_that_began(cuda):
    stream = cuda.Stream()
    stream.begin_capture("relaxed")

    def work(label, own):
        with cuda.device(0):
            if own:
                with arena.collect() as inner:
                    arena.retain(label, stream)
                assert inner == [label]
            else:
                arena.retain(label, stream)

    with arena.collect() as owners:
        capture = begin(stream)
        stream.kernel()
        for label, own in (("plain", False), ("own", True)):
            thread = threading.Thread(target=work, args=(label, own))
            thread.start()
            thread.join()
        arena.retain("here", stream)
        capture.seal()
    assert owners == ["plain", "here"]
    graph = stream.end_capture()
    capture.drop()
    graph.destroy()


# ---- fences ----


def test_dropped_in_flight_the_owners_stay_until_the_replay_has_ended(cuda):
    alive = weakref.ref(owner := Owner())
    stream = cuda.Stream()
    graph, capture = managed(stream, owner)
    del owner
    executable = graph.instantiate()
    capture.hold()
    gate = cuda.Event()
    executable.launch(stream, until=gate)
    capture.note(stream.handle)
    capture.drop()
    executable.destroy()
    graph.destroy()
    assert stays(lambda: alive() is not None)
    gate.set()
    stream.synchronize()
    assert until(lambda: alive() is None)


def test_without_the_fence_they_would_go_during_the_replay(cuda):
    alive = weakref.ref(owner := Owner())
    stream = cuda.Stream()
    graph, capture = managed(stream, owner)
    del owner
    executable = graph.instantiate()
    capture.hold()
    gate = cuda.Event()
    executable.launch(stream, until=gate)
    capture.drop()  # not told of the replay
    assert until(lambda: alive() is None)
    gate.set()
    stream.synchronize()
    executable.destroy()
    graph.destroy()


def test_every_stream_that_replayed_is_waited_for(cuda):
    alive = weakref.ref(owner := Owner())
    streams = [cuda.Stream() for _ in range(3)]
    gates = [cuda.Event() for _ in range(3)]
    graph, capture = managed(streams[0], owner)
    del owner
    # Launches of one executable follow each other: one executable a stream.
    executables = [graph.instantiate() for _ in streams]
    capture.hold()
    for executable, stream, gate in zip(executables, streams, gates, strict=True):
        executable.launch(stream, until=gate)
        capture.note(stream.handle)
    capture.drop()
    for gate in gates:
        assert stays(lambda: alive() is not None, 0.02)
        gate.set()
    assert until(lambda: alive() is None)
    for executable in executables:
        executable.destroy()
    graph.destroy()


def test_a_fence_on_a_stream_that_is_capturing_breaks_nothing_and_is_made_later(cuda):
    """An event recorded there would be swallowed, and its query would invalidate the capture."""
    alive = weakref.ref(owner := Owner())
    stream = cuda.Stream()
    graph, capture = managed(stream, owner)
    del owner
    executable = graph.instantiate()
    capture.hold()
    executable.launch(stream)
    stream.synchronize()
    capture.note(stream.handle)
    with stream.capture("global") as other:
        stream.kernel()
        capture.drop()
        arena.reclaim(0.05)
        assert alive() is not None
    other.graph.destroy()
    assert until(lambda: alive() is None)
    executable.destroy()
    graph.destroy()


def test_fences_are_polled_in_relaxed_mode_beside_somebodys_capture(cuda):
    alive = weakref.ref(owner := Owner())
    stream, other = cuda.Stream(), cuda.Stream()
    graph, capture = managed(stream, owner)
    del owner
    executable = graph.instantiate()
    capture.hold()
    executable.launch(stream)
    capture.note(stream.handle)
    with other.capture("global") as beside:
        other.kernel()
        capture.drop()
        assert until(lambda: alive() is None)
    beside.graph.destroy()
    executable.destroy()
    graph.destroy()


def test_a_simulated_driver_that_ends_takes_along_what_captures_still_hold():
    """Else one failing test of a library would fail all that come after it."""
    with simulated_driver() as cuda:
        stream = cuda.Stream()
        alive = weakref.ref(owner := Owner())
        graph, sealed = managed(stream, owner)
        del owner
        stream.begin_capture("relaxed")
        opened = begin(stream)
        arena.retain(Owner(), stream)
    assert alive() is None
    with simulated_driver() as cuda:
        sealed.drop()
        opened.seal()
        opened.drop()
        stream = cuda.Stream()
        graph, capture = managed(stream, Owner())
        capture.drop()
        graph.destroy()


@pytest.mark.parametrize("symbol", ["cuUserObjectCreate", "cuGraphRetainUserObject"])
def test_a_refused_first_retain_leaves_the_capture_managed(simulated, symbol):
    alive = weakref.ref(owner := Owner())
    stream = simulated.Stream()
    stream.begin_capture("relaxed")
    with arena.collect() as owners:
        capture = begin(stream)
        simulated.fail(symbol)
        with pytest.raises(arena.DriverError, match=symbol):
            arena.retain(owner, stream)
        thread = threading.Thread(target=lambda: arena.retain("from a worker", stream))
        thread.start()
        thread.join()
        assert owners == ["from a worker"]
    assert arena.retain(owner, stream)
    del owner
    stream.kernel()
    capture.seal()
    graph = stream.end_capture()
    executable = graph.instantiate()
    capture.hold()
    assert (graph.owners, executable.owners) == (0, 0)
    assert alive() is not None
    capture.drop()
    assert until(lambda: alive() is None)
    executable.destroy()
    graph.destroy()


@pytest.mark.parametrize("code", [700, 709, 716, 719])
def test_a_fence_of_a_context_that_is_lost_for_good_passes(simulated, code):
    alive = weakref.ref(owner := Owner())
    stream = simulated.Stream()
    graph, capture = managed(stream, owner)
    del owner
    executable = graph.instantiate()
    executable.launch(stream, until=simulated.Event())  # which nobody will ever open
    capture.note(stream.handle)
    simulated.fail("cuEventQuery", code=code)
    capture.drop()
    assert until(lambda: alive() is None)


@pytest.mark.parametrize("before", ["launched before", "never launched"])
@pytest.mark.parametrize("told", ["told", "not told"])
def test_a_launch_that_a_capturing_external_stream_refused_keeps_no_owner(simulated, before, told):
    """The control, where the registry is not told: nobody can say what is behind the mark, and the owners stay."""
    alive = weakref.ref(owner := Owner())
    stream, external = simulated.Stream(), simulated.Stream()
    graph, capture = managed(stream, owner)
    del owner
    executable, gate = graph.instantiate(), simulated.Event()
    capture.hold()
    if before == "launched before":
        capture.note(external.handle, True)
        executable.launch(external, until=gate)
        capture.launched()
    external.begin_capture("relaxed")
    capture.note(external.handle, True)
    with pytest.raises(simulated.Error):
        executable.launch(external)
    capture.launched(told == "told")
    with pytest.raises(simulated.Error):
        external.end_capture()
    capture.drop()
    if before == "launched before":
        assert stays(lambda: alive() is not None)
    gate.set()
    if told == "told":
        assert until(lambda: alive() is None)
    else:
        assert stays(lambda: alive() is not None)
    external.destroy()
    executable.destroy()
    graph.destroy()


def test_a_graph_let_go_of_or_replayed_elsewhere_while_its_replay_is_noted_loses_no_event(simulated):
    """The event of an external stream is recorded without the GIL: what it is noted in may have moved or gone meanwhile."""
    switch = sys.getswitchinterval()
    streams = [simulated.Stream() for _ in range(40)]
    made, gone = -simulated.calls("cuEventCreate"), -simulated.calls("cuEventDestroy")
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(150):
            graph, capture = managed(streams[0], Owner())
            graph.destroy()
            capture.hold()
            capture.note(streams[0].handle, True)

            def elsewhere(capture=capture):
                for stream in streams[1:]:
                    capture.note(stream.handle)
                capture.drop()

            thread = threading.Thread(target=elsewhere)
            thread.start()
            while thread.is_alive():
                capture.launched()
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert until(lambda: arena.stats().owners == 0)
    made, gone = made + simulated.calls("cuEventCreate"), gone + simulated.calls("cuEventDestroy")
    assert made > 150
    assert made == gone
