/* What the request path reads of torch without a Python call: the thread's gradient and inference modes, whether a dispatch
 * mode is active, and a tensor's metadata. From libraries that torch has loaded already; what is not found is asked of
 * Python instead. Included by workspace.pyx alone; with the GIL.
 */
#ifndef ARENA_WORKSPACE_H
#define ARENA_WORKSPACE_H

#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef RTLD_NOLOAD
#define RTLD_NOLOAD 4
#endif

/* ---- the thread's modes ---- */

enum { MODE_GRAD = 1, MODE_INFERENCE = 2 }; /* bits of the first byte of c10::AutogradState; checked by modes_are() */

static const unsigned char *(*autograd_state)(void); /* NULL: not found, or not laid out as expected */
static int64_t (*dispatch_modes)(void);              /* NULL: not found */

static inline int modes_known(void) { return autograd_state != NULL; }
static inline unsigned modes_now(void) { return *autograd_state() & (MODE_GRAD | MODE_INFERENCE); }
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
    void *tensors;    /* a tuple of them */
    view_mark *marks; /* one for each where the tensors themselves are handed out; else NULL */
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

static inline void request_free(request *known) { /* but for `tensors`, which is Python's */
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

#endif
