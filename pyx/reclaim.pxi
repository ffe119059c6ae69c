# The way out: dead lists are taken from the stack that destructors push to, queued, and their owners released in the
# order of registration, by whoever calls `reclaim()` or by one daemon thread. The queue is guarded by the GIL and each
# owner is taken off before it is released, so that an owner's `__del__` may reclaim, retain or destroy graphs.

from cpython.ref cimport Py_DECREF

cdef extern from *:
    """
    #include <pthread.h>
    #include <sched.h>

    static __thread int releasing_here; /* calls of release_some() that this thread is inside of */
    static sem_t reclaimer_stopped;     /* posted by the thread as its last act */

    static double seconds_now(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    }
    #define NAP 0.0003
    static void nap(void) { nanosleep(&(struct timespec){0, (long)(NAP * 1e9)}, NULL); }
    static void wait_for_stop(long seconds) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += seconds;
        while (sem_timedwait(&reclaimer_stopped, &until) && errno == EINTR) {
        }
    }
    """
    int releasing_here
    sem_t reclaimer_stopped
    double seconds_now() nogil
    double NAP
    void nap() nogil
    void wait_for_stop(long seconds) nogil
    int sched_yield() nogil
    int pthread_atfork(void *, void *, void (*child)() noexcept) nogil

cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef enum:
    BATCH = 256            # owners that the thread releases before it lets others have the GIL
    LONGEST_CAPTURE = 30   # seconds for which the thread waits for open managed captures; then it goes on
    FENCE_POLL_MS = 1
    EXIT_SECONDS = 2       # for the last release, and again for the thread to stop

cdef double LATE_DESTRUCTOR = 0.01  # the driver runs them up to about 1 ms after the executable's destruction

cdef owner_list *queue_first = NULL  # dead lists, the first to die first
cdef owner_list *queue_last = NULL
cdef int releasing = 0               # calls of release_some() that any thread is inside of
cdef bint reclaimer_started = False  # or could not be: it is tried once
cdef bint reclaimer_asked = False    # of the main thread, by a caller without the GIL
cdef bint reclaimer_runs = False
cdef bint stopping = False
cdef unsigned int process = 0        # grows in each forked child


def reclaim(timeout=None):
    """Releases the owners whose graphs are gone.

    A thread does this by itself; call it where memory must be back before the next line. It may be called from an
    owner's `__del__`. While a managed capture is open nothing is released: finalizers could break the capture.

    Args:
        timeout: None: do what can be done now. A number: wait that many seconds at most for owners that are on their way
            out (behind a fence, behind an open managed capture, in the thread's hands, or in the driver, which runs
            destructors up to about a millisecond after the executable was destroyed). A graph that is still alive, or an
            executable destroyed with a launch in flight, is not waited for: synchronize first.

    Returns:
        How many owners went during the call.

    Raises:
        ValueError: `timeout` is negative or not a number.
    """
    cdef double limit = 0, quiet_since, now
    cdef uint64_t before = released, seen
    cdef int patience = 4
    if timeout is not None:
        limit = timeout
        if not limit >= 0:
            raise ValueError(f"timeout is {timeout!r}, not a number of seconds")
    release_now()
    while patience and (polling or releasing > releasing_here):  # the thread has them in hand: they go in a moment
        patience -= 1
        with nogil:
            nap()
        release_now()
    if limit > 0:
        quiet_since = seconds_now()
        limit += quiet_since
        seen = released
        while True:
            now = seconds_now()
            if released != seen:
                seen = released
                quiet_since = now
            if now >= limit or not on_their_way() and (not lists_alive() or now - quiet_since > LATE_DESTRUCTOR):
                break
            with nogil:
                nap()
            PyErr_CheckSignals()
            release_now()
    return released - before


cdef bint on_their_way() noexcept:
    return queue_first != NULL or owner_dead_any() or fences != NULL or polling or releasing > releasing_here


cdef void drain() noexcept:
    """Takes the dead lists from the stack: out of the index, into the queue. Runs no Python code."""
    global queue_first, queue_last, dead, live, current_list
    cdef owner_list *each
    cdef owner_list *first = owner_dead_take()
    while first != NULL:
        each = first
        first = first.next
        each.next = NULL
        owner_lock()  # whoever was retaining into it without the GIL has done so, and nobody will find it again
        owner_index_remove_locked(&index, each)
        if each.object != NULL:
            live -= 1
        owner_unlock()
        if current_list == each:
            current_list = NULL
        dead += owner_list_count(each)
        note_death(each)
        if queue_last != NULL:
            queue_last.next = each
        else:
            queue_first = each
        queue_last = each


cdef void release_now() noexcept:
    """Everything that is dead now. Not what dies meanwhile: other threads may go on for ever."""
    poll_fences()
    drain()
    if not managed_open:
        release_some(dead)


