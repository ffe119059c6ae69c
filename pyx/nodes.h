/* What an audit asks of the CUDA driver: the nodes of a graph, their parameters, and what a pointer points into. A table of its
 * own beside driver.h, because nothing that retains may depend on it: a driver that lacks these can still do all the rest.
 * Filled on first use by node_fill(), or by the simulated driver with its own functions. Called with the GIL; nothing here
 * calls Python or initialises CUDA. tests/test_driver_table.py holds the declarations against real cuda.h files.
 */
#ifndef ARENA_NODES_H
#define ARENA_NODES_H

#include "driver.h"

/* X(name, value), as in driver.h. */
#define NODE_CONSTANTS(X) \
    X(CU_GRAPH_NODE_TYPE_KERNEL, 0) \
    X(CU_GRAPH_NODE_TYPE_MEMCPY, 1) \
    X(CU_GRAPH_NODE_TYPE_MEMSET, 2) \
    X(CU_GRAPH_NODE_TYPE_HOST, 3) \
    X(CU_GRAPH_NODE_TYPE_GRAPH, 4) \
    X(CU_GRAPH_NODE_TYPE_EMPTY, 5) \
    X(CU_GRAPH_NODE_TYPE_WAIT_EVENT, 6) \
    X(CU_GRAPH_NODE_TYPE_EVENT_RECORD, 7) \
    X(CU_GRAPH_NODE_TYPE_CONDITIONAL, 13) \
    X(CU_MEMORYTYPE_HOST, 1) \
    X(CU_MEMORYTYPE_DEVICE, 2) \
    X(CU_MEMORYTYPE_ARRAY, 3) \
    X(CU_MEMORYTYPE_UNIFIED, 4) \
    X(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 2) \
    X(CU_POINTER_ATTRIBUTE_BUFFER_ID, 7) \
    X(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 9) \
    X(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, 11) \
    X(CU_POINTER_ATTRIBUTE_RANGE_SIZE, 12) \
    X(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, 17)

enum { /* what a kernel node's `extra` is made of; macros in cuda.h */
    NODE_EXTRA_END = 0,
    NODE_EXTRA_BUFFER = 1,
    NODE_EXTRA_SIZE = 2,
};

#ifndef __cuda_cuda_h__
typedef int CUgraphNodeType;
typedef int CUmemorytype;
typedef int CUpointer_attribute;
typedef unsigned long long CUdeviceptr;
typedef struct CUfunc_st *CUfunction;
typedef struct CUkern_st *CUkernel;
typedef struct CUarray_st *CUarray;
enum {
#define X(name, value) name = value,
    NODE_CONSTANTS(X)
#undef X
};
typedef struct kernel_node {
    CUfunction func;
    unsigned int gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    void **kernelParams; /* one pointer to each parameter's bytes, or NULL: see `extra` */
    void **extra;
    CUkernel kern; /* where func is NULL */
    CUcontext ctx;
} kernel_node;
typedef struct memset_node {
    CUdeviceptr dst;
    size_t pitch;
    unsigned int value, elementSize;
    size_t width, height; /* elements, rows */
} memset_node;
typedef struct memcpy_node {
    size_t srcXInBytes, srcY, srcZ, srcLOD;
    CUmemorytype srcMemoryType;
    const void *srcHost;
    CUdeviceptr srcDevice;
    CUarray srcArray;
    void *reserved0;
    size_t srcPitch, srcHeight;
    size_t dstXInBytes, dstY, dstZ, dstLOD;
    CUmemorytype dstMemoryType;
    void *dstHost;
    CUdeviceptr dstDevice;
    CUarray dstArray;
    void *reserved1;
    size_t dstPitch, dstHeight;
    size_t WidthInBytes, Height, Depth;
} memcpy_node;
#else
typedef CUDA_KERNEL_NODE_PARAMS_v2 kernel_node;
typedef CUDA_MEMSET_NODE_PARAMS memset_node;
typedef CUDA_MEMCPY3D memcpy_node;
#endif

