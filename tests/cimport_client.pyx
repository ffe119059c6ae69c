# An op library that cimports the registry: what it does per call, and loops that time it from C. Built by native.py.

from libc.stdint cimport intptr_t
from libc.stdlib cimport free, malloc

from arena._registry cimport retain_on, retain_opaque

cdef extern from *:
    """
    #include <time.h>
    static double now(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    }
    static long freed;
    static void free_block(void *block) { __atomic_add_fetch(&freed, 1, __ATOMIC_RELAXED); free(block); }
    typedef int (*query_t)(void *, int *, unsigned long long *, void **, const void **, size_t *);
    """
    double now() nogil
    long freed
    void free_block(void *) noexcept nogil
    ctypedef int (*query_t)(void *, int *, unsigned long long *, void **, const void **, size_t *) noexcept nogil


def retain(object owner, stream):
    return bool(retain_on(owner, <void *><intptr_t>stream))


def retain_block(size_t size, stream):
    """A malloc block that `free_block` releases. False, and freed here, if nothing captures."""
    cdef void *block = malloc(size)
    try:
        if retain_opaque(block, free_block, <void *><intptr_t>stream):
            return True
    except BaseException:
        free(block)
        raise
    free(block)
    return False


def retain_null(stream):
    return retain_opaque(NULL, free_block, <void *><intptr_t>stream)


def blocks_freed():
    return freed


def seconds_per_retain(object owner, stream, long count):
    """The mean cost of one `retain_on`, called from C."""
    cdef void *handle = <void *><intptr_t>stream
    cdef double start = now()
    for _ in range(count):
        retain_on(owner, handle)
    return (now() - start) / count


def seconds_per_query(function, stream, long count):
    """The mean cost of the driver's own question, called from C by its address."""
    cdef query_t query = <query_t><void *><intptr_t>function
    cdef void *handle = <void *><intptr_t>stream
    cdef int status
    cdef unsigned long long capture
    cdef void *graph
    cdef double start = now()
    for _ in range(count):
        query(handle, &status, &capture, &graph, NULL, NULL)
    return (now() - start) / count
