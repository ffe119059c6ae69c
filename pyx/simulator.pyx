"""The Python face of the simulated driver: CUDA's nouns as classes, and the switches that a test turns.

It owns no state but which Python object stands for which slot; the driver itself is in simulator_*.c. Any thread may
call. The GIL is released around calls that may wait, end captures, or destroy something; a release of a user object
keeps it, so that tests meet both. arena/testing.py opens and closes the driver, and documents it.
"""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

from arena._audit cimport use_nodes
from arena._registry cimport use_driver
from driver cimport (
    CU_GRAPH_USER_OBJECT_MOVE,
    CU_USER_OBJECT_NO_DESTRUCTOR_SYNC,
    CUDA_ERROR_NOT_READY,
    CUDA_SUCCESS,
    CUevent,
    CUgraph,
    CUresult,
    CUstream,
    CUstreamCaptureMode,
    CUstreamCaptureStatus,
    CUuserObject,
    driver_table,
)

import cython
from array import array
from collections import namedtuple


cdef extern from "simulator.h" nogil:
    enum:
        CUDA_ERROR_INVALID_VALUE
        CUDA_ERROR_INVALID_HANDLE

    ctypedef void *CUgraphExec

    ctypedef struct sim_record:
        int64_t number
        int thread_id
        int on_driver

    ctypedef struct node_table:
        pass

    enum:
        CU_GRAPH_NODE_TYPE_KERNEL
        CU_GRAPH_NODE_TYPE_MEMCPY
        CU_GRAPH_NODE_TYPE_MEMSET

    ctypedef struct sim_node:
        int type
        const char *name
        uint32_t count
        const uint32_t *sizes
        const unsigned char *values
        uint64_t to
        uint64_t from_ "from"
        uint64_t length
        int to_host
        int from_host
        int packed

    int sim_open()
    void sim_finish()
    void sim_close()
    const driver_table *sim_table()
    const node_table *sim_node_table()

    const char *sim_error_name(CUresult code)
    int sim_symbol(const char *name)
    const char *sim_symbol_name(int symbol)
    int sim_fail(int symbol, uint64_t nth, CUresult code)
    uint64_t sim_calls(int symbol)
    int64_t sim_records(int64_t first, int64_t count, sim_record *records)
    uint32_t sim_generation(const void *handle)
    bint sim_lives(const void *handle, uint32_t generation)

    CUresult sim_device(int *device)
    CUresult sim_push_device(int device)
    CUresult sim_pop_device()
    CUresult sim_reset_context()
    CUresult sim_call(const char *name, CUstream stream, int again)

    CUresult sim_stream_create(CUstream *stream, int blocking, int device)
    CUresult sim_stream_destroy(CUstream stream)
    CUresult sim_stream_enter(CUstream stream, int device)
    CUresult sim_stream_leave()
    CUresult sim_stream_kernel(CUstream stream, const sim_node *what)
    CUresult sim_stream_wait_stream(CUstream stream, CUstream other)
    CUresult sim_stream_wait_event(CUstream stream, CUevent event)
    CUresult sim_stream_query(CUstream stream)
    CUresult sim_stream_synchronize(CUstream stream, int again)
    CUresult sim_capture_begin(
        CUstream stream, CUstreamCaptureMode mode, CUgraph into, uint64_t *id, CUgraph *graph)
    CUresult sim_capture_end(CUstream stream, CUgraph *graph)
    CUresult sim_capture_invalidate(CUstream stream)

    CUresult sim_event_set(CUevent event)
    CUresult sim_event_synchronize(CUevent event, int again)

    void sim_destructor(void *unused)
    CUresult sim_object_number(CUuserObject obj, int64_t number)
    CUresult sim_object_retain(CUuserObject obj, unsigned int count)
    CUresult sim_graph_create(CUgraph *graph)
    CUresult sim_graph_destroy(CUgraph graph)
    CUresult sim_graph_clone(CUgraph *clone, CUgraph graph)
    CUresult sim_graph_add_node(CUgraph graph, const sim_node *what)
    CUresult sim_graph_add_child(CUgraph graph, CUgraph child)
    CUresult sim_graph_add_conditional(CUgraph graph, CUgraph *body)
    CUresult sim_graph_owners(CUgraph graph, int64_t *owners)
    CUresult sim_graph_instantiate(CUgraphExec *exec, CUgraph graph)
    CUresult sim_exec_launch(CUgraphExec exec, CUstream stream, int64_t nanoseconds, CUevent until)
    CUresult sim_exec_update(CUgraphExec exec, CUgraph graph)
    CUresult sim_exec_destroy(CUgraphExec exec)
    CUresult sim_exec_owners(CUgraphExec exec, int64_t *owners)
    CUresult sim_memory_plant(uint64_t size, int host, uint64_t *address)
    CUresult sim_memory_free(uint64_t address)


