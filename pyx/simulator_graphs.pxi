# User objects, graphs, their nodes and executables, as Python has them. Makes and destroys by the calls of simulator_graphs.c.

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
