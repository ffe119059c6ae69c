/* The simulated CUDA driver: its slots, its one mutex, and its one thread, which ends launches and runs late destructors.
 * Any thread may call. The three calls on the hot path (capture query, current device, current stream) take no lock; all
 * others take the mutex, and none holds it while a destructor runs. Nothing here knows Python. Where a comment says
 * "measured", the fact is the real driver's; the tests hold both drivers to it.
 */
#include "simulator.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define DEVICES 2
#define LANES 64     /* streams that can take part in one capture */
#define DEPTH 32     /* contexts, or streams, that a thread can have pushed */
#define FAULTS 32    /* calls of sim_fail() that wait for their turn */
#define RECORDS (1 << 20) /* destructors noted; later ones run unnoted */
#define LATE 500000  /* ns from the end of an idle executable to its destructors; measured: up to 1 ms */
#define SLICE 50000000 /* ns that a synchronize waits before it lets its caller look around */
#define NEVER INT64_MAX

#define UNLIKELY(x) __builtin_expect(!!(x), 0)
#define LOAD(x) atomic_load_explicit(&(x), memory_order_relaxed)
#define STORE(x, value) atomic_store_explicit(&(x), (value), memory_order_relaxed)

/* ---- slots ---- */

/* Every handle points to one. generation is odd while the slot lives, and grows at birth and death: handle and generation
 * together are never reused. Slots are never freed, so a stale handle can be looked at. */
typedef struct slot {
    _Atomic uint32_t generation; /* written under the mutex, read anywhere */
    uint32_t next;               /* index + 1 of the next free slot; 0: none */
} slot;

/* used == living slots + slots on the free list; slots from `used` on were not given out since sim_open(). */
typedef struct pool {
    char *base;        /* capacity * size bytes of zeroed, lazily mapped memory */
    size_t size;       /* of one slot's struct */
    uint32_t capacity; /* slots */
    uint32_t used;     /* slots given out since sim_open(), freed ones included */
    uint32_t freed;    /* index + 1 of the slot that is given out next: the last one freed */
} pool;

/* The objects of one holder, in the order in which they were retained. count <= capacity; no object is in it twice. */
typedef struct holding {
    struct object *object; /* held `references` times: it lives */
    uint64_t references;   /* > 0 */
} holding;

typedef struct holdings {
    holding *items;    /* `capacity` of them, or NULL */
    uint32_t count;    /* different objects */
    uint32_t capacity; /* room */
} holdings;

/* total == own + references of all holders; total == 0 only while it is dying. */
typedef struct object {
    slot slot;            /* lives until its destructor has returned */
    CUhostFn destroy;     /* runs once, without the mutex */
    void *data;           /* for `destroy` */
    int64_t number;       /* for the record; -1: none */
    uint64_t own;         /* references of the program: what cuUserObjectRelease can give back */
    uint64_t total;       /* references of all */
    struct object *dying; /* the next whose destructor is to run */
} object;

/* inner (with a parent): a child's clone or a conditional body; it goes with its parent. */
typedef struct graph {
    slot slot;
    int device;              /* whose context's reset takes it along */
    holdings held;           /* its own objects, not those of inner graphs */
    uint64_t nodes;          /* of its own */
    uint64_t capture_id;     /* of every capture into it; 0: none so far */
    struct capture *capture; /* open on it, or NULL */
    struct graph *parent;    /* NULL: a template of the program's */
    struct graph *inner;     /* the first of the inner graphs, in order */
    struct graph *next;      /* the next inner graph of the same parent */
} graph;

/* What an executable held at one time. pins == executables that hold it (0 or 1) + launches made with it and unfinished.
 * At pins == 0 it is on the due list, for the driver's thread. */
typedef struct bag {
    holdings held;    /* the template's, the children's, the bodies' */
    uint64_t pins;    /* see above */
    int device;       /* whose context's reset forgets it */
    int64_t due;      /* when its references may go */
    struct bag *next; /* on the due list */
} bag;

typedef struct exec {
    slot slot;
    int device;     /* whose context's reset takes it along */
    bag *held;      /* pinned */
    uint64_t nodes; /* inner graphs' included: an update has to match it */
} exec;

/* One piece of a stream's queue: a launch (held != NULL), or a wait for other work. */
typedef struct work {
    struct work *next;         /* behind it on the stream */
    bag *held;                 /* pinned until the launch ends */
    int64_t nanoseconds;       /* a launch lasts at least that long */
    int64_t end;               /* when those are over; 0: not begun */
    struct event *gate;        /* a launch lasts until that is set, or gone; may be NULL */
    uint32_t gate_generation;  /* a recycled gate is not the one that was meant */
    struct stream *on;         /* a wait ends when on->completed >= after */
    uint64_t after;            /* see `on` */
} work;

/* submitted - completed == pieces in the queue, and both only grow, for the life of the process: work of a former stream
 * of this slot counts as completed. Capturing (capture != NULL) <=> status != NONE. status, id and graph change together,
 * under an odd `sequence`. Aligned so that the hot path can check a handle with a mask. */
typedef struct stream {
    slot slot;
    _Atomic uint32_t sequence;   /* of the next three; the hot path reads them without the mutex */
    _Atomic int32_t status;      /* CU_STREAM_CAPTURE_STATUS_... */
    _Atomic uint64_t id;         /* 0 unless ACTIVE */
    _Atomic(graph *) graph;      /* NULL unless ACTIVE */
    int device;                  /* its context */
    int blocking;                /* synchronizes with the legacy stream */
    int busy;                    /* on the list of streams with work */
    int leaving;                 /* destroyed with work queued: the slot is freed when that is done */
    work *first;                 /* the queue */
    work *last;                  /* its end, if there is one */
    uint64_t submitted;          /* pieces ever queued */
    uint64_t completed;          /* pieces ever done */
    struct stream *next_busy;    /* on the list of streams with work */
    struct capture *capture;     /* that it takes part in */
    struct stream *next_capture; /* the next that takes part in it */
    uint32_t lane;               /* its place in the clocks of that capture */
    uint32_t clock[LANES];       /* work of each lane that its next work depends on */
} __attribute__((aligned(512))) stream;

/* At rest: on == NULL (never recorded), or complete when on->completed >= after. Captured: capture != 0. */
typedef struct event {
    slot slot;
    int device;            /* its context */
    _Atomic int set;       /* an open gate */
    stream *on;            /* the slot recorded on */
    uint64_t after;        /* see above */
    uint64_t capture;      /* serial of the capture recorded in; stays after its end: such an event cannot be queried */
    uint32_t clock[LANES]; /* work that it stands for, in that capture */
} event;

/* One open capture. origin is one of streams; width lanes are given out, and none twice. */
typedef struct capture {
    struct capture *next;     /* open too */
    struct capture *previous; /* open too */
    uint64_t serial;          /* of this capture alone; the id is the graph's */
    uint64_t thread;          /* that began it */
    graph *graph;             /* under capture */
    stream *origin;           /* where it has to end */
    stream *streams;          /* that take part */
    uint32_t width;           /* lanes given out */
    int mode;                 /* CU_STREAM_CAPTURE_MODE_... */
    int broken;               /* invalidated */
} capture;

static stream streams[1 << 12];
static event events[1 << 16];
static object objects[1 << 20];
static graph graphs[1 << 18];
static exec execs[1 << 18];

#define POOL(slots) {(char *)(slots), sizeof (slots)[0], sizeof (slots) / sizeof (slots)[0], 0, 0}
static pool stream_pool = POOL(streams);
static pool event_pool = POOL(events);
static pool object_pool = POOL(objects);
static pool graph_pool = POOL(graphs);
static pool exec_pool = POOL(execs);

/* The last slot freed is the next one given out: handles are recycled at once (measured), and stale ones get caught. */
static void *pool_take(pool *pool) {
    slot *taken;
    if (pool->freed) {
        taken = (slot *)(pool->base + (size_t)(pool->freed - 1) * pool->size);
        pool->freed = taken->next;
    } else if (pool->used < pool->capacity) {
        taken = (slot *)(pool->base + (size_t)pool->used++ * pool->size);
    } else {
        return NULL;
    }
    STORE(taken->generation, LOAD(taken->generation) + 1);
    return taken;
}

