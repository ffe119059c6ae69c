# Managed captures: those whose begin and end are seen (arena.torch patches them in). Their executables are kept clean: the
# user object leaves the graph before each instantiation, and a reference on the CPU side, or the kept template, holds it
# from then on. What the driver then no longer covers, launches in flight, is covered by fences. Called with the GIL.

from libc.stdlib cimport free, realloc

cdef extern from *:
    """
    /* Whether an object refers to another, itself or through its __dict__. As the garbage collector finds out, but without
     * asking it for lists: all owners of each capture are looked at. */
    typedef struct { PyObject *wanted; int left, depth, found; } look;
    static int look_at(PyObject *each, void *arg) {
        look *here = (look *)arg;
        if (each == here->wanted) return here->found = 1;
        if (here->left-- <= 0) return 1;
        if (here->depth && PyDict_CheckExact(each)) {
            here->depth = 0;
            Py_TYPE(each)->tp_traverse(each, look_at, arg);
            here->depth = 1;
        }
        return here->found;
    }
    static int refers(PyObject *owner, PyObject *wanted) {
        look here = {wanted, 1000, 1, owner == wanted};
        if (!here.found && PyObject_IS_GC(owner) && Py_TYPE(owner)->tp_traverse)
            Py_TYPE(owner)->tp_traverse(owner, look_at, &here);
        return here.found;
    }
    """
    int refers(PyObject *owner, PyObject *wanted)

cdef uint64_t cycles = 0     # owners that were found to reach their own graph
cdef int managed_open = 0   # managed captures between begin and seal
cdef unsigned int epoch = 0  # of driver and process: what was made in another has nothing to say to this one
begin_hooks = []             # called with nothing when a managed capture has begun on the current stream


cdef inline owner_list *open_here(void *stream) noexcept:
    """The list of the managed capture that this thread began on that stream, without asking the driver; or NULL."""
    cdef owner_list *owners
    if not managed_open or managed_here.capture == 0 or managed_here.stream != stream or owner_question_now() == NULL:
        return NULL
    owners = list_of(managed_here.capture)
    if owners == NULL or owners.sealed or not owner_list_attached(owners):
        return NULL
    return owners


