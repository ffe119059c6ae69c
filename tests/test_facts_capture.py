"""What the driver allows while a stream is being captured, what breaks a capture, and what events can fence.

Each test is one row of what was measured on a real driver, and runs on it and on the simulated one with the same body.
"""

import ctypes
import signal
import threading

import pytest
from conftest import refused, run_python, stays, until

MODES = ["global", "thread_local", "relaxed"]
NOT_RELAXED = ["global", "thread_local"]
ACTIVE, INVALIDATED = 1, 2


def on_another_thread(cuda, function):
    """What `function()` returned there; a driver thread needs a context of its own."""
    answers = []

    def body():
        with cuda.device(0):
            answers.append(function())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(20)
    assert answers, "the thread did not finish"
    return answers[0]


def code_of(function):
    """The status that the call ended with."""
    try:
        function()
    except RuntimeError as error:
        return error.code
    return 0


def status(cuda, stream):
    return cuda.query(stream)[1]


def instance(cuda, tag=None):
    """An executable that alone holds an object."""
    graph = cuda.Graph()
    graph.add_node()
    obj = cuda.UserObject(tag)
    graph.retain(obj, move=True)
    executable = graph.instantiate()
    graph.destroy()
    return executable, obj


# Identity


def test_every_stream_and_thread_of_a_capture_reports_the_same_id_and_graph(cuda):
    stream, side = cuda.Stream(), cuda.Stream()
    with stream.capture() as capture:
        stream.kernel()
        side.wait(stream)
        side.kernel()
        expected = (0, ACTIVE, capture.id, capture.graph.handle)
        assert cuda.query(stream) == expected
        assert cuda.query(side) == expected
        assert on_another_thread(cuda, lambda: cuda.query(side)) == expected
        assert on_another_thread(cuda, lambda: cuda.query(stream)) == expected
        stream.wait(side)
    assert cuda.query(side) == cuda.query(stream) == (0, 0, 0, 0)


def test_stream_that_takes_no_part_in_a_capture_is_not_capturing(cuda):
    stream, other = cuda.Stream(), cuda.Stream()
    with stream.capture():
        assert cuda.query(other) == (0, 0, 0, 0)


@pytest.mark.parametrize("mode", MODES)
def test_graph_seen_during_capture_is_the_one_that_end_returns(cuda, mode):
    stream = cuda.Stream()
    stream.begin_capture(mode)
    stream.kernel()
    _, _, _, handle = cuda.query(stream)
    assert stream.end_capture().handle == handle


def test_capture_ids_are_never_recycled_and_graph_handles_are(cuda):
    stream = cuda.Stream()
    ids, handles = set(), set()
    for _ in range(200):
        with stream.capture() as capture:
            stream.kernel()
        ids.add(capture.id)
        handles.add(capture.graph.handle)
        capture.graph.destroy()
    assert len(ids) == 200
    assert len(handles) < 200


def test_two_captures_into_one_graph_share_its_id(cuda):
    graph, stream, other = cuda.Graph(), cuda.Stream(), cuda.Stream()
    with stream.capture(into=graph) as first:
        stream.kernel()
    with other.capture(into=graph) as second:
        other.kernel()
    assert first.id == second.id
    assert first.graph.handle == second.graph.handle == graph.handle


def test_captures_into_different_graphs_have_different_ids(cuda):
    stream = cuda.Stream()
    with stream.capture(into=cuda.Graph()) as first:
        stream.kernel()
    with stream.capture(into=cuda.Graph()) as second:
        stream.kernel()
    assert first.id != second.id


def test_relaxed_capture_may_end_in_another_thread(cuda):
    stream = cuda.Stream()
    stream.begin_capture("relaxed")
    stream.kernel()
    _, _, _, handle = cuda.query(stream)
    assert on_another_thread(cuda, lambda: stream.end_capture().handle) == handle


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("thread", ["same", "another"])
def test_objects_may_be_made_and_retained_in_every_mode_on_any_thread(cuda, mode, thread):
    stream = cuda.Stream()
    with stream.capture(mode) as capture:
        stream.kernel()

        def retain():
            obj = cuda.UserObject("a")
            capture.graph.retain(obj, move=True)
            return obj

        obj = retain() if thread == "same" else on_another_thread(cuda, retain)
        assert status(cuda, stream) == ACTIVE
    executable = capture.graph.instantiate()
    capture.graph.destroy()
    assert stays(lambda: not obj.destroyed)
    executable.destroy()
    assert until(lambda: obj.destroyed)


# Streams that are not capturing, for three reasons (the third, a forked child, is with the other facts about processes)


