# cython: language_level=3
"""The registry: which owners each captured graph keeps alive.

It owns every owner list from the first `retain` of a capture until the last owner of the list was released. Its state is
guarded by the GIL, which is never given up between the driver's answer and the append that rests on it; what callers
without the GIL reach too (index, attaching, `state`) by the lock of owners.h. The driver itself calls one function, the
destructor, in owners.h. This file holds the way in (retaining, attaching); opaque.pxi the way in without the GIL and the C
API; asking.pxi what is asked of the driver, scopes.pxi `collect` and `suspend`, reclaim.pxi the way out (queue, thread,
exit, fork), managed.pxi the captures whose begin and end we see, fences.pxi the wait for their replays, listing.pxi what is
alive.
"""

cimport cython
from cpython.exc cimport PyErr_Clear
from cpython.long cimport PyLong_AsVoidPtr, PyLong_CheckExact
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport intptr_t, uint64_t

from driver cimport *
from owners cimport *


cdef extern from "Python.h":
    ctypedef PyObject *(*PyCFunction)(PyObject *, PyObject *) except NULL
    ctypedef struct PyMethodDef:
        const char *ml_name
        PyCFunction ml_meth
        int ml_flags
        const char *ml_doc
    int METH_FASTCALL, METH_KEYWORDS
    object PyCFunction_NewEx(PyMethodDef *method, PyObject *self, object module)
    PyObject *PyObject_Vectorcall(object call, PyObject *const *args, size_t count, PyObject *names) except NULL
    PyObject *_PyType_Lookup(type kind, object name)
    PyObject *PyThreadState_GetDict()
    long PyLong_AsLong(object value)  # -1 with an error set; checked by find_handle

cdef extern from "shortcuts.h":
    ctypedef struct here:
        void *stream
        uint64_t capture
        CUdevice device
    here managed_here
    int short_handle(PyObject *value, void **handle)
    PyObject *new_bool(int value) except NULL
    int is_plain(object owner)
    int note_plain(object owner)


cdef extern from "arena.h":
    enum:
        ARENA_RETAINED
        ARENA_NOT_CAPTURING
        ARENA_RAISED
        ARENA_NULL
        ARENA_INVALIDATED
        ARENA_SEALED
        ARENA_ENDED
        ARENA_NO_MEMORY
        ARENA_NO_DRIVER
        ARENA_REFUSED
        ARENA_SLOTS
    ctypedef struct arena_api:
        size_t slots
        const char *version
        const unsigned int *gate
        int (*retain)(PyObject *owner, void *stream) noexcept
        int (*retain_opaque)(void *owner, void (*release)(void *) noexcept nogil, void *stream) noexcept nogil
        int (*capturing)(void *stream) noexcept nogil
        int (*set_error)(int code, void *stream) noexcept

ctypedef CUresult (*question_type)(
    CUstream, CUstreamCaptureStatus *, uint64_t *, CUgraph *, const CUgraphNode **, size_t *) noexcept nogil


debug_level = ARENA_DEBUG  # that this was built with: 0, 1 or 2


class DriverError(RuntimeError):
    """The CUDA driver is missing, too old, or refused a call that the registry needs."""

    __module__ = "arena"


class CaptureError(RuntimeError):
    """The stream's capture cannot take owners: it was invalidated, sealed, or ended meanwhile."""

    __module__ = "arena"


# Whether the driver may be called. Read and written with the lock; the hot path looks at owner_question_now(), which is not
# NULL exactly while this is READY.
cdef enum:
    UNASKED = 0   # nobody needed the driver yet
    READY = 1     # `driver` is filled
    ABSENT = 2    # no libcuda.so.1: nothing can be capturing
    UNUSABLE = 3  # a driver that lacks something we need; `why` says what
    FORKED = 4    # a forked child where CUDA is not initialised (yet, or for good: see driver_ready)

cdef int state = UNASKED
cdef driver_table driver
cdef char[256] why

cdef owner_index index                # lists that take owners, or did and are held by a graph
cdef owner_list *current_list = NULL  # the one used last; NULL, or in `index` (or dead), with an object, and open