@cython.final
cdef class ManagedCapture:
    """One capture from its begin to the end of its graph's owner: begin, seal, hold, replayed, drop."""

    cdef readonly uint64_t id   # the capture's id
    cdef public bint lazy       # the wrapper's note: a replay must instantiate first, so that the executable is clean
    cdef CUuserObject object    # our reference, from the seal on; NULL if nothing was retained
    cdef void *stream           # that the capture began on
    cdef CUcontext context      # that was current when the capture began
    cdef readonly CUdevice device  # whose context that is; -1: none
    cdef CUgraph holder         # the graph that holds a reference too, or NULL
    cdef unsigned int epoch     # that it was made in
    cdef bint open              # between begin and seal
    cdef list scopes            # of the thread that began
    cdef public list bodies     # the wrapper's note: the open conditional bodies, innermost last
    cdef here before            # what this thread had in managed_here when the capture began
    cdef fence *replays         # the streams that the graph was replayed on, not in `fences` yet; or NULL
    cdef size_t last            # the mark of the last replay, if there are any

    def __cinit__(self):
        self.object = NULL
        self.holder = NULL
        self.replays = NULL

    def __dealloc__(self):
        self.let_go()
        free(self.replays)

    def seal(self):
        """The list takes no more owners and no graph holds it: what is instantiated now is clean.

        Called before the end of the capture, and again before each further instantiation of a kept template.
        """
        cdef owner_list *owners
        if self.epoch != epoch:
            return
        if self.open:
            self.close()
            owners = close_list(self.id)
            if owners == NULL:
                return
            if owners.object == NULL:
                discard(owners)
                return
            if owners.managed:  # else it is held by the executable: its begin was not seen
                self.object = <CUuserObject>owners.object
                if self.still_captures():  # else the graph is not to be touched; its reference goes with it
                    self.holder = <CUgraph>owners.graph
        if self.holder != NULL:
            driver.cuGraphReleaseUserObject(self.holder, self.object, 1)
            self.holder = NULL

    def hold(self, template=0):
        """The capture has ended. With `template` (a CUgraph), that graph holds the owners too, so that its clones do.

        Raises:
            DriverError: The template refused the reference; ours still holds the owners.
        """
        cdef CUgraph graph = <CUgraph>PyLong_AsVoidPtr(template)
        cdef owner_list *owners
        if self.epoch != epoch:
            return
        owners = list_of(self.id)
        if owners != NULL and owners.sealed:
            owner_list_end(owners)
        if self.object == NULL or graph == NULL:
            return
        check(driver.cuGraphRetainUserObject(graph, self.object, 1, 0), "cuGraphRetainUserObject")
        self.holder = graph

    @property
    def template(self):
        """The kept template that holds the owners too, or 0."""
        return <intptr_t>self.holder

    @property
    def holds(self):
        """Whether anything was retained: after the seal, a capture that holds nothing need not be kept."""
        return self.object != NULL

    def replayed(self):
        """The graph is about to be launched on torch's current stream of the capture's device, as torch does it, whichever
        device is current. Cheap where that is the stream of the last time.

        Returns:
            0: noted. 1: noted, and `launched()` is to be called after the launch. None: not noted. See to `lazy`, and call
            `note()`.
        """
        cdef void *handle = NULL
        cdef fence_mark *mark
        if self.replays == NULL or self.lazy or driver.current_stream == NULL:
            return None
        if driver.current_stream(self.device, &handle) != 0:
            return None
        mark = &self.replays.marks[self.last]
        if mark.stream != handle:
            return None
        if mark.kind == OURS:
            return 0
        mark.kind = LAUNCHING
        return 1

    def note(self, stream, bint external=False):
        """The graph is about to be launched on that stream: the owners must outlive that work.

        Args:
            stream: The handle.
            external: The stream may be destroyed before this capture lets go.

        Returns:
            As `replayed()`: `external` as an int.

        Raises:
            DriverError: No context is current, nor was at the begin: nothing could tell when the work is done.
            MemoryError: There is no room to note the stream.
        """
        cdef CUcontext context = NULL
        cdef void *handle = PyLong_AsVoidPtr(stream)
        cdef fence *replays
        cdef fence_mark *mark
        cdef size_t count
        if driver.cuCtxGetCurrent(&context) != CUDA_SUCCESS or context == NULL:
            # A graph is launched into a stream of its own context, whichever is current.
            context = self.context
        if context == NULL:
            raise DriverError(f"no context is current, nor was at the begin of capture {self.id}: nothing can tell when "
                              f"the work on stream {stream:#x} is done")
        mark = self.mark_of(handle, <void *>context)
        if mark != NULL:
            mark.kind = LAUNCHING if external else OURS
            return external
        count = 0 if self.replays == NULL else self.replays.count
        # Here and not in let_go(), where a failure could only leak.
        replays = <fence *>realloc(self.replays, sizeof(fence) + (count + 1) * sizeof(fence_mark))
        if replays == NULL:
            raise MemoryError(f"no memory to note that capture {self.id} was replayed on stream {stream:#x}")
        self.replays = replays
        replays.marks[count].stream = handle
        replays.marks[count].context = <void *>context
        replays.marks[count].event = NULL
        replays.marks[count].kind = LAUNCHING if external else OURS
        replays.count = count + 1
        self.last = count
        return external

    def launched(self, bint failed=False):
        """The graph was launched on the external stream of the last `replayed()` or `note()`, or its launch failed: an event
        goes behind what the stream has to do."""
        cdef CUstreamCaptureMode mode
        cdef CUresult code
        cdef CUevent before
        cdef fence_mark mark
        cdef fence_mark *place
        if self.replays == NULL or not relax(&mode):  # another thread has let go meanwhile, and made its own fence
            return
        # A copy: recording lets other threads run, which may note a stream or let go. The event is in nobody's reach then.
        mark = self.replays.marks[self.last]
        self.replays.marks[self.last].event = NULL
        before = mark.event
        code = record(&mark)
        if code != CUDA_SUCCESS:
            if failed and code == CUDA_ERROR_NOT_READY and mark.event == before:
                # The stream captures, so it took no launch: the work of the last one, if any, is still what to wait for.
                mark.kind = RECORDED if before != NULL else NEVER
            else:
                mark.kind = LOST  # the owners stay for good: nobody can say when they may go
        place = self.mark_of(mark.stream, mark.context)
        if place == NULL:
            if mark.event != NULL:
                driver.cuEventDestroy(mark.event)
        else:
            if place.event != NULL:
                driver.cuEventDestroy(place.event)
            place.event = mark.event
            place.kind = mark.kind
        restore(&mode)

    cdef fence_mark *mark_of(self, void *stream, void *context) noexcept:
        """The mark of that stream, which becomes the last one; or NULL."""
        cdef size_t i
        cdef size_t count = 0 if self.replays == NULL else self.replays.count
        for i in range(count):
            if self.replays.marks[i].stream == stream and self.replays.marks[i].context == context:
                self.last = i
                return &self.replays.marks[i]
        return NULL

    def join(self, ManagedCapture outer not None):
        """This was a conditional body of the graph that `outer` captures. What it retained is that capture's from now on.

        Called before the end of the body's capture, and once; `drop()` comes next in any case.

        Raises:
            ValueError: `outer` is this capture.
            CaptureError, DriverError, MemoryError: The other capture could not take the owners. The body's graph holds
                them, and with it the executable.
        """
        cdef owner_list *mine
        cdef owner_list *theirs = NULL
        cdef int code
        if outer.id == self.id:
            raise ValueError(f"capture {self.id} is not a body of itself")
        if self.epoch != epoch or not self.open:
            return
        while True:
            mine = list_of(self.id)
            code = 0 if mine == NULL or not mine.managed else owner_list_join(theirs, mine)
            if code == 0:
                break
            if code < 0:
                no_memory(theirs)
            theirs = list_for(outer.stream, mine.count)
            if theirs == NULL or theirs.capture != outer.id:
                raise CaptureError(f"capture {outer.id} ended before its conditional body {self.id}")
        self.seal()

    @property
    def owners(self):
        """The Python owners, in order of retention. After the seal."""
        cdef owner_list *owners = NULL if self.epoch != epoch or self.object == NULL else list_of(self.id)
        cdef size_t i
        if owners == NULL:
            return []
        return [<object>owners.entries[i].object for i in range(owners.count) if owners.entries[i].release == NULL]

    def count_cycles(self, graph):
        """Counts the owners that are `graph`, the wrapper of what was captured, or refer to it directly. After the seal."""
        global cycles
        cdef owner_list *owners = NULL if self.epoch != epoch or self.object == NULL else list_of(self.id)
        cdef size_t i
        if owners == NULL:
            return
        for i in range(owners.count):
            if owners.entries[i].release == NULL and refers(<PyObject *>owners.entries[i].object, <PyObject *>graph):
                cycles += 1

    @property
    def capturing(self):
        """Whether its stream still captures it."""
        return self.epoch == epoch and self.still_captures()

    cdef bint still_captures(self) noexcept:
        cdef uint64_t capture
        cdef CUgraph graph
        try:
            return ask(self.stream, &capture, &graph) == 1 and capture == self.id
        except Exception:  # invalidated
            return False

    def drop(self):
        """The graph's owner is gone. Our reference goes when all replays have finished; the call does not wait."""
        self.let_go()

    cdef void close(self) noexcept:
        global managed_open, managed_here
        self.open = False
        managed_open -= 1
        owner_gate_managed(managed_open)
        if managed_here.capture == self.id:
            managed_here = self.before

    cdef void let_go(self) noexcept:
        cdef owner_list *owners
        cdef CUuserObject object
        cdef fence *replays
        if self.epoch != epoch:
            return
        if self.open:  # abandoned: the capture was neither sealed nor ended in our sight
            self.close()
            owners = list_of(self.id)
            if owners != NULL and owners.managed:
                owners = close_list(self.id)
            else:
                owners = NULL
            if owners != NULL:
                owner_list_end(owners)
                if owners.object == NULL:
                    discard(owners)
                else:
                    self.object = <CUuserObject>owners.object
        object, self.object = self.object, NULL
        replays, self.replays = self.replays, NULL
        if object == NULL:
            free(replays)
        elif replays == NULL:
            driver.cuUserObjectRelease(object, 1)
        else:
            replays.object = object
            add_fence(replays)


