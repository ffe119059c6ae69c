# The driver, asked: whether there is one, what a stream is capturing, which stream is meant, and in which capture mode. With
# the GIL, which is not given up (the answers are acted on before anybody else can run), but for what says `nogil`. Nothing
# here initialises CUDA.

from libc.string cimport memcpy

cdef extern from *:
    """
#ifndef RTLD_NOLOAD
#define RTLD_NOLOAD 4
#endif
    /* torch's stable C ABI, from a library that torch has already loaded. 0: there is none. */
    static int find_torch(driver_table *table) {
        if (!PyDict_GetItemString(PyImport_GetModuleDict(), "torch")) return 0;
        void *library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
        if (!library) return 0;
        *(void **)&table->current_device = dlsym(library, "aoti_torch_get_current_device_index");
        *(void **)&table->current_stream = dlsym(library, "aoti_torch_get_current_cuda_stream");
        return table->current_device && table->current_stream;
    }
    """
    int find_torch(driver_table *table)


cdef int need_driver() except -1:
    if driver_ready():
        return 0
    if state == FORKED:
        raise DriverError("this is a forked process where CUDA is not initialised (and cannot be if its parent used it)")
    raise DriverError(why.decode())


cdef int driver_ready() except -1:
    """1: `driver` may be called. 0: nothing can be capturing in this process."""
    cdef int now = find_driver()
    if now == UNUSABLE:
        # Something may well be capturing: False would be a lie that frees memory too early.
        raise DriverError(why.decode())
    return now == READY


cdef int find_driver() noexcept nogil:
    """The state, after looking for a driver where nobody had. With the GIL or without."""
    global state, driver
    cdef driver_table found
    cdef char[256] reason
    cdef CUdevice device
    cdef int now, code
    owner_lock()
    # Asked about its parent's stream, the driver tells a child "capturing"; but this call it refuses with "not initialised"
    # for ever in a child of a process that used CUDA, and in any other until CUDA is initialised there.
    if state == FORKED and driver.cuCtxGetDevice(&device) != CUDA_ERROR_NOT_INITIALIZED:
        state = READY
        owner_question_set(<void *>driver.cuStreamGetCaptureInfo)
    now = state
    owner_unlock()
    if now != UNASKED:
        return now
    code = driver_fill(&found, reason, sizeof(reason))  # loads a library: not with the lock
    owner_lock()
    if state == UNASKED:  # else another thread was faster
        if code == DRIVER_READY:
            driver = found
            state = READY
            owner_question_set(<void *>driver.cuStreamGetCaptureInfo)
        else:
            memcpy(why, reason, sizeof(why))
            state = ABSENT if code == DRIVER_ABSENT else UNUSABLE
    now = state
    owner_unlock()
    return now


cdef inline int ask(void *stream, uint64_t *capture, CUgraph *graph) except -1:
    """1 with the capture's id and graph, or 0: not capturing."""
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUresult code
    if owner_question_now() == NULL and not driver_ready():
        return 0
    code = driver.cuStreamGetCaptureInfo(<CUstream>stream, &status, capture, graph, NULL, NULL)
    if code == CUDA_SUCCESS:
        if status == CU_STREAM_CAPTURE_STATUS_NONE:
            return 0
        if status == CU_STREAM_CAPTURE_STATUS_ACTIVE:
            return 1
    return no_capture(stream, code)


cdef int no_capture(void *stream, CUresult code) except -1:
    if code == CUDA_SUCCESS:
        raise CaptureError(f"the capture on stream {<intptr_t>stream:#x} was invalidated: it takes no owners")
    if means_none(code):
        return 0
    check(code, "cuStreamGetCaptureInfo", stream)


cdef bint means_none(CUresult code) noexcept nogil:
    """No context, CUDA not initialised or already shut down, no device, or the legacy stream beside somebody's capture."""
    return code in (
        CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_DEINITIALIZED, CUDA_ERROR_NO_DEVICE,
        CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
    )


cdef int check(CUresult code, str call, void *stream=NULL) except -1:
    """Turns a status into a DriverError that names the call, the code and the stream."""
    cdef const char *name = NULL
    if code == CUDA_SUCCESS:
        return 0
    driver.cuGetErrorName(code, &name)
    where = f" on stream {<intptr_t>stream:#x}" if stream != NULL else ""
    raise DriverError(f"{call} failed{where}: {code} ({name.decode() if name != NULL else 'unknown error'})")


cdef int find_stream(object stream, void **handle) except -1:
    """1 with the handle; 0 if no stream was given and none is current."""
    if PyLong_CheckExact(stream):
        return find_handle(stream, handle)
    if stream is None:
        return find_current_stream(handle)
    return find_handle(handle_in(stream), handle)


cdef inline int find_handle(object value, void **handle) except -1:
    cdef long number = PyLong_AsLong(value)
    if number < 0:  # or -1 with an error: no pointer of user space has its top bit set
        return bad_handle(value)
    handle[0] = <void *>number
    return 1


cdef int bad_handle(object value) except -1:
    PyErr_Clear()
    raise ValueError(f"{value!r} is not a stream handle")


cdef object handle_in(object stream):
    """The handle that a stream object carries, as a number."""
    cdef type kind = type(stream)
    if _PyType_Lookup(kind, "cuda_stream") != NULL:  # torch's
        return stream.cuda_stream
    if _PyType_Lookup(kind, "__cuda_stream__") != NULL:
        return stream.__cuda_stream__()[1]
    raise TypeError(f"a stream is an int handle, a torch.cuda.Stream or has __cuda_stream__; got {kind.__name__}")


cdef int find_current_stream(void **handle) except -1:
    """torch's current stream, from C: no Python call, and CUDA is never initialised by it."""
    cdef CUdevice device
    cdef CUresult code
    if owner_question_now() == NULL and not driver_ready():
        return 0
    # On the stream of its own managed capture a thread need not ask for its device. (Where it made another device the
    # current one meanwhile, this still says the capture's: at worst an owner lives as long as that graph.)
    if managed_open and managed_here.capture and driver.current_stream != NULL:
        if driver.current_stream(managed_here.device, handle) == 0 and handle[0] == managed_here.stream:
            return 1
    code = driver.cuCtxGetDevice(&device)
    if code != CUDA_SUCCESS and code != CUDA_ERROR_INVALID_CONTEXT:
        return 0
    if driver.current_stream == NULL and not find_torch(&driver):
        return 0
    # A thread may have entered a capturing stream and not have a context yet: torch makes it current at the first launch.
    if code == CUDA_ERROR_INVALID_CONTEXT and driver.current_device(<int32_t *>&device) != 0:
        return 0
    return driver.current_stream(device, handle) == 0


cdef inline bint relax(CUstreamCaptureMode *mode) noexcept:
    """This thread's calls break nobody's capture from here to `restore`. False: refused, and nothing to restore."""
    mode[0] = CU_STREAM_CAPTURE_MODE_RELAXED
    return driver.cuThreadExchangeStreamCaptureMode(mode) == CUDA_SUCCESS


cdef inline void restore(CUstreamCaptureMode *mode) noexcept:
    driver.cuThreadExchangeStreamCaptureMode(mode)