cdef uint64_t retained = 0         # owners ever retained with the GIL
cdef uint64_t retained_opaque = 0  # the lock's: and without; both == owners alive + dead + released + leaked
cdef uint64_t dead = 0      # owners of dead lists, not yet released
cdef uint64_t released = 0  # owners let go
cdef uint64_t leaked = 0    # owners that never will be (a forked child's)
cdef size_t live = 0        # the lock's: lists whose user object exists


# ---- public ----

def retain(owner, stream=None):
    """Ties `owner` to the life of the graph that `stream` is capturing.

    The owner (or what its type's `__cuda_owners__()` returns) lives until the graph, every executable, clone and parent
    made from it, and every launch of those is gone. Nothing is paid for it at replay beyond what the driver charges an
    executable that holds a user object, however many owners there are.

    Args:
        owner: Any object but None. It is never compared, hashed or copied. If its type defines `__cuda_owners__()`, the
            owners that this returns (an iterable, taken as they are) are retained instead of it; it is called only while
            a capture or a scope is open.
        stream: A CUstream as an int, a `torch.cuda.Stream`, a `cuda.core` stream, or anything with `__cuda_stream__`.
            None: torch's current stream, where torch is loaded and CUDA is initialised. An int cannot be checked: a
            handle that was destroyed is undefined behaviour in the driver. A stream object that was closed raises what
            it raises when asked for its handle.

    Returns:
        True if a capture or an enclosing `collect()` took the owner; False if neither was open. Without a CUDA driver
        nothing captures, so False. Asking never initialises CUDA.

    Raises:
        TypeError: `owner` is None, or `stream` is not a stream.
        ValueError: `stream` is a negative handle.
        CaptureError: The capture was invalidated, or was sealed and has not ended.
        DriverError: The driver refused, or is too old. In every case of an exception nothing was retained.
    """
    cdef void *handle = NULL
    if owner is None:
        raise TypeError("retain() needs an owner, not None")
    cdef int found = find_stream(stream, &handle)
    if scopes_open:
        return retain_scoped(owner, handle, found)
    if found and keep_if_capturing(owner, handle):
        return True
    return False


# The same function as the interpreter calls it: taking its arguments apart costs more than all the rest, so the common
# forms, retain(x) and retain(x, stream), are recognised here; keywords, open scopes and mistakes go to the one above.

cdef object retain_any_form = retain
cdef bytes retain_doc = b"retain(owner, stream=None)\n--\n\n" + retain.__doc__.encode()
cdef PyMethodDef retain_method


cdef PyObject *retain_call(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names) except NULL:
    cdef void *handle = NULL
    cdef int found
    if names == NULL and not scopes_open and (count == 2 or count == 1) and args[0] != <PyObject *>None:
        if count == 1:
            found = find_current_stream(&handle)
        else:
            found = short_handle(args[1], &handle) or find_stream(<object>args[1], &handle)
        return new_bool(found and keep_if_capturing(<object>args[0], handle))
    return PyObject_Vectorcall(retain_any_form, args, count, names)


retain_method.ml_name = "retain"
retain_method.ml_meth = <PyCFunction><void *>retain_call
retain_method.ml_flags = METH_FASTCALL | METH_KEYWORDS
retain_method.ml_doc = retain_doc
retain = PyCFunction_NewEx(&retain_method, NULL, "arena")


def capture_id(stream=None):
    """The id of the capture that `stream` takes part in, or None.

    Args:
        stream: As for `retain`.

    Returns:
        An int that the driver gives to one graph under capture and never again in this process
        (cuStreamGetCaptureInfo); all streams and threads of a capture see the same. None if the stream is not capturing.

    Raises:
        TypeError, ValueError, DriverError: As for `retain`.
        CaptureError: The capture was invalidated: it has no id any more.
    """
    cdef void *handle = NULL
    cdef uint64_t capture
    cdef CUgraph graph
    if find_stream(stream, &handle) and ask(handle, &capture, &graph):
        return capture
    return None


