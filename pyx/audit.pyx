# cython: language_level=3
"""Reads captured graphs back: their nodes, every word of their parameters that could be a pointer, and what those point into.

It owns one `Nodes` per reading, and knows neither torch nor owners: arena/auditing.py sorts what is found. Called with the GIL,
far from any hot path, by whoever audits; the walk itself is C. A graph that is still being captured may be read too.
"""

cimport cython
from cpython.array cimport array
from libc.stdint cimport int32_t, intptr_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from driver cimport CUDA_ERROR_INVALID_VALUE, CUDA_SUCCESS, CUgraph, CUgraphNode, CUresult, DRIVER_READY
from nodes cimport *

from arena._registry import DriverError

cdef enum:
    DEPTH = 64          # of graphs in graphs; a deeper one is not read
    SMALL = 1 << 16     # the most bytes of one parameter block (CUDA allows 32,764)

cdef node_table driver
cdef bint ready = False
cdef char[256] why

# A word that could be an address: it lies in what 57 bits of user space leave, above the first 4 GiB.
cdef uint64_t LOWEST = <uint64_t>1 << 32
cdef uint64_t HIGHEST = <uint64_t>1 << 56

cdef struct word:
    uint64_t value
    uint32_t node    # number in the walk
    int32_t param    # of a kernel; of a copy 0: to, 1: from
    uint32_t offset  # in that parameter
    uint32_t size    # of that parameter


cdef int use_nodes(const void *table) except -1:
    global driver, ready
    if table != NULL:
        driver = (<const node_table *>table)[0]
    ready = table != NULL
    return 0


cdef int need_nodes() except -1:
    global ready
    if not ready:
        if node_fill(&driver, why, sizeof(why)) != DRIVER_READY:
            raise DriverError(why.decode())
        ready = True
    return 0


cdef int check(CUresult code, str call, str about) except -1:
    if code != CUDA_SUCCESS:
        raise DriverError(f"{call} failed for {about}: {code}")
    return 0


cdef const unsigned long long *numbers_of(array numbers) except? NULL:
    if numbers.typecode != "Q":
        raise TypeError(f"ranges are told by an array of 'Q', not of {numbers.typecode!r}")
    return numbers.data.as_ulonglongs


cdef tuple KINDS = (
    "kernel", "memcpy", "memset", "host", "graph", "empty", "wait", "record", "signal", "semaphore", "alloc", "free", "batch",
    "conditional",
)


