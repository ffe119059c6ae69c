# A sample op library in Cython, as sample_op.c is in C: it cimports the registry of an installed arena.

from libc.stdint cimport intptr_t
from libc.stdlib cimport free, malloc

from arena._registry cimport maybe_capturing, retain_on, retain_opaque_nogil

cdef long freed = 0


cdef void free_block(void *block) noexcept nogil:
    global freed
    freed += 1
    free(block)


def scale(scratch, stream):
    """An op whose scratch is a Python object."""
    return bool(retain_on(scratch, <void *><intptr_t>stream))


def scale_with(size_t size, stream):
    """An op that allocates its scratch itself and works without the GIL."""
    cdef void *handle = <void *><intptr_t>stream
    cdef void *scratch = malloc(size)
    cdef int kept
    with nogil:
        kept = retain_opaque_nogil(scratch, free_block, handle) if maybe_capturing(False) else 0
        if kept != 1:
            free_block(scratch)
    if kept < 0:
        raise RuntimeError(f"the op's scratch could not be retained: {kept}")
    return kept == 1


def state():
    return {"arena": 1, "freed": freed}