cdef size_t release_some(size_t most) noexcept:
    """Releases up to `most` owners of the queue, in relaxed capture mode and in their list's context."""
    global queue_first, queue_last, dead, released, releasing, releasing_here
    cdef size_t done = 0
    cdef owner_list *owners
    cdef owner_entry entry
    cdef CUcontext context = NULL
    cdef CUstreamCaptureMode mode
    cdef bint relaxed
    cdef unsigned int before = process
    cdef int open_before = managed_open
    if queue_first == NULL:
        return 0
    # Releasing frees memory and destroys events and graphs: in any other mode that would break somebody's capture.
    relaxed = relax(&mode)
    releasing += 1
    releasing_here += 1
    while True:
        # Read afresh each time: the release before may have reclaimed, and freed the list.
        owners = queue_first
        if owners == NULL:
            break
        if owner_list_empty(owners):
            queue_first = owners.next
            if queue_first == NULL:
                queue_last = NULL
            free_list(owners)
            continue
        if done == most or managed_open > open_before:  # a capture was begun meanwhile: the rest waits for its end
            break
        if <void *>context != owners.context:
            if context != NULL:
                driver.cuCtxPopCurrent(&context)
            context = <CUcontext>owners.context
            if context != NULL and driver.cuCtxPushCurrent(context) != CUDA_SUCCESS:
                context = NULL  # it was destroyed: the owners go without it
                owners.context = NULL
        owner_list_check(owners)
        entry = owner_list_take(owners)
        done += 1
        if entry.release != NULL:
            entry.release(entry.object)
        else:
            Py_DECREF(<object>entry.object)
        if process != before:
            return done  # a child that the owner forked: it counts from new, and has no driver to restore
        dead -= 1
        released += 1
    releasing_here -= 1
    releasing -= 1
    if context != NULL:
        driver.cuCtxPopCurrent(&context)
    if relaxed:
        restore(&mode)
    return done


# ---- the thread ----

cdef void start_reclaimer() noexcept:
    """On the first list of the process. A thread that cannot be started (at exit, out of threads) is not missed:
    `reclaim()` does its work, and what nobody reclaims is left to the process's end."""
    global reclaimer_started, reclaimer_runs
    owner_lock()
    reclaimer_started = True
    owner_unlock()
    if stopping:
        return
    try:
        import _thread
        import atexit
        atexit.unregister(stop_reclaimer)  # from the import of this module, or the parent's of a forked child
        atexit.register(stop_reclaimer)
        _thread.start_new_thread(reclaimer, ())
        reclaimer_runs = True
    except Exception:
        return


def reclaimer():
    """The daemon thread: sleeps without the GIL until the first death, then releases in batches."""
    cdef double waited
    cdef unsigned int here = process  # a child forked by an owner that goes on this thread has a reclaimer of its own
    while not stopping and process == here:
        with nogil:
            owner_dead_wait(-1 if fences == NULL and not polling else FENCE_POLL_MS / 1000.0)
        if stopping:
            break
        poll_fences()
        drain()
        waited = 0
        while queue_first != NULL and not stopping:
            if managed_open and waited < LONGEST_CAPTURE:
                with nogil:
                    nap()
                waited += NAP
                continue
            release_some(BATCH)
            with nogil:
                sched_yield()
            drain()
    sem_post(&reclaimer_stopped)


def stop_reclaimer():
    """Before the interpreter goes: release what is dead, for a bounded time (each owner may have to wait for the GIL behind
    busy threads), and make sure that the thread never asks for the GIL again. The rest is left to the process's end."""
    global stopping, reclaimer_runs
    cdef double limit = seconds_now() + EXIT_SECONDS
    poll_fences()
    drain()
    while seconds_now() < limit and not managed_open and release_some(1):
        pass
    owner_lock()
    stopping = True  # and nobody asks for the thread any more
    owner_unlock()
    if reclaimer_runs:
        reclaimer_runs = False
        sem_post(&owner_dead_wake)
        with nogil:
            wait_for_stop(EXIT_SECONDS)


cdef void forked() noexcept nogil:
    """In a child, right after fork. What was inherited is the parent's: its memory is leaked here, its owners never touched."""
    global state, leaked, dead, live, index, current_list, queue_first, queue_last, releasing, releasing_here
    global reclaimer_started, reclaimer_asked, reclaimer_runs, managed_open, fences, polling, epoch, process
    owner_dead_reset()
    owner_lock_reset()  # its holder was a thread of the parent
    leaked = retained + retained_opaque - released
    dead = live = 0
    index = owner_index(NULL, 0, 0)
    current_list = queue_first = queue_last = NULL
    releasing = releasing_here = 0
    reclaimer_started = reclaimer_asked = reclaimer_runs = False
    managed_open = polling = 0
    owner_gate_managed(0)
    fences = NULL
    epoch += 1
    process += 1
    if state == READY:
        state = FORKED
        owner_question_set(NULL)


def _at_exit():
    """Also where no thread was started: callers without the GIL must know that the interpreter goes."""
    import atexit
    atexit.register(stop_reclaimer)


_at_exit()
owner_dead_reset()
sem_init(&reclaimer_stopped, 0, 0)
pthread_atfork(NULL, NULL, forked)