@cython.final
cdef class Nodes:
    """One graph as it was read: nodes in the order of the walk, and the words that could be addresses."""

    cdef word *words
    cdef size_t count
    cdef size_t capacity
    cdef readonly list kinds
    """What each node is: "kernel", "memcpy", ..."""
    cdef readonly list names
    """A kernel's name; "" of other nodes."""
    cdef readonly list paths
    """Where each node stands: its number in its graph, as a tuple through the graphs around it."""
    cdef readonly list unread
    """(path, kind, reason) of what could not be read."""
    cdef dict kernels

    def __cinit__(self):
        self.words = NULL

    def __init__(self):
        raise TypeError("use read()")

    def __dealloc__(self):
        free(self.words)

    def __len__(self):
        return len(self.kinds)

    @property
    def addresses(self):
        """How many words could be addresses."""
        return self.count

    def word(self, size_t index):
        """(node, parameter, offset, size of the parameter, value) of one of them."""
        if index >= self.count:
            raise IndexError(f"word {index} of {self.count}")
        cdef word *at = &self.words[index]
        return at.node, at.param, at.offset, at.size, at.value

    def where(self, starts, ends):
        """Which words lie in which ranges.

        Args:
            starts, ends: Two `array.array("Q")`, sorted, of ranges that do not overlap.

        Returns:
            ({range: [words]}, {value: [words]}): words by the range that they lie in, and those that lie in none.
        """
        cdef const unsigned long long *low = numbers_of(starts)
        cdef const unsigned long long *high = numbers_of(ends)
        cdef dict inside = {}
        cdef dict outside = {}
        cdef size_t i, left, right, middle, ranges = len(starts)
        cdef uint64_t value
        cdef object key
        for i in range(self.count):
            value = self.words[i].value
            left, right = 0, ranges  # the first range that starts above the value
            while left < right:
                middle = (left + right) >> 1
                if low[middle] <= value:
                    left = middle + 1
                else:
                    right = middle
            if left and value < high[left - 1]:
                key = left - 1
                if key in inside:
                    (<list>inside[key]).append(i)
                else:
                    inside[key] = [i]
            else:
                key = value
                if key in outside:
                    (<list>outside[key]).append(i)
                else:
                    outside[key] = [i]
        return inside, outside

    cdef int add(self, uint64_t value, int param, size_t offset, size_t size) except -1:
        cdef size_t capacity
        cdef word *words
        if value < LOWEST or value >= HIGHEST:
            return 0
        if self.count == self.capacity:
            capacity = self.capacity * 2 + 64
            words = <word *>realloc(self.words, capacity * sizeof(word))
            if words == NULL:
                raise MemoryError(f"no memory for {capacity} words of a graph")
            self.words, self.capacity = words, capacity
        self.words[self.count].value = value
        self.words[self.count].node = <uint32_t>(len(self.kinds) - 1)
        self.words[self.count].param = param
        self.words[self.count].offset = <uint32_t>offset
        self.words[self.count].size = <uint32_t>size
        self.count += 1
        return 0

    cdef int add_bytes(self, const char *value, int param, size_t size) except -1:
        """Every aligned word of a parameter: a pointer may be one of many in a struct by value, a tensor map's among them."""
        cdef size_t offset = 0
        cdef uint64_t one
        while offset + 8 <= size:
            memcpy(&one, value + offset, 8)
            self.add(one, param, offset, size)
            offset += 8
        return 0

    cdef int walk(self, CUgraph graph, tuple path) except -1:
        cdef size_t count = 0, i
        cdef CUgraphNode *nodes
        cdef CUgraphNodeType kind
        about = f"graph {<intptr_t>graph:#x}"
        check(driver.cuGraphGetNodes(graph, NULL, &count), "cuGraphGetNodes", about)
        if not count:
            return 0
        nodes = <CUgraphNode *>malloc(count * sizeof(CUgraphNode))
        if nodes == NULL:
            raise MemoryError(f"no memory for {count} nodes of a graph")
        try:
            check(driver.cuGraphGetNodes(graph, nodes, &count), "cuGraphGetNodes", about)
            for i in range(count):
                here = (*path, i)
                check(driver.cuGraphNodeGetType(nodes[i], &kind), "cuGraphNodeGetType", f"node {i} of {about}")
                self.kinds.append(KINDS[kind] if kind < len(KINDS) else f"type {kind}")
                self.names.append("")
                self.paths.append(here)
                if kind == CU_GRAPH_NODE_TYPE_KERNEL:
                    self.read_kernel(nodes[i])
                elif kind == CU_GRAPH_NODE_TYPE_MEMCPY:
                    self.read_memcpy(nodes[i])
                elif kind == CU_GRAPH_NODE_TYPE_MEMSET:
                    self.read_memset(nodes[i])
                elif kind == CU_GRAPH_NODE_TYPE_GRAPH or kind == CU_GRAPH_NODE_TYPE_CONDITIONAL:
                    self.read_inner(nodes[i], kind, here)
                elif kind not in (
                    CU_GRAPH_NODE_TYPE_HOST, CU_GRAPH_NODE_TYPE_EMPTY, CU_GRAPH_NODE_TYPE_WAIT_EVENT,
                    CU_GRAPH_NODE_TYPE_EVENT_RECORD,
                ):
                    self.skip("nodes of this kind are not read")
        finally:
            free(nodes)
        return 0

    cdef int skip(self, str reason) except -1:
        self.unread.append((self.paths[len(self.paths) - 1], self.kinds[len(self.kinds) - 1], reason))
        return 0

    cdef int read_inner(self, CUgraphNode node, CUgraphNodeType kind, tuple path) except -1:
        cdef CUgraph inner = NULL
        cdef any_node told
        cdef size_t i
        cdef CUresult code
        if len(path) > DEPTH:
            return self.skip(f"it lies {len(path)} graphs deep")
        if kind == CU_GRAPH_NODE_TYPE_GRAPH:
            code = driver.cuGraphChildGraphNodeGetGraph(node, &inner)
            return self.walk(inner, path) if code == CUDA_SUCCESS else self.skip(f"cuGraphChildGraphNodeGetGraph: {code}")
        if driver.cuGraphNodeGetParams == NULL:
            return self.skip("only a driver of CUDA 13.2 or later tells its bodies")
        memset(&told, 0, sizeof(told))
        code = driver.cuGraphNodeGetParams(node, &told)
        if code != CUDA_SUCCESS:
            return self.skip(f"cuGraphNodeGetParams: {code}")
        for i in range(told.conditional.size):
            self.walk(told.conditional.phGraph_out[i], (*path, i) if told.conditional.size > 1 else path)
        return 0

    cdef int read_memcpy(self, CUgraphNode node) except -1:
        cdef memcpy_node told
        cdef CUresult code = driver.cuGraphMemcpyNodeGetParams(node, &told)
        if code != CUDA_SUCCESS:
            return self.skip(f"cuGraphMemcpyNodeGetParams: {code}")
        for param, kind, device, host in (
            (0, told.dstMemoryType, <uint64_t>told.dstDevice, <uint64_t>told.dstHost),
            (1, told.srcMemoryType, <uint64_t>told.srcDevice, <uint64_t>told.srcHost),
        ):
            if kind == CU_MEMORYTYPE_HOST:
                self.add(host, param, 0, 8)
            elif kind == CU_MEMORYTYPE_DEVICE or kind == CU_MEMORYTYPE_UNIFIED:
                self.add(device, param, 0, 8)
        return 0

    cdef int read_memset(self, CUgraphNode node) except -1:
        cdef memset_node told
        cdef CUresult code = driver.cuGraphMemsetNodeGetParams(node, &told)
        if code != CUDA_SUCCESS:
            return self.skip(f"cuGraphMemsetNodeGetParams: {code}")
        return self.add(told.dst, 0, 0, 8)

    cdef int read_kernel(self, CUgraphNode node) except -1:
        cdef kernel_node told
        cdef void *values = NULL
        cdef size_t size = 0, offset, bytes
        cdef int i = 0
        cdef CUresult code = driver.cuGraphKernelNodeGetParams(node, &told)
        if code != CUDA_SUCCESS:
            return self.skip(f"cuGraphKernelNodeGetParams: {code}")
        name, layout, code = self.kernel(told.func, told.kern)
        self.names[len(self.names) - 1] = name
        if code != CUDA_ERROR_INVALID_VALUE:
            return self.skip(f"{'cuFuncGetParamInfo' if told.func != NULL else 'cuKernelGetParamInfo'}: {code}")
        if not layout:
            return 0
        if told.kernelParams != NULL:
            for i in range(len(layout)):
                if told.kernelParams[i] != NULL:
                    self.add_bytes(<const char *>told.kernelParams[i], i, layout[i][1])
            return 0
        if told.extra == NULL:
            return self.skip("its parameters are not told")
        while told.extra[i] != <void *>NODE_EXTRA_END:
            if told.extra[i] == <void *>NODE_EXTRA_BUFFER:
                values = told.extra[i + 1]
            elif told.extra[i] == <void *>NODE_EXTRA_SIZE:
                size = (<size_t *>told.extra[i + 1])[0]
            i += 2
        if values == NULL or size > SMALL:
            return self.skip("its parameters are not told")
        for i in range(len(layout)):
            offset, bytes = layout[i]
            if offset + bytes <= size:
                self.add_bytes(<const char *>values + offset, i, bytes)
        return 0

    cdef tuple kernel(self, CUfunction function, CUkernel kern):
        """(name, ((offset, size), ...), what the driver said at their end) of a kernel. Asked once for each: graphs repeat few
        kernels many times."""
        cdef const char *name = NULL
        cdef size_t offset, size, i = 0
        cdef CUresult code
        cdef object key = <intptr_t>function if function != NULL else -<intptr_t>kern
        known = self.kernels.get(key)
        if known is not None:
            return known
        code = driver.cuFuncGetName(&name, function) if function != NULL else driver.cuKernelGetName(&name, kern)
        layout = []
        while True:
            if function != NULL:
                code = driver.cuFuncGetParamInfo(function, i, &offset, &size)
            else:
                code = driver.cuKernelGetParamInfo(kern, i, &offset, &size)
            if code != CUDA_SUCCESS:  # past the last one: CUDA_ERROR_INVALID_VALUE
                break
            layout.append((offset, size))
            i += 1
        known = (name.decode(errors="replace") if name != NULL else "?", tuple(layout), code)
        self.kernels[key] = known
        return known