@cython.final
cdef class Stats:
    """What the registry holds at one moment: `retained == owners + dead + released + leaked`."""

    cdef readonly uint64_t lists
    """Owner lists alive: captures that retained something and whose graph still exists."""
    cdef readonly uint64_t owners
    """Owners that a living graph keeps."""
    cdef readonly uint64_t dead
    """Owners whose graph is gone and that wait to be released."""
    cdef readonly uint64_t released
    """Owners released since the process began."""
    cdef readonly uint64_t leaked
    """Owners that will never be released: in a forked child, those that its parent held."""
    cdef readonly uint64_t retained
    """Owners ever retained; one object retained twice counts twice."""
    cdef readonly uint64_t cycles
    """Owners that were found to reach their own graph at the end of a managed capture: neither can be collected."""

    def __repr__(self):
        return (
            f"Stats(lists={self.lists}, owners={self.owners}, dead={self.dead}, released={self.released}, "
            f"leaked={self.leaked}, retained={self.retained}, cycles={self.cycles})"
        )


def stats():
    """Counts what the registry holds now. Exact, and costs the same however much that is.

    Returns:
        A `Stats` with the ints `lists`, `owners`, `dead`, `released`, `leaked`, `retained` and `cycles`.
    """
    cdef Stats now = Stats.__new__(Stats)
    drain()
    owner_lock()
    now.lists = live
    now.retained = retained + retained_opaque
    owner_unlock()
    now.owners = now.retained - dead - released - leaked
    now.dead = dead
    now.released = released
    now.leaked = leaked
    now.cycles = cycles
    return now


def capture_open():
    """Whether torch's current stream takes part in a capture, a broken one included; False where nobody can say."""
    cdef uint64_t capture
    cdef void *stream
    try:
        return current_capture(&stream, &capture) == 1
    except CaptureError:
        return True
    except DriverError:
        return False


def driver_version():
    """The installed driver's CUDA version as the driver gives it (13000 for 13.0).

    Raises:
        DriverError: There is no driver, it is too old, or this is a forked child in which CUDA is not initialised.
    """
    cdef int version = 0
    need_driver()
    check(driver.cuDriverGetVersion(&version), "cuDriverGetVersion")
    return version


def enter_relaxed():
    """Puts the calling thread into relaxed capture mode: what it destroys or asks then breaks nobody's capture.

    Returns:
        What `leave_relaxed` needs, or None if there is nothing to restore.
    """
    cdef CUstreamCaptureMode mode
    return mode if owner_question_now() != NULL and relax(&mode) else None


def leave_relaxed(mode):
    """Undoes `enter_relaxed`, which returned `mode`."""
    cdef CUstreamCaptureMode before
    if mode is not None:
        before = mode
        restore(&before)


def pending():
    """Whether owners are dead or on their way out: something for `reclaim` to do."""
    return on_their_way()


# ---- for Cython ----

cdef int retain_on(object owner, void *stream) except -1:
    return keep_if_capturing(owner, stream)


cdef int retain_opaque(void *thing, void (*release)(void *) noexcept nogil, void *stream) except -1:
    cdef int code = retain_opaque_nogil(thing, release, stream)
    if code < 0:
        raise_for(code, stream)
    if code and not reclaimer_started:
        start_reclaimer()
    return code


cdef int current_capture(void **stream, uint64_t *capture) except -1:
    cdef CUgraph graph
    cdef owner_list *owners
    if not find_current_stream(stream):  # not the gate: it says nothing of captures that are not torch's
        return 0
    owners = open_here(stream[0])
    if owners != NULL:
        capture[0] = owners.capture
        return 1
    return ask(stream[0], capture, &graph)


