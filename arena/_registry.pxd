# The C surface for Cython modules that `cimport` the registry. It is called with the GIL held, but for what says `nogil`, and
# pointers are opaque: a stream is a CUstream. Nothing here initialises CUDA. C and C++ have the same in include/arena.h.

from libc.stdint cimport uint64_t

# Registers one owner with the graph that `stream` is capturing. 1: retained; 0: the stream is not capturing.
# Raises CaptureError, DriverError, MemoryError; then nothing was retained.
cdef int retain_on(object owner, void *stream) except -1

# The same for memory that is no Python object: `release(thing)` is called once, by the thread that reclaims,
# after the graph's last executable is gone; arena.h says what it may do. On 0 or an exception it stays the caller's.
cdef int retain_opaque(void *thing, void (*release)(void *) noexcept nogil, void *stream) except -1

# The same without the GIL. Instead of an exception a negative code: ARENA_INVALIDATED and its like in arena.h.
cdef int retain_opaque_nogil(void *thing, void (*release)(void *) noexcept nogil, void *stream) noexcept nogil

# Whether the stream is capturing, asked of the driver: 1, 0 or a negative code.
cdef int capturing(void *stream) noexcept nogil

# 0: certainly nothing is to be retained; else maybe. Only who promises what arena_only_torch() in arena.h means is ever told 0.
cdef bint maybe_capturing(bint only_torch) noexcept nogil

# The function table (driver_table of driver.h) to ask instead of the installed driver; NULL: the installed one again.
# Refused with RuntimeError while owners are alive.
cdef int use_driver(const void *table) except -1

# The capture that torch's current stream takes part in: 1 with the stream and the capture's id, 0 if there is none.
cdef int current_capture(void **stream, uint64_t *capture) except -1