# ---- errors ----


class Error(RuntimeError):
    """A driver call that did not succeed; `code` is the CUresult."""

    def __init__(self, call, code):
        super().__init__(call, code)

    @property
    def code(self):
        return self.args[1]

    def __str__(self):
        cdef const char *name = sim_error_name(self.args[1])
        return f"{self.args[0]} failed: {self.args[1]} ({name.decode() if name != NULL else 'no known CUresult'})"


Destructor = namedtuple("Destructor", ("tag", "thread", "thread_id"), module="arena.testing")
Destructor.__doc__ = """One user object's destructor that ran.

tag: what `UserObject(tag)` was given; None for objects that the code under test made itself.
thread: "caller", inside a call made by one of the program's threads; or "driver", on a thread of the driver.
thread_id: the operating system's thread id (`threading.get_native_id()`).
"""


cdef int check(str call, CUresult result) except -1:
    if result != CUDA_SUCCESS:
        raise Error(call, result)
    return 0


# Where a destroyed object's slot may be someone else's already: its own object must not reach that.
cdef int check_lives(str call, const void *handle, uint32_t generation) except -1:
    return check(call, CUDA_SUCCESS if sim_lives(handle, generation) else CUDA_ERROR_INVALID_HANDLE)


cdef dict MODES = {"global": 0, "thread_local": 1, "relaxed": 2}


cdef int mode_number(str mode) except -1:
    if mode not in MODES:
        raise ValueError(f"the capture mode is {mode!r}, but has to be one of {', '.join(MODES)}")
    return MODES[mode]


# ---- what a node does ----


@cython.final
cdef class Work:
    """What a kernel, copy or fill node says when it is read; alive for as long as the call that takes it."""

    cdef sim_node what
    cdef bytes name
    cdef bytes sizes
    cdef bytes values


cdef Work kernel_work(str name, tuple parameters):
    cdef Work work = Work.__new__(Work)
    sizes, values = array("I"), bytearray()
    for each in parameters:
        value = each.to_bytes(8, "little") if isinstance(each, int) else bytes(each)
        sizes.append(len(value))
        values += value
    work.name, work.sizes, work.values = name.encode(), sizes.tobytes(), bytes(values)
    work.what.type = CU_GRAPH_NODE_TYPE_KERNEL
    work.what.name = work.name
    work.what.count = len(parameters)
    work.what.sizes = <const uint32_t *><const char *>work.sizes
    work.what.values = <const unsigned char *><const char *>work.values
    return work


cdef Work copy_work(int type, uint64_t to, uint64_t source, uint64_t length, bint to_host, bint from_host):
    cdef Work work = Work.__new__(Work)
    work.what.type = type
    work.what.to, work.what.from_, work.what.length = to, source, length
    work.what.to_host, work.what.from_host = to_host, from_host
    return work


# ---- objects, graphs, executables ----


@cython.final
cdef class UserObject:
    """A CUuserObject with one reference, whose destructor is noted in `Driver.destructors`."""

    cdef CUuserObject _handle
    cdef uint32_t _generation
    cdef int _fate  # after the driver was closed: 1 destroyed, 0 not; -1 before
    cdef readonly object tag

    def __cinit__(self):
        self._handle = NULL
        self._fate = -1

    def __init__(self):
        raise TypeError("use Driver.UserObject()")

    @property
    def handle(self):
        return <uintptr_t>self._handle

    @property
    def destroyed(self):
        """Whether its destructor has run."""
        return self._fate == 1 if self._fate >= 0 else not sim_lives(self._handle, self._generation)

    def retain(self, unsigned int count=1):
        """cuUserObjectRetain: `count` more references for the program."""
        cdef bint lives = sim_lives(self._handle, self._generation)
        check("cuUserObjectRetain", sim_object_retain(self._handle, count) if lives else CUDA_ERROR_INVALID_VALUE)

    def release(self, unsigned int count=1):
        """cuUserObjectRelease: gives back references of the program.

        Raises:
            Error: 1, and nothing has changed, if the program has fewer than `count`.
        """
        cdef bint lives = sim_lives(self._handle, self._generation)
        check("cuUserObjectRelease",
              sim_table().cuUserObjectRelease(self._handle, count) if lives else CUDA_ERROR_INVALID_VALUE)


