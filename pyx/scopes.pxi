# Scopes: `collect()` and `suspend()`. They see what is retained on their own thread (and, in a managed capture, what its
# other threads retain while having no scope of their own). Each thread's open scopes are a list in its thread state, so
# they end with the thread. Called with the GIL.


cdef Py_ssize_t scopes_open = 0  # of all threads, and a watch: while it is 0 the hot path never comes here
cdef object told = None          # what is told of each retention: see watch_retains()


@cython.final
cdef class Scope:
    """One `collect()` or `suspend()`; a context manager, usable once at a time."""

    cdef list collected  # None: a suspension
    cdef list stack      # the open scopes of the thread that entered, while entered
    cdef bint open       # counted in scopes_open

    def __dealloc__(self):
        global scopes_open
        scopes_open -= self.open  # its thread ended inside it

    def __enter__(self):
        global scopes_open
        if self.open:
            raise RuntimeError("this scope is already open")
        self.stack = scopes_here(True)
        self.stack.append(self)
        self.open = True
        scopes_open += 1
        return self.collected

    def __exit__(self, *exc):
        global scopes_open
        if not self.open:
            raise RuntimeError("this scope is not open")
        # Wherever it stands: scopes of generators may end out of order, or on another thread.
        self.stack.remove(self)
        self.stack = None
        self.open = False
        scopes_open -= 1


def collect():
    """A scope that notes what is retained inside it.

        with arena.collect() as owners:
            run_op()
        # owners: a list, in the order of retention

    The innermost scope of the calling thread alone gets an owner; duplicates are kept. Inside it `retain` returns True
    whether or not a capture is open, and if one is, the graph retains the owner too. In a managed capture, threads that
    have no scope of their own reach the scope of the thread that began the capture.

    Returns:
        A context manager; entering it gives a list, which stays readable after the exit.
    """
    cdef Scope scope = Scope.__new__(Scope)
    scope.collected = []
    return scope


def suspend():
    """A scope inside which the outer `collect()` scopes get nothing. What a capture retains is not affected.

    Returns:
        A context manager; entering it gives None.
    """
    return Scope.__new__(Scope)


def watch_retains(tell):
    """For debugging: `tell(owner, stream)` before each `retain`, which then goes the way of open scopes; None ends it.

    `stream` is a handle, or None where there is no current stream. What `tell` raises, `retain` raises, and retains nothing.
    Retentions from C are not told.
    """
    global told, scopes_open
    scopes_open += (tell is not None) - (told is not None)
    told = tell


cdef list scopes_here(bint create):
    """The calling thread's open scopes, outermost first; None if it never had one."""
    cdef PyObject *state = PyThreadState_GetDict()
    if state == NULL:
        raise RuntimeError("this thread has no Python state")
    scopes = (<dict>state).get(Scope)
    if scopes is None and create:
        scopes = (<dict>state)[Scope] = []
    return scopes


cdef bint retain_scoped(object owner, void *handle, int found) except -1:
    """`retain` while some scope is open somewhere."""
    cdef uint64_t capture
    cdef CUgraph graph
    cdef owner_list *managed
    cdef list scopes = scopes_here(False)
    cdef Scope scope
    if told is not None:
        told(owner, <uint64_t>handle if found else None)
    if not scopes and managed_open and found and ask(handle, &capture, &graph):
        managed = list_of(capture)
        if managed != NULL and managed.scopes != NULL:
            scopes = <list>managed.scopes
    if not scopes:
        return found and retain_on(owner, handle)
    scope = scopes[len(scopes) - 1]
    if scope.collected is None:
        return found and retain_on(owner, handle)
    owners = owners_of(owner)
    if found:
        retain_all(owners, handle)
    scope.collected.extend(owners)
    return True
