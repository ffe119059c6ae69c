# What is alive, listed: for audits and reports, never on the hot path. A list knows where and when it began: a managed one from
# its begin, another from behind its first owner. When it died is noted as it is taken from the stack. Called with the GIL.

import os as _os
import sys as _sys

from cpython.ref cimport Py_XDECREF
from libc.stdlib cimport malloc

cdef extern from *:
    """
    static double wall_now(void) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    }
    #define DEATHS 1024
    /* A list that died. The last of them, the oldest overwritten first. */
    typedef struct { uint64_t capture; size_t owners; double when; double began; void *code; int line; } death;
    static death deaths[DEATHS];
    static uint64_t death_count;
    /* The entry takes the list's birth over. What it had itself goes to the list, which is freed where Python code may run:
     * dropping a code object may call back who refers to it weakly. */
    static void note_death(owner_list *list) {
        size_t at = (size_t)(death_count++ % DEATHS);
        void *code = deaths[at].code;
        deaths[at].capture = list->capture;
        deaths[at].owners = owner_list_count(list);
        deaths[at].when = wall_now();
        deaths[at].began = list->began;
        deaths[at].code = list->code;
        deaths[at].line = list->line;
        list->code = code;
    }
    """
    double wall_now()
    int DEATHS
    ctypedef struct death:
        uint64_t capture
        size_t owners
        double when
        double began
        void *code
        int line
    death *deaths
    uint64_t death_count
    void note_death(owner_list *list)

cdef extern from "Python.h":
    int PyGC_Disable()
    int PyGC_Enable()

cdef str own_folder = _os.path.dirname(_os.path.abspath(__file__)) + _os.sep


cdef object call_site(int *line):
    """The code of the innermost frame that is neither ours nor torch's, and its line; None: it cannot be told."""
    try:
        torch = getattr(_sys.modules.get("torch"), "__file__", None)
        inner = (own_folder, _os.path.dirname(torch) + _os.sep) if torch else (own_folder,)
        frame = _sys._getframe()
        while frame.f_back is not None and (
            frame.f_code.co_filename.startswith(inner) or frame.f_code.co_filename.endswith("contextlib.py")
        ):
            frame = frame.f_back
        line[0] = frame.f_lineno or 0
        return frame.f_code
    except Exception:
        return None


cdef void set_birth(owner_list *owners, object code, int line) noexcept:
    """Of a list that has none. Runs no Python code."""
    if code is None:
        return
    Py_INCREF(code)
    owners.code, owners.line, owners.began = <void *>code, line, wall_now()


cdef void note_birth(uint64_t capture) noexcept:
    """The first owner of a capture was retained. May run Python code, so it comes when all is done."""
    cdef int line = 0
    cdef owner_list *owners
    code = call_site(&line)
    owners = owner_index_find(&index, capture)  # that code may have ended the capture
    if owners != NULL and owners.code == NULL:
        set_birth(owners, code, line)


cdef object birth_of(double began, void *code, int line):
    """(seconds, file, line, function), or None where it is not known."""
    if code == NULL:
        return None
    return began, (<object>code).co_filename, line, (<object>code).co_name


cdef void free_list(owner_list *owners) noexcept:
    """May run Python code, after the list is gone."""
    cdef void *code = owners.code
    owners.code = NULL
    owner_list_free(owners)
    Py_XDECREF(<PyObject *>code)


def lists():
    """Every owner list that is alive and indexed.

    Returns:
        A list of (capture id, graph handle, managed, sealed, owners, opaque owners, birth): `owners` is a tuple of the Python
        objects in order of retention, the next a count, `birth` (seconds, file, line, function) of a managed
        capture's begin, else of the first retain, or None.
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
                          birth_of(each.began, each.code, each.line)))
    finally:
        free(all)
        if collecting:
            PyGC_Enable()
    return found


def died():
    """(capture id, owners, seconds, birth) of the lists that died last, the first to die first; at most 1,024."""
    cdef uint64_t i
    drain()
    return [
        (deaths[i % DEATHS].capture, deaths[i % DEATHS].owners, deaths[i % DEATHS].when,
         birth_of(deaths[i % DEATHS].began, deaths[i % DEATHS].code, deaths[i % DEATHS].line))
        for i in range(death_count - min(death_count, <uint64_t>DEATHS), death_count)
    ]


def born(capture):
    """(seconds, file, line, function) of a managed capture's begin, or of the first owner of another; None if it is not known
    (any more): of the captures whose owners are gone, those that `died()` lists are."""
    cdef uint64_t number = capture
    cdef uint64_t i
    cdef owner_list *owners
    cdef death *at
    cdef void *code = NULL
    cdef double began = 0
    cdef int line = 0
    owner_lock()
    owners = owner_index_find_locked(&index, number)
    if owners != NULL:
        began, code, line = owners.began, owners.code, owners.line
    owner_unlock()
    for i in range(min(death_count, <uint64_t>DEATHS) if owners == NULL else 0):
        if deaths[(death_count - 1 - i) % DEATHS].capture == number:
            at = &deaths[(death_count - 1 - i) % DEATHS]
            began, code, line = at.began, at.code, at.line
            break
    return birth_of(began, code, line)


def set_pool(capture, pool):
    """The graph of a capture has its memory in that pool: two integers, as torch has it. Nothing if no owner lives."""
    cdef uint64_t first = pool[0]
    cdef uint64_t second = pool[1]
    cdef owner_list *owners = owner_index_find(&index, capture)
    if owners != NULL:
        owners.pool[0], owners.pool[1] = first, second


def pool_of(capture):
    """What `set_pool` said, or None."""
    cdef owner_list *owners = owner_index_find(&index, capture)
    if owners == NULL or not (owners.pool[0] or owners.pool[1]):
        return None
    return owners.pool[0], owners.pool[1]


def capture_of(stream=None):
    """(capture id, graph handle) of the capture that `stream` takes part in, or None; as for `capture_id`."""
    cdef void *handle = NULL
    cdef uint64_t capture
    cdef CUgraph graph
    if find_stream(stream, &handle) and ask(handle, &capture, &graph):
        return capture, <intptr_t>graph
    return None