@cython.final
cdef class Graph:
    """A template (CUgraph). Handles are recycled after `destroy()`."""

    cdef CUgraph _handle
    cdef uint32_t _generation

    def __cinit__(self):
        self._handle = NULL

    def __init__(self):
        raise TypeError("use Driver.Graph(), or capture one")

    @property
    def handle(self):
        return <uintptr_t>self._handle

    @property
    def owners(self):
        """How many different user objects this graph itself holds."""
        cdef int64_t owners = 0
        check_lives("owners", self._handle, self._generation)
        check("owners", sim_graph_owners(self._handle, &owners))
        return owners

    def add_node(self, str name="kernel", *parameters):
        """Adds one kernel node; what it says of itself as for `Stream.kernel`."""
        cdef Work work = kernel_work(name, parameters)
        check_lives("cuGraphAddKernelNode", self._handle, self._generation)
        check("cuGraphAddKernelNode", sim_graph_add_node(self._handle, &work.what))

    def add_child(self, Graph child not None):
        """Adds a child-graph node: a clone of `child`, with references of its own to what that holds."""
        check_lives("cuGraphAddChildGraphNode", self._handle, self._generation)
        check_lives("cuGraphAddChildGraphNode", child._handle, child._generation)
        check("cuGraphAddChildGraphNode", sim_graph_add_child(self._handle, child._handle))

    def add_conditional(self):
        """Adds a conditional node and returns its body, to be filled by `Stream.capture(into=body)`.

        The body goes with this graph; `destroy()` of a body raises.
        """
        cdef CUgraph body = NULL
        check_lives("cuGraphAddNode", self._handle, self._generation)
        check("cuGraphAddNode", sim_graph_add_conditional(self._handle, &body))
        return graph_of(body)

    def clone(self):
        """cuGraphClone: a graph with references of its own to what this one holds."""
        cdef CUgraph clone = NULL
        check_lives("cuGraphClone", self._handle, self._generation)
        check("cuGraphClone", sim_graph_clone(&clone, self._handle))
        return graph_of(clone)

    def instantiate(self):
        """cuGraphInstantiate: an executable that holds what this graph, its children and its bodies hold now."""
        cdef CUgraphExec handle = NULL
        check_lives("cuGraphInstantiate", self._handle, self._generation)
        check("cuGraphInstantiate", sim_graph_instantiate(&handle, self._handle))
        cdef Exec made = Exec.__new__(Exec)
        made._handle = handle
        made._generation = sim_generation(handle)
        return made

    def retain(self, UserObject obj not None, unsigned int count=1, *, bint move=False):
        """cuGraphRetainUserObject: with `move`, the program's references become the graph's; else there are more.

        Raises:
            Error: 1, if the graph or the object is destroyed, or the program has fewer than `count` to move.
        """
        cdef bint lives = sim_lives(self._handle, self._generation) and sim_lives(obj._handle, obj._generation)
        cdef unsigned int flags = CU_GRAPH_USER_OBJECT_MOVE if move else 0
        check("cuGraphRetainUserObject",
              sim_table().cuGraphRetainUserObject(self._handle, obj._handle, count, flags)
              if lives else CUDA_ERROR_INVALID_VALUE)

    def release(self, UserObject obj not None, unsigned int count=1):
        """cuGraphReleaseUserObject.

        Raises:
            Error: 1, and nothing has changed, if the graph holds fewer than `count` references.
        """
        check_lives("cuGraphReleaseUserObject", self._handle, self._generation)
        cdef bint lives = sim_lives(obj._handle, obj._generation)
        check("cuGraphReleaseUserObject",
              sim_table().cuGraphReleaseUserObject(self._handle, obj._handle, count)
              if lives else CUDA_ERROR_INVALID_VALUE)

    def destroy(self):
        """cuGraphDestroy. What nothing else holds is destroyed by this thread before the call returns."""
        cdef CUresult result
        check_lives("cuGraphDestroy", self._handle, self._generation)
        with nogil:
            result = sim_graph_destroy(self._handle)
        check("cuGraphDestroy", result)


