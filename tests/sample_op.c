/* A sample op library in C. Its kernel is imagined: what is shown is what it does for the owners of the memory that the kernel
 * would point to. Built against an installed arena by test_oplib_wheel.py:
 *     cc -shared -fPIC -I$(python -c "import arena; print(arena.get_include())") -I<Python's include> sample_op.c -o ...
 */
#include <Python.h>

#include <arena.h>
#include <stdlib.h>

static long freed;
static void free_block(void *block) {
    __atomic_add_fetch(&freed, 1, __ATOMIC_RELAXED); /* only so that the tests can count */
    free(block);
}

/* scale(scratch, stream): an op whose scratch is a Python object. */
static PyObject *scale(PyObject *module, PyObject *args) {
    PyObject *scratch;
    Py_ssize_t stream;
    (void)module;
    if (!PyArg_ParseTuple(args, "On", &scratch, &stream)) return NULL;
    int kept = arena_retain(scratch, (void *)stream);
    if (kept < 0) return NULL;
    return PyBool_FromLong(kept);
}

/* scale_with(bytes, stream): an op that allocates its scratch itself and works without the GIL. */
static PyObject *scale_with(PyObject *module, PyObject *args) {
    Py_ssize_t bytes, stream;
    (void)module;
    if (!PyArg_ParseTuple(args, "nn", &bytes, &stream)) return NULL;
    void *scratch = malloc((size_t)bytes);
    if (!scratch) return PyErr_NoMemory();
    int kept;
    Py_BEGIN_ALLOW_THREADS
    kept = arena_retain_opaque(scratch, free_block, (void *)stream);
    if (kept != ARENA_RETAINED) free_block(scratch); /* no capture: it may go once the kernel is launched */
    Py_END_ALLOW_THREADS
    if (kept < 0) {
        arena_set_error(kept, (void *)stream);
        return NULL;
    }
    return PyBool_FromLong(kept);
}

static PyObject *state(PyObject *module, PyObject *args) {
    (void)module, (void)args;
    return Py_BuildValue("{s:i,s:l}", "arena", arena_there(), "freed", freed);
}

static PyMethodDef methods[] = {
    {"scale", scale, METH_VARARGS, NULL},
    {"scale_with", scale_with, METH_VARARGS, NULL},
    {"state", state, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "sample_op", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_sample_op(void) {
    if (arena_import() < 0) PyErr_Clear(); /* works without arena, too: then nobody captures safely */
    return PyModule_Create(&definition);
}
