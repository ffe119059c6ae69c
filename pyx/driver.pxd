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
        CUDA_ERROR_INVALID_VALUE
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
            CUstream, CUstreamCaptureStatus *, uint64_t *, CUgraph *, const CUgraphNode **, size_t *) noexcept nogil
        CUresult (*cuUserObjectCreate)(
            CUuserObject *, void *, void (*)(void *) noexcept nogil, unsigned int, unsigned int) noexcept nogil
        CUresult (*cuUserObjectRelease)(CUuserObject, unsigned int) noexcept nogil
        CUresult (*cuGraphRetainUserObject)(CUgraph, CUuserObject, unsigned int, unsigned int) noexcept nogil
        CUresult (*cuGraphReleaseUserObject)(CUgraph, CUuserObject, unsigned int) noexcept nogil
        CUresult (*cuThreadExchangeStreamCaptureMode)(CUstreamCaptureMode *) noexcept nogil
        CUresult (*cuCtxGetDevice)(CUdevice *) noexcept nogil
        CUresult (*cuCtxGetCurrent)(CUcontext *) noexcept nogil
        CUresult (*cuCtxPushCurrent)(CUcontext) noexcept nogil
        CUresult (*cuCtxPopCurrent)(CUcontext *) noexcept nogil
        CUresult (*cuEventCreate)(CUevent *, unsigned int) noexcept nogil
        CUresult (*cuEventDestroy)(CUevent) noexcept nogil
        CUresult (*cuEventRecord)(CUevent, CUstream) noexcept nogil
        CUresult (*cuEventQuery)(CUevent) noexcept nogil
        CUresult (*cuDriverGetVersion)(int *) noexcept nogil
        CUresult (*cuGetErrorName)(CUresult, const char **) noexcept nogil
        int32_t (*current_device)(int32_t *) noexcept nogil
        int32_t (*current_stream)(int32_t, void **) noexcept nogil

    int driver_fill(driver_table *table, char *why, size_t size)
