/* Streams: their captures, their queues of launches, the events that stand for either, and the calls that break a
 * capture. Any thread may call what is in the table or in simulator.h; what else is shared wants the mutex held.
 */
#include <errno.h>

#include "simulator_state.h"

#define GONE (-1)      /* status of a stream that was destroyed with work queued */
#define SLICE 50000000 /* ns that a synchronize waits before it lets its caller look around */

static uint64_t capture_ids;     /* given out so far in this process */
static uint64_t capture_serials; /* likewise */

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

static void count_capturing(const stream *part, int change) {
    if (part->blocking) STORE(capturing[part->device], LOAD(capturing[part->device]) + change);
}

static void attach(capture *joined, stream *joining) {
    joining->capture = joined;
    joining->next_capture = joined->streams;
    joined->streams = joining;
    joining->lane = joined->width++;
    joining->clock[joining->lane] = 0; /* measured: a fork without work of its own need not be joined */
    count_capturing(joining, 1);
    publish(joining, CU_STREAM_CAPTURE_STATUS_ACTIVE, joined->graph->capture_id, joined->graph);
}

static void invalidate(capture *broken) {
    if (broken->broken) return;
    broken->broken = 1;
    for (stream *part = broken->streams; part; part = part->next_capture) {
        count_capturing(part, -1);
        publish(part, CU_STREAM_CAPTURE_STATUS_INVALIDATED, 0, NULL); /* measured */
    }
}

/* Takes an open capture off its streams and its graph, and frees it. */
void dissolve(capture *over) {
    for (stream *next, *part = over->streams; part; part = next) {
        next = part->next_capture;
        if (!over->broken) count_capturing(part, -1);
        part->capture = NULL;
        publish(part, CU_STREAM_CAPTURE_STATUS_NONE, 0, NULL);
    }
    over->graph->capture = NULL;
    if (over->next) over->next->previous = over->previous;
    *(over->previous ? &over->previous->next : &captures) = over->next;
    free(over);
}

/* An unsafe call by this thread. Its mode says whose captures it breaks: in global mode everybody's global ones, and
 * unless it is relaxed the thread's own that are not relaxed (measured). */
