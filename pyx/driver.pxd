# The C declarations of driver.h, for the extension modules of this project.

from libc.stdint cimport int32_t, uint64_t


cdef extern from "driver.h" nogil:
    ctypedef int CUresult
    ctypedef int CUdevice
    ctypedef int CUstreamCaptureStatus
    ctypedef int CUstreamCaptureMode
    ctypedef void *CUcontext
    ctypedef void *CUstream
    ctypedef void *CUevent
    ctypedef void *CUgraph
    ctypedef void *CUgraphNode
    ctypedef void *CUuserObject

    enum:
        CUDA_SUCCESS
        CUDA_ERROR_NOT_INITIALIZED
        CUDA_ERROR_DEINITIALIZED
        CUDA_ERROR_NO_DEVICE
        CUDA_ERROR_INVALID_CONTEXT
        CUDA_ERROR_NOT_READY
        CUDA_ERROR_ILLEGAL_ADDRESS
        CUDA_ERROR_LAUNCH_TIMEOUT
        CUDA_ERROR_CONTEXT_IS_DESTROYED
        CUDA_ERROR_ASSERT
        CUDA_ERROR_HARDWARE_STACK_ERROR
        CUDA_ERROR_LAUNCH_FAILED
        CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        CU_STREAM_CAPTURE_STATUS_NONE
        CU_STREAM_CAPTURE_STATUS_ACTIVE
        CU_STREAM_CAPTURE_STATUS_INVALIDATED
        CU_STREAM_CAPTURE_MODE_RELAXED
        CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
        CU_GRAPH_USER_OBJECT_MOVE
        CU_EVENT_DISABLE_TIMING

        DRIVER_READY
        DRIVER_ABSENT
        DRIVER_UNUSABLE

    ctypedef struct driver_table:
        CUresult (*cuStreamGetCaptureInfo)(
            CUstream, CUstreamCaptureStatus *, uint64_t *, CUgraph *, const CUgraphNode **, size_t *)
        CUresult (*cuUserObjectCreate)(CUuserObject *, void *, void (*)(void *), unsigned int, unsigned int)
        CUresult (*cuUserObjectRelease)(CUuserObject, unsigned int)
        CUresult (*cuGraphRetainUserObject)(CUgraph, CUuserObject, unsigned int, unsigned int)
        CUresult (*cuGraphReleaseUserObject)(CUgraph, CUuserObject, unsigned int)
        CUresult (*cuThreadExchangeStreamCaptureMode)(CUstreamCaptureMode *)
        CUresult (*cuCtxGetDevice)(CUdevice *)
        CUresult (*cuCtxGetCurrent)(CUcontext *)
        CUresult (*cuCtxPushCurrent)(CUcontext)
        CUresult (*cuCtxPopCurrent)(CUcontext *)
        CUresult (*cuEventCreate)(CUevent *, unsigned int)
        CUresult (*cuEventDestroy)(CUevent)
        CUresult (*cuEventRecord)(CUevent, CUstream)
        CUresult (*cuEventQuery)(CUevent)
        CUresult (*cuDriverGetVersion)(int *)
        CUresult (*cuGetErrorName)(CUresult, const char **)
        int32_t (*current_device)(int32_t *)
        int32_t (*current_stream)(int32_t, void **)

    int driver_fill(driver_table *table, char *why, size_t size)