@cython.final
cdef class Exec:
    """An executable (CUgraphExec)."""

    cdef CUgraphExec _handle
    cdef uint32_t _generation

    def __cinit__(self):
        self._handle = NULL

    def __init__(self):
        raise TypeError("use Graph.instantiate()")

    @property
    def handle(self):
        return <uintptr_t>self._handle

    @property
    def owners(self):
        """How many different user objects this executable holds, those of children and bodies included."""
        cdef int64_t owners = 0
        check_lives("owners", self._handle, self._generation)
        check("owners", sim_exec_owners(self._handle, &owners))
        return owners

    def launch(self, Stream stream not None, *, double seconds=0.0, Event until=None):
        """cuGraphLaunch: runs behind the work that `stream` has.

        Args:
            stream: where; one that is capturing is refused with 900, and its capture is broken.
            seconds: how long the launch lasts at least.
            until: a gate: the launch lasts until it is `set()`, or destroyed.
        """
        if not 0.0 <= seconds <= 1e6:
            raise ValueError(f"a launch cannot last {seconds} seconds")
        check_lives("cuGraphLaunch", self._handle, self._generation)
        cdef CUevent gate = NULL
        if until is not None:
            check_lives("cuGraphLaunch", until._handle, until._generation)
            gate = until._handle
        check("cuGraphLaunch", sim_exec_launch(self._handle, stream._handle, <int64_t>(seconds * 1e9), gate))

    def update(self, Graph graph not None):
        """cuGraphExecUpdate: from now on it holds what `graph` holds, and launches in flight what it held.

        Raises:
            Error: 910, and it holds what it held, if the numbers of nodes differ.
        """
        check_lives("cuGraphExecUpdate", self._handle, self._generation)
        check_lives("cuGraphExecUpdate", graph._handle, graph._generation)
        check("cuGraphExecUpdate", sim_exec_update(self._handle, graph._handle))

    def destroy(self):
        """cuGraphExecDestroy. What nothing else holds is destroyed by the driver's thread, some time after the call.

        Raises:
            Error: 900, and it lives on, if the call broke a capture.
        """
        cdef CUresult result
        check_lives("cuGraphExecDestroy", self._handle, self._generation)
        with nogil:
            result = sim_exec_destroy(self._handle)
        check("cuGraphExecDestroy", result)


cdef Graph graph_of(CUgraph handle):
    cdef Graph graph = Graph.__new__(Graph)
    graph._handle = handle
    graph._generation = sim_generation(handle)
    return graph


# ---- streams, captures, events ----


@cython.final
cdef class Event:
    """A CUevent; or, never recorded but `set()` by the test, the gate of `Exec.launch(until=...)`."""

    cdef CUevent _handle
    cdef uint32_t _generation

    def __cinit__(self):
        self._handle = NULL

    def __init__(self):
        raise TypeError("use Driver.Event()")

    @property
    def handle(self):
        return <uintptr_t>self._handle

    def record(self, Stream stream not None):
        """cuEventRecord: stands for the work that `stream` has; on one that is capturing, for captured work."""
        check_lives("cuEventRecord", self._handle, self._generation)
        check("cuEventRecord", sim_table().cuEventRecord(self._handle, stream._handle))

    def query(self):
        """cuEventQuery: whether the work it stands for is done; True for an event that was never recorded."""
        check_lives("cuEventQuery", self._handle, self._generation)
        cdef CUresult result = sim_table().cuEventQuery(self._handle)
        if result != CUDA_ERROR_NOT_READY:
            check("cuEventQuery", result)
        return result == CUDA_SUCCESS

    def synchronize(self):
        """cuEventSynchronize."""
        cdef CUresult result = CUDA_ERROR_NOT_READY
        cdef int again = 0
        while result == CUDA_ERROR_NOT_READY:
            check_lives("cuEventSynchronize", self._handle, self._generation)
            with nogil:
                result = sim_event_synchronize(self._handle, again)
            again = 1
            PyErr_CheckSignals()
        check("cuEventSynchronize", result)

    def set(self):
        """Opens the gate, for good."""
        check_lives("set", self._handle, self._generation)
        check("set", sim_event_set(self._handle))

    def destroy(self):
        """cuEventDestroy."""
        check_lives("cuEventDestroy", self._handle, self._generation)
        check("cuEventDestroy", sim_table().cuEventDestroy(self._handle))


