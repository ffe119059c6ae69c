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


include "simulator_graphs.pxi"
include "simulator_streams.pxi"


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