def test_query_of_the_legacy_stream_during_a_capture_is_status_906_and_breaks_nothing(cuda):
    stream = cuda.Stream(blocking=True)
    with stream.capture() as capture:
        stream.kernel()
        assert cuda.query(cuda.legacy)[0] == 906
        assert cuda.query(stream) == (0, ACTIVE, capture.id, capture.graph.handle)


def test_query_of_the_legacy_stream_without_a_context_is_status_201(cuda):
    with cuda.no_context():
        assert cuda.query(cuda.legacy)[0] == 201


# During a capture. `Other` is what exists beside it; a call is a function from that to the status it ended with.


class Other:
    """What a call made during the capture of `stream` is about."""

    def __init__(self, cuda, stream):
        self.cuda = cuda
        self.captured = stream
        self.stream = cuda.Stream()
        self.fence = cuda.Event()
        self.fence.record(self.stream)
        self.graph, self.source = (cuda.Graph() for _ in range(2))
        self.graph.add_node()
        self.source.add_node()
        self.spare = cuda.Graph()
        self.executable = self.graph.instantiate()
        self.obj = cuda.UserObject("other")
        assert until(self.fence.query)

    def retain_and_release(self):
        self.graph.retain(self.obj)
        self.graph.release(self.obj)

    def make_and_drop_object(self):
        obj = self.cuda.UserObject("dropped")
        obj.retain()
        obj.release(2)


UNSAFE = {
    "cuGraphExecDestroy": lambda o: code_of(o.executable.destroy),
    "cuGraphInstantiate": lambda o: code_of(o.graph.instantiate),
    "cuEventQuery": lambda o: code_of(o.fence.query),
    "cuEventSynchronize": lambda o: code_of(o.fence.synchronize),
    "cuStreamQuery": lambda o: o.cuda.call("cuStreamQuery", o.stream),
    "cuStreamSynchronize": lambda o: o.cuda.call("cuStreamSynchronize", o.stream),
    "cuMemAlloc": lambda o: o.cuda.call("cuMemAlloc"),
    "cuMemFree": lambda o: o.cuda.call("cuMemFree"),
}
FORBIDDEN = {
    "cuCtxSynchronize": lambda o: o.cuda.call("cuCtxSynchronize"),
    "cuCtxRecordEvent": lambda o: o.cuda.call("cuCtxRecordEvent"),
    "cuStreamGetId": lambda o: o.cuda.call("cuStreamGetId", o.captured),
    "cuStreamGetFlags": lambda o: o.cuda.call("cuStreamGetFlags", o.captured),
    "cuStreamGetDevice": lambda o: o.cuda.call("cuStreamGetDevice", o.captured),
}
SAFE = {
    "cuGraphDestroy": lambda o: code_of(o.spare.destroy),
    "cuGraphCreate": lambda o: o.cuda.call("cuGraphCreate"),
    "cuUserObjectCreate": lambda o: o.cuda.call("cuUserObjectCreate"),
    "cuUserObjectRetain": lambda o: code_of(o.make_and_drop_object),
    "cuGraphRetainUserObject": lambda o: code_of(o.retain_and_release),
    "cuEventCreate": lambda o: o.cuda.call("cuEventCreate"),
    "cuEventDestroy": lambda o: code_of(o.fence.destroy),
    "cuEventRecord": lambda o: code_of(lambda: o.fence.record(o.stream)),
    "cuLaunchHostFunc": lambda o: o.cuda.call("cuLaunchHostFunc", o.stream),
    "cuGraphLaunch": lambda o: code_of(lambda: o.executable.launch(o.stream)),
    "cuGraphExecUpdate": lambda o: code_of(lambda: o.executable.update(o.source)),
    "cuStreamCreate": lambda o: o.cuda.call("cuStreamCreate"),
    "cuStreamGetCtx": lambda o: o.cuda.call("cuStreamGetCtx", o.captured),
    "cuStreamGetPriority": lambda o: o.cuda.call("cuStreamGetPriority", o.captured),
}


def during_a_capture(cuda, call, mode, thread="same"):
    """Makes the call in that thread mode during a global-mode capture: its status, and the capture's after it."""
    stream = cuda.Stream()
    other = Other(cuda, stream)

    def in_mode():
        with cuda.thread_mode(mode):
            return call(other)

    stream.begin_capture("global")
    stream.kernel()
    code = in_mode() if thread == "same" else on_another_thread(cuda, in_mode)
    after = status(cuda, stream)
    assert code_of(stream.end_capture) == (901 if after == INVALIDATED else 0)
    return code, after


