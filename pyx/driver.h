/* The CUDA driver as this project sees it: the types and constants it uses, the list of symbols, and the table that holds
 * them. The table is filled on first use by driver_fill() (dlopen, cuGetProcAddress) or by the simulated driver with its
 * own functions. Called with the GIL; nothing here calls Python or initialises CUDA. No CUDA header is needed: where one
 * was included first its declarations are used instead, and tests/test_driver_table.py holds ours against them.
 */
#ifndef ARENA_DRIVER_H
#define ARENA_DRIVER_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* X(name, value): every constant of cuda.h that we rely on. */
#define DRIVER_CONSTANTS(X) \
    X(CUDA_SUCCESS, 0) \
    X(CUDA_ERROR_INVALID_VALUE, 1) \
    X(CUDA_ERROR_OUT_OF_MEMORY, 2) \
    X(CUDA_ERROR_NOT_INITIALIZED, 3) \
    X(CUDA_ERROR_DEINITIALIZED, 4) \
    X(CUDA_ERROR_NO_DEVICE, 100) \
    X(CUDA_ERROR_INVALID_CONTEXT, 201) \
    X(CUDA_ERROR_INVALID_HANDLE, 400) \
    X(CUDA_ERROR_NOT_FOUND, 500) \
    X(CUDA_ERROR_NOT_READY, 600) \
    X(CUDA_ERROR_ILLEGAL_ADDRESS, 700) \
    X(CUDA_ERROR_LAUNCH_TIMEOUT, 702) \
    X(CUDA_ERROR_CONTEXT_IS_DESTROYED, 709) \
    X(CUDA_ERROR_ASSERT, 710) \
    X(CUDA_ERROR_HARDWARE_STACK_ERROR, 714) \
    X(CUDA_ERROR_LAUNCH_FAILED, 719) \
    X(CUDA_ERROR_NOT_PERMITTED, 800) \
    X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 900) \
    X(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, 901) \
    X(CUDA_ERROR_STREAM_CAPTURE_MERGE, 902) \
    X(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, 904) \
    X(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, 906) \
    X(CUDA_ERROR_CAPTURED_EVENT, 907) \
    X(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, 908) \
    X(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, 910) \
    X(CU_STREAM_CAPTURE_STATUS_NONE, 0) \
    X(CU_STREAM_CAPTURE_STATUS_ACTIVE, 1) \
    X(CU_STREAM_CAPTURE_STATUS_INVALIDATED, 2) \
    X(CU_STREAM_CAPTURE_MODE_GLOBAL, 0) \
    X(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, 1) \
    X(CU_STREAM_CAPTURE_MODE_RELAXED, 2) \
    X(CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, 1) \
    X(CU_GRAPH_USER_OBJECT_MOVE, 1) \
    X(CU_EVENT_DISABLE_TIMING, 2)

#ifndef __cuda_cuda_h__
typedef int CUresult;
typedef int CUdevice;
typedef int CUstreamCaptureStatus;
typedef int CUstreamCaptureMode;
typedef uint64_t cuuint64_t;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUuserObject_st *CUuserObject;
typedef void (*CUhostFn)(void *);
enum {
#define X(name, value) name = value,
    DRIVER_CONSTANTS(X)
#undef X
};
#endif

/* X(name, name in cuda.h, ABI version asked of cuGetProcAddress, parameters). The version is pinned, so a newer driver
 * still hands out the form that is declared here. */
#define DRIVER_SYMBOLS(X) \
    X(cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_v2, 11030, \
      (CUstream, CUstreamCaptureStatus *, cuuint64_t *, CUgraph *, const CUgraphNode **, size_t *)) \
    X(cuUserObjectCreate, cuUserObjectCreate, 11030, (CUuserObject *, void *, CUhostFn, unsigned int, unsigned int)) \
    X(cuUserObjectRelease, cuUserObjectRelease, 11030, (CUuserObject, unsigned int)) \
    X(cuGraphRetainUserObject, cuGraphRetainUserObject, 11030, (CUgraph, CUuserObject, unsigned int, unsigned int)) \
    X(cuGraphReleaseUserObject, cuGraphReleaseUserObject, 11030, (CUgraph, CUuserObject, unsigned int)) \
    X(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, 10010, (CUstreamCaptureMode *)) \
    X(cuCtxGetDevice, cuCtxGetDevice, 2000, (CUdevice *)) \
    X(cuCtxGetCurrent, cuCtxGetCurrent, 4000, (CUcontext *)) \
    X(cuCtxPushCurrent, cuCtxPushCurrent_v2, 4000, (CUcontext)) \
    X(cuCtxPopCurrent, cuCtxPopCurrent_v2, 4000, (CUcontext *)) \
    X(cuEventCreate, cuEventCreate, 2000, (CUevent *, unsigned int)) \
    X(cuEventDestroy, cuEventDestroy_v2, 4000, (CUevent)) \
    X(cuEventRecord, cuEventRecord, 2000, (CUevent, CUstream)) \
    X(cuEventQuery, cuEventQuery, 2000, (CUevent)) \
    X(cuDriverGetVersion, cuDriverGetVersion, 2020, (int *)) \
    X(cuGetErrorName, cuGetErrorName, 6000, (CUresult, const char **))

/* A table is whole or it is not used: driver_fill() sets every pointer or reports the first that is missing. */
typedef struct driver_table {
#define X(name, abi_name, version, parameters) CUresult(*name) parameters;
    DRIVER_SYMBOLS(X)
#undef X
    /* The calling thread's current device, and its current stream there: torch's, or the simulator's. NULL while torch is
     * not loaded. Both work on a thread that has no context yet, and give it none. */
    int32_t (*current_device)(int32_t *device);
    int32_t (*current_stream)(int32_t device, void **stream);
} driver_table;

enum { DRIVER_READY = 0, DRIVER_ABSENT = -1, DRIVER_UNUSABLE = -2 };

/* Fills `table` from the installed driver. Returns DRIVER_READY, or another with one sentence in `why` on what is missing. */
static int driver_fill(driver_table *table, char *why, size_t size) {
    typedef CUresult (*get_proc_address)(const char *, void **, int, uint64_t, int *);
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(why, size, "no CUDA driver: %s", dlerror());
        return DRIVER_ABSENT;
    }
    get_proc_address get = (get_proc_address)dlsym(library, "cuGetProcAddress_v2");
    if (!get) {
        snprintf(why, size, "the CUDA driver is too old: libcuda.so.1 has no cuGetProcAddress_v2 (CUDA 12.0 or later is needed)");
        return DRIVER_UNUSABLE;
    }
    driver_table found = {0};
#define X(name, abi_name, version, parameters) \
    if (get(#name, (void **)&found.name, version, 0, NULL) != CUDA_SUCCESS || !found.name) { \
        snprintf(why, size, "the CUDA driver has no " #name " at ABI version %d (CUDA 12.0 or later is needed)", version); \
        return DRIVER_UNUSABLE; \
    }
    DRIVER_SYMBOLS(X)
#undef X
    *table = found;
    return DRIVER_READY;
}

#endif