def begin(stream=None):
    """Begins a managed capture: `stream` (torch's current one) has just begun to capture, on this thread.

    Returns:
        A `ManagedCapture`.

    Raises:
        CaptureError: The stream is not capturing, or its capture was invalidated.
        DriverError: There is no usable driver.
    """
    global managed_open
    cdef void *handle = NULL
    cdef uint64_t capture
    cdef CUgraph graph
    cdef owner_list *owners
    cdef owner_list *before
    cdef int line = 0
    cdef ManagedCapture managed = ManagedCapture.__new__(ManagedCapture)
    need_driver()
    code = call_site(&line)
    managed.scopes = scopes_here(True)
    if not reclaimer_started:
        start_reclaimer()
    if not find_stream(stream, &handle) or not ask(handle, &capture, &graph):
        raise CaptureError(f"stream {<intptr_t>handle:#x} is not capturing")
    owners = owner_list_new(capture)
    if owners == NULL or owner_index_reserve(&index):
        if owners != NULL:
            owner_list_free(owners)
        raise MemoryError(f"no memory for the owner list of capture {capture}")
    before = list_of(capture)
    if before != NULL:
        forget(before)  # an earlier capture into the same graph
    owners.managed = True
    owners.scopes = <void *>managed.scopes
    owners.graph = graph
    set_birth(owners, code, line)
    owner_index_insert(&index, owners)
    if driver.cuCtxGetDevice(&managed.device) != CUDA_SUCCESS:
        managed.device = -1
    driver.cuCtxGetCurrent(&managed.context)
    managed.stream = handle
    managed.id = capture
    managed.epoch = epoch
    managed.open = True
    managed_open += 1
    owner_gate_managed(managed_open)
    managed.before = managed_here
    managed_here.stream = handle
    managed_here.capture = capture
    managed_here.device = managed.device
    for hook in begin_hooks:
        try:
            hook()
        except Exception as error:  # the capture is the caller's, and it has begun
            report_hook(hook, error)
    return managed