@cython.final
cdef class Capture:
    """What `Stream.capture()` yields."""

    cdef Stream _stream
    cdef int _mode
    cdef Graph _into
    cdef Graph _graph
    cdef uint64_t _id

    def __init__(self):
        raise TypeError("use Stream.capture()")

    @property
    def id(self):
        """The capture's id: the graph's, and never given out again."""
        return self._id

    @property
    def graph(self):
        """The graph under capture, and after the `with` the one captured."""
        return self._graph

    def __enter__(self):
        if self._stream is None:
            raise TypeError("use Stream.capture()")
        self._stream.begin(self._mode, self._into, &self._id)
        self._graph = self._stream._target
        try:
            self._stream.__enter__()
        except BaseException:
            self._stream.end()
            raise
        return self

    def __exit__(self, kind, error, traceback):
        if self._stream is None:
            raise TypeError("use Stream.capture()")
        # As torch does: an exception ends the capture like any other way out, and is not hidden by what that says.
        self._stream.__exit__(kind, error, traceback)
        cdef CUresult result = self._stream.end()
        if kind is None:
            check("cuStreamEndCapture", result)


@cython.final
cdef class Stream:
    """A CUstream. Entered as a context manager it is the calling thread's current stream.

    A real driver crashes on a destroyed stream; this one raises `Error` with code 400. In both a handle that was given
    out again answers for the other stream, and so does this object.
    """

    cdef CUstream _handle  # NULL: the legacy stream
    cdef Graph _target  # what the capture that was begun here captures into
    cdef tuple _protocol  # the answer of __cuda_stream__, made once
    cdef readonly int device

    def __cinit__(self):
        self._handle = NULL

    def __init__(self):
        raise TypeError("use Driver.Stream()")

    @property
    def handle(self):
        return <uintptr_t>self._handle

    def __cuda_stream__(self):
        """The stream protocol: (version, handle)."""
        if self._handle != NULL and not sim_generation(self._handle) & 1:
            raise Error("__cuda_stream__", CUDA_ERROR_INVALID_HANDLE)
        if self._protocol is None:
            self._protocol = (0, <uintptr_t>self._handle)
        return self._protocol

    def __enter__(self):
        check("with stream", sim_stream_enter(self._handle, self.device))
        return self

    def __exit__(self, kind, error, traceback):
        check("with stream", sim_stream_leave())

    cdef int begin(self, int mode, Graph into, uint64_t *id) except -1:
        cdef CUgraph target = NULL
        cdef CUgraph captured = NULL
        if into is not None:
            check_lives("cuStreamBeginCaptureToGraph", into._handle, into._generation)
            target = into._handle
        check("cuStreamBeginCapture", sim_capture_begin(self._handle, mode, target, id, &captured))
        self._target = into if into is not None else graph_of(captured)
        return 0

    # After success `_target` is the graph captured.
    cdef CUresult end(self) noexcept:
        cdef CUgraph captured = NULL
        cdef CUresult result
        with nogil:
            result = sim_capture_end(self._handle, &captured)
        return result

    def capture(self, str mode="global", *, Graph into=None):
        """Captures the body of the `with`; this stream is the current one meanwhile.

        An exception in the body ends the capture as usual, and the graph stays.

        Args:
            mode: "global", "thread_local" or "relaxed".
            into: an existing graph, or a conditional body; two captures into one graph have the same id.

        Raises:
            Error: 901 at the end, if the capture was broken; 904, if a forked stream was not joined. Either way the
                graph is destroyed, `into` too.
        """
        cdef Capture capture = Capture.__new__(Capture)
        capture._stream = self
        capture._mode = mode_number(mode)
        capture._into = into
        return capture

    def begin_capture(self, str mode="global", *, Graph into=None):
        """cuStreamBeginCapture, or cuStreamBeginCaptureToGraph; the current stream stays what it is."""
        cdef uint64_t id = 0
        self.begin(mode_number(mode), into, &id)

    def end_capture(self):
        """cuStreamEndCapture: the graph captured.

        Raises:
            Error: As `capture()` does; and 908, where it stays open, on another thread than began it, unless it is
                relaxed.
        """
        check("cuStreamEndCapture", self.end())
        cdef Graph captured = self._target
        self._target = None
        return captured

    def kernel(self, str name="kernel", *parameters, bint packed=False):
        """One unit of work: a node where the stream is capturing, else nothing that can be seen.

        Args:
            name: the kernel's, for whom an audit reads the node.
            parameters: an int for a parameter of 8 bytes, a bytes object for a struct by value.
            packed: the node tells them as one block, as a launch may give them.
        """
        if not parameters and name == "kernel":
            check("cuLaunchKernel", sim_stream_kernel(self._handle, NULL))
            return
        cdef Work work = kernel_work(name, parameters)
        work.what.packed = packed
        check("cuLaunchKernel", sim_stream_kernel(self._handle, &work.what))

    def copy(self, uint64_t to, uint64_t source, uint64_t length, *, bint to_host=False, bint from_host=False):
        """cuMemcpyAsync: a node where the stream is capturing. Nothing is copied."""
        cdef Work work = copy_work(CU_GRAPH_NODE_TYPE_MEMCPY, to, source, length, to_host, from_host)
        check("cuMemcpyAsync", sim_stream_kernel(self._handle, &work.what))

    def fill(self, uint64_t to, uint64_t length):
        """cuMemsetD8Async: a node where the stream is capturing. Nothing is filled."""
        cdef Work work = copy_work(CU_GRAPH_NODE_TYPE_MEMSET, to, 0, length, False, False)
        check("cuMemsetD8Async", sim_stream_kernel(self._handle, &work.what))

    def wait(self, other):
        """Work that comes later on this stream waits for `other`; forks or joins a capture.

        Args:
            other: a `Stream` (all the work it has) or an `Event`.
        """
        cdef Event event
        cdef Stream stream
        if isinstance(other, Event):
            event = <Event>other
            check_lives("cuStreamWaitEvent", event._handle, event._generation)
            check("cuStreamWaitEvent", sim_stream_wait_event(self._handle, event._handle))
            return
        stream = <Stream?>other
        check("cuStreamWaitEvent", sim_stream_wait_stream(self._handle, stream._handle))

    def invalidate(self):
        """Breaks the capture that this stream takes part in, as an illegal call would."""
        check("invalidate", sim_capture_invalidate(self._handle))

    def query(self):
        """cuStreamQuery: whether all its work is done."""
        cdef CUresult result = sim_stream_query(self._handle)
        if result != CUDA_ERROR_NOT_READY:
            check("cuStreamQuery", result)
        return result == CUDA_SUCCESS

    def synchronize(self):
        """cuStreamSynchronize."""
        check("cuStreamSynchronize", call_until_done("cuStreamSynchronize", self))

    def destroy(self):
        """cuStreamDestroy. Work that it has goes on."""
        cdef CUresult result
        with nogil:
            result = sim_stream_destroy(self._handle)
        check("cuStreamDestroy", result)


