/* arena for C and C++ op libraries: owners of memory that a CUDA graph captured live as long as that graph. Header only: it
 * needs Python.h and, when it runs, the installed package; nothing is linked. C11 or C++17, gcc or clang.
 *
 *     if (arena_import() < 0) PyErr_Clear();           once, with the GIL, in the module's init function
 *     ...
 *     if (arena_retain(scratch, stream) < 0) return NULL;
 *
 * After an import that failed, or none, every call answers "nothing was retained", so an op library runs without arena, too.
 * One import serves all the files of a shared library. Streams are CUstream or cudaStream_t handles; NULL is the legacy one.
 * Nothing here initialises CUDA.
 */
#ifndef ARENA_H
#define ARENA_H

#include <Python.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What the calls answer. Negative: nothing was retained though the stream was capturing, or may have been. */
enum {
    ARENA_RETAINED = 1,
    ARENA_NOT_CAPTURING = 0,  /* also: no driver, no context, a forked child, arena is not there */
    ARENA_RAISED = -1,        /* with the GIL only: a Python exception is set */
    ARENA_NULL = -2,          /* an owner or a release function that is NULL */
    ARENA_INVALIDATED = -3,   /* the stream's capture was invalidated */
    ARENA_SEALED = -4,        /* the capture was sealed and has not ended: it is about to end */
    ARENA_ENDED = -5,         /* the capture ended while an owner was being retained */
    ARENA_NO_MEMORY = -6,
    ARENA_NO_DRIVER = -7,     /* there is a CUDA driver, but one that is too old */
    ARENA_REFUSED = -1000     /* and below: the driver refused; the CUresult is ARENA_REFUSED - code */
};

/* What the capsule arena._registry._C_API points to. Slots are numbered, never change their meaning, and are only ever
 * appended: a library that was built for n of them works with every arena that has n or more. */
typedef struct arena_api {
    size_t slots;                                                             /* 0: how many there are, this one too */
    const char *version;                                                      /* 1: of arena */
    const unsigned *gate;                                                     /* 2 */
    int (*retain)(PyObject *owner, void *stream);                             /* 3: with the GIL */
    int (*retain_opaque)(void *owner, void (*release)(void *), void *stream); /* 4: without it, or with */
    int (*capturing)(void *stream);                                           /* 5: without it, or with */
    int (*set_error)(int code, void *stream);                                 /* 6: with the GIL */
} arena_api;
#define ARENA_SLOTS 7 /* that this header knows */

/* One of each in a shared library, however many of its files include this. */
#define ARENA_SHARED __attribute__((weak, visibility("hidden")))
extern ARENA_SHARED const unsigned arena_never;
extern ARENA_SHARED const unsigned arena_always;
extern ARENA_SHARED const arena_api *arena_table;
extern ARENA_SHARED const unsigned *arena_gate;
const unsigned arena_never = 0;
const unsigned arena_always = 1;
const arena_api *arena_table = NULL;
const unsigned *arena_gate = &arena_never;

/* With the GIL. 0: arena is there. -1 with an ImportError: it is not, or it is older than this header. Twice is once. */
static inline int arena_import(void) {
    const arena_api *found = NULL;
    PyObject *module, *capsule;
    if (arena_table) return 0;
    module = PyImport_ImportModule("arena._registry");
    if (!module) {
        if (!PyErr_ExceptionMatches(PyExc_ImportError)) {
            PyErr_Clear();
            PyErr_SetString(PyExc_ImportError, "arena (cuda-graph-arena) is installed but cannot be imported");
        }
        return -1;
    }
    capsule = PyObject_GetAttrString(module, "_C_API");
    Py_DECREF(module);
    if (capsule && PyCapsule_IsValid(capsule, "arena._registry._C_API"))
        found = (const arena_api *)PyCapsule_GetPointer(capsule, "arena._registry._C_API");
    Py_XDECREF(capsule);
    PyErr_Clear();
    if (!found) {
        PyErr_SetString(PyExc_ImportError, "the installed arena (cuda-graph-arena) has no C API: it is too old, upgrade it");
        return -1;
    }
    if (found->slots < ARENA_SLOTS) {
        PyErr_Format(PyExc_ImportError,
                     "this module was built for an arena whose C API has %d slots; the installed cuda-graph-arena %s has %zu: "
                     "upgrade it",
                     ARENA_SLOTS, found->slots > 1 ? found->version : "?", found->slots);
        return -1;
    }
    arena_table = found; /* it lives as long as the process */
    arena_gate = &arena_always;
    return 0;
}