@pytest.mark.parametrize("call", UNSAFE)
@pytest.mark.parametrize(
    ("mode", "thread"), [("global", "same"), ("thread_local", "same"), ("global", "another")], ids="-".join
)
def test_unsafe_call_breaks_a_global_mode_capture(cuda, call, mode, thread):
    code, after = during_a_capture(cuda, UNSAFE[call], mode, thread)
    assert (code, after) == (900, INVALIDATED)


@pytest.mark.parametrize("call", UNSAFE)
@pytest.mark.parametrize("thread", ["same", "another"])
def test_unsafe_call_in_relaxed_mode_is_fine(cuda, call, thread):
    assert during_a_capture(cuda, UNSAFE[call], "relaxed", thread) == (0, ACTIVE)


@pytest.mark.parametrize("call", FORBIDDEN)
@pytest.mark.parametrize("mode", MODES)
def test_forbidden_call_breaks_a_capture_in_every_mode(cuda, call, mode):
    code, after = during_a_capture(cuda, FORBIDDEN[call], mode)
    assert code != 0
    assert after == INVALIDATED


@pytest.mark.parametrize("call", SAFE)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("thread", ["same", "another"])
def test_safe_call_is_fine_in_every_mode(cuda, call, mode, thread):
    assert during_a_capture(cuda, SAFE[call], mode, thread) == (0, ACTIVE)


@pytest.mark.parametrize("mode", MODES)
def test_event_recorded_on_a_capturing_stream_breaks_the_capture_when_it_is_queried(cuda, mode):
    stream, event = cuda.Stream(), cuda.Event()
    with refused(901), stream.capture():
        stream.kernel()
        with cuda.thread_mode(mode):
            event.record(stream)
            assert status(cuda, stream) == ACTIVE
            assert code_of(event.query) == 907
        assert status(cuda, stream) == INVALIDATED


@pytest.mark.parametrize("mode", MODES)
def test_event_recorded_on_the_null_stream_breaks_the_capture_of_a_blocking_stream(cuda, mode):
    stream, event = cuda.Stream(blocking=True), cuda.Event()
    with refused(901), stream.capture():
        stream.kernel()
        with cuda.thread_mode(mode):
            assert code_of(lambda: event.record(cuda.legacy)) == 906
        assert status(cuda, stream) == INVALIDATED


def test_refused_destroy_of_an_executable_keeps_its_objects(cuda):
    stream = cuda.Stream()
    executable, obj = instance(cuda, "a")
    with refused(901), stream.capture():
        assert code_of(executable.destroy) == 900
    assert stays(lambda: not obj.destroyed)
    executable.destroy()
    assert until(lambda: obj.destroyed)


def test_destroy_of_an_executable_in_relaxed_mode_drops_its_objects_during_a_capture(cuda):
    stream = cuda.Stream()
    executable, obj = instance(cuda, "a")
    with stream.capture():
        stream.kernel()
        with cuda.thread_mode("relaxed"):
            executable.destroy()
        assert until(lambda: obj.destroyed)
        assert status(cuda, stream) == ACTIVE


@pytest.mark.parametrize(("mode", "outcome"), [("global", "broken"), ("relaxed", "fine")])
def test_reset_of_a_torch_graph_breaks_another_capture_unless_relaxed(real, mode, outcome):
    pytest.importorskip("torch")
    code = f"""
import os, torch
from real_driver import open_driver
opened = open_driver("real")
cuda = opened.__enter__()
data = torch.zeros(8, device="cuda")
victim, other = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
with torch.cuda.graph(other):
    data.add_(1)
outcome = "fine"
try:
    with torch.cuda.graph(victim):
        data.add_(1)
        with cuda.thread_mode({mode!r}):
            other.reset()
        data.add_(1)
except RuntimeError:
    outcome = "broken"
print(outcome, flush=True)
os._exit(0)
"""
    done = run_python(code, timeout=60)
    assert done.stdout.split() == [outcome], done.stderr


# Streams as fences


@pytest.mark.parametrize("call", ["event.record(stream)", "stream.query()", "cuda.query(stream)"])
def test_use_of_a_destroyed_stream_is_a_segmentation_fault(real, call):
    code = f"""
import resource
from real_driver import open_driver
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
opened = open_driver("real")
cuda = opened.__enter__()
stream, event = cuda.Stream(), cuda.Event()
stream.synchronize()
stream.destroy()
print("destroyed", flush=True)
{call}
print("survived", flush=True)
"""
    done = run_python(code, timeout=60)
    assert done.stdout.split() == ["destroyed"], done.stderr
    assert done.returncode == -signal.SIGSEGV