cdef int report_hook(object hook, object error) except -1:
    import logging
    logging.getLogger("arena").warning("%r failed at the begin of a managed capture", hook, exc_info=error)
    return 0


def count_cycle():
    """An owner was found that reaches its own graph."""
    global cycles
    cycles += 1


cdef owner_list *close_list(uint64_t capture) noexcept:
    """Seals the list of that capture; NULL: there is none."""
    global current_list
    cdef owner_list *owners
    drain()
    owners = owner_index_seal(&index, capture)
    if owners != NULL:
        if current_list == owners:
            current_list = NULL
        owners.scopes = NULL
    return owners


cdef void discard(owner_list *owners) noexcept:
    """A list that nothing was retained in, and that no user object knows."""
    forget(owners)
    free_list(owners)


cdef void forget_managed() noexcept:
    """Another driver is about to be used: all lists are gone, and with them all that these could hold."""
    global managed_open, fences, polling, epoch
    cdef fence *wait
    cdef owner_list *each
    epoch += 1
    managed_open = polling = 0
    owner_gate_managed(0)
    while fences != NULL:
        wait, fences = fences, fences.next
        free(wait)
    drain()
    while True:
        each = owner_index_take_unattached(&index)  # a managed capture that retained nothing: no user object knows its list
        if each == NULL:
            break
        discard(each)