static void pool_give(pool *pool, void *given) {
    slot *freed = given;
    STORE(freed->generation, LOAD(freed->generation) + 1);
    freed->next = pool->freed;
    pool->freed = (uint32_t)(((char *)given - pool->base) / pool->size) + 1;
}

static int lives(const void *given) { return LOAD(((const slot *)given)->generation) & 1; }

/* The living slot that a handle from outside points to, or NULL. */
static void *pool_find(const pool *pool, const void *handle) {
    size_t offset = (size_t)((uintptr_t)handle - (uintptr_t)pool->base);
    if (offset >= (size_t)pool->used * pool->size || offset % pool->size || !lives(handle)) return NULL;
    return (void *)handle;
}

/* For `type *x` over every slot given out since sim_open(); look whether it lives. */
#define EACH(type, x, pool) (type *x = (type *)(pool).base; x < (type *)(pool).base + (pool).used; x++)

/* ---- state: all of it, but for what is atomic, is the mutex's ---- */

enum symbol {
#define X(name, abi_name, version, parameters) S_##name,
    DRIVER_SYMBOLS(X)
#undef X
    S_current_stream,
    SYMBOLS,
};
static const char *const symbol_names[SYMBOLS] = {
#define X(name, abi_name, version, parameters) #name,
    DRIVER_SYMBOLS(X)
#undef X
    "current_stream",
};

/* A fault that waits for its turn: the `left`th call from now of `symbol` returns `code`. */
typedef struct fault {
    int symbol;
    CUresult code;
    uint64_t left; /* > 0 */
} fault;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake;     /* the driver's thread has something to do, or to wait for */
static pthread_cond_t progress; /* work was completed */
static pthread_t thread;
static int running; /* the driver's thread is there to be joined */
static int ending;  /* launches end at once: gates count as open, seconds as over */

static _Atomic uint64_t epoch;   /* counts sim_open() */
static _Atomic int opened;       /* between sim_open() and sim_close() */
static _Atomic int forked;       /* in a child of the process that opened it */
static _Atomic uint64_t token = UINT64_MAX; /* the epoch, while every call may take its short way; else no thread's token */

static _Atomic uint64_t calls[SYMBOLS];
static fault faults[FAULTS];
static int fault_count;

static sim_record *records;
static int64_t record_count;
static int64_t record_capacity;

static stream legacy[DEVICES]; /* the NULL stream of each context: not slots, since NULL is no address */
static _Atomic int capturing[DEVICES]; /* streams in an active capture */
static stream *busy;           /* streams with work, in no order */
static capture *captures;      /* open */
static uint64_t capture_ids;   /* given out so far in this process */
static uint64_t capture_serials;
static bag *due;               /* to be dropped by the driver's thread, in order of arrival */
static bag **due_last = &due;
static struct context { int device; } contexts[DEVICES] = {{0}, {1}};

/* What the hot path needs of a thread. token == the epoch <=> the thread has met this simulator, has a context, and is not
 * inside a destructor. Small, since it takes static TLS of the process. */
static __thread struct {
    uint64_t token;         /* 0: take the long way */
    int device;             /* of the current context; -1: none */
    int mode;               /* cuThreadExchangeStreamCaptureMode */
    void *current[DEVICES]; /* the stream entered last, per device */
} here __attribute__((tls_model("initial-exec")));

static __thread struct {
    uint64_t epoch;                 /* of which the rest, and `here`, are true */
    uint64_t serial;                /* the thread's: never reused, as thread ids are */
    int destructors;                /* that this thread is inside of */
    int contexts;                   /* pushed, the first one included */
    int streams;                    /* entered */
    signed char context[DEPTH];     /* device, or -1 */
    signed char entered[DEPTH];     /* device */
    void *before[DEPTH];            /* current stream of that device before */
} deep;

static _Atomic uint64_t thread_serials;

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void lock(void) { pthread_mutex_lock(&mutex); }
static void unlock(void) { pthread_mutex_unlock(&mutex); }

static CUresult unlocked(CUresult result) {
    unlock();
    return result;
}

/* ---- the calling thread ---- */

static void settle(void) {
    here.device = deep.contexts ? deep.context[deep.contexts - 1] : -1;
    here.token = here.device >= 0 && !deep.destructors ? deep.epoch : 0;
}

/* A thread meets each simulator as new: what it pushed and entered in the last one is forgotten. */
static void arrive(void) {
    uint64_t current = LOAD(epoch);
    if (deep.epoch == current) return;
    deep.epoch = current;
    if (!deep.serial) deep.serial = atomic_fetch_add_explicit(&thread_serials, 1, memory_order_relaxed) + 1;
    deep.destructors = deep.streams = 0;
    deep.contexts = 1;
    deep.context[0] = 0;
    here.mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    for (int device = 0; device < DEVICES; device++) here.current[device] = NULL;
    settle();
}

static void refresh_token(void) { STORE(token, LOAD(opened) && !LOAD(forked) && !fault_count ? LOAD(epoch) : UINT64_MAX); }

static int take_fault(int symbol, CUresult *code) {
    int found = 0;
    for (int i = 0; i < fault_count;) {
        if (faults[i].symbol != symbol || --faults[i].left) {
            i++;
        } else {
            *code = faults[i].code;
            faults[i] = faults[--fault_count];
            found = 1;
        }
    }
    refresh_token();
    return found;
}

/* The way into a call of the table where something is special. Returns whether the call is over, with `*result`. */
static int intercept(int symbol, CUresult *result) {
    arrive();
    if (!LOAD(opened)) return *result = CUDA_ERROR_DEINITIALIZED, 1;
    if (deep.destructors && symbol != S_current_stream) return *result = CUDA_ERROR_NOT_PERMITTED, 1; /* measured */
    lock();
    int failed = take_fault(symbol, result);
    unlock();
    if (failed) return 1;
    if (!LOAD(forked)) return 0;
    switch (symbol) {
    case S_cuStreamGetCaptureInfo: /* it tells the two apart itself */
    case S_cuUserObjectCreate:
    case S_cuGraphRetainUserObject:
    case S_cuThreadExchangeStreamCaptureMode:
    case S_cuCtxGetDevice:
    case S_cuCtxGetCurrent:
    case S_cuDriverGetVersion:
    case S_cuGetErrorName:
    case S_current_stream:
        return 0;
    default:
        return *result = CUDA_ERROR_NOT_INITIALIZED, 1;
    }
}

static int special(void) { return UNLIKELY(here.token != LOAD(token)); }

/* Opens every function of the table. The hot ones count with a load and a store: no locked instruction, and a count that
 * may fall behind where threads race. */
