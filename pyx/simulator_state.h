/* What the rooms of the simulated driver share: its structs, its state, the way into every call, and what each room
 * does for the others. simulator_core.c has the thread, the table and the life of it all; simulator_graphs.c objects,
 * graphs and executables; simulator_nodes.c what is in graphs; simulator_streams.c captures, queues, streams and events. All
 * of the state that is not atomic is the mutex's, and a function that does not take the mutex wants it held.
 */
#ifndef ARENA_SIMULATOR_STATE_H
#define ARENA_SIMULATOR_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "simulator.h"

#define DEVICES 2
#define LANES 64     /* streams that can take part in one capture */
#define DEPTH 32     /* contexts, or streams, that a thread can have pushed */
#define LATE 500000  /* ns from the end of an idle executable to its destructors; measured: up to 1 ms */
#define NEVER INT64_MAX

#define UNLIKELY(x) __builtin_expect(!!(x), 0)
#define LOAD(x) atomic_load_explicit(&(x), memory_order_relaxed)
#define STORE(x, value) atomic_store_explicit(&(x), (value), memory_order_relaxed)

/* The compiler takes an extern variable for someone else's, and goes the long way to it, unless told so: -fvisibility
 * speaks of definitions only. */
#pragma GCC visibility push(hidden)

/* ---- structs ---- */

/* Every handle points to one. generation is odd while the slot lives, and grows at birth and death: handle and
 * generation together are never reused. Slots are never freed, so a stale handle can be looked at. */
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
    uint64_t nodes;          /* of its own: the list */
    struct node *first_node; /* in order of adding */
    struct node *last_node;  /* NULL: none */
    uint64_t capture_id;     /* of every capture into it; 0: none so far */
    struct capture *capture; /* open on it, or NULL */
    struct graph *parent;    /* NULL: a template of the program's */
    struct graph *inner;     /* the first of the inner graphs, in order */
    struct graph *next;      /* the next inner graph of the same parent */
} graph;

/* What an executable held at one time. pins == executables that hold it (0 or 1) + launches made with it and
 * unfinished. At pins == 0 it is on the due list, for the driver's thread. */
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

/* submitted - completed == pieces in the queue, and both only grow, for the life of the process: work of a former
 * stream of this slot counts as completed. Capturing (capture != NULL) <=> status != NONE. status, id and graph change
 * together, under an odd `sequence`. Aligned so that the hot path can check a handle with a mask. */
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

/* Objects whose destructors are to run, in this order, once the mutex is free. */
typedef struct dying {
    object *first;
    object **last; /* &first, or &dying of the last object */
} dying;

#define NONE_DYING(list) dying list = {NULL, &list.first}

/* ---- state ---- */

enum symbol {
#define X(name, abi_name, version, parameters) S_##name,
    DRIVER_SYMBOLS(X)
#undef X
    S_current_device,
    S_current_stream,
#define X(name, abi_name, version, parameters) S_##name,
    NODE_SYMBOLS(X)
    NODE_SYMBOLS_OPTIONAL(X)
#undef X
    SYMBOLS,
};

extern pthread_mutex_t mutex;
extern pthread_cond_t wake;     /* the driver's thread has something to do, or to wait for */
extern pthread_cond_t progress; /* work was completed */
extern int ending;              /* launches end at once: gates count as open, seconds as over */

extern _Atomic uint64_t epoch; /* counts sim_open() */
extern _Atomic int opened;     /* between sim_open() and sim_close() */
extern _Atomic int forked;     /* in a child of the process that opened it */
extern _Atomic uint64_t token; /* the epoch, while every call may take its short way; else no thread's token */
extern _Atomic uint64_t calls[SYMBOLS];

extern stream streams[1 << 12];
extern pool stream_pool;
extern pool event_pool;
extern pool object_pool;
extern pool graph_pool;
extern pool exec_pool;

extern stream legacy[DEVICES];         /* the NULL stream of each context: not slots, since NULL is no address */
extern _Atomic int capturing[DEVICES]; /* streams in an active capture */
extern stream *busy;                   /* streams with work, in no order */
extern capture *captures;              /* open */
extern bag *due;                       /* to be dropped by the driver's thread, in order of arrival */
extern bag **due_last;                 /* &due, or &next of the last bag */

/* What the hot path needs of a thread. token == the epoch <=> the thread has met this simulator, has a context, and is
 * not inside a destructor. Small, since it takes static TLS of the process. */
extern __thread struct here {
    uint64_t token;         /* 0: take the long way */
    int device;             /* of the current context; -1: none */
    int mode;               /* cuThreadExchangeStreamCaptureMode */
    void *current[DEVICES]; /* the stream entered last, per device */
} here __attribute__((tls_model("initial-exec")));