CUresult forbid(void) {
    CUresult result = CUDA_SUCCESS;
    if (here.mode == CU_STREAM_CAPTURE_MODE_RELAXED) return result;
    for (capture *open = captures; open; open = open->next) {
        int mine = open->thread == deep.serial && open->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
        int global = open->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && here.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (open->broken || !(mine || global)) continue;
        invalidate(open);
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return result;
}

/* A call on the whole current context: breaks every capture there, in whatever mode both are (measured). */
static CUresult forbid_context(void) {
    CUresult result = CUDA_SUCCESS;
    for (capture *open = captures; open; open = open->next) {
        if (open->broken || open->graph->device != here.device) continue;
        invalidate(open);
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return result;
}

/* A call on the legacy stream would wait for the device's blocking streams, which a capture cannot: breaks it. */
CUresult forbid_implicit(const stream *called) {
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
CUresult forbid_on(const stream *called) {
    if (!called->capture) return CUDA_SUCCESS;
    if (called->capture->broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    invalidate(called->capture);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult find_stream(CUstream handle, stream **found) {
    if (handle) {
        *found = pool_find(&stream_pool, handle);
        return *found && !(*found)->leaving ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    }
    if (here.device < 0) return CUDA_ERROR_INVALID_CONTEXT;
    *found = &legacy[here.device];
    return CUDA_SUCCESS;
}


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

void unpin(bag *pinned, int64_t when) {
    if (!--pinned->pins) put_due(pinned, when);
}

static int work_done(work *piece, int64_t time, int64_t *next) {
    if (!piece->held) return done(piece->on, piece->after);
    if (!piece->end) piece->end = time + piece->nanoseconds;
    if (ending) return 1;
    event *gate = piece->gate;
    if (gate && LOAD(gate->slot.generation) == piece->gate_generation && !LOAD(gate->set)) return 0;
    if (time >= piece->end) return 1;
    if (piece->end < *next) *next = piece->end;
    return 0;
}

/* Ends what is over and begins what is next, on all streams. Returns when to look again. */
int64_t advance(int64_t time) {
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

void queue(stream *on, work *piece) {
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
CUresult queue_implicit(stream *on) {
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
    if (UNLIKELY(found == GONE)) return CUDA_ERROR_INVALID_HANDLE;
    *status = found;
    if (!found) return CUDA_SUCCESS; /* measured: the other outputs stay what they were */
    if (id) *id = found_id;
    if (captured) *captured = (CUgraph)found_graph;
    return CUDA_SUCCESS;
}

CUresult capture_info(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *captured,
                             const CUgraphNode **dependencies, size_t *count) {
    ENTER_HOT(cuStreamGetCaptureInfo);
    if (UNLIKELY(!status)) return CUDA_ERROR_INVALID_VALUE;
    if (dependencies) *dependencies = NULL;
    if (count) *count = 0;
    stream *asked;
    if (handle) {
        size_t offset = (size_t)((uintptr_t)handle - (uintptr_t)streams);
        asked = (stream *)handle;
        if (UNLIKELY(offset >= sizeof streams || offset % sizeof(stream) || !lives(asked)))
            return CUDA_ERROR_INVALID_HANDLE;
    } else {
        if (here.device < 0) return CUDA_ERROR_INVALID_CONTEXT; /* measured: no other stream needs one */
        if (UNLIKELY(LOAD(forked))) return CUDA_ERROR_NOT_INITIALIZED; /* measured: any other stream answers */
        if (UNLIKELY(LOAD(capturing[here.device]))) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT; /* measured: unharmed */
        asked = &legacy[here.device];
    }
    return read_capture(asked, status, id, captured);
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
    publish(made, CU_STREAM_CAPTURE_STATUS_NONE, 0, NULL);
    *handle = (CUstream)made;
    return unlocked(CUDA_SUCCESS);
}

/* measured: one that is capturing is destroyed like any other. What then becomes of the capture was not: here it is
 * broken, and over if this was the stream where it had to end. */
static void leave_capture(stream *leaving, dying *list) {
    capture *left = leaving->capture;
    graph *captured = left->graph;
    invalidate(left);
    if (left->origin == leaving) {
        dissolve(left);
        graph_free(captured, list);
        return;
    }
    stream **link = &left->streams;
    while (*link != leaving) link = &(*link)->next_capture;
    *link = leaving->next_capture;
    leaving->capture = NULL;
    publish(leaving, CU_STREAM_CAPTURE_STATUS_NONE, 0, NULL);
}

CUresult sim_stream_destroy(CUstream handle) {
    VISIT();
    NONE_DYING(list);
    lock();
    FIND_STREAM(destroyed, handle);
    if (!handle) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    if (destroyed->capture) leave_capture(destroyed, &list);
    if (destroyed->first) {
        destroyed->leaving = 1;
        publish(destroyed, GONE, 0, NULL);
    } else {
        pool_give(&stream_pool, destroyed);
    }
    return unlocked_after(CUDA_SUCCESS, &list);
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
static CUresult begin_work(stream *on, const sim_node *what) {
    if (on->capture) {
        if (on->capture->broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (node_add(on->capture->graph, what)) return CUDA_ERROR_OUT_OF_MEMORY;
        on->clock[on->lane]++;
        return CUDA_SUCCESS;
    }
    return forbid_implicit(on);
}

CUresult sim_stream_kernel(CUstream handle, const sim_node *what) {
    VISIT();
    lock();
    FIND_STREAM(on, handle);
    return unlocked(begin_work(on, what));
}

CUresult sim_stream_query(CUstream handle) {
    VISIT_EVEN_FORKED();
    lock();
    FIND_STREAM(asked, handle);
    CUresult result = forbid_on(asked);
    if (!result) result = forbid_implicit(asked);
    if (!result) result = forbid();
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
    if (!result && !again) result = forbid();
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
    VISIT_EVEN_FORKED();
    NONE_DYING(list);
    *made = NULL;
    lock();
    FIND_STREAM(origin, handle);
    capture *ended = origin->capture;
    if (!ended) return unlocked(SIM_ERROR_ILLEGAL_STATE);
    if (ended->origin != origin) {
        invalidate(ended); /* measured */
        return unlocked(SIM_ERROR_CAPTURE_UNMATCHED);
    }
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
        return unlocked(open ? wait_captured(waiting, open, source->clock) : CUDA_ERROR_INVALID_VALUE);
    }
    return unlocked(source->on ? wait_plain(waiting, source->on, source->after) : CUDA_SUCCESS);
}

/* ---- events ---- */

CUresult event_create(CUevent *handle, unsigned int flags) {
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

CUresult event_destroy(CUevent handle) {
    ENTER(cuEventDestroy);
    lock();
    event *destroyed = pool_find(&event_pool, handle);
    if (!destroyed) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    pool_give(&event_pool, destroyed);
    advance(now()); /* a launch that waited for this gate waits no longer */
    pthread_cond_signal(&wake);
    return unlocked(CUDA_SUCCESS);
}

CUresult event_record(CUevent handle, CUstream stream_handle) {
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
    if (!asked->capture) return forbid();
    capture *open = find_capture(asked->capture);
    if (!open) return CUDA_ERROR_INVALID_VALUE; /* measured */
    invalidate(open);
    return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult event_query(CUevent handle) {
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
    CUresult result = again ? CUDA_SUCCESS : forbid_context();
    if (!result) advance(now());
    for (stream *each = busy; each && !result; each = each->next_busy)
        if (each->device == here.device)
            return await(each, each->submitted) ? CUDA_ERROR_NOT_READY : context_synchronize(1);
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
        return unlocked(IS("cuCtxRecordEvent") ? forbid_context() : forbid());
    }
    FIND_STREAM(called, handle);
    if (IS("cuLaunchHostFunc")) return unlocked(begin_work(called, NULL));
    if (IS("cuStreamGetId") || IS("cuStreamGetFlags") || IS("cuStreamGetDevice")) return unlocked(forbid_on(called));
    if (IS("cuStreamGetCtx") || IS("cuStreamGetPriority")) return unlocked(CUDA_SUCCESS);
    return unlocked(-1);
#undef IS
}