cdef int use_driver(const void *table) except -1:
    global driver, state
    cdef bint in_use
    if table == NULL:
        forget_managed()  # the simulated driver has ended, and with it all that these could hold
    release_now()
    owner_lock()
    in_use = live or queue_first != NULL or fences != NULL or managed_open
    if not in_use:
        # Who has asked without the GIL looks, with the lock, whether the question is still the same, or asks again.
        owner_question_set(NULL)
        if table != NULL:
            driver = (<const driver_table *>table)[0]
            state = READY
            owner_question_set(<void *>driver.cuStreamGetCaptureInfo)
        else:
            state = UNASKED
    owner_unlock()
    if in_use:
        raise RuntimeError(
            f"the driver cannot be exchanged while {lists_alive()} owner lists are alive, {dead} owners wait to be released "
            f"and {managed_open} managed captures are open")
    return 0


cdef size_t lists_alive() noexcept:
    owner_lock()
    cdef size_t now = live
    owner_unlock()
    return now


# ---- attaching and appending ----

cdef inline int keep_if_capturing(object owner, void *stream) except -1:
    """The hot path: the driver's answer, two comparisons, an append. All that is rarer goes the long way, which asks again."""
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef uint64_t capture
    cdef CUgraph graph
    cdef CUresult code
    cdef owner_list *owners = current_list
    cdef void *question = owner_question_now()
    if managed_open:
        # Inside a managed capture its thread need not ask; see open_here(), of which this is the common case.
        if question != NULL and owners != NULL and managed_here.stream == stream and (
            owners.capture == managed_here.capture and not owner_dead_any()
        ) and owners.count < owners.capacity and is_plain(owner):
            keep(owners, owner)
            return 1
    elif question != NULL:
        code = (<question_type>question)(<CUstream>stream, &status, &capture, &graph, NULL, NULL)
        if code != CUDA_SUCCESS or status == CU_STREAM_CAPTURE_STATUS_INVALIDATED:
            return no_capture(stream, code)
        if status == CU_STREAM_CAPTURE_STATUS_NONE:
            return 0
        if owners != NULL and owners.capture == capture and (
            not owner_dead_any() and owners.count < owners.capacity and is_plain(owner)
        ):
            keep(owners, owner)
            return 1
    return keep_slowly(owner, stream)


cdef int keep_slowly(object owner, void *stream) except -1:
    cdef uint64_t capture
    cdef CUgraph graph
    cdef owner_list *owners = open_here(stream)
    if owners == NULL:
        if not ask(stream, &capture, &graph):
            return 0
        owners = list_of(capture)
    if not note_plain(owner):
        return retain_all(owners_of(owner), stream)
    if owners == NULL or owners.sealed or not owner_list_attached(owners):
        owners = list_for(stream, 1)
        if owners == NULL:
            return 0
    elif owners.count == owners.capacity and owner_list_reserve(owners, 1):
        no_memory(owners)
    keep(owners, owner)
    if owners.count == 1 and owners.code == NULL:
        note_birth(owners.capture)
    return 1


cdef inline owner_list *list_of(uint64_t capture) noexcept:
    """The list of that capture, or NULL. A list whose object was destroyed is never returned."""
    global current_list
    if owner_dead_any():
        drain()
    owner_index_check(&index)
    if current_list != NULL and current_list.capture == capture:
        return current_list
    cdef owner_list *owners = owner_index_find(&index, capture)
    if owners != NULL and owner_list_attached(owners) and not owners.sealed:
        current_list = owners
    return owners


cdef inline void keep(owner_list *owners, object owner) noexcept:
    global retained
    Py_INCREF(owner)
    owner_list_append(owners, <void *>owner, NULL)
    retained += 1


cdef owner_list *list_for(void *stream, size_t more) except? NULL:
    """An open list with room for `more` owners, held by the graph that the stream is capturing; NULL: not capturing.

    No Python code runs between the driver's last answer and the return, and what follows the return cannot fail.
    """
    global current_list
    cdef uint64_t capture
    cdef CUgraph graph
    cdef attempt at
    cdef owner_list *owners
    cdef int code
    while True:
        if not ask(stream, &capture, &graph):
            return NULL
        owners = list_of(capture)
        if reclaimer_started or (owners != NULL and (owners.sealed and not owners.ended or owner_list_attached(owners))):
            break
        start_reclaimer()  # may run Python code: ask again
    owner_lock()
    code = place(&at, stream, capture, graph, more, False)
    owner_unlock()
    if code != ARENA_RETAINED:
        raise_for(code, stream, &at)
    current_list = at.owners
    return at.owners


