/* What the hot path does below the Python C API: it reads a handle, knows a plain owner and the managed capture of its thread
 * without a call. Included by registry.pyx alone; with the GIL.
 */
#ifndef ARENA_SHORTCUTS_H
#define ARENA_SHORTCUTS_H

#include <Python.h>
#if PY_VERSION_HEX < 0x030B0000
#include <longintrepr.h>
#endif

#include "driver.h"

/* Most owners are of types that define no __cuda_owners__, and one type often comes many times in a row. A version tag
 * names one state of one type and is never given out again, so it tells "like the last one" without a look-up. */
static unsigned int plain_version;
static inline int is_plain(PyObject *owner) {
    PyTypeObject *kind = Py_TYPE(owner);
#if PY_VERSION_HEX < 0x030C0000
    if (!(kind->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG)) return 0; /* later versions zero the tag instead */
#endif
    return kind->tp_version_tag == plain_version && plain_version;
}
/* The look-up; what it finds is noted for is_plain(). */
static int note_plain(PyObject *owner) {
    static PyObject *name;
    PyTypeObject *kind = Py_TYPE(owner);
    if (!name && !(name = PyUnicode_InternFromString("__cuda_owners__"))) {
        PyErr_Clear();
        return 0; /* owners_of() looks it up too, and says that there is no memory */
    }
    if (_PyType_Lookup(kind, name)) return 0;
#if PY_VERSION_HEX < 0x030C0000
    if (kind->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG)
#endif
        plain_version = kind->tp_version_tag;
    return 1;
}

/* A handle is an int of up to two digits; what this does not take goes through the C API. */
static inline int short_handle(PyObject *value, void **handle) {
    if (!PyLong_CheckExact(value)) return 0;
#if PY_VERSION_HEX >= 0x030C0000
    uintptr_t tag = ((PyLongObject *)value)->long_value.lv_tag;
    Py_ssize_t digits = (tag & 3) ? 0 : (Py_ssize_t)(tag >> 3); /* the low bits: 1 is zero, 2 is negative */
    const digit *d = ((PyLongObject *)value)->long_value.ob_digit;
#else
    Py_ssize_t digits = Py_SIZE(value);
    const digit *d = ((PyLongObject *)value)->ob_digit;
#endif
    if (digits != 2 && digits != 1) return 0;
    *handle = (void *)(d[0] | (digits == 2 ? (uintptr_t)d[1] << PyLong_SHIFT : 0));
    return 1;
}
/* Where a retain on this thread most likely belongs. A hint only: `capture` is looked up, and ids are never reused, so
 * a stale one finds a sealed list or none. initial-exec: one instruction instead of a call, for 24 bytes of the static
 * thread-local space that the C library keeps for libraries loaded late. */
typedef struct { void *stream; uint64_t capture; CUdevice device; } here;
static __thread here managed_here __attribute__((tls_model("initial-exec")));

static inline PyObject *new_bool(int value) {
    return value < 0 ? NULL : Py_NewRef(value ? Py_True : Py_False);
}

#endif
