/* What the request path reads of torch without a Python call: the thread's gradient and inference modes, whether a dispatch
 * mode is active, and a tensor's metadata. From libraries that torch has loaded already; what is not found is asked of
 * Python instead. Included by workspace.pyx alone; with the GIL.
 */
#ifndef ARENA_WORKSPACE_H
#define ARENA_WORKSPACE_H

#include <Python.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef RTLD_NOLOAD
#define RTLD_NOLOAD 4
#endif

/* ---- the thread's modes ---- */

enum { MODE_GRAD = 1, MODE_INFERENCE = 2 }; /* low bits of the byte of c10::AutogradState that holds its flags */

static const unsigned char *(*autograd_state)(void); /* NULL: not found, or not laid out as expected */
static size_t autograd_flags;                        /* where in it: first, or behind an std::optional<SafePyObject> */
static int64_t (*dispatch_modes)(void);              /* NULL: not found */

static inline int modes_known(void) { return autograd_state != NULL; }
static inline unsigned modes_now(void) { return autograd_state()[autograd_flags] & (MODE_GRAD | MODE_INFERENCE); }
static inline void modes_at(size_t offset) { autograd_flags = offset; }
static inline void modes_forget(void) { autograd_state = NULL; }

/* ---- tensors, by torch's stable C ABI ---- */

typedef void *tensor_handle; /* AtenTensorHandle: a reference to the tensor, on the heap */

static struct {
    int32_t (*data)(tensor_handle, void **);
    int32_t (*dim)(tensor_handle, int64_t *);
    int32_t (*sizes)(tensor_handle, int64_t **);
    int32_t (*strides)(tensor_handle, int64_t **);
    int32_t (*dtype)(tensor_handle, int32_t *);
    int32_t (*free)(tensor_handle);
} tensor;

/* What a cached view looked like when it was made; its shape stands in the request's key. */
typedef struct view_mark {
    tensor_handle handle;
    void *data;    /* address of its first element */
    int32_t dtype; /* torch's number for it */
} view_mark;

static int view_mark_set(view_mark *mark, tensor_handle handle) {
    mark->handle = handle;
    return tensor.data(handle, &mark->data) | tensor.dtype(handle, &mark->dtype);
}

/* Whether it is still the contiguous view of that shape that it was: nobody called set_, resize_ or the like on it. */
static inline int view_mark_holds(const view_mark *mark, const int64_t *shape, int64_t dim) {
    void *data;
    int64_t now, *sizes, *strides, stride = 1;
    int32_t dtype;
    if (tensor.data(mark->handle, &data) | tensor.dim(mark->handle, &now) | tensor.dtype(mark->handle, &dtype)) return 0;
    if (data != mark->data || now != dim || dtype != mark->dtype) return 0;
    if (tensor.sizes(mark->handle, &sizes) | tensor.strides(mark->handle, &strides)) return 0;
    for (int64_t i = dim; i-- > 0; stride *= shape[i] ? shape[i] : 1)
        if (sizes[i] != shape[i] || strides[i] != stride) return 0;
    return 1;
}

/* ---- the lot, found once ---- */

/* 1: marks can be set. */
static int find_torch_symbols(void) {
    void *core = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD), *cpu = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (core) {
        *(void **)&autograd_state = dlsym(core, "_ZN3c1013AutogradState13get_tls_stateEv");
        *(void **)&dispatch_modes = dlsym(core, "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv");
    }
    if (!cpu) return 0;
    *(void **)&tensor.data = dlsym(cpu, "aoti_torch_get_data_ptr");
    *(void **)&tensor.dim = dlsym(cpu, "aoti_torch_get_dim");
    *(void **)&tensor.sizes = dlsym(cpu, "aoti_torch_get_sizes");
    *(void **)&tensor.strides = dlsym(cpu, "aoti_torch_get_strides");
    *(void **)&tensor.dtype = dlsym(cpu, "aoti_torch_get_dtype");
    *(void **)&tensor.free = dlsym(cpu, "aoti_torch_delete_tensor_object");
    return tensor.data && tensor.dim && tensor.sizes && tensor.strides && tensor.dtype && tensor.free;
}

/* ---- one request that was seen before ---- */

enum { REQUEST_WORDS = 128 }; /* longer keys are not kept */

/* The views of one block that answer one request. `words`: modes, then for each view its dtype's address, its number of
 * dimensions, and these. */
typedef struct request {
    uint64_t hash;
    size_t count;     /* words */
    size_t views;     /* tensors */
    void *tensors;    /* a tuple of them; NULL: the request came once */
    view_mark *marks; /* one for each, where they are checked at each hit; else NULL */
    bool shared;      /* the tensors themselves are handed out */
    int64_t words[];
} request;

static inline uint64_t words_hash(const int64_t *words, size_t count) {
    uint64_t hash = count;
    for (size_t i = 0; i < count; i++) hash = (hash ^ (uint64_t)words[i]) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
    return hash;
}

static inline int request_is(const request *known, uint64_t hash, const int64_t *words, size_t count) {
    return known->hash == hash && known->count == count && !memcmp(known->words, words, count * sizeof *words);
}