cdef int no_memory(owner_list *owners) except -1:
    raise MemoryError(f"no memory for owner {owners.count + 1} of capture {owners.capture}")


# One attempt to find or make the list of a capture: what came of it, and what to say if nothing did.
cdef struct attempt:
    owner_list *owners  # the list; NULL: none could be made
    uint64_t capture
    const char *call    # of the driver, that refused; or NULL


cdef int place(
    attempt *at, void *stream, uint64_t capture, CUgraph graph, size_t more, bint opaque
) noexcept nogil:
    """Finds or makes the open list of that capture, which the driver has just named for this stream, with room for `more`
    owners or for one that is opaque. With the lock, with or without the GIL.

    Returns ARENA_RETAINED, or why not; then nothing was changed.
    """
    cdef owner_list *owners = owner_index_find_locked(&index, capture)
    at.owners = owners
    at.capture = capture
    at.call = NULL
    if owners != NULL and (owner_list_is_dead(owners) or owners.ended):
        # A second capture into the same graph, or its objects were taken from it: same id, a list of its own.
        owner_index_remove_locked(&index, owners)
        owners = NULL
    if owners == NULL or owners.object == NULL and not owners.sealed:
        return attach(at, owners, stream, graph, more, opaque)
    if owners.sealed:
        return ARENA_SEALED
    return ARENA_NO_MEMORY if reserve(owners, more, opaque) else ARENA_RETAINED


cdef inline int reserve(owner_list *owners, size_t more, bint opaque) noexcept nogil:
    return owner_list_reserve_opaque(owners, more) if opaque else owner_list_reserve(owners, more)


cdef int attach(attempt *at, owner_list *owners, void *stream, CUgraph graph, size_t more, bint opaque) noexcept nogil:
    """The first owner of a capture: one user object, whose destructor is the list's death. `owners`: NULL, or a managed
    list without an object yet. As place()."""
    global live
    cdef bint fresh = owners == NULL
    cdef CUuserObject object = NULL
    cdef CUgraph graph_now
    cdef uint64_t capture_now
    cdef CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE
    cdef CUresult code
    cdef CUcontext context = NULL
    if fresh:
        owners = owner_list_new(at.capture)
    at.owners = NULL
    if owners == NULL or reserve(owners, more, opaque) or owner_index_reserve_locked(&index):
        if fresh and owners != NULL:
            owner_list_free(owners)
        return ARENA_NO_MEMORY
    driver.cuCtxGetCurrent(&context)
    owners.context = context
    owners.graph = graph
    # A managed list keeps one reference on our side; the other goes to the graph.
    code = driver.cuUserObjectCreate(
        &object, owners, owner_list_died, 2 if owners.managed else 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
    if code != CUDA_SUCCESS:
        if fresh:
            owner_list_free(owners)
        at.call = "cuUserObjectCreate"
        return ARENA_REFUSED - code
    # From here on the list belongs to the object: if the object goes, the destructor sends the (still empty) list to
    # the reclaimer, so no failure below frees anything itself. Nobody frees the list meanwhile: that needs our lock.
    code = driver.cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE)
    if code != CUDA_SUCCESS:
        replace_managed(owners)
        driver.cuUserObjectRelease(object, 2 if owners.managed else 1)
        at.call = "cuGraphRetainUserObject"
        return ARENA_REFUSED - code
    # Threads that do not need the GIL may have ended this capture meanwhile, and graph handles are recycled at once.
    code = driver.cuStreamGetCaptureInfo(<CUstream>stream, &status, &capture_now, &graph_now, NULL, NULL)
    if code != CUDA_SUCCESS or status != CU_STREAM_CAPTURE_STATUS_ACTIVE or capture_now != at.capture:
        replace_managed(owners)
        driver.cuGraphReleaseUserObject(graph, object, 1)
        if owners.managed:
            driver.cuUserObjectRelease(object, 1)
        return ARENA_ENDED
    if not owners.managed:
        owner_gate_met()
    owner_list_attach(owners, object)
    if fresh:
        owner_index_insert_locked(&index, owners)
    live += 1
    at.owners = owners
    return ARENA_RETAINED


