# Opaque owners, which come without the GIL, and the capsule through which C and C++ call (arena/include/arena.h). Any thread,
# with the GIL or without, also while the interpreter is going or gone: but for the two functions that say so, nothing here
# touches Python.
#
# Why it is right: a list is found, made, sealed, taken from the index and declared dead under one lock, and freed only by who
# holds the GIL and has since had that lock for it (drain). So a list that is found here stays whole until the lock is given
# back, and an owner that is put into it is either seen by the seal or refused by it. The question is asked before the lock is
# taken, so that nobody waits who is not capturing; what may change in between is the driver (then we ask again), and the
# capture, which may end: a list that died since is refused, one that dies after the append is released like any other.

from cpython.pycapsule cimport PyCapsule_New

cdef extern from "Python.h":
    int Py_AddPendingCall(int (*function)(void *) noexcept, void *argument) nogil


cdef int retain_opaque_nogil(void *thing, void (*release)(void *) noexcept nogil, void *stream) noexcept nogil:
    global retained_opaque
    cdef void *question = NULL
    cdef uint64_t capture
    cdef CUgraph graph
    cdef attempt at
    cdef int code
    if thing == NULL or release == NULL:
        return ARENA_NULL
    while True:
        code = ask_nogil(stream, &question, &capture, &graph)
        if code != 1:
            return code
        owner_lock()
        if owner_question_now() == question:
            break
        owner_unlock()  # another driver meanwhile, or a forked child
    code = place(&at, stream, capture, graph, 1, True)
    if code == ARENA_RETAINED:
        owner_list_append_opaque(at.owners, thing, release)
        retained_opaque += 1
        ask_for_reclaimer()
    owner_unlock()
    return code


cdef int capturing(void *stream) noexcept nogil:
    cdef void *question = NULL
    cdef uint64_t capture
    cdef CUgraph graph
    return ask_nogil(stream, &question, &capture, &graph)


cdef bint maybe_capturing(bint only_torch) noexcept nogil:
    return not only_torch or owner_gate_any()


cdef inline int ask_nogil(void *stream, void **question, uint64_t *capture, CUgraph *graph) noexcept nogil:
    """1 with the capture's id and graph and the function that said so, 0: not capturing, or a negative code."""
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUresult code
    cdef int now
    question[0] = owner_question_now()
    if question[0] == NULL:
        now = find_driver()
        question[0] = owner_question_now()
        if question[0] == NULL:
            return ARENA_NO_DRIVER if now == UNUSABLE else ARENA_NOT_CAPTURING
    code = (<question_type>question[0])(<CUstream>stream, &status, capture, graph, NULL, NULL)
    if code != CUDA_SUCCESS:
        return ARENA_NOT_CAPTURING if means_none(code) else ARENA_REFUSED - code
    if status == CU_STREAM_CAPTURE_STATUS_NONE:
        return ARENA_NOT_CAPTURING
    return 1 if status == CU_STREAM_CAPTURE_STATUS_ACTIVE else ARENA_INVALIDATED


cdef inline void ask_for_reclaimer() noexcept nogil:
    """Where nobody came with the GIL yet, the main thread is asked to start the reclaimer as soon as it runs Python. With the
    lock: so stop_reclaimer(), which runs before the interpreter goes, is not overtaken. A full queue: the next owner asks."""
    global reclaimer_asked
    if not reclaimer_started and not reclaimer_asked and not stopping:
        reclaimer_asked = Py_AddPendingCall(asked_reclaimer, NULL) == 0


cdef int asked_reclaimer(void *nothing) noexcept:
    if not reclaimer_started:
        start_reclaimer()
    return 0


# ---- the capsule ----

cdef int api_retain(PyObject *owner, void *stream) except -1:
    if owner == NULL or owner == <PyObject *>None:
        raise TypeError("arena_retain() needs an owner, not NULL or None")
    return keep_if_capturing(<object>owner, stream)


cdef int api_set_error(int code, void *stream) except -1:
    return raise_for(code, stream)


cdef extern from *:
    const char *ARENA_VERSION

# What `except -1` means to Cython is to C a function that answers ARENA_RAISED with an exception set.
cdef arena_api api
api.slots = ARENA_SLOTS
api.version = ARENA_VERSION
api.gate = <const unsigned int *>owner_gate_word()
api.retain = <int (*)(PyObject *, void *) noexcept><void *>api_retain
api.retain_opaque = retain_opaque_nogil
api.capturing = capturing
api.set_error = <int (*)(int, void *) noexcept><void *>api_set_error

_C_API = PyCapsule_New(&api, "arena._registry._C_API", NULL)


def watched(bint every):
    """Whether each of torch's captures is seen to begin and end from here on: what makes the gate of arena.h exact."""
    owner_gate_watched(every)
