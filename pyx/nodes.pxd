# The C declarations of nodes.h, for audit.pyx.

from libc.stdint cimport uint64_t

from driver cimport CUgraph, CUgraphNode, CUresult


cdef extern from "nodes.h" nogil:
    ctypedef int CUgraphNodeType
    ctypedef int CUpointer_attribute
    ctypedef unsigned long long CUdeviceptr
    ctypedef void *CUfunction
    ctypedef void *CUkernel

    enum:
        CU_GRAPH_NODE_TYPE_KERNEL
        CU_GRAPH_NODE_TYPE_MEMCPY
        CU_GRAPH_NODE_TYPE_MEMSET
        CU_GRAPH_NODE_TYPE_HOST
        CU_GRAPH_NODE_TYPE_GRAPH
        CU_GRAPH_NODE_TYPE_EMPTY
        CU_GRAPH_NODE_TYPE_WAIT_EVENT
        CU_GRAPH_NODE_TYPE_EVENT_RECORD
        CU_GRAPH_NODE_TYPE_CONDITIONAL
        CU_MEMORYTYPE_HOST
        CU_MEMORYTYPE_DEVICE
        CU_MEMORYTYPE_UNIFIED
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        CU_POINTER_ATTRIBUTE_BUFFER_ID
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
        CU_POINTER_ATTRIBUTE_RANGE_SIZE
        CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
        NODE_EXTRA_END
        NODE_EXTRA_BUFFER
        NODE_EXTRA_SIZE

    ctypedef struct kernel_node:
        CUfunction func
        void **kernelParams
        void **extra
        CUkernel kern

    ctypedef struct memset_node:
        CUdeviceptr dst
        size_t pitch
        unsigned int elementSize
        size_t width
        size_t height

    ctypedef struct memcpy_node:
        int srcMemoryType
        const void *srcHost
        CUdeviceptr srcDevice
        int dstMemoryType
        void *dstHost
        CUdeviceptr dstDevice

    ctypedef struct conditional_part:
        unsigned int size
        CUgraph *phGraph_out

    ctypedef struct any_node:
        CUgraphNodeType type
        conditional_part conditional

    ctypedef struct node_table:
        CUresult (*cuGraphGetNodes)(CUgraph, CUgraphNode *, size_t *) noexcept nogil
        CUresult (*cuGraphNodeGetType)(CUgraphNode, CUgraphNodeType *) noexcept nogil
        CUresult (*cuGraphKernelNodeGetParams)(CUgraphNode, kernel_node *) noexcept nogil
        CUresult (*cuGraphMemcpyNodeGetParams)(CUgraphNode, memcpy_node *) noexcept nogil
        CUresult (*cuGraphMemsetNodeGetParams)(CUgraphNode, memset_node *) noexcept nogil
        CUresult (*cuGraphChildGraphNodeGetGraph)(CUgraphNode, CUgraph *) noexcept nogil
        CUresult (*cuFuncGetName)(const char **, CUfunction) noexcept nogil
        CUresult (*cuFuncGetParamInfo)(CUfunction, size_t, size_t *, size_t *) noexcept nogil
        CUresult (*cuKernelGetName)(const char **, CUkernel) noexcept nogil
        CUresult (*cuKernelGetParamInfo)(CUkernel, size_t, size_t *, size_t *) noexcept nogil
        CUresult (*cuPointerGetAttributes)(
            unsigned int, CUpointer_attribute *, void **, CUdeviceptr) noexcept nogil
        CUresult (*cuGraphNodeGetParams)(CUgraphNode, any_node *) noexcept nogil

    int node_fill(node_table *table, char *why, size_t size)
