/* The simulated CUDA driver: its state, its thread, which ends launches and runs late destructors, its table, its life.
 * Any thread may call. The calls on the hot path (capture query, current device, current stream) take no lock; all
 * others take the one mutex, and none holds it while a destructor runs. Nothing here knows Python. Where a comment
 * says "measured", the fact is the real driver's; the tests hold both drivers to it.
 */
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "simulator_state.h"

#define FAULTS 32         /* calls of sim_fail() that wait for their turn */
#define RECORDS (1 << 20) /* destructors noted; later ones run unnoted */

/* ---- state ---- */

#define POOL(slots) {(char *)(slots), sizeof (slots)[0], sizeof (slots) / sizeof (slots)[0], 0, 0}
static event events[1 << 16];
static object objects[1 << 20];
static graph graphs[1 << 18];
static exec execs[1 << 18];
stream streams[1 << 12];
pool stream_pool = POOL(streams);
pool event_pool = POOL(events);
pool object_pool = POOL(objects);
pool graph_pool = POOL(graphs);
pool exec_pool = POOL(execs);

stream legacy[DEVICES];
_Atomic int capturing[DEVICES];
stream *busy;
capture *captures;
bag *due;
bag **due_last = &due;

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t wake;
pthread_cond_t progress;
int ending;

_Atomic uint64_t epoch;
_Atomic int opened;
_Atomic int forked;
_Atomic uint64_t token = UINT64_MAX;
_Atomic uint64_t calls[SYMBOLS];

__thread struct here here __attribute__((tls_model("initial-exec")));
__thread struct deep deep;

static pthread_t driver;
static int running; /* the driver's thread is there to be joined */

static struct context {
    int device;
} contexts[DEVICES] = {{0}, {1}};

static const char *const symbol_names[SYMBOLS] = {
#define X(name, abi_name, version, parameters) #name,
    DRIVER_SYMBOLS(X)
#undef X
    "current_device",
    "current_stream",
#define X(name, abi_name, version, parameters) #name,
    NODE_SYMBOLS(X)
    NODE_SYMBOLS_OPTIONAL(X)
#undef X
};

/* A fault that waits for its turn: the `left`th call from now of `symbol` returns `code`. */
typedef struct fault {
    int symbol;
    CUresult code;
    uint64_t left; /* > 0 */
} fault;

static fault faults[FAULTS];
static int fault_count;

static sim_record *records;
static int64_t record_count;
static int64_t record_capacity;

/* ---- the calling thread ---- */

void settle(void) {
    here.device = deep.contexts ? deep.context[deep.contexts - 1] : -1;
    here.token = here.device >= 0 && !deep.destructors ? deep.epoch : 0;
}

/* A thread meets each simulator as new: what it pushed and entered in the last one is forgotten. */
void arrive(void) {
    uint64_t current = LOAD(epoch);
    if (deep.epoch == current) return;
    deep.epoch = current;
    static _Atomic uint64_t thread_serials;
    if (!deep.serial) deep.serial = atomic_fetch_add_explicit(&thread_serials, 1, memory_order_relaxed) + 1;
    deep.destructors = deep.streams = 0;
    deep.contexts = 1;
    deep.context[0] = 0;
    here.mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    for (int device = 0; device < DEVICES; device++) here.current[device] = NULL;
    settle();
}

static void refresh_token(void) {
    STORE(token, LOAD(opened) && !LOAD(forked) && !fault_count ? LOAD(epoch) : UINT64_MAX);
}

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
int intercept(int symbol, CUresult *result) {
    arrive();
    if (!LOAD(opened)) return *result = CUDA_ERROR_DEINITIALIZED, 1;
    if (deep.destructors && symbol != S_current_device && symbol != S_current_stream) return *result = CUDA_ERROR_NOT_PERMITTED, 1; /* measured */
    lock();
    int failed = take_fault(symbol, result);
    unlock();
    if (failed) return 1;
    if (!LOAD(forked)) return 0;
    switch (symbol) { /* measured: what needs a current context is refused, the rest works on what it finds */
    case S_cuCtxGetDevice:
    case S_cuCtxGetCurrent:
    case S_cuCtxPushCurrent:
    case S_cuCtxPopCurrent:
    case S_cuEventCreate:
        return *result = CUDA_ERROR_NOT_INITIALIZED, 1;
    default:
        return 0;
    }
}

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

CUresult get_device(CUdevice *device) {
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

/* The last two are not the driver's but torch's: they answer without a context too. */
static int32_t current_device(int32_t *current) {
    ENTER_HOT(current_device);
    *current = UNLIKELY(here.device < 0) ? 0 : here.device;
    return CUDA_SUCCESS;
}

static int32_t current_stream(int32_t device, void **current) {
    ENTER_HOT(current_stream);
    if (UNLIKELY((uint32_t)device >= DEVICES)) return CUDA_ERROR_INVALID_VALUE;
    *current = here.current[device];
    return CUDA_SUCCESS;
}

/* ---- destructors ---- */

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
void run_destructors(const dying *list, int on_driver) {
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

/* ---- the table ---- */

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
        .current_device = current_device,
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

/* In the child the driver's thread is gone, and whoever waited. What the parent made can be looked at, and no more. */
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
    running = !pthread_create(&driver, NULL, drive, NULL); /* it starts at the mutex */
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
    pthread_join(driver, NULL);
    list = (dying){NULL, &list.first};
    lock();
    objects_abandon(&list);
    unlock();
    run_destructors(&list, 0);
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
    for EACH (graph, each, graph_pool) nodes_free(each); /* of a context that was reset, too */
    memory_forget();
    pool_clear(&graph_pool);
    pool_clear(&exec_pool);
    free(records);
    records = NULL;
    record_count = record_capacity = 0;
    unlock();
}
