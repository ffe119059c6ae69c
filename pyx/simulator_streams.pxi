# Streams, captures and events, as Python has them. What may wait looks for signals meanwhile, so that a test can be ended.

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