static inline int marks_hold(const request *known) {
    const int64_t *word = known->words + 1;
    for (size_t i = 0; i < known->views; i++, word += 2 + word[1])
        if (!view_mark_holds(&known->marks[i], word + 2, word[1])) return 0;
    return 1;
}

static void request_free(request *known);
static request *request_new(uint64_t hash, const int64_t *words, size_t count, size_t views, int marked) {
    request *known = (request *)calloc(1, sizeof *known + count * sizeof *words);
    if (!known) return NULL;
    known->hash = hash;
    known->count = count;
    known->views = views;
    memcpy(known->words, words, count * sizeof *words);
    if (marked && !(known->marks = (view_mark *)calloc(views ? views : 1, sizeof(view_mark)))) {
        free(known);
        return NULL;
    }
    return known;
}

static void request_free(request *known) { /* but for `tensors`, which is Python's */
    if (known->marks)
        for (size_t i = 0; i < known->views; i++)
            if (known->marks[i].handle) tensor.free(known->marks[i].handle);
    free(known->marks);
    free(known);
}

/* At most half of the places are taken, so a search ends. A full table starts again: a working set of ROOM never misses. */
enum { REQUEST_PLACES = 512, REQUEST_ROOM = 256 };

static inline request **request_place(request **table, uint64_t hash, const int64_t *words, size_t count) {
    size_t i = hash % REQUEST_PLACES;
    while (table[i] && !request_is(table[i], hash, words, count)) i = (i + 1) % REQUEST_PLACES;
    return &table[i];
}

/* ---- one persistent tensor ---- */

enum { KEPT_DIMS = 8 };

typedef struct kept_tensor {
    PyObject *tensor; /* a strong reference */
    PyObject *dtype;  /* borrowed: dtypes are for ever */
    view_mark mark;
    int64_t dim;
    int64_t shape[KEPT_DIMS];
} kept_tensor;

static int kept_set(kept_tensor *kept, tensor_handle handle, PyObject *object, PyObject *dtype, PyObject *shape) {
    if (view_mark_set(&kept->mark, handle)) return tensor.free(handle), -1;
    kept->tensor = Py_NewRef(object);
    kept->dtype = dtype;
    kept->dim = PyTuple_GET_SIZE(shape);
    for (int64_t i = 0; i < kept->dim; i++) kept->shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
    return 0;
}

/* Whether it has that shape (a tuple of ints) and dtype, as it had them when it was kept. */
static inline int kept_is(const kept_tensor *kept, PyObject *shape, PyObject *dtype) {
    if (dtype != kept->dtype || !PyTuple_Check(shape) || PyTuple_GET_SIZE(shape) != kept->dim) return 0;
    for (int64_t i = 0; i < kept->dim; i++) {
        PyObject *size = PyTuple_GET_ITEM(shape, i);
        if (!PyLong_CheckExact(size) || PyLong_AsLongLong(size) != kept->shape[i]) return PyErr_Clear(), 0;
    }
    return view_mark_holds(&kept->mark, kept->shape, kept->dim);
}

static void kept_drop(kept_tensor *kept) {
    tensor.free(kept->mark.handle);
    Py_DECREF(kept->tensor);
}

/* ---- Python ---- */

/* In the place of the method that Cython made, which packs its arguments in a tuple. */
static int replace_method(PyTypeObject *kind, PyMethodDef *method) {
    PyObject *descriptor = PyDescr_NewMethod(kind, method);
    int failed = !descriptor || PyDict_SetItemString(kind->tp_dict, method->ml_name, descriptor);
    Py_XDECREF(descriptor);
    PyType_Modified(kind);
    return failed ? -1 : 0;
}

/* A dict's version changes with its contents, and is never given out again: what was looked up once need not be looked up
 * while it stays. 0: this Python has none. */
static inline uint64_t dict_version(PyObject *names) {
#if PY_VERSION_HEX < 0x030C0000
    return ((PyDictObject *)names)->ma_version_tag;
#elif PY_VERSION_HEX < 0x030E0000
    _Py_COMP_DIAG_PUSH _Py_COMP_DIAG_IGNORE_DEPR_DECLS
    uint64_t version = ((PyDictObject *)names)->ma_version_tag;
    _Py_COMP_DIAG_POP
    return version;
#else
    return (void)names, 0;
#endif
}

/* The method that was replaced, with the arguments as they came. */
static PyObject *call_method(PyObject *method, PyObject *self, PyObject *const *args, size_t count, PyObject *names) {
    size_t all = count + (names ? (size_t)PyTuple_GET_SIZE(names) : 0);
    PyObject **with_self = (PyObject **)PyMem_Malloc((all + 1) * sizeof *with_self);
    if (!with_self) return PyErr_NoMemory();
    with_self[0] = self;
    if (all) memcpy(with_self + 1, args, all * sizeof *args);
    PyObject *result = PyObject_Vectorcall(method, with_self, count + 1, names);
    PyMem_Free(with_self);
    return result;
}

static inline PyObject *const *tuple_items(PyObject *tuple) { return &PyTuple_GET_ITEM(tuple, 0); }

#endif