#if defined(__cuda_cuda_h__) && CUDA_VERSION >= 12040
typedef CUgraphNodeParams any_node;
#else
typedef struct any_node {
    CUgraphNodeType type;
    int reserved0[3];
    union {
        long long reserved1[29];
        struct {
            unsigned long long handle;
            int type;
            unsigned int size;    /* bodies */
            CUgraph *phGraph_out; /* the driver's, as long as the node lives */
            CUcontext ctx;
        } conditional;
    };
    long long reserved2;
} any_node;
#endif

/* X(name, name in cuda.h, ABI version asked of cuGetProcAddress, parameters). */
#define NODE_SYMBOLS(X) \
    X(cuGraphGetNodes, cuGraphGetNodes, 10000, (CUgraph, CUgraphNode *, size_t *)) \
    X(cuGraphNodeGetType, cuGraphNodeGetType, 10000, (CUgraphNode, CUgraphNodeType *)) \
    X(cuGraphKernelNodeGetParams, cuGraphKernelNodeGetParams_v2, 12000, (CUgraphNode, kernel_node *)) \
    X(cuGraphMemcpyNodeGetParams, cuGraphMemcpyNodeGetParams, 10000, (CUgraphNode, memcpy_node *)) \
    X(cuGraphMemsetNodeGetParams, cuGraphMemsetNodeGetParams, 10000, (CUgraphNode, memset_node *)) \
    X(cuGraphChildGraphNodeGetGraph, cuGraphChildGraphNodeGetGraph, 10000, (CUgraphNode, CUgraph *)) \
    X(cuFuncGetName, cuFuncGetName, 12030, (const char **, CUfunction)) \
    X(cuFuncGetParamInfo, cuFuncGetParamInfo, 12040, (CUfunction, size_t, size_t *, size_t *)) \
    X(cuKernelGetName, cuKernelGetName, 12030, (const char **, CUkernel)) \
    X(cuKernelGetParamInfo, cuKernelGetParamInfo, 12040, (CUkernel, size_t, size_t *, size_t *)) \
    X(cuPointerGetAttributes, cuPointerGetAttributes, 7000, (unsigned int, CUpointer_attribute *, void **, CUdeviceptr))

/* The one that may be missing: it alone tells the bodies of a conditional node, and came with CUDA 13.2. */
#define NODE_SYMBOLS_OPTIONAL(X) X(cuGraphNodeGetParams, cuGraphNodeGetParams, 13020, (CUgraphNode, any_node *))

/* A table is whole, but for the optional, or it is not used. */
typedef struct node_table {
#define X(name, abi_name, version, parameters) CUresult(*name) parameters;
    NODE_SYMBOLS(X)
    NODE_SYMBOLS_OPTIONAL(X) /* or NULL */
#undef X
} node_table;

/* As driver_fill(). */
static int node_fill(node_table *table, char *why, size_t size) {
    typedef CUresult (*get_proc_address)(const char *, void **, int, uint64_t, int *);
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(why, size, "no CUDA driver: %s", dlerror());
        return DRIVER_ABSENT;
    }
    get_proc_address get = (get_proc_address)dlsym(library, "cuGetProcAddress_v2");
    node_table found = {0};
#define X(name, abi_name, version, parameters) \
    if (!get || get(#name, (void **)&found.name, version, 0, NULL) != CUDA_SUCCESS || !found.name) { \
        snprintf(why, size, "an audit needs CUDA 12.4 or later: the driver has no " #name " at ABI version %d", version); \
        return DRIVER_UNUSABLE; \
    }
    NODE_SYMBOLS(X)
#undef X
#define X(name, abi_name, version, parameters) \
    if (get(#name, (void **)&found.name, version, 0, NULL) != CUDA_SUCCESS) found.name = NULL;
    NODE_SYMBOLS_OPTIONAL(X)
#undef X
    *table = found;
    return DRIVER_READY;
}

#endif