def test_use_of_a_destroyed_stream_is_caught_by_the_simulator(simulated):
    stream, event = simulated.Stream(), simulated.Event()
    stream.destroy()
    for call in (lambda: event.record(stream), stream.query, stream.kernel, stream.begin_capture, stream.destroy):
        assert code_of(call) == 400
    assert simulated.query(stream) == (400, 0, 0, 0)


def recycled(cuda):
    """A destroyed stream, and a new one that got its handle."""
    destroyed = {}
    for _ in range(16):
        stream = cuda.Stream()
        destroyed[stream.handle] = stream
    for stream in destroyed.values():
        stream.destroy()
    for _ in range(200):
        stream = cuda.Stream()
        if stream.handle in destroyed:
            return destroyed[stream.handle], stream
    pytest.fail("no new stream got the handle of a destroyed one")


def test_handle_of_a_destroyed_stream_is_recycled(cuda):
    assert recycled(cuda)[1].query()


def test_recycled_stream_handle_answers_for_someone_elses_work(real):
    executable, _ = instance(real)
    (old, new), gate = recycled(real), real.Event()
    assert old.query()
    executable.launch(new, until=gate)
    assert not old.query()
    gate.set()
    assert until(old.query)
    executable.destroy()


def test_event_of_one_context_on_another_contexts_stream_is_status_400(cuda):
    event = cuda.Event()
    stream = cuda.Stream(device=1)
    assert code_of(lambda: event.record(stream)) == 400


def test_fence_recorded_before_a_capture_may_be_queried_during_it_in_relaxed_mode(cuda):
    stream, replayed, fence, gate = cuda.Stream(), cuda.Stream(), cuda.Event(), cuda.Event()
    executable, _ = instance(cuda)
    executable.launch(replayed, until=gate)
    fence.record(replayed)
    with stream.capture():
        stream.kernel()
        with cuda.thread_mode("relaxed"):
            assert not fence.query()
            gate.set()
            assert until(fence.query)
        assert status(cuda, stream) == ACTIVE
    executable.destroy()


def test_launch_into_a_capturing_stream_is_status_900(cuda):
    stream = cuda.Stream()
    executable, _ = instance(cuda)
    stream.begin_capture()
    stream.kernel()
    assert code_of(lambda: executable.launch(stream)) == 900
    code_of(stream.end_capture)  # whether the capture survives is not promised
    executable.destroy()


# Memory that grows in place


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class AllocationProperties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class Range:
    """Reserved addresses, backed by device memory from the start up to `size`."""

    def __init__(self, chunks):
        from real_driver import P, do

        self.do, self.size, self.handles = do, 0, []
        self.properties = AllocationProperties(type=1, location=Location(1, 0))
        chunk = ctypes.c_size_t()
        do("cuMemGetAllocationGranularity", ctypes.byref(chunk), ctypes.byref(self.properties), 0)
        self.chunk, self.reserved = chunk.value, chunk.value * chunks
        start = P()
        do("cuMemAddressReserve", ctypes.byref(start), self.reserved, 0, None, 0)
        self.start = start.value

    def grow(self):
        handle, at = ctypes.c_ulonglong(), self.start + self.size
        access = Access(Location(1, 0), 3)
        self.do("cuMemCreate", ctypes.byref(handle), self.chunk, ctypes.byref(self.properties), 0)
        self.do("cuMemMap", at, self.chunk, 0, handle, 0)
        self.do("cuMemSetAccess", at, self.chunk, ctypes.byref(access), 1)
        self.handles.append(handle)
        self.size += self.chunk

    def free(self):
        self.do("cuMemUnmap", self.start, self.size)
        for handle in self.handles:
            self.do("cuMemRelease", handle)
        self.do("cuMemAddressFree", self.start, self.reserved)


@pytest.mark.parametrize("mode", NOT_RELAXED)
def test_mapped_memory_may_grow_during_a_capture_and_captured_pointers_stay_valid(real, mode):
    memory, stream = Range(4), real.Stream()
    memory.grow()
    with stream.capture(mode) as capture:
        memory.do("cuMemsetD8Async", memory.start, 7, 1, stream.handle)
        memory.grow()
        assert status(real, stream) == ACTIVE
        memory.do("cuMemsetD8Async", memory.start + memory.size - 1, 9, 1, stream.handle)
    memory.grow()
    executable = capture.graph.instantiate()
    executable.launch(stream)
    stream.synchronize()
    for at, expected in ((memory.start, 7), (memory.start + 2 * memory.chunk - 1, 9)):
        value = ctypes.c_ubyte()
        memory.do("cuMemcpyDtoH_v2", ctypes.byref(value), at, 1)
        assert value.value == expected
    executable.destroy()
    memory.free()