cdef CUresult call_until_done(str name, Stream stream) except? -1:
    cdef bytes encoded = name.encode()
    cdef const char *c_name = encoded
    cdef CUstream handle = stream._handle if stream is not None else NULL
    cdef CUresult result
    cdef int again = 0
    cdef bint waits = name in ("cuStreamSynchronize", "cuCtxSynchronize")
    while True:
        with nogil:
            result = sim_call(c_name, handle, again)
        if not waits or result != CUDA_ERROR_NOT_READY:
            return result
        again = 1
        PyErr_CheckSignals()


# ---- the driver ----


cdef tuple CALLS = (
    "cuMemAlloc", "cuMemFree", "cuCtxGetDevice", "cuCtxSynchronize", "cuCtxRecordEvent", "cuStreamCreate",
    "cuEventCreate", "cuUserObjectCreate", "cuGraphCreate",
)
cdef tuple CALLS_ON_STREAM = (
    "cuStreamQuery", "cuStreamSynchronize", "cuStreamGetId", "cuStreamGetFlags", "cuStreamGetDevice", "cuStreamGetCtx",
    "cuStreamGetPriority", "cuLaunchHostFunc",
)


cdef int symbol_number(str symbol) except -1:
    cdef int number = sim_symbol(symbol.encode())
    if number < 0:
        known = []
        while sim_symbol_name(len(known)) != NULL:
            known.append(sim_symbol_name(len(known)).decode())
        raise ValueError(f"the table has no {symbol!r}, only {', '.join(known)}")
    return number


