# What is alive, listed: for audits and reports, never on the hot path. Where and when a list began is noted once for each
# capture, behind its first owner; when it died, as its list is taken from the stack. Called with the GIL.

import os as _os
import sys as _sys

from libc.stdlib cimport malloc

cdef extern from *:
    """
    static double wall_now(void) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    }
    #define DEATHS 1024
    /* The last lists that died, the oldest overwritten first. */
    static struct { uint64_t capture; size_t owners; double when; } deaths[DEATHS];
    static uint64_t death_count;
    static void note_death(uint64_t capture, size_t owners) {
        size_t at = (size_t)(death_count++ % DEATHS);
        deaths[at].capture = capture;
        deaths[at].owners = owners;
        deaths[at].when = wall_now();
    }
    """
    double wall_now()
    int DEATHS
    ctypedef struct death:
        uint64_t capture
        size_t owners
        double when
    death *deaths
    uint64_t death_count
    void note_death(uint64_t capture, size_t owners)

cdef extern from "Python.h":
    int PyGC_Disable()
    int PyGC_Enable()

cdef dict births = {}  # capture: (seconds, file, line, function) of its first owner
cdef str own_folder = _os.path.dirname(_os.path.abspath(__file__)) + _os.sep


cdef void note_birth(uint64_t capture) noexcept:
    """The first owner of a capture was retained. May run Python code, so it comes when all is done."""
    try:
        frame = _sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename.startswith(own_folder):
            frame = frame.f_back
        births[capture] = (wall_now(), frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        if <size_t>len(births) > 2 * (live + DEATHS):
            known = {each[0] for each in lists()} | {each[0] for each in died()}
            for number in [each for each in births if each not in known]:
                del births[number]
    except Exception:
        return


def lists():
    """Every owner list that is alive and indexed.

    Returns:
        A list of (capture id, graph handle, managed, sealed, owners, opaque owners, birth): `owners` is a tuple of the Python
        objects in order of retention, the next a count, `birth` (seconds, file, line, function) of the first retain, or None.
        The handle is that of the graph under capture, which may be gone if an executable lives on.

    Raises:
        MemoryError: There is no room for as many as there are.
    """
    cdef list found = []
    cdef owner_list **all = NULL
    cdef owner_list *each
    cdef size_t i, at, count, room = 0
    cdef int collecting
    drain()
    while True:  # opaque owners may begin another list meanwhile
        count = owner_index_all(&index, all, room)
        if count <= room:
            break
        room = count + 16
        free(all)
        all = <owner_list **>malloc(room * sizeof(owner_list *))
        if all == NULL:
            raise MemoryError(f"no memory to list the owners of {count} captures")
    collecting = PyGC_Disable()  # a finalizer could retain, and the entries would move under this loop
    try:
        for i in range(count):
            each = all[i]
            found.append((each.capture, <intptr_t>each.graph, bool(each.managed), bool(each.sealed),
                          tuple([<object>each.entries[at].object for at in range(each.count)]), owner_list_opaque(each),
                          births.get(each.capture)))
    finally:
        free(all)
        if collecting:
            PyGC_Enable()
    return found


def died():
    """(capture id, owners, seconds) of the lists that died last, the first to die first; at most 1,024."""
    cdef uint64_t i
    drain()
    return [
        (deaths[i % DEATHS].capture, deaths[i % DEATHS].owners, deaths[i % DEATHS].when)
        for i in range(death_count - min(death_count, <uint64_t>DEATHS), death_count)
    ]


def born(capture):
    """(seconds, file, line, function) of a capture's first owner, or None if it is not known (any more)."""
    return births.get(capture)


def capture_of(stream=None):
    """(capture id, graph handle) of the capture that `stream` takes part in, or None; as for `capture_id`."""
    cdef void *handle = NULL
    cdef uint64_t capture
    cdef CUgraph graph
    if find_stream(stream, &handle) and ask(handle, &capture, &graph):
        return capture, <intptr_t>graph
    return None
