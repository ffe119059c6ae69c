/* What tests and benchmarks do through arena.h: owners that write down when they go, threads that retain without the GIL, and
 * loops that time a call. Built by native.py.
 */
#include <Python.h>

#include <arena.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *pointer(PyObject *value) { return PyLong_AsVoidPtr(value); }

/* ---- the log: numbers, in the order in which their owners went ---- */

enum { ROOM = 1 << 20 };
static long entries[ROOM];
static long logged;
static void note(void *number) { /* __atomic: releases come from one thread at a time, but which one changes */
    long at = __atomic_fetch_add(&logged, 1, __ATOMIC_RELAXED);
    if (at < ROOM) entries[at] = (long)(uintptr_t)number;
}
static PyObject *log_number(PyObject *m, PyObject *value) {
    (void)m;
    note(pointer(value));
    Py_RETURN_NONE;
}
static PyObject *take_log(PyObject *m, PyObject *args) {
    (void)m, (void)args;
    long count = __atomic_exchange_n(&logged, 0, __ATOMIC_RELAXED);
    PyObject *list = PyList_New(0);
    for (long i = 0; list && i < count && i < ROOM; i++) {
        PyObject *number = PyLong_FromLong(entries[i]);
        if (!number || PyList_Append(list, number)) Py_CLEAR(list);
        Py_XDECREF(number);
    }
    return list;
}

/* ---- the calls ---- */

static PyObject *there(PyObject *m, PyObject *args) {
    (void)m, (void)args;
    return PyLong_FromLong(arena_there());
}
static PyObject *import(PyObject *m, PyObject *args) {
    (void)m, (void)args;
    if (arena_import() < 0) return NULL;
    Py_RETURN_NONE;
}
static PyObject *only_torch(PyObject *m, PyObject *args) {
    (void)m, (void)args;
    arena_only_torch();
    Py_RETURN_NONE;
}
static PyObject *maybe(PyObject *m, PyObject *args) {
    (void)m, (void)args;
    return PyBool_FromLong(arena_maybe_capturing());
}
static PyObject *is_capturing(PyObject *m, PyObject *stream) {
    (void)m;
    void *handle = pointer(stream);
    int code;
    Py_BEGIN_ALLOW_THREADS
    code = arena_capturing(handle);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(code);
}
static PyObject *retain(PyObject *m, PyObject *args) {
    PyObject *owner, *stream;
    (void)m;
    if (!PyArg_ParseTuple(args, "OO", &owner, &stream)) return NULL;
    int code = arena_retain(owner == Py_Ellipsis ? NULL : owner, pointer(stream));
    return code < 0 ? NULL : PyLong_FromLong(code);
}
/* retain_opaque(number, stream, count=1): `count` owners from that number on, without the GIL. The first code that is not
 * ARENA_RETAINED, or that. */
