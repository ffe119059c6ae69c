/* User objects, and the graphs and executables that hold them. Any thread may call what is in the table or in
 * simulator.h; what else is shared wants the mutex held. The queues that launches go to are simulator_streams.c's.
 */
#include "simulator_state.h"

/* ---- objects and who holds them ---- */

static void drop(object *held, uint64_t references, dying *list) {
    held->total -= references;
    if (held->total) return;
    held->dying = NULL;
    *list->last = held;
    list->last = &held->dying;
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

void holdings_drop(holdings *held, dying *list) {
    for (uint32_t i = 0; i < held->count; i++) drop(held->items[i].object, held->items[i].references, list);
    free(held->items);
    *held = (holdings){0};
}

/* Of a context that was reset: the references stay, so no destructor ever runs (measured). */
void holdings_forget(holdings *held) {
    free(held->items);
    *held = (holdings){0};
}

/* Dying objects have slots still, but no references to give or take. */
static object *find_object(CUuserObject handle) {
    object *found = pool_find(&object_pool, handle);
    return found && found->total ? found : NULL;
}

CUresult object_create(CUuserObject *handle, void *data, CUhostFn destroy, unsigned int count, unsigned int flags) {
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

CUresult object_release(CUuserObject handle, unsigned int count) {
    ENTER(cuUserObjectRelease);
    NONE_DYING(list);
    lock();
    object *released = find_object(handle);
    if (!released || !count || count > released->own) return unlocked(CUDA_ERROR_INVALID_VALUE);
    released->own -= count;
    drop(released, count, &list);
    return unlocked_after(CUDA_SUCCESS, &list);
}

/* What the code under test still holds by itself goes too, so that no list outlives the driver it was made with. */
void objects_abandon(dying *list) {
    for EACH (object, each, object_pool)
        if (lives(each) && each->number < 0 && each->own) {
            uint64_t own = each->own;
            each->own = 0;
            drop(each, own, list);
        }
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

CUresult graph_retain(CUgraph handle, CUuserObject wanted, unsigned int count, unsigned int flags) {
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

CUresult graph_release(CUgraph handle, CUuserObject wanted, unsigned int count) {
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

graph *graph_new(int device) {
    graph *made = pool_take(&graph_pool);
    if (!made) return NULL;
    made->device = device;
    nodes_free(made); /* left by a context that was reset */
    made->capture_id = 0;
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
void graph_free(graph *freed, dying *list) {
    holdings_drop(&freed->held, list);
    nodes_free(freed);
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
    int failed = nodes_copy(copy, source) || holdings_reserve(&copy->held, source->held.count);
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
    graph *copy = graph_copy(source, source->device);
    *clone = (CUgraph)copy;
    return unlocked(copy ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

CUresult sim_graph_add_node(CUgraph handle, const sim_node *what) {
    VISIT();
    lock();
    graph *grown = pool_find(&graph_pool, handle);
    if (!grown) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    return unlocked(node_add(grown, what) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS);
}

/* A node for `inner`, which goes into the parent with it, or is freed. */
static int add_inner(graph *parent, int type, graph *inner) {
    uint32_t before = 0;
    for (const graph *each = parent->inner; each; each = each->next) before++;
    if (node_add_inner(parent, type, before)) {
        NONE_DYING(list); /* stays empty: the source of a copy holds them all */
        graph_free(inner, &list);
        return -1;
    }
    graph_put_inside(parent, inner);
    return 0;
}

CUresult sim_graph_add_child(CUgraph handle, CUgraph child) {
    VISIT();
    lock();
    graph *parent = pool_find(&graph_pool, handle);
    graph *source = pool_find(&graph_pool, child);
    if (!parent || !source) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    graph *copy = graph_copy(source, parent->device);
    if (!copy) return unlocked(CUDA_ERROR_OUT_OF_MEMORY);
    if (add_inner(parent, CU_GRAPH_NODE_TYPE_GRAPH, copy)) return unlocked(CUDA_ERROR_OUT_OF_MEMORY);
    return unlocked(CUDA_SUCCESS);
}

CUresult sim_graph_add_conditional(CUgraph handle, CUgraph *body) {
    VISIT();
    lock();
    graph *parent = pool_find(&graph_pool, handle);
    if (!parent) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    graph *made = graph_new(parent->device);
    if (!made) return unlocked(CUDA_ERROR_OUT_OF_MEMORY);
    if (add_inner(parent, CU_GRAPH_NODE_TYPE_CONDITIONAL, made)) return unlocked(CUDA_ERROR_OUT_OF_MEMORY);
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
    if (here.device < 0) return CUDA_ERROR_INVALID_CONTEXT;
    lock();
    graph *source = pool_find(&graph_pool, template);
    if (!source) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    CUresult forbidden = forbid();
    if (forbidden) return unlocked(forbidden);
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
    VISIT_EVEN_FORKED();
    if (LOAD(forked)) return CUDA_SUCCESS; /* measured; nothing runs, though */
    lock();
    exec *launched = pool_find(&exec_pool, handle);
    event *gate = until ? pool_find(&event_pool, until) : NULL;
    if (!launched || (until && !gate)) return unlocked(CUDA_ERROR_INVALID_HANDLE);
    FIND_STREAM(queued, on);
    CUresult result = forbid_on(queued); /* measured: 900, and the capture is broken */
    if (!result) result = forbid_implicit(queued);
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
    CUresult forbidden = forbid();
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