@cython.final
cdef class Driver:
    """What `simulated_driver()` yields: CUDA's nouns, and the switches that a test turns.

    Calls made through these classes count in `calls()` and can be made to `fail()` where the table has them, like those
    of the code under test.
    """

    cdef list _objects  # every UserObject, by its number
    cdef list _destructors  # after the driver was closed

    def __init__(self):
        raise TypeError("use simulated_driver()")

    @property
    def Error(self):
        return Error

    @property
    def destructors(self):
        """Every destructor that ran, in order (objects of the code under test included); the first million of them."""
        if self._destructors is not None:
            return list(self._destructors)
        cdef sim_record[64] records
        cdef int64_t first = 0, count, i
        cdef list found = []
        while True:
            count = min(<int64_t>64, sim_records(first, 64, records) - first)
            for i in range(count):
                tag = (<UserObject>self._objects[records[i].number]).tag if records[i].number >= 0 else None
                found.append(Destructor(tag, "driver" if records[i].on_driver else "caller", records[i].thread_id))
            first += count
            if count < 64:
                return found

    @property
    def legacy(self):
        """The legacy NULL stream of the current context."""
        cdef Stream stream = Stream.__new__(Stream)
        cdef int device = 0
        sim_device(&device)
        stream.device = max(device, 0)
        return stream

    def device(self, int index):
        """Makes that device's context the calling thread's current one (there are two devices)."""
        if not 0 <= index <= 1:
            raise ValueError(f"there is no device {index}, only 0 and 1")
        return context_scope(index)

    def no_context(self):
        """The calling thread has no current context in the body."""
        return context_scope(-1)

    def thread_mode(self, str mode):
        """cuThreadExchangeStreamCaptureMode around the body."""
        cdef ModeScope scope = ModeScope.__new__(ModeScope)
        scope.mode = mode_number(mode)
        return scope

    def call(self, str name, stream=None):
        """Makes one bare driver call that a capture may forbid, and returns its status.

        `cuMemAlloc`, `cuMemFree`, `cuCtxGetDevice`, `cuCtxSynchronize`, `cuCtxRecordEvent`, `cuStreamCreate`,
        `cuEventCreate`, `cuUserObjectCreate`, `cuGraphCreate`; and on `stream`: `cuStreamQuery`, `cuStreamSynchronize`,
        `cuStreamGetId`, `cuStreamGetFlags`, `cuStreamGetDevice`, `cuStreamGetCtx`, `cuStreamGetPriority`,
        `cuLaunchHostFunc`. What such a call makes is gone when it returns.
        """
        if name not in CALLS and name not in CALLS_ON_STREAM:
            known = ", ".join(CALLS + CALLS_ON_STREAM)
            raise ValueError(f"the simulated driver has no bare call {name!r}, only {known}")
        if (stream is not None) != (name in CALLS_ON_STREAM):
            raise ValueError(f"{name} is {'not ' if stream is not None else ''}made on a stream")
        return call_until_done(name, <Stream?>stream if stream is not None else None)

    def query(self, stream not None):
        """cuStreamGetCaptureInfo: (result, status, capture id, graph handle)."""
        cdef Stream asked = <Stream?>stream
        cdef CUstreamCaptureStatus status = 0
        cdef uint64_t id = 0
        cdef CUgraph graph = NULL
        cdef CUresult result = sim_table().cuStreamGetCaptureInfo(asked._handle, &status, &id, &graph, NULL, NULL)
        return (result, status, id, <uintptr_t>graph)

    def reset_context(self):
        """cuDevicePrimaryCtxReset of the current device.

        Its graphs, executables, captures, streams and events are gone. The destructors of what they held never run.
        """
        cdef CUresult result
        with nogil:
            result = sim_reset_context()
        check("cuDevicePrimaryCtxReset", result)

    def fail(self, str symbol, uint64_t nth=1, CUresult code=2):
        """Makes the nth call from now of one of the table's symbols return `code` and do nothing else.

        Several may wait for their turn, on one symbol too.
        """
        cdef int number = symbol_number(symbol)
        if nth == 0:
            raise ValueError("nth is 0, but the next call is number 1")
        if sim_fail(number, nth, code):
            raise ValueError("no more than 32 failures can wait for their turn")

    def calls(self, str symbol):
        """How many calls of one of the table's symbols were made so far.

        Exact where one thread calls at a time; calls of cuStreamGetCaptureInfo, cuCtxGetDevice, current_device
        and current_stream that race may be counted as one.
        """
        return sim_calls(symbol_number(symbol))

    def plant(self, uint64_t size, *, bint host=False):
        """Plants an allocation of the driver's own: an address that pointers can point to. Nothing lies there.

        The address of one that was freed goes to the next of its size.
        """
        cdef uint64_t address = 0
        check("cuMemAlloc", sim_memory_plant(size, host, &address))
        return address

    def unplant(self, uint64_t address):
        """Frees what `plant` returned."""
        check("cuMemFree", sim_memory_free(address))

    def Stream(self, *, bint blocking=False, device=None):
        """A new stream, of the current device or of `device`; `blocking`: one that waits for the legacy stream."""
        return stream_new(blocking, -1 if device is None else device)

    def Event(self):
        """A new event of the current device."""
        return event_new()

    def Graph(self):
        """cuGraphCreate: a new, empty graph."""
        cdef CUgraph handle = NULL
        check("cuGraphCreate", sim_graph_create(&handle))
        return graph_of(handle)

    def UserObject(self, tag=None):
        """A new user object, with one reference that is the program's."""
        return object_new(self._objects, tag)