static PyObject *retain_opaque(PyObject *m, PyObject *args) {
    PyObject *stream;
    long number, count = 1;
    int code = 0;
    (void)m;
    if (!PyArg_ParseTuple(args, "lO|l", &number, &stream, &count)) return NULL;
    void *handle = pointer(stream);
    Py_BEGIN_ALLOW_THREADS
    for (long i = 0; i < count; i++) {
        code = arena_retain_opaque((void *)(uintptr_t)(number + i), note, handle);
        if (code != ARENA_RETAINED) break;
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(code);
}
static PyObject *retain_with_gil(PyObject *m, PyObject *args) {
    PyObject *stream;
    long number;
    (void)m;
    if (!PyArg_ParseTuple(args, "lO", &number, &stream)) return NULL;
    return PyLong_FromLong(arena_retain_opaque((void *)(uintptr_t)number, note, pointer(stream)));
}
static PyObject *retain_null(PyObject *m, PyObject *stream) {
    (void)m;
    return Py_BuildValue("ii", arena_retain_opaque(NULL, note, pointer(stream)), arena_retain_opaque(m, NULL, pointer(stream)));
}
static PyObject *set_error(PyObject *m, PyObject *args) {
    PyObject *stream;
    int code;
    (void)m;
    if (!PyArg_ParseTuple(args, "iO", &code, &stream)) return NULL;
    arena_set_error(code, pointer(stream));
    return NULL;
}

/* ---- threads that never have the GIL, nor a Python thread state ---- */

typedef struct job {
    pthread_t thread;
    void *stream;
    long first, count, took;
} job;
static void *work(void *argument) {
    job *mine = argument;
    for (long i = 0; i < mine->count; i++)
        mine->took += arena_retain_opaque((void *)(uintptr_t)(mine->first + i), note, mine->stream) == ARENA_RETAINED;
    return NULL;
}
/* start(first, count, stream) -> a job; join(job) -> how many were retained. */
static PyObject *start(PyObject *m, PyObject *args) {
    PyObject *stream;
    (void)m;
    job *mine = calloc(1, sizeof *mine);
    if (!mine || !PyArg_ParseTuple(args, "llO", &mine->first, &mine->count, &stream)) return free(mine), NULL;
    mine->stream = pointer(stream);
    pthread_create(&mine->thread, NULL, work, mine);
    return PyLong_FromVoidPtr(mine);
}
static PyObject *join(PyObject *m, PyObject *value) {
    (void)m;
    job *mine = pointer(value);
    long took;
    Py_BEGIN_ALLOW_THREADS
    pthread_join(mine->thread, NULL);
    Py_END_ALLOW_THREADS
    took = mine->took;
    free(mine);
    return PyLong_FromLong(took);
}
/* A thread that asks for ever, and retains where it can: through forks, exchanges of the driver, and the interpreter's end. */
static void *hammering(void *stream) {
    for (;;) {
        arena_retain_opaque((void *)1, note, stream);
        arena_capturing(stream);
    }
    return NULL;
}
static PyObject *hammer(PyObject *m, PyObject *stream) {
    pthread_t thread;
    (void)m;
    pthread_create(&thread, NULL, hammering, pointer(stream));
    pthread_detach(thread);
    Py_RETURN_NONE;
}

/* ---- what a call costs: seconds, the mean of `count`, in C ---- */

typedef int (*query_type)(void *, int *, unsigned long long *, void **, const void **, size_t *);

/* cost(what, stream, count, owner or the address of the driver's question) */
static PyObject *cost(PyObject *m, PyObject *args) {
    const char *what;
    PyObject *stream, *thing;
    long count;
    (void)m;
    if (!PyArg_ParseTuple(args, "sOlO", &what, &stream, &count, &thing)) return NULL;
    void *handle = pointer(stream);
    int status, failed = 0;
    unsigned long long capture;
    void *graph;
    double start = now();
    if (!strcmp(what, "retain")) {
        for (long i = 0; i < count; i++) failed |= arena_retain(thing, handle) < 0;
    } else if (!strcmp(what, "opaque")) {
        Py_BEGIN_ALLOW_THREADS
        start = now();
        for (long i = 0; i < count; i++) failed |= arena_retain_opaque((void *)1, note, handle) < 0;
        Py_END_ALLOW_THREADS
    } else if (!strcmp(what, "capturing")) {
        for (long i = 0; i < count; i++) failed |= arena_capturing(handle) < 0;
    } else if (!strcmp(what, "gate")) {
        for (long i = 0; i < count; i++) {
            failed += arena_maybe_capturing();
            __asm__ volatile("" ::: "memory"); /* each time anew, as in an op */
        }
        failed = 0;
    } else if (!strcmp(what, "loop")) {
        for (long i = 0; i < count; i++) __asm__ volatile("" ::: "memory");
    } else {
        query_type query = (query_type)pointer(thing);
        for (long i = 0; i < count; i++) query(handle, &status, &capture, &graph, NULL, NULL);
    }
    double seconds = (now() - start) / (double)count;
    if (failed) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_RuntimeError, "a call failed");
    return PyFloat_FromDouble(seconds);
}

static PyMethodDef methods[] = {
    {"log", log_number, METH_O, NULL},
    {"take_log", take_log, METH_NOARGS, NULL},
    {"there", there, METH_NOARGS, NULL},
    {"import_arena", import, METH_NOARGS, NULL},
    {"only_torch", only_torch, METH_NOARGS, NULL},
    {"maybe_capturing", maybe, METH_NOARGS, NULL},
    {"capturing", is_capturing, METH_O, NULL},
    {"retain", retain, METH_VARARGS, NULL},
    {"retain_opaque", retain_opaque, METH_VARARGS, NULL},
    {"retain_with_gil", retain_with_gil, METH_VARARGS, NULL},
    {"retain_null", retain_null, METH_O, NULL},
    {"set_error", set_error, METH_VARARGS, NULL},
    {"start", start, METH_VARARGS, NULL},
    {"join", join, METH_O, NULL},
    {"hammer", hammer, METH_O, NULL},
    {"cost", cost, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "op_client", NULL, -1, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit_op_client(void) { return PyModule_Create(&definition); }
