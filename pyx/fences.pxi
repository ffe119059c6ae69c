# Fences: events behind the replays of a managed graph, and the references to user objects that wait for them. They are made
# when the graph's owner goes, on each stream that it was replayed on, and polled in relaxed capture mode, so that nobody's
# capture breaks. Called with the GIL, which is given up around what may wait in the driver.

cdef extern from *:
    """
    /* One stream that a graph was replayed on. An external stream may be gone when the graph goes, and may not be touched
     * then: its event is recorded at each replay. Any other's is NULL until it could be recorded, at the end. */
    enum { OURS, RECORDED, LAUNCHING, LOST, NEVER }; /* torch's; external: behind the last launch; not yet; could not be;
                                                        none was launched */
    typedef struct fence_mark { void *stream; void *context; CUevent event; int kind; } fence_mark;

    /* A reference to a user object that goes when every mark has passed: the last of the `count` first. */
    typedef struct fence {
        struct fence *next;
        CUuserObject object;
        size_t count;
        fence_mark marks[];
    } fence;
    """
    enum:
        OURS
        RECORDED
        LAUNCHING
        LOST
        NEVER

    ctypedef struct fence_mark:
        void *stream
        void *context
        CUevent event
        int kind

    ctypedef struct fence:
        fence *next
        CUuserObject object
        size_t count
        fence_mark *marks

cdef fence *fences = NULL   # references that wait for replays to finish
cdef int polling = 0         # threads that have taken `fences` in hand; 0 or 1


cdef void add_fence(fence *wait) noexcept:
    global fences
    wait.next = fences
    fences = wait
    poll_fences()
    if fences != NULL:
        sem_post(&owner_dead_wake)  # the thread begins to poll


cdef void poll_fences() noexcept:
    """Lets go of the references whose replays have finished. One thread at a time: recording may wait for room in a stream's
    queue, so the GIL is given up for it."""
    global fences, polling
    cdef fence *wait
    cdef fence *left = NULL
    cdef fence *last = NULL
    cdef fence *after
    cdef CUstreamCaptureMode mode
    cdef CUuserObject object
    cdef unsigned int before = epoch
    # In any other mode a query breaks every global-mode capture of the process.
    if fences == NULL or polling or not relax(&mode):
        return
    polling += 1
    wait, fences = fences, NULL
    while wait != NULL:
        after = wait.next
        while wait.count and passed(&wait.marks[wait.count - 1]):
            wait.count -= 1
        if epoch != before:
            return  # another driver or process meanwhile: what was in hand is nobody's any more
        if wait.count:
            if last == NULL:
                last = wait
            wait.next = left
            left = wait
        else:
            object = wait.object
            free(wait)
            driver.cuUserObjectRelease(object, 1)
        wait = after
    if last != NULL:
        last.next = fences  # those that were added meanwhile
        fences = left
    polling -= 1
    restore(&mode)


cdef bint passed(fence_mark *mark) noexcept:
    """Whether the work that the stream had when the mark was made is done. Makes the mark where it could not be made."""
    cdef CUresult code
    if mark.kind == LOST or mark.kind == NEVER:
        return mark.kind == NEVER
    if mark.event == NULL or mark.kind == LAUNCHING:
        code = record(mark)
        if code != CUDA_SUCCESS:
            return is_over(code)
    with nogil:
        code = driver.cuEventQuery(mark.event)
    if code != CUDA_SUCCESS and not is_over(code):
        return False  # not yet, or the driver cannot say now
    driver.cuEventDestroy(mark.event)
    mark.event = NULL
    return True


cdef CUresult record(fence_mark *mark) noexcept:
    """Puts the mark's event behind what its stream has to do. In relaxed mode."""
    cdef CUresult code
    cdef CUevent event = mark.event
    cdef CUcontext context
    if busy(mark):
        return CUDA_ERROR_NOT_READY
    code = driver.cuCtxPushCurrent(<CUcontext>mark.context)
    if code != CUDA_SUCCESS:
        return code
    with nogil:
        if event == NULL:
            code = driver.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING)
        if code == CUDA_SUCCESS:
            code = driver.cuEventRecord(event, <CUstream>mark.stream)
    driver.cuCtxPopCurrent(&context)
    mark.event = event
    # A capture that began meanwhile has swallowed the record; to query it would break that capture.
    if code == CUDA_SUCCESS and busy(mark):
        code = CUDA_ERROR_NOT_READY
    if code != CUDA_SUCCESS and event != NULL:
        driver.cuEventDestroy(event)
        mark.event = NULL
    elif mark.kind == LAUNCHING:
        mark.kind = RECORDED
    return code


cdef bint is_over(CUresult code) noexcept:
    """The context is gone, or broken for good by a fault on the device (illegal address, time-out, assertion, launch
    failure and their like): its work is over, and no later answer will say so better."""
    return code in (
        CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_DEINITIALIZED,
        CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_LAUNCH_TIMEOUT, CUDA_ERROR_ASSERT,
    ) or CUDA_ERROR_HARDWARE_STACK_ERROR <= code <= CUDA_ERROR_LAUNCH_FAILED


cdef bint busy(fence_mark *mark) noexcept:
    """Whether the stream is capturing, or cannot be asked now."""
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef uint64_t capture
    return driver.cuStreamGetCaptureInfo(<CUstream>mark.stream, &status, &capture, NULL, NULL, NULL) != CUDA_SUCCESS or (
        status != CU_STREAM_CAPTURE_STATUS_NONE)
