# The C surface for Cython modules that `cimport` the registry. All of it is called with the GIL held, and pointers are
# opaque: a stream is a CUstream. Nothing here initialises CUDA.

from libc.stdint cimport uint64_t

# Registers one owner with the graph that `stream` is capturing. 1: retained; 0: the stream is not capturing.
# Raises CaptureError, DriverError, MemoryError; then nothing was retained.
cdef int retain_on(object owner, void *stream) except -1

# The same for memory that is no Python object: `release(thing)` is called once, by the thread that reclaims,
# after the graph's last executable is gone; it must not need the GIL. On 0 or an exception it stays the caller's.
cdef int retain_opaque(void *thing, void (*release)(void *) noexcept nogil, void *stream) except -1

# The function table (driver_table of driver.h) to ask instead of the installed driver; NULL: the installed one again.
# Refused with RuntimeError while owners are alive.
cdef int use_driver(const void *table) except -1

# The capture that torch's current stream takes part in: 1 with the stream and the capture's id, 0 if there is none.
cdef int current_capture(void **stream, uint64_t *capture) except -1