/* Whether the import has succeeded. */
static inline int arena_there(void) { return arena_table != NULL; }

/* Ties a Python owner to the life of the graph that `stream` is capturing; with the GIL. ARENA_RETAINED: a reference was
 * taken. ARENA_NOT_CAPTURING. ARENA_RAISED: nothing was retained. As arena.retain(), but that collect() scopes see nothing. */
static inline int arena_retain(PyObject *owner, void *stream) {
    return arena_table ? arena_table->retain(owner, stream) : ARENA_NOT_CAPTURING;
}

/* The same for what is no Python object. It needs no GIL (and may have it): for C++ ops that run while torch has given it up.
 * On ARENA_RETAINED the owner is the graph's, and `release(owner)` is called exactly once, after the last of what holds the
 * graph's owners has gone. Releases begin in the order in which all owners of the capture, of both kinds, were retained; where
 * two threads release at once (see below), one that gives the GIL up in the middle may end after its successor. On anything
 * else it stays the caller's. No exception is set; arena_set_error() does so.
 *
 * `release` runs on arena's own thread or on one that calls arena.reclaim(), resets a CUDAGraph or begins a capture; never
 * on the driver's, and not while a capture that arena manages is open (unless that lasts half a minute). It runs in relaxed
 * capture mode, with the context current in which the first owner was retained, if that still exists. The thread has the
 * GIL, so that releases begin in order, but a release must work without: it may free memory, destroy events, modules and
 * graphs, delete an at::Tensor, and call what here needs no GIL. It must not throw, call Python (destroying what does so by
 * itself, as a tensor with a Python half, is fine), or wait for a thread that may be waiting for the GIL. Once the
 * interpreter is going it is not called any more: the process is ending.
 *
 *     at::Tensor *held = new at::Tensor(scratch);
 *     if (arena_retain_opaque(held, [](void *t) { delete static_cast<at::Tensor *>(t); }, stream) != ARENA_RETAINED) delete held;
 */
static inline int arena_retain_opaque(void *owner, void (*release)(void *), void *stream) {
    return arena_table ? arena_table->retain_opaque(owner, release, stream) : ARENA_NOT_CAPTURING;
}

/* Whether the stream is capturing, asked of the driver: 1, 0 or a negative code. With or without the GIL. */
static inline int arena_capturing(void *stream) { return arena_table ? arena_table->capturing(stream) : 0; }

/* With the GIL: sets the Python exception for a negative code of the two above. Returns -1. */
static inline int arena_set_error(int code, void *stream) {
    if (arena_table) return arena_table->set_error(code, stream);
    PyErr_SetString(PyExc_ImportError, "arena (cuda-graph-arena) was not imported");
    return -1;
}

/* The gate: 0 where certainly nothing is to be retained, else "maybe: call and see". One load, for ops that would otherwise
 * have to make an owner first. With or without the GIL.
 *
 * Without arena it says 0. After arena_import() it says maybe, always: no library can see the captures that others begin.
 * It is exact for a library that promises, by arena_only_torch(), that its ops are only ever captured by torch.cuda.CUDAGraph
 * and torch.cuda.graph, in a process where arena.torch.install() is in force: then it says maybe from the begin of such a
 * capture until it is sealed, and 0 where none is open. If arena comes across a capture that it had not seen begin, it says
 * maybe from then on. A 0 in a capture of any other kind (cuda.core, CuPy, raw CUDA, torch's C++ class) would lose the owner:
 * do not promise what you do not know. install() belongs before the first capture. */
static inline int arena_maybe_capturing(void) {
    return __atomic_load_n(arena_gate, __ATOMIC_RELAXED) != 0; /* pairs with owner_gate in arena's owners.h, which says why */
}

/* The promise that arena_maybe_capturing() needs to be exact. After arena_import(). */
static inline void arena_only_torch(void) {
    if (arena_table) arena_gate = arena_table->gate;
}

#ifdef __cplusplus
}
#endif
#endif