@cython.final
cdef class ContextScope:
    """A pushed context, or none, around the body of a `with`."""

    cdef int device

    def __enter__(self):
        check("cuCtxPushCurrent", sim_push_device(self.device))

    def __exit__(self, kind, error, traceback):
        check("cuCtxPopCurrent", sim_pop_device())


@cython.final
cdef class ModeScope:
    """A thread's capture mode, exchanged around the body of a `with`."""

    cdef CUstreamCaptureMode mode

    def __enter__(self):
        check("cuThreadExchangeStreamCaptureMode", sim_table().cuThreadExchangeStreamCaptureMode(&self.mode))

    def __exit__(self, kind, error, traceback):
        self.__enter__()


cdef ContextScope context_scope(int device):
    cdef ContextScope scope = ContextScope.__new__(ContextScope)
    scope.device = device
    return scope


cdef Stream stream_new(bint blocking, int device):
    cdef CUstream handle = NULL
    cdef int current = device
    if device < 0:
        check("cuStreamCreate", sim_device(&current))
    check("cuStreamCreate", sim_stream_create(&handle, blocking, current))
    cdef Stream stream = Stream.__new__(Stream)
    stream._handle = handle
    stream.device = current
    return stream


cdef Event event_new():
    cdef CUevent handle = NULL
    check("cuEventCreate", sim_table().cuEventCreate(&handle, 0))
    cdef Event event = Event.__new__(Event)
    event._handle = handle
    event._generation = sim_generation(handle)
    return event


cdef UserObject object_new(list objects, object tag):
    cdef UserObject obj = UserObject.__new__(UserObject)
    obj.tag = tag
    objects.append(obj)
    try:
        check("cuUserObjectCreate",
              sim_table().cuUserObjectCreate(&obj._handle, NULL, sim_destructor, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC))
    except Error:
        objects.pop()
        raise
    obj._generation = sim_generation(obj._handle)
    sim_object_number(obj._handle, len(objects) - 1)
    return obj


# ---- life: arena/testing.py calls these, in this order ----


def table_address():
    """Where the function table lies, for benchmarks that call its entries from C."""
    return <uintptr_t>sim_table()


def open_driver():
    """Begins a simulated driver and puts it in the place of the installed one."""
    cdef int failed = sim_open()
    if failed == -1:
        raise RuntimeError("simulated_driver() is open already, and there is one driver in a process")
    if failed:
        raise OSError("there is no thread to be had for the simulated driver")
    cdef Driver driver = Driver.__new__(Driver)
    driver._objects = []
    try:
        use_driver(sim_table())
        use_nodes(sim_node_table())
    except BaseException:
        sim_finish()
        sim_close()
        raise
    return driver


def finish_driver():
    """Ends captures and launches, destroys every graph and executable, and joins the driver's thread."""
    with nogil:
        sim_finish()


def close_driver(Driver driver not None):
    """Puts the installed driver back, and forgets the rest. What was recorded stays with `driver`."""
    cdef UserObject obj
    use_nodes(NULL)
    try:
        use_driver(NULL)
    finally:
        driver._destructors = driver.destructors
        for obj in driver._objects:
            obj._fate = not sim_lives(obj._handle, obj._generation)
        sim_close()