def read(graph):
    """Reads a graph's nodes, those of graphs inside it included.

    Args:
        graph: A CUgraph, as an int. It must not be changed by others meanwhile.

    Raises:
        DriverError: There is no driver, it is older than CUDA 12.4, or it does not know the graph.
    """
    cdef CUgraph handle = <CUgraph><intptr_t>graph
    cdef Nodes nodes = Nodes.__new__(Nodes)
    need_nodes()
    nodes.kinds, nodes.names, nodes.paths, nodes.unread, nodes.kernels = [], [], [], [], {}
    nodes.walk(handle, ())
    return nodes


def pointed(uint64_t address):
    """What the driver says of an address: (memory type, start, bytes, id, device, pool), or None: nothing it allocated.

    The id is the allocation's own and never given out again: another one at the same place means other memory. The type is
    1 for host memory, 2 for a device's; device is -1 where the driver names none.

    Raises:
        DriverError: The driver cannot say: none is there, this is a forked child, or a fault has left the context unusable.
    """
    cdef unsigned int kind = 0
    cdef unsigned long long number = 0
    cdef int device = -1
    cdef uint64_t start = 0
    cdef size_t size = 0
    cdef uint64_t pool = 0
    cdef CUpointer_attribute[6] asked
    cdef (void *)[6] answers
    need_nodes()
    asked[:] = [
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        CU_POINTER_ATTRIBUTE_BUFFER_ID, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
    ]
    answers[0], answers[1], answers[2] = &kind, &start, &size
    answers[3], answers[4], answers[5] = &number, &device, &pool
    # Of an address that is not its own it says zeros, and success. A failure says nothing of the memory, least that it is gone.
    cdef CUresult code = driver.cuPointerGetAttributes(6, asked, answers, address)
    if code != CUDA_ERROR_INVALID_VALUE:
        check(code, "cuPointerGetAttributes", f"{address:#x}")
    if code != CUDA_SUCCESS or not kind or not size:
        return None
    return kind, start, size, number, max(device, -1), pool