cdef int raise_for(int code, void *stream, const attempt *at=NULL) except -1:
    """The exception for a negative code; `at` where it is known what was attempted."""
    where = f"stream {<intptr_t>stream:#x}"
    if code == ARENA_NULL:
        raise ValueError("an opaque owner needs an object and a release function, neither of them NULL")
    if code == ARENA_INVALIDATED:
        no_capture(stream, CUDA_SUCCESS)
    if code == ARENA_SEALED:
        if at == NULL:
            raise CaptureError(f"the capture on {where} was sealed and takes no more owners")
        raise CaptureError(
            f"capture {at.capture} was sealed with {owner_list_count(at.owners)} owners and takes no more")
    if code == ARENA_ENDED:
        what = f"capture {at.capture}" if at != NULL else "the capture"
        raise CaptureError(f"{what} on {where} ended while an owner was being retained")
    if code == ARENA_NO_MEMORY:
        if at == NULL:
            raise MemoryError(f"no memory for an opaque owner on {where}")
        if at.owners == NULL:
            raise MemoryError(f"no memory for the owner list of capture {at.capture}")
        no_memory(at.owners)
    if code == ARENA_NO_DRIVER:
        raise DriverError(why.decode())
    if code <= ARENA_REFUSED:
        check(ARENA_REFUSED - code, at.call.decode() if at != NULL and at.call != NULL else "retaining an owner", stream)
    raise ValueError(f"{code} is no code of a failed call")


cdef void replace_managed(owner_list *owners) noexcept nogil:
    """A managed list that is about to die with its refused object leaves an empty one in its place. Without memory for that
    the capture goes on as one that is not managed: held by the executable. With the lock."""
    cdef owner_list *again
    if not owners.managed:
        return
    owner_index_remove_locked(&index, owners)
    again = owner_list_new(owners.capture)
    if again != NULL:
        again.managed = True
        again.scopes = owners.scopes
        again.graph = owners.graph
        again.began, again.line = owners.began, owners.line
        again.code, owners.code = owners.code, NULL
        owner_index_insert_locked(&index, again)  # into the room that was just left


cdef void forget(owner_list *owners) noexcept:
    """The list takes no more owners under its id. It lives on until its object's destructor has run."""
    global current_list
    if current_list == owners:
        current_list = NULL
    owner_index_remove(&index, owners)


cdef tuple owners_of(object owner):
    """What stands for `owner`: itself, or what its type's `__cuda_owners__()` returns."""
    if _PyType_Lookup(type(owner), "__cuda_owners__") == NULL:
        return (owner,)
    kind = type(owner).__name__
    owners = owner.__cuda_owners__()
    try:
        owners = tuple(owners)
    except TypeError:
        raise TypeError(f"{kind}.__cuda_owners__() returned {type(owners).__name__}, not an iterable of owners") from None
    for each in owners:
        if each is None:  # by identity: comparing owners may launch kernels
            raise TypeError(f"{kind}.__cuda_owners__() returned None among {len(owners)} owners")
    return owners


cdef int retain_all(tuple owners, void *stream) except -1:
    """All of them or, with an exception, none."""
    cdef owner_list *room
    cdef uint64_t capture
    cdef CUgraph graph
    if not owners:
        return ask(stream, &capture, &graph)
    room = list_for(stream, len(owners))
    if room == NULL:
        return 0
    for owner in owners:
        keep(room, owner)
    if room.count == <size_t>len(owners) and room.code == NULL:
        note_birth(room.capture)
    return 1


include "asking.pxi"
include "opaque.pxi"
include "scopes.pxi"
include "reclaim.pxi"
include "fences.pxi"
include "managed.pxi"
include "listing.pxi"