/* The rest: off the hot path. */
extern __thread struct deep {
    uint64_t epoch;                 /* of which the rest, and `here`, are true */
    uint64_t serial;                /* the thread's: never reused, as thread ids are */
    int destructors;                /* that this thread is inside of */
    int contexts;                   /* pushed, the first one included */
    int streams;                    /* entered */
    signed char context[DEPTH];     /* device, or -1 */
    signed char entered[DEPTH];     /* device */
    void *before[DEPTH];            /* current stream of that device before */
} deep;

/* ---- slots ---- */

/* The last slot freed is the next one given out: handles are recycled at once (measured), and stale ones get caught. */
static inline void *pool_take(pool *pool) {
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

static inline void pool_give(pool *pool, void *given) {
    slot *freed = given;
    STORE(freed->generation, LOAD(freed->generation) + 1);
    freed->next = pool->freed;
    pool->freed = (uint32_t)(((char *)given - pool->base) / pool->size) + 1;
}

static inline int lives(const void *given) { return LOAD(((const slot *)given)->generation) & 1; }

/* The living slot that a handle from outside points to, or NULL. */
static inline void *pool_find(const pool *pool, const void *handle) {
    size_t offset = (size_t)((uintptr_t)handle - (uintptr_t)pool->base);
    if (offset >= (size_t)pool->used * pool->size || offset % pool->size || !lives(handle)) return NULL;
    return (void *)handle;
}

/* For `type *x` over every slot given out since sim_open(); look whether it lives. */
#define EACH(type, x, pool) (type *x = (type *)(pool).base; x < (type *)(pool).base + (pool).used; x++)

/* ---- the way in, and out ---- */

void arrive(void);                            /* makes `here` and `deep` those of this simulator */
CUresult get_device(CUdevice *device);        /* cuCtxGetDevice */
void settle(void);                            /* makes `here` say what `deep` says */
int intercept(int symbol, CUresult *result);  /* see ENTER */
void run_destructors(const dying *list, int on_driver);

static inline int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static inline void lock(void) { pthread_mutex_lock(&mutex); }
static inline void unlock(void) { pthread_mutex_unlock(&mutex); }

static inline CUresult unlocked(CUresult result) {
    unlock();
    return result;
}

static inline CUresult unlocked_after(CUresult result, const dying *list) {
    unlock();
    run_destructors(list, 0);
    return result;
}

static inline int special(void) { return UNLIKELY(here.token != LOAD(token)); }

/* Opens every function of the table. The hot ones count with a load and a store: no locked instruction, and a count
 * that may fall behind where threads race. */
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

/* Opens every function beyond the table; the second form those that a forked child may call too. */
#define VISIT() \
    do { \
        VISIT_EVEN_FORKED(); \
        if (LOAD(forked)) return CUDA_ERROR_NOT_INITIALIZED; \
    } while (0)
#define VISIT_EVEN_FORKED() \
    do { \
        arrive(); \
        if (!LOAD(opened)) return CUDA_ERROR_DEINITIALIZED; \
    } while (0)

/* ---- simulator_graphs.c, for the others ---- */

void holdings_drop(holdings *held, dying *list);
void objects_abandon(dying *list);
void holdings_forget(holdings *held); /* of a context that was reset */
graph *graph_new(int device);         /* NULL: none to be had */
void graph_free(graph *freed, dying *list);

CUresult object_create(CUuserObject *, void *, CUhostFn, unsigned int, unsigned int);
CUresult object_release(CUuserObject, unsigned int);
CUresult graph_retain(CUgraph, CUuserObject, unsigned int, unsigned int);
CUresult graph_release(CUgraph, CUuserObject, unsigned int);

/* ---- simulator_nodes.c, for the others ---- */

int node_add(graph *to, const sim_node *what);
int node_add_inner(graph *to, int type, uint32_t inner);
int nodes_copy(graph *to, const graph *from);
void nodes_free(graph *of);
void memory_forget(void);

/* ---- simulator_streams.c, for the others ---- */

void dissolve(capture *over);
CUresult forbid(void);
CUresult forbid_on(const stream *called);
CUresult forbid_implicit(const stream *called);
CUresult find_stream(CUstream handle, stream **found);
void unpin(bag *pinned, int64_t when);
int64_t advance(int64_t time); /* returns when to call again */
void queue(stream *on, work *piece);
CUresult queue_implicit(stream *on);

CUresult capture_info(CUstream, CUstreamCaptureStatus *, cuuint64_t *, CUgraph *, const CUgraphNode **, size_t *);
CUresult event_create(CUevent *, unsigned int);
CUresult event_destroy(CUevent);
CUresult event_record(CUevent, CUstream);
CUresult event_query(CUevent);

/* For `stream *x = the stream of a handle`, with the mutex held; leaves the function if there is none. */
#define FIND_STREAM(x, handle) \
    stream *x = NULL; \
    do { \
        CUresult found_ = find_stream(handle, &x); \
        if (found_) return unlocked(found_); \
    } while (0)

#pragma GCC visibility pop
#endif