#define ENTER(symbol) \
    do { \
        CUresult result_; \
        atomic_fetch_add_explicit(&calls[S_##symbol], 1, memory_order_relaxed); \
        if (special() && intercept(S_##symbol, &result_)) return result_; \
    } while (0)
#define ENTER_HOT(symbol) \
    do { \
        CUresult result_; \
        STORE(calls[S_##symbol], LOAD(calls[S_##symbol]) + 1); \
        if (special() && intercept(S_##symbol, &result_)) return result_; \
    } while (0)

/* Opens every function beyond the table. */
#define VISIT() \
    do { \
        arrive(); \
        if (!LOAD(opened)) return CUDA_ERROR_DEINITIALIZED; \
        if (LOAD(forked)) return CUDA_ERROR_NOT_INITIALIZED; \
    } while (0)

CUresult sim_device(int *device) {
    arrive();
    *device = here.device;
    return here.device < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

CUresult sim_push_device(int device) {
    arrive();
    if (device < -1 || device >= DEVICES) return CUDA_ERROR_INVALID_VALUE;
    if (deep.contexts == DEPTH) return CUDA_ERROR_OUT_OF_MEMORY;
    deep.context[deep.contexts++] = (signed char)device;
    settle();
    return CUDA_SUCCESS;
}

CUresult sim_pop_device(void) {
    arrive();
    if (!deep.contexts) return CUDA_ERROR_INVALID_CONTEXT;
    deep.contexts--;
    settle();
    return CUDA_SUCCESS;
}

static CUresult get_device(CUdevice *device) {
    ENTER_HOT(cuCtxGetDevice);
    if (UNLIKELY(here.device < 0)) return CUDA_ERROR_INVALID_CONTEXT;
    *device = here.device;
    return CUDA_SUCCESS;
}

static CUresult get_current(CUcontext *context) {
    ENTER(cuCtxGetCurrent);
    *context = here.device < 0 ? NULL : (CUcontext)&contexts[here.device];
    return CUDA_SUCCESS;
}

static CUresult push_current(CUcontext context) {
    ENTER(cuCtxPushCurrent);
    for (int device = 0; device < DEVICES; device++)
        if (context == (CUcontext)&contexts[device]) return sim_push_device(device);
    return CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult pop_current(CUcontext *context) {
    ENTER(cuCtxPopCurrent);
    if (deep.contexts && context) *context = here.device < 0 ? NULL : (CUcontext)&contexts[here.device];
    return sim_pop_device();
}

static CUresult exchange_mode(CUstreamCaptureMode *mode) {
    ENTER(cuThreadExchangeStreamCaptureMode);
    if (!mode || (unsigned)*mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    int before = here.mode;
    here.mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

static int32_t current_stream(int32_t device, void **current) {
    ENTER_HOT(current_stream);
    if (UNLIKELY((uint32_t)device >= DEVICES)) return CUDA_ERROR_INVALID_VALUE;
    *current = here.current[device];
    return CUDA_SUCCESS;
}

/* ---- objects and who holds them ---- */

/* Objects whose destructors are to run, in this order, once the mutex is free. */
typedef struct dying {
    object *first;
    object **last; /* &first, or &dying of the last object */
} dying;

#define NONE_DYING(list) dying list = {NULL, &list.first}

static void drop(object *held, uint64_t references, dying *list) {
    held->total -= references;
    if (held->total) return;
    held->dying = NULL;
    *list->last = held;
    list->last = &held->dying;
}

static void note(int64_t number, int on_driver) {
    if (record_count == record_capacity) {
        int64_t capacity = record_capacity ? 2 * record_capacity : 256;
        sim_record *grown = capacity <= RECORDS ? realloc(records, (size_t)capacity * sizeof *records) : NULL;
        if (!grown) return;
        records = grown;
        record_capacity = capacity;
    }
    records[record_count++] = (sim_record){number, (int32_t)syscall(SYS_gettid), on_driver};
}

/* Without the mutex: a destructor may be slow, or call back (to be told 800). */
static void run_destructors(const dying *list, int on_driver) {
    uint64_t begun = deep.epoch;
    for (object *next, *dead = list->first; dead; dead = next) {
        next = dead->dying;
        deep.destructors++;
        settle();
        dead->destroy(dead->data);
        deep.destructors--;
        settle();
        lock();
        if (begun == LOAD(epoch) && LOAD(opened)) {
            note(dead->number, on_driver);
            pool_give(&object_pool, dead);
        }
        unlock();
    }
}

static CUresult unlocked_after(CUresult result, const dying *list) {
    unlock();
    run_destructors(list, 0);
    return result;
}

static holding *held_by(const holdings *held, const object *wanted) {
    for (uint32_t i = 0; i < held->count; i++)
        if (held->items[i].object == wanted) return &held->items[i];
    return NULL;
}

/* Room for `more` different objects: 0, or -1 and nothing has changed. */
static int holdings_reserve(holdings *held, uint32_t more) {
    if (more <= held->capacity - held->count) return 0;
    uint32_t capacity = 2 * held->capacity > held->count + more ? 2 * held->capacity : held->count + more;
    holding *items = realloc(held->items, capacity * sizeof *items);
    if (!items) return -1;
    held->items = items;
    held->capacity = capacity;
    return 0;
}

/* There is room. The references are new ones. */
static void holdings_add(holdings *held, object *added, uint64_t references) {
    holding *old = held_by(held, added);
    if (old) old->references += references;
    else held->items[held->count++] = (holding){added, references};
    added->total += references;
}

static void holdings_drop(holdings *held, dying *list) {
    for (uint32_t i = 0; i < held->count; i++) drop(held->items[i].object, held->items[i].references, list);
    free(held->items);
    *held = (holdings){0};
}

/* Of a context that was reset: the references stay, so no destructor ever runs (measured). */
static void holdings_forget(holdings *held) {
    free(held->items);
    *held = (holdings){0};
}

/* Dying objects have slots still, but no references to give or take. */
static object *find_object(CUuserObject handle) {
    object *found = pool_find(&object_pool, handle);
    return found && found->total ? found : NULL;
}

static CUresult object_create(CUuserObject *handle, void *data, CUhostFn destroy, unsigned int count, unsigned int flags) {
    ENTER(cuUserObjectCreate);
    if (!handle || !destroy || !count || count > INT32_MAX || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
        return CUDA_ERROR_INVALID_VALUE;
    lock();
    object *made = LOAD(opened) ? pool_take(&object_pool) : NULL;
    if (!made) return unlocked(CUDA_ERROR_OUT_OF_MEMORY);
    made->destroy = destroy;
    made->data = data;
    made->number = -1;
    made->own = made->total = count;
    *handle = (CUuserObject)made;
    return unlocked(CUDA_SUCCESS);
}

static CUresult object_release(CUuserObject handle, unsigned int count) {
    ENTER(cuUserObjectRelease);
    NONE_DYING(list);
    lock();
    object *released = find_object(handle);
    if (!released || !count || count > released->own) return unlocked(CUDA_ERROR_INVALID_VALUE);
    released->own -= count;
    drop(released, count, &list);
    return unlocked_after(CUDA_SUCCESS, &list);
}

void sim_destructor(void *unused) { (void)unused; }

CUresult sim_object_retain(CUuserObject handle, unsigned int count) {
    VISIT();
    lock();
    object *retained = find_object(handle);
    if (!retained || !count || count > INT32_MAX) return unlocked(CUDA_ERROR_INVALID_VALUE);
    retained->own += count;
    retained->total += count;
    return unlocked(CUDA_SUCCESS);
}

CUresult sim_object_number(CUuserObject handle, int64_t number) {
    lock();
    object *numbered = find_object(handle);
    if (numbered) numbered->number = number;
    return unlocked(numbered ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

/* ---- graphs ---- */

static CUresult graph_retain(CUgraph handle, CUuserObject wanted, unsigned int count, unsigned int flags) {
    ENTER(cuGraphRetainUserObject);
    if (!count || count > INT32_MAX || flags & ~(unsigned)CU_GRAPH_USER_OBJECT_MOVE) return CUDA_ERROR_INVALID_VALUE;
    lock();
    graph *holder = pool_find(&graph_pool, handle);
    object *retained = find_object(wanted);
    if (!holder || !retained) return unlocked(CUDA_ERROR_INVALID_VALUE); /* measured, for the graph */
    int move = flags == CU_GRAPH_USER_OBJECT_MOVE;
    if (move && count > retained->own) return unlocked(CUDA_ERROR_INVALID_VALUE);
    if (holdings_reserve(&holder->held, 1)) return unlocked(CUDA_ERROR_OUT_OF_MEMORY);
    holdings_add(&holder->held, retained, count);
    if (move) {
        retained->own -= count;
        retained->total -= count;
    }
    return unlocked(CUDA_SUCCESS);
}

static CUresult graph_release(CUgraph handle, CUuserObject wanted, unsigned int count) {
    ENTER(cuGraphReleaseUserObject);
    NONE_DYING(list);
    lock();
    graph *holder = pool_find(&graph_pool, handle);
    object *released = find_object(wanted);
    holding *held = holder && released ? held_by(&holder->held, released) : NULL;
    if (!held || !count || count > held->references) return unlocked(CUDA_ERROR_INVALID_VALUE);
    held->references -= count;
    if (!held->references) {
        holding *end = holder->held.items + --holder->held.count;
        memmove(held, held + 1, (size_t)(end - held) * sizeof *held); /* the order is that of retention */
    }
    drop(released, count, &list);
    return unlocked_after(CUDA_SUCCESS, &list);
}

static graph *graph_new(int device) {
    graph *made = pool_take(&graph_pool);
    if (!made) return NULL;
    made->device = device;
    made->nodes = made->capture_id = 0;
    made->capture = NULL;
    made->parent = made->inner = made->next = NULL;
    return made;
}

static void graph_put_inside(graph *parent, graph *inner) {
    graph **end = &parent->inner;
    while (*end) end = &(*end)->next;
    *end = inner;
    inner->parent = parent;
}

/* With its inner graphs. The objects go in the order of retention (measured), the outer graph's first. */
static void graph_free(graph *freed, dying *list) {
    holdings_drop(&freed->held, list);
    for (graph *next, *inner = freed->inner; inner; inner = next) {
        next = inner->next;
        inner->parent = NULL;
        graph_free(inner, list);
    }
    for (graph **link = freed->parent ? &freed->parent->inner : NULL; link && *link; link = &(*link)->next)
        if (*link == freed) {
            *link = freed->next;
            break;
        }
    pool_give(&graph_pool, freed);
}

static int graph_captured(const graph *outer) {
    if (outer->capture) return 1;
    for (const graph *inner = outer->inner; inner; inner = inner->next)
        if (graph_captured(inner)) return 1;
    return 0;
}

static uint64_t graph_nodes(const graph *outer) {
    uint64_t nodes = outer->nodes;
    for (const graph *inner = outer->inner; inner; inner = inner->next) nodes += graph_nodes(inner);
    return nodes;
}

/* A copy with references of its own; NULL: no memory, and nothing has changed. */
static graph *graph_copy(const graph *source, int device) {
    graph *copy = graph_new(device);
    if (!copy) return NULL;
    copy->nodes = source->nodes;
    int failed = holdings_reserve(&copy->held, source->held.count);
    for (uint32_t i = 0; !failed && i < source->held.count; i++)
        holdings_add(&copy->held, source->held.items[i].object, source->held.items[i].references);
    for (const graph *inner = source->inner; inner && !failed; inner = inner->next) {
        graph *inner_copy = graph_copy(inner, device);
        if (inner_copy) graph_put_inside(copy, inner_copy);
        failed = !inner_copy;
    }
    if (!failed) return copy;
    NONE_DYING(list); /* stays empty: the source holds them all */
    graph_free(copy, &list);
    return NULL;
}

CUresult sim_graph_create(CUgraph *handle) {
    VISIT();
    lock();
    graph *made = graph_new(here.device < 0 ? 0 : here.device);
    *handle = (CUgraph)made;
    return unlocked(made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

CUresult sim_graph_destroy(CUgraph handle) {
    VISIT();
    NONE_DYING(list);
    lock();
    graph *destroyed = pool_find(&graph_pool, handle);
    if (!destroyed) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    if (destroyed->parent || graph_captured(destroyed)) return unlocked(CUDA_ERROR_INVALID_VALUE);
    graph_free(destroyed, &list);
    return unlocked_after(CUDA_SUCCESS, &list);
}

CUresult sim_graph_clone(CUgraph *clone, CUgraph handle) {
    VISIT();
    lock();
    graph *source = pool_find(&graph_pool, handle);
    if (!source) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    if (graph_captured(source)) return unlocked(CUDA_ERROR_INVALID_VALUE);
    graph *copy = graph_copy(source, source->device);
    *clone = (CUgraph)copy;
    return unlocked(copy ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

CUresult sim_graph_add_node(CUgraph handle) {
    VISIT();
    lock();
    graph *grown = pool_find(&graph_pool, handle);
    if (!grown) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    grown->nodes++;
    return unlocked(CUDA_SUCCESS);
}

CUresult sim_graph_add_child(CUgraph handle, CUgraph child) {
    VISIT();
    lock();
    graph *parent = pool_find(&graph_pool, handle);
    graph *source = pool_find(&graph_pool, child);
    if (!parent || !source) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    if (graph_captured(source)) return unlocked(CUDA_ERROR_INVALID_VALUE);
    graph *copy = graph_copy(source, parent->device);
    if (!copy) return unlocked(CUDA_ERROR_OUT_OF_MEMORY);
    graph_put_inside(parent, copy);
    parent->nodes++;
    return unlocked(CUDA_SUCCESS);
}

CUresult sim_graph_add_conditional(CUgraph handle, CUgraph *body) {
    VISIT();
    lock();
    graph *parent = pool_find(&graph_pool, handle);
    if (!parent) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    graph *made = graph_new(parent->device);
    if (!made) return unlocked(CUDA_ERROR_OUT_OF_MEMORY);
    graph_put_inside(parent, made);
    parent->nodes++;
    *body = (CUgraph)made;
    return unlocked(CUDA_SUCCESS);
}

CUresult sim_graph_owners(CUgraph handle, int64_t *owners) {
    lock();
    const graph *asked = pool_find(&graph_pool, handle);
    if (!asked) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    *owners = asked->held.count;
    return unlocked(CUDA_SUCCESS);
}

/* ---- captures: who takes part, and what breaks them ---- */

/* The only writer of the published fields; the mutex is held. release on each: a reader who sees one of the new values
 * sees the odd sequence too; pairs with the acquires in capture_info(). */
static void publish(stream *changed, int status, uint64_t id, graph *captured) {
    uint32_t sequence = LOAD(changed->sequence);
    STORE(changed->sequence, sequence + 1);
    atomic_store_explicit(&changed->status, status, memory_order_release);
    atomic_store_explicit(&changed->id, id, memory_order_release);
    atomic_store_explicit(&changed->graph, captured, memory_order_release);
    atomic_store_explicit(&changed->sequence, sequence + 2, memory_order_release);
}

static void count_capturing(int device, int change) { STORE(capturing[device], LOAD(capturing[device]) + change); }

static void attach(capture *joined, stream *joining) {
    joining->capture = joined;
    joining->next_capture = joined->streams;
    joined->streams = joining;
    joining->lane = joined->width++;
    joining->clock[joining->lane] = 1; /* a fork is work: it has to be joined, even if nothing follows it */
    count_capturing(joining->device, 1);
    publish(joining, CU_STREAM_CAPTURE_STATUS_ACTIVE, joined->graph->capture_id, joined->graph);
}

static void invalidate(capture *broken) {
    if (broken->broken) return;
    broken->broken = 1;
    for (stream *part = broken->streams; part; part = part->next_capture) {
        count_capturing(part->device, -1);
        publish(part, CU_STREAM_CAPTURE_STATUS_INVALIDATED, 0, NULL); /* measured */
    }
}

/* Takes an open capture off its streams and its graph, and frees it. */
static void dissolve(capture *over) {
    for (stream *next, *part = over->streams; part; part = next) {
        next = part->next_capture;
        if (!over->broken) count_capturing(part->device, -1);
        part->capture = NULL;
        publish(part, CU_STREAM_CAPTURE_STATUS_NONE, 0, NULL);
    }
    over->graph->capture = NULL;
    if (over->next) over->next->previous = over->previous;
    *(over->previous ? &over->previous->next : &captures) = over->next;
    free(over);
}

/* An unsafe call by this thread: breaks every global capture, and the thread's own thread-local one; in relaxed mode only
 * if the call is one of those that do so even then. */
static CUresult forbid(int even_relaxed) {
    CUresult result = CUDA_SUCCESS;
    if (here.mode == CU_STREAM_CAPTURE_MODE_RELAXED && !even_relaxed) return result;
    for (capture *open = captures; open; open = open->next) {
        int mine = open->mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL && open->thread == deep.serial;
        if (open->broken || !(mine || open->mode == CU_STREAM_CAPTURE_MODE_GLOBAL)) continue;
        invalidate(open);
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return result;
}

/* A call on the legacy stream would wait for the device's blocking streams, which a capture cannot: breaks it. */
static CUresult forbid_implicit(const stream *called) {
    CUresult result = CUDA_SUCCESS;
    if (called != &legacy[called->device]) return result;
    for (capture *open = captures; open; open = open->next)
        for (const stream *part = open->broken ? NULL : open->streams; part; part = part->next_capture)
            if (part->blocking && part->device == called->device) {
                invalidate(open);
                result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
                break;
            }
    return result;
}

/* A call that cannot be made on a stream that captures, in whatever mode: breaks the capture. */
static CUresult forbid_on(const stream *called) {
    if (!called->capture) return CUDA_SUCCESS;
    if (called->capture->broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    invalidate(called->capture);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

static CUresult find_stream(CUstream handle, stream **found) {
    if (handle) {
        *found = pool_find(&stream_pool, handle);
        return *found && !(*found)->leaving ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    }
    if (here.device < 0) return CUDA_ERROR_INVALID_CONTEXT;
    *found = &legacy[here.device];
    return CUDA_SUCCESS;
}

/* For `stream *x = the stream of a handle`, with the mutex held; leaves the function if there is none. */
#define FIND_STREAM(x, handle) \
    stream *x = NULL; \
    do { \
        CUresult found_ = find_stream(handle, &x); \
        if (found_) return unlocked(found_); \
    } while (0)

/* ---- the queues ---- */

static int done(stream *on, uint64_t after) { return on->completed >= after; }

static void put_due(bag *dropped, int64_t when) {
    if (!dropped->held.count) {
        free(dropped->held.items);
        free(dropped);
        return;
    }
    dropped->due = when;
    dropped->next = NULL;
    *due_last = dropped;
    due_last = &dropped->next;
    pthread_cond_signal(&wake);
}

static void unpin(bag *pinned, int64_t when) {
    if (!--pinned->pins) put_due(pinned, when);
}

static int work_done(work *piece, int64_t time, int64_t *next) {
    if (!piece->held) return done(piece->on, piece->after);
    if (!piece->end) piece->end = time + piece->nanoseconds;
    if (ending) return 1;
    if (piece->gate && LOAD(piece->gate->slot.generation) == piece->gate_generation && !LOAD(piece->gate->set)) return 0;
    if (time >= piece->end) return 1;
    if (piece->end < *next) *next = piece->end;
    return 0;
}

/* Ends what is over and begins what is next, on all streams. Returns when to look again. */
static int64_t advance(int64_t time) {
    int64_t next;
    int moved, any = 0;
    do {
        moved = 0;
        next = NEVER;
        for (stream **link = &busy, *each; (each = *link);) {
            while (each->first && work_done(each->first, time, &next)) {
                work *over = each->first;
                each->first = over->next;
                each->completed++;
                if (over->held) unpin(over->held, time);
                free(over);
                moved = any = 1;
            }
            if (each->first) {
                link = &each->next_busy;
                continue;
            }
            *link = each->next_busy;
            each->busy = 0;
            if (each->leaving) pool_give(&stream_pool, each);
        }
    } while (moved);
    if (any) pthread_cond_broadcast(&progress);
    return next;
}

static void queue(stream *on, work *piece) {
    piece->next = NULL;
    *(on->first ? &on->last->next : &on->first) = piece;
    on->last = piece;
    on->submitted++;
    if (!on->busy) {
        on->busy = 1;
        on->next_busy = busy;
        busy = on;
    }
}

static CUresult queue_wait(stream *waiting, stream *on, uint64_t after) {
    if (waiting == on || done(on, after)) return CUDA_SUCCESS;
    work *piece = calloc(1, sizeof *piece);
    if (!piece) return CUDA_ERROR_OUT_OF_MEMORY;
    piece->on = on;
    piece->after = after;
    queue(waiting, piece);
    return CUDA_SUCCESS;
}

/* The legacy stream waits for the context's blocking streams, and they for it. */
static CUresult queue_implicit(stream *on) {
    if (!on->blocking) return CUDA_SUCCESS;
    stream *other = &legacy[on->device];
    if (on != other) return queue_wait(on, other, other->submitted);
    for (other = busy; other; other = other->next_busy) {
        if (!other->blocking || other->device != on->device) continue;
        CUresult result = queue_wait(on, other, other->submitted);
        if (result) return result;
    }
    return CUDA_SUCCESS;
}

/* Waits for the end of all work up to a point; the mutex is held, and released meanwhile. */
static CUresult await(stream *on, uint64_t after) {
    int64_t limit = now() + SLICE;
    struct timespec until = {limit / 1000000000, limit % 1000000000};
    advance(now());
    while (!done(on, after))
        if (pthread_cond_timedwait(&progress, &mutex, &until) == ETIMEDOUT) break;
    return done(on, after) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static void *drive(void *unused) {
    (void)unused;
    arrive();
    lock();
    for (;;) {
        int64_t time = now(), next = advance(time);
        NONE_DYING(list);
        for (bag **link = &due, *each; (each = *link);) {
            if (each->due > time && !ending) {
                if (each->due < next) next = each->due;
                link = &each->next;
                continue;
            }
            *link = each->next;
            if (!each->next) due_last = link;
            holdings_drop(&each->held, &list);
            free(each);
        }
        if (list.first) {
            unlock();
            run_destructors(&list, 1);
            lock();
        } else if (ending && !busy && !due) {
            break;
        } else if (next == NEVER) {
            pthread_cond_wait(&wake, &mutex);
        } else {
            struct timespec until = {next / 1000000000, next % 1000000000};
            pthread_cond_timedwait(&wake, &mutex, &until);
        }
    }
    unlock();
    return NULL;
}

/* ---- executables ---- */

static uint32_t held_in(const graph *outer) {
    uint32_t count = outer->held.count;
    for (const graph *inner = outer->inner; inner; inner = inner->next) count += held_in(inner);
    return count;
}

static void collect(holdings *held, const graph *outer) {
    for (uint32_t i = 0; i < outer->held.count; i++)
        holdings_add(held, outer->held.items[i].object, outer->held.items[i].references);
    for (const graph *inner = outer->inner; inner; inner = inner->next) collect(held, inner);
}

/* References of its own to all that a template and its inner graphs hold now. */
static bag *bag_new(const graph *source) {
    bag *made = calloc(1, sizeof *made);
    if (!made || holdings_reserve(&made->held, held_in(source))) {
        free(made);
        return NULL;
    }
    collect(&made->held, source);
    made->pins = 1;
    made->device = source->device;
    return made;
}

CUresult sim_graph_instantiate(CUgraphExec *handle, CUgraph template) {
    VISIT();
    lock();
    graph *source = pool_find(&graph_pool, template);
    if (!source) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    CUresult forbidden = forbid(0);
    if (forbidden) return unlocked(forbidden);
    if (graph_captured(source)) return unlocked(CUDA_ERROR_INVALID_VALUE);
    bag *held = bag_new(source);
    exec *made = held ? pool_take(&exec_pool) : NULL;
    if (!made) {
        NONE_DYING(list); /* stays empty: the source holds them all */
        if (held) holdings_drop(&held->held, &list);
        free(held);
        return unlocked(CUDA_ERROR_OUT_OF_MEMORY);
    }
    made->device = source->device;
    made->held = held;
    made->nodes = graph_nodes(source);
    *handle = (CUgraphExec)made;
    return unlocked(CUDA_SUCCESS);
}

CUresult sim_exec_launch(CUgraphExec handle, CUstream on, int64_t nanoseconds, CUevent until) {
    VISIT();
    lock();
    exec *launched = pool_find(&exec_pool, handle);
    event *gate = until ? pool_find(&event_pool, until) : NULL;
    if (!launched || (until && !gate)) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    FIND_STREAM(queued, on);
    if (queued->capture)
        return unlocked(queued->capture->broken ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                                                : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED); /* measured */
    CUresult result = forbid_implicit(queued);
    if (!result) result = queue_implicit(queued);
    if (result) return unlocked(result);
    if (!queued->first && !gate && nanoseconds <= 0) { /* over at once: nothing that could be seen */
        queued->submitted++;
        queued->completed++;
        return unlocked(CUDA_SUCCESS);
    }
    work *piece = calloc(1, sizeof *piece);
    if (!piece) return unlocked(CUDA_ERROR_OUT_OF_MEMORY);
    piece->held = launched->held;
    piece->held->pins++;
    piece->nanoseconds = nanoseconds > 0 ? nanoseconds : 0;
    piece->gate = gate;
    piece->gate_generation = gate ? LOAD(gate->slot.generation) : 0;
    queue(queued, piece);
    advance(now());
    pthread_cond_signal(&wake);
    return unlocked(CUDA_SUCCESS);
}

CUresult sim_exec_update(CUgraphExec handle, CUgraph template) {
    VISIT();
    lock();
    exec *updated = pool_find(&exec_pool, handle);
    graph *source = pool_find(&graph_pool, template);
    if (!updated || !source) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    if (graph_captured(source)) return unlocked(CUDA_ERROR_INVALID_VALUE);
    if (graph_nodes(source) != updated->nodes) return unlocked(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
    bag *held = bag_new(source);
    if (!held) return unlocked(CUDA_ERROR_OUT_OF_MEMORY);
    unpin(updated->held, now() + LATE); /* launches in flight go on holding it */
    updated->held = held;
    return unlocked(CUDA_SUCCESS);
}

CUresult sim_exec_destroy(CUgraphExec handle) {
    VISIT();
    lock();
    exec *destroyed = pool_find(&exec_pool, handle);
    if (!destroyed) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    CUresult forbidden = forbid(0);
    if (forbidden) return unlocked(forbidden); /* it lives on, and whoever thinks it gone leaks it (measured) */
    unpin(destroyed->held, now() + LATE); /* measured: idle or not, the call returns first */
    pool_give(&exec_pool, destroyed);
    return unlocked(CUDA_SUCCESS);
}

CUresult sim_exec_owners(CUgraphExec handle, int64_t *owners) {
    lock();
    const exec *asked = pool_find(&exec_pool, handle);
    if (!asked) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    *owners = asked->held->held.count;
    return unlocked(CUDA_SUCCESS);
}

/* ---- streams ---- */

/* Without the mutex. acquire on each field: pairs with the releases in publish(), and keeps the second look at the
 * sequence behind them. A stream that changes meanwhile is asked again. */
static CUresult read_capture(stream *asked, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *captured) {
    uint32_t before, after;
    uint64_t found_id;
    graph *found_graph;
    int found;
    do {
        before = atomic_load_explicit(&asked->sequence, memory_order_acquire);
        found = atomic_load_explicit(&asked->status, memory_order_acquire);
        found_id = atomic_load_explicit(&asked->id, memory_order_acquire);
        found_graph = atomic_load_explicit(&asked->graph, memory_order_acquire);
        after = LOAD(asked->sequence);
    } while (UNLIKELY(before != after || before & 1));
    *status = found;
    if (id) *id = found_id;
    if (captured) *captured = (CUgraph)found_graph;
    return CUDA_SUCCESS;
}

static CUresult capture_info(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *captured,
                             const CUgraphNode **dependencies, size_t *count) {
    ENTER_HOT(cuStreamGetCaptureInfo);
    if (UNLIKELY(here.device < 0)) return CUDA_ERROR_INVALID_CONTEXT; /* measured */
    if (UNLIKELY(!status)) return CUDA_ERROR_INVALID_VALUE;
    if (dependencies) *dependencies = NULL;
    if (count) *count = 0;
    stream *asked = &legacy[here.device];
    if (handle) {
        size_t offset = (size_t)((uintptr_t)handle - (uintptr_t)streams);
        asked = (stream *)handle;
        if (UNLIKELY(offset >= sizeof streams || offset % sizeof(stream) || !lives(asked))) return CUDA_ERROR_INVALID_HANDLE;
    } else if (UNLIKELY(LOAD(capturing[here.device]))) { /* measured; and no capture is harmed */
        return LOAD(forked) ? CUDA_ERROR_NOT_INITIALIZED : CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    CUresult result = read_capture(asked, status, id, captured);
    /* measured: in a forked child only a stream that the parent was capturing answers */
    if (UNLIKELY(LOAD(forked)) && *status == CU_STREAM_CAPTURE_STATUS_NONE) return CUDA_ERROR_NOT_INITIALIZED;
    return result;
}

CUresult sim_stream_create(CUstream *handle, int blocking, int device) {
    VISIT();
    if (device < -1 || device >= DEVICES) return CUDA_ERROR_INVALID_VALUE;
    if (device < 0) device = here.device;
    if (device < 0) return CUDA_ERROR_INVALID_CONTEXT;
    lock();
    stream *made = pool_take(&stream_pool);
    if (!made) return unlocked(CUDA_ERROR_OUT_OF_MEMORY);
    made->device = device;
    made->blocking = blocking;
    made->leaving = 0;
    *handle = (CUstream)made;
    return unlocked(CUDA_SUCCESS);
}

CUresult sim_stream_destroy(CUstream handle) {
    VISIT();
    lock();
    FIND_STREAM(destroyed, handle);
    if (!handle) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    CUresult forbidden = forbid_on(destroyed);
    if (forbidden) return unlocked(forbidden);
    if (destroyed->first) destroyed->leaving = 1;
    else pool_give(&stream_pool, destroyed);
    return unlocked(CUDA_SUCCESS);
}

CUresult sim_stream_enter(CUstream handle, int device) {
    VISIT();
    if (handle && !lives((stream *)handle)) return CUDA_ERROR_INVALID_HANDLE;
    if (handle) device = ((stream *)handle)->device;
    if (device < 0 || device >= DEVICES) return CUDA_ERROR_INVALID_VALUE;
    if (deep.streams == DEPTH) return CUDA_ERROR_OUT_OF_MEMORY;
    deep.entered[deep.streams] = (signed char)device;
    deep.before[deep.streams++] = here.current[device];
    here.current[device] = handle;
    return CUDA_SUCCESS;
}

CUresult sim_stream_leave(void) {
    arrive();
    if (!deep.streams) return SIM_ERROR_ILLEGAL_STATE;
    deep.streams--;
    here.current[deep.entered[deep.streams]] = deep.before[deep.streams];
    return CUDA_SUCCESS;
}

/* A piece of work on a stream: a node where it captures, else nothing but what it may break. */
static CUresult begin_work(stream *on) {
    if (on->capture) {
        if (on->capture->broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        on->clock[on->lane]++;
        on->capture->graph->nodes++;
        return CUDA_SUCCESS;
    }
    return forbid_implicit(on);
}

CUresult sim_stream_kernel(CUstream handle) {
    VISIT();
    lock();
    FIND_STREAM(on, handle);
    return unlocked(begin_work(on));
}

CUresult sim_stream_query(CUstream handle) {
    VISIT();
    lock();
    FIND_STREAM(asked, handle);
    CUresult result = forbid_on(asked);
    if (!result) result = forbid_implicit(asked);
    if (!result) result = forbid(0);
    if (!result) result = queue_implicit(asked);
    if (result) return unlocked(result);
    advance(now());
    return unlocked(asked->first ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

CUresult sim_stream_synchronize(CUstream handle, int again) {
    VISIT();
    lock();
    FIND_STREAM(awaited, handle);
    CUresult result = again ? CUDA_SUCCESS : forbid_on(awaited);
    if (!result && !again) result = forbid_implicit(awaited);
    if (!result && !again) result = forbid(0);
    if (!result && !again) result = queue_implicit(awaited);
    if (result) return unlocked(result);
    return unlocked(await(awaited, awaited->submitted));
}

CUresult sim_capture_begin(CUstream handle, CUstreamCaptureMode mode, CUgraph into, uint64_t *id, CUgraph *captured) {
    VISIT();
    if ((unsigned)mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    lock();
    FIND_STREAM(origin, handle);
    if (!handle) return unlocked(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (origin->capture) return unlocked(SIM_ERROR_ILLEGAL_STATE);
    graph *target = into ? pool_find(&graph_pool, into) : NULL;
    if (into && !target) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    if (target && target->capture) return unlocked(CUDA_ERROR_INVALID_VALUE);
    capture *begun = calloc(1, sizeof *begun);
    if (begun && !target) target = graph_new(origin->device);
    if (!begun || !target) {
        free(begun);
        return unlocked(CUDA_ERROR_OUT_OF_MEMORY);
    }
    if (!target->capture_id) target->capture_id = ++capture_ids; /* measured: per graph, and never given out again */
    target->capture = begun;
    begun->serial = ++capture_serials;
    begun->thread = deep.serial;
    begun->graph = target;
    begun->origin = origin;
    begun->mode = mode;
    begun->next = captures;
    if (captures) captures->previous = begun;
    captures = begun;
    memset(origin->clock, 0, sizeof origin->clock);
    attach(begun, origin);
    *id = target->capture_id;
    *captured = (CUgraph)target;
    return unlocked(CUDA_SUCCESS);
}

static int joined(const capture *ended) {
    for (const stream *part = ended->streams; part; part = part->next_capture)
        if (ended->origin->clock[part->lane] < part->clock[part->lane]) return 0;
    return 1;
}

CUresult sim_capture_end(CUstream handle, CUgraph *made) {
    VISIT();
    NONE_DYING(list);
    *made = NULL;
    lock();
    FIND_STREAM(origin, handle);
    capture *ended = origin->capture;
    if (!ended) return unlocked(SIM_ERROR_ILLEGAL_STATE);
    if (ended->origin != origin) return unlocked(SIM_ERROR_CAPTURE_UNMATCHED);
    if (ended->mode != CU_STREAM_CAPTURE_MODE_RELAXED && ended->thread != deep.serial)
        return unlocked(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    CUresult result = CUDA_SUCCESS;
    if (ended->broken) result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    else if (!joined(ended)) result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    graph *captured = ended->graph;
    dissolve(ended);
    if (result) graph_free(captured, &list); /* measured: the program's own graph too */
    else *made = (CUgraph)captured;
    return unlocked_after(result, &list);
}

CUresult sim_capture_invalidate(CUstream handle) {
    VISIT();
    lock();
    FIND_STREAM(part, handle);
    if (!part->capture) return unlocked(SIM_ERROR_ILLEGAL_STATE);
    invalidate(part->capture);
    return unlocked(CUDA_SUCCESS);
}

static capture *find_capture(uint64_t serial) {
    capture *open = captures;
    while (open && open->serial != serial) open = open->next;
    return open;
}

/* What comes later on a stream waits for captured work, which `clock` stands for: the stream joins that capture. */
static CUresult wait_captured(stream *waiting, capture *source, const uint32_t *clock) {
    if (source->broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (waiting == &legacy[waiting->device]) {
        invalidate(source);
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    if (waiting->capture && waiting->capture != source) {
        invalidate(waiting->capture);
        invalidate(source);
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    if (!waiting->capture) {
        if (source->width == LANES) return CUDA_ERROR_OUT_OF_MEMORY;
        memcpy(waiting->clock, clock, sizeof waiting->clock);
        attach(source, waiting);
        return CUDA_SUCCESS;
    }
    for (int lane = 0; lane < LANES; lane++)
        if (waiting->clock[lane] < clock[lane]) waiting->clock[lane] = clock[lane];
    return CUDA_SUCCESS;
}

/* The same for work that is not captured: of no use to a stream that captures. */
static CUresult wait_plain(stream *waiting, stream *on, uint64_t after) {
    CUresult result = CUDA_SUCCESS;
    if (!waiting->capture) {
        result = forbid_implicit(waiting);
        return result ? result : queue_wait(waiting, on, after);
    }
    if (waiting->capture->broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    invalidate(waiting->capture);
    return SIM_ERROR_CAPTURE_ISOLATION;
}

CUresult sim_stream_wait_stream(CUstream handle, CUstream other) {
    VISIT();
    lock();
    FIND_STREAM(waiting, handle);
    FIND_STREAM(source, other);
    if (waiting == source) return unlocked(CUDA_SUCCESS);
    if (source->capture) return unlocked(wait_captured(waiting, source->capture, source->clock));
    CUresult result = forbid_implicit(source);
    if (!result) result = queue_implicit(source);
    if (!result) result = wait_plain(waiting, source, source->submitted);
    return unlocked(result);
}

CUresult sim_stream_wait_event(CUstream handle, CUevent recorded) {
    VISIT();
    lock();
    FIND_STREAM(waiting, handle);
    event *source = pool_find(&event_pool, recorded);
    if (!source) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    if (source->capture) {
        capture *open = find_capture(source->capture);
        return unlocked(open ? wait_captured(waiting, open, source->clock) : CUDA_ERROR_CAPTURED_EVENT);
    }
    return unlocked(source->on ? wait_plain(waiting, source->on, source->after) : CUDA_SUCCESS);
}

/* ---- events ---- */

static CUresult event_create(CUevent *handle, unsigned int flags) {
    ENTER(cuEventCreate);
    (void)flags;
    if (here.device < 0) return CUDA_ERROR_INVALID_CONTEXT;
    lock();
    event *made = LOAD(opened) ? pool_take(&event_pool) : NULL;
    if (!made) return unlocked(CUDA_ERROR_OUT_OF_MEMORY);
    made->device = here.device;
    made->on = NULL;
    made->after = made->capture = 0;
    STORE(made->set, 0);
    *handle = (CUevent)made;
    return unlocked(CUDA_SUCCESS);
}

static CUresult event_destroy(CUevent handle) {
    ENTER(cuEventDestroy);
    lock();
    event *destroyed = pool_find(&event_pool, handle);
    if (!destroyed) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    pool_give(&event_pool, destroyed);
    advance(now()); /* a launch that waited for this gate waits no longer */
    pthread_cond_signal(&wake);
    return unlocked(CUDA_SUCCESS);
}

static CUresult event_record(CUevent handle, CUstream stream_handle) {
    ENTER(cuEventRecord);
    lock();
    event *recorded = pool_find(&event_pool, handle);
    if (!recorded) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    FIND_STREAM(on, stream_handle);
    if (on->device != recorded->device) return unlocked(CUDA_ERROR_INVALID_HANDLE); /* measured */
    if (on->capture) {
        if (on->capture->broken) return unlocked(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        recorded->capture = on->capture->serial;
        memcpy(recorded->clock, on->clock, sizeof recorded->clock);
        return unlocked(CUDA_SUCCESS); /* measured: the harm comes with the query */
    }
    CUresult result = forbid_implicit(on);
    if (!result) result = queue_implicit(on);
    if (result) return unlocked(result);
    recorded->capture = 0;
    recorded->on = on;
    recorded->after = on->submitted;
    return unlocked(CUDA_SUCCESS);
}

/* A captured event has no state to ask for; to ask breaks the capture, in every mode (measured). */
static CUresult forbid_event(const event *asked) {
    if (!asked->capture) return forbid(0);
    capture *open = find_capture(asked->capture);
    if (open) invalidate(open);
    return CUDA_ERROR_CAPTURED_EVENT;
}

static CUresult event_query(CUevent handle) {
    ENTER(cuEventQuery);
    lock();
    event *asked = pool_find(&event_pool, handle);
    if (!asked) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    CUresult result = forbid_event(asked);
    if (result) return unlocked(result);
    if (busy) advance(now());
    return unlocked(!asked->on || done(asked->on, asked->after) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

CUresult sim_event_synchronize(CUevent handle, int again) {
    VISIT();
    lock();
    event *awaited = pool_find(&event_pool, handle);
    if (!awaited) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    CUresult result = again ? CUDA_SUCCESS : forbid_event(awaited);
    if (!result && awaited->on) result = await(awaited->on, awaited->after);
    return unlocked(result);
}

CUresult sim_event_set(CUevent handle) {
    VISIT();
    lock();
    event *gate = pool_find(&event_pool, handle);
    if (!gate) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    STORE(gate->set, 1);
    advance(now());
    pthread_cond_signal(&wake);
    return unlocked(CUDA_SUCCESS);
}

/* ---- bare calls ---- */

static CUresult context_synchronize(int again) {
    CUresult result = again ? CUDA_SUCCESS : forbid(1);
    if (!result) advance(now());
    for (stream *each = busy; each && !result; each = each->next_busy)
        if (each->device == here.device) return await(each, each->submitted) ? CUDA_ERROR_NOT_READY : context_synchronize(1);
    return result;
}

static CUresult call_event_create(void) {
    CUevent made;
    CUresult result = event_create(&made, 0);
    if (result) return result;
    lock();
    pool_give(&event_pool, made);
    return unlocked(result);
}

static CUresult call_object_create(void) {
    CUuserObject made;
    CUresult result = object_create(&made, NULL, sim_destructor, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
    if (result) return result;
    lock();
    pool_give(&object_pool, made);
    return unlocked(result);
}

CUresult sim_call(const char *name, CUstream handle, int again) {
#define IS(known) !strcmp(name, known)
    int device;
    if (IS("cuCtxGetDevice")) return get_device(&device);
    VISIT();
    if (IS("cuEventCreate")) return call_event_create();
    if (IS("cuUserObjectCreate")) return call_object_create();
    if (IS("cuGraphCreate")) return CUDA_SUCCESS;
    if (IS("cuStreamQuery")) return sim_stream_query(handle);
    if (IS("cuStreamSynchronize")) return sim_stream_synchronize(handle, again);
    if (IS("cuStreamCreate")) return here.device < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
    lock();
    if (IS("cuMemAlloc") || IS("cuMemFree") || IS("cuCtxSynchronize") || IS("cuCtxRecordEvent")) {
        if (here.device < 0) return unlocked(CUDA_ERROR_INVALID_CONTEXT);
        if (IS("cuCtxSynchronize")) return unlocked(context_synchronize(again));
        return unlocked(forbid(IS("cuCtxRecordEvent")));
    }
    FIND_STREAM(called, handle);
    if (IS("cuLaunchHostFunc")) return unlocked(begin_work(called));
    if (IS("cuStreamGetId") || IS("cuStreamGetFlags") || IS("cuStreamGetDevice")) return unlocked(forbid_on(called));
    if (IS("cuStreamGetCtx") || IS("cuStreamGetPriority")) return unlocked(CUDA_SUCCESS);
    return unlocked(-1);
#undef IS
}

/* ---- the rest of the table ---- */

const char *sim_error_name(CUresult code) {
    static const struct {
        CUresult code;
        const char *name;
    } names[] = {
#define X(name, value) {value, #name},
        DRIVER_CONSTANTS(X)
#undef X
        {SIM_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE"},
        {SIM_ERROR_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"},
        {SIM_ERROR_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (names[i].code == code && !strncmp(names[i].name, "CUDA_", 5)) return names[i].name;
    return NULL;
}

static CUresult error_name(CUresult code, const char **name) {
    ENTER(cuGetErrorName);
    *name = sim_error_name(code);
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult driver_version(int *version) {
    ENTER(cuDriverGetVersion);
    *version = 13000;
    return CUDA_SUCCESS;
}

const driver_table *sim_table(void) {
    static const driver_table table = {
        .cuStreamGetCaptureInfo = capture_info,
        .cuUserObjectCreate = object_create,
        .cuUserObjectRelease = object_release,
        .cuGraphRetainUserObject = graph_retain,
        .cuGraphReleaseUserObject = graph_release,
        .cuThreadExchangeStreamCaptureMode = exchange_mode,
        .cuCtxGetDevice = get_device,
        .cuCtxGetCurrent = get_current,
        .cuCtxPushCurrent = push_current,
        .cuCtxPopCurrent = pop_current,
        .cuEventCreate = event_create,
        .cuEventDestroy = event_destroy,
        .cuEventRecord = event_record,
        .cuEventQuery = event_query,
        .cuDriverGetVersion = driver_version,
        .cuGetErrorName = error_name,
        .current_stream = current_stream,
    };
    return &table;
}

/* ---- switches and gauges ---- */

int sim_symbol(const char *name) {
    for (int symbol = 0; symbol < SYMBOLS; symbol++)
        if (!strcmp(name, symbol_names[symbol])) return symbol;
    return -1;
}

const char *sim_symbol_name(int symbol) { return symbol >= 0 && symbol < SYMBOLS ? symbol_names[symbol] : NULL; }

int sim_fail(int symbol, uint64_t nth, CUresult code) {
    lock();
    int full = fault_count == FAULTS;
    if (!full) faults[fault_count++] = (fault){symbol, code, nth};
    refresh_token();
    unlock();
    return full ? -1 : 0;
}

uint64_t sim_calls(int symbol) { return LOAD(calls[symbol]); }

int64_t sim_records(int64_t first, int64_t count, sim_record *copies) {
    lock();
    int64_t all = record_count;
    for (int64_t i = first; i < all && i - first < count; i++) copies[i - first] = records[i];
    unlock();
    return all;
}

uint32_t sim_generation(const void *handle) { return LOAD(((const slot *)handle)->generation); }

int sim_lives(const void *handle, uint32_t generation) { return handle && sim_generation(handle) == generation; }

/* ---- life ---- */

/* Drops what a stream has queued, as if it had been done. */
static void abandon(stream *left) {
    for (work *next, *piece = left->first; piece; piece = next) {
        next = piece->next;
        if (piece->held) unpin(piece->held, now());
        free(piece);
    }
    left->first = NULL;
    left->completed = left->submitted;
}

/* Whatever holds objects in the name of a device (-1: of any) forgets them, so that their destructors never run. */
static void forget(int device) {
    for (bag *each = due; each; each = each->next)
        if (device < 0 || each->device == device) holdings_forget(&each->held);
    for (stream *each = busy; each; each = each->next_busy)
        for (work *piece = each->first; piece; piece = piece->next)
            if (piece->held && (device < 0 || piece->held->device == device)) holdings_forget(&piece->held->held);
    for EACH (exec, each, exec_pool)
        if (lives(each) && (device < 0 || each->device == device)) {
            holdings_forget(&each->held->held);
            unpin(each->held, now());
            pool_give(&exec_pool, each);
        }
    for EACH (graph, each, graph_pool)
        if (lives(each) && (device < 0 || each->device == device)) {
            holdings_forget(&each->held);
            pool_give(&graph_pool, each);
        }
}

/* The captures, streams and events of a device (-1: of any) are no more. */
static void disband(int device) {
    for (capture *next, *open = captures; open; open = next) {
        int hit = device < 0 || open->graph->device == device;
        for (stream *part = open->streams; part; part = part->next_capture) hit |= part->device == device;
        next = open->next;
        if (hit) dissolve(open);
    }
    for (stream **link = &busy, *each; (each = *link);) {
        if (device >= 0 && each->device != device) {
            link = &each->next_busy;
            continue;
        }
        abandon(each);
        *link = each->next_busy;
        each->busy = 0;
    }
    for EACH (stream, each, stream_pool)
        if (lives(each) && (device < 0 || each->device == device)) pool_give(&stream_pool, each);
    for EACH (event, each, event_pool)
        if (lives(each) && (device < 0 || each->device == device)) pool_give(&event_pool, each);
    pthread_cond_broadcast(&progress);
    pthread_cond_signal(&wake);
}

CUresult sim_reset_context(void) {
    VISIT();
    if (here.device < 0) return CUDA_ERROR_INVALID_CONTEXT;
    lock();
    int device = here.device;
    disband(device);
    forget(device);
    return unlocked(CUDA_SUCCESS);
}

static void make_conditions(void) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&wake, &monotonic);
    pthread_cond_init(&progress, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

/* In the child the driver's thread is gone, and with it whoever waited. What the parent made can be looked at, no more. */
static void after_fork(void) {
    make_conditions();
    running = 0;
    STORE(forked, LOAD(opened));
    refresh_token();
    unlock();
}

static void prepare_process(void) {
    make_conditions();
    pthread_atfork(lock, unlock, after_fork); /* locked, so that the child inherits a whole state */
}

int sim_open(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, prepare_process);
    lock();
    if (LOAD(opened)) return unlock(), -1;
    sigset_t all, before; /* the program's signals are its own threads' */
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    STORE(epoch, LOAD(epoch) + 1);
    ending = 0;
    running = !pthread_create(&thread, NULL, drive, NULL); /* it starts at the mutex */
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    for (int symbol = 0; symbol < SYMBOLS; symbol++) STORE(calls[symbol], 0);
    for (int device = 0; device < DEVICES; device++) legacy[device].device = device, legacy[device].blocking = 1;
    fault_count = 0;
    STORE(forked, 0);
    STORE(opened, running);
    refresh_token();
    unlock();
    return running ? 0 : -2;
}

void sim_finish(void) {
    NONE_DYING(list);
    arrive();
    lock();
    fault_count = 0;
    refresh_token();
    if (!LOAD(opened) || !running) { /* not open, or not in this process */
        unlock();
        return;
    }
    ending = 1;
    running = 0;
    while (captures) dissolve(captures);
    for EACH (graph, each, graph_pool)
        if (lives(each) && !each->parent) graph_free(each, &list);
    for EACH (exec, each, exec_pool)
        if (lives(each)) {
            unpin(each->held, now());
            pool_give(&exec_pool, each);
        }
    advance(now());
    pthread_cond_signal(&wake);
    unlock();
    run_destructors(&list, 0);
    pthread_join(thread, NULL);
}

static void pool_clear(pool *cleared) {
    for (uint32_t i = 0; i < cleared->used; i++) {
        void *each = cleared->base + (size_t)i * cleared->size;
        if (lives(each)) pool_give(cleared, each);
    }
    cleared->used = cleared->freed = 0;
}

void sim_close(void) {
    lock();
    STORE(opened, 0);
    STORE(forked, 0);
    refresh_token();
    disband(-1);
    forget(-1);
    for (bag *next; due; due = next) {
        next = due->next;
        free(due);
    }
    due_last = &due;
    pool_clear(&stream_pool);
    pool_clear(&event_pool);
    pool_clear(&object_pool);
    pool_clear(&graph_pool);
    pool_clear(&exec_pool);
    free(records);
    records = NULL;
    record_count = record_capacity = 0;
    unlock();
}
