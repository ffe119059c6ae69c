/* Owner lists: what one capture retains, how a list is found by its capture, and how its death is told. Everything here
 * is called with the GIL held, but for owner_list_died(): the driver calls that on any thread, at any time, and it takes
 * no lock, allocates nothing and knows neither Python nor CUDA. Every atomic of the project is in this file.
 */
#ifndef ARENA_OWNERS_H
#define ARENA_OWNERS_H

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#ifndef ARENA_DEBUG
#define ARENA_DEBUG 0 /* 0: nothing, 1: invariants of the list in hand, 2: every indexed list at every call */
#endif
#if ARENA_DEBUG
#undef NDEBUG
#include <stdio.h>
#define ARENA_ASSERT(x) \
    ((x) ? (void)0 : (fprintf(stderr, "arena: broken invariant %s (%s:%d)\n", #x, __FILE__, __LINE__), abort()))
#else
#define ARENA_ASSERT(x) ((void)0)
#endif

typedef void (*owner_release)(void *);

/* One owner. 16 bytes; `release` tells the kind. */
typedef struct owner_entry {
    void *object;          /* a PyObject (one strong reference), or whatever `release` takes */
    owner_release release; /* NULL: drop the reference */
} owner_entry;

/* The owners of one capture, in the order in which they were retained.
 * cursor <= count <= capacity; cursor > 0 only after death; capacity == count once sealed (or both small).
 * A list is in one place: the index (alive), the dead stack, or the reclaimer's queue.
 */
typedef struct owner_list {
    struct owner_list *next;  /* below it on the dead stack, or behind it in the queue */
    struct owner_list *chain; /* next in its bucket of the index */
    uint64_t capture;         /* the capture's id: unique in the process, zero never */
    owner_entry *entries;     /* count of them are set */
    size_t count;             /* owners retained */
    size_t capacity;          /* room in `entries` */
    size_t cursor;            /* owners released */
    void *context;            /* CUcontext that was current when the list was made, or NULL */
    void *graph;              /* CUgraph under capture: not to be touched after the end of the capture */
    void *object;             /* CUuserObject, or NULL while no owner was retained */
    void *scopes;             /* managed capture: the scope stack of the thread that began it, borrowed */
    bool managed;             /* a reference to `object` is kept on the CPU side too */
    bool sealed;              /* takes no more owners */
    bool ended;               /* sealed, and the capture is over: the next one of this id begins a new list */
    bool indexed;             /* in the index */
} owner_list;

/* ---- the list ---- */

static inline void owner_list_check(const owner_list *list) {
    (void)list;
    ARENA_ASSERT(list->cursor <= list->count);
    ARENA_ASSERT(list->count <= list->capacity);
    ARENA_ASSERT((list->capacity == 0) == (list->entries == NULL));
    ARENA_ASSERT(list->sealed || !list->ended);
#if ARENA_DEBUG
    for (size_t i = list->cursor; i < list->count; i++) ARENA_ASSERT(list->entries[i].object);
#endif
}

static inline owner_list *owner_list_new(uint64_t capture) {
    owner_list *list = (owner_list *)calloc(1, sizeof *list);
    if (list) list->capture = capture;
    return list;
}

static inline void owner_list_free(owner_list *list) {
    ARENA_ASSERT(!list->indexed && list->cursor == list->count);
    free(list->entries);
    free(list);
}

/* Room for `more` owners. Grows by half, so that a list never keeps more than 24 bytes an owner (but for the first few). */
static inline int owner_list_reserve(owner_list *list, size_t more) {
    if (more <= list->capacity - list->count) return 0;
    if (more > SIZE_MAX / sizeof(owner_entry) - list->count) return -1;
    size_t capacity = list->capacity + list->capacity / 2;
    if (capacity < list->count + more) capacity = list->count + more;
    if (capacity < 4) capacity = 4;
    owner_entry *entries = (owner_entry *)realloc(list->entries, capacity * sizeof *entries);
    if (!entries) return -1;
    list->entries = entries;
    list->capacity = capacity;
    return 0;
}

/* Cannot fail: there is room. */
static inline void owner_list_append(owner_list *list, void *object, owner_release release) {
    ARENA_ASSERT(object && !list->sealed && list->count < list->capacity);
    list->entries[list->count++] = (owner_entry){object, release};
}

static inline void owner_list_seal(owner_list *list) {
    list->sealed = true;
    if (list->count == list->capacity) return;
    if (list->count == 0) {
        free(list->entries);
        list->entries = NULL;
        list->capacity = 0;
        return;
    }
    owner_entry *entries = (owner_entry *)realloc(list->entries, list->count * sizeof *entries);
    if (!entries) return; /* still the old, larger block */
    list->entries = entries;
    list->capacity = list->count;
}

/* ---- the index: capture id -> list ---- */

/* count == lists reachable from `buckets`; size is a power of two, or zero before the first list. */
typedef struct owner_index {
    owner_list **buckets; /* chains through owner_list.chain */
    size_t size;          /* buckets */
    size_t count;         /* lists */
} owner_index;

/* Ids are small and dense in some drivers: a multiplication spreads them. */
static inline size_t owner_index_bucket(const owner_index *index, uint64_t capture) {
    return (size_t)((capture * 0x9E3779B97F4A7C15u) >> 32) & (index->size - 1);
}

static inline void owner_index_check(const owner_index *index) {
    (void)index;
#if ARENA_DEBUG >= 2
    size_t count = 0;
    for (size_t i = 0; i < index->size; i++)
        for (const owner_list *list = index->buckets[i]; list; list = list->chain, count++) {
            ARENA_ASSERT(list->indexed && owner_index_bucket(index, list->capture) == i);
            owner_list_check(list);
        }
    ARENA_ASSERT(count == index->count);
#endif
}

static inline owner_list *owner_index_find(const owner_index *index, uint64_t capture) {
    if (!index->size) return NULL;
    owner_list *list = index->buckets[owner_index_bucket(index, capture)];
    while (list && list->capture != capture) list = list->chain;
    return list;
}

/* Room for one more list. A table that cannot grow serves on with longer chains; only the first one can fail. */
static inline int owner_index_reserve(owner_index *index) {
    if (index->count < index->size) return 0;
    size_t size = index->size ? index->size * 2 : 64;
    owner_list **buckets = (owner_list **)calloc(size, sizeof *buckets);
    if (!buckets) return index->size ? 0 : -1;
    owner_index grown = {buckets, size, index->count};
    for (size_t i = 0; i < index->size; i++)
        for (owner_list *list = index->buckets[i], *after; list; list = after) {
            after = list->chain;
            size_t bucket = owner_index_bucket(&grown, list->capture);
            list->chain = buckets[bucket];
            buckets[bucket] = list;
        }
    free(index->buckets);
    *index = grown;
    return 0;
}

static inline void owner_index_insert(owner_index *index, owner_list *list) {
    ARENA_ASSERT(!list->indexed && !owner_index_find(index, list->capture));
    size_t bucket = owner_index_bucket(index, list->capture);
    list->chain = index->buckets[bucket];
    index->buckets[bucket] = list;
    index->count++;
    list->indexed = true;
}

static inline void owner_index_remove(owner_index *index, owner_list *list) {
    if (!list->indexed) return;
    owner_list **link = &index->buckets[owner_index_bucket(index, list->capture)];
    while (*link != list) link = &(*link)->chain;
    *link = list->chain;
    list->chain = NULL;
    list->indexed = false;
    index->count--;
}

/* ---- death ---- */

#ifndef ARENA_PUBLISH /* the stress test weakens it, to see ThreadSanitizer object */
#define ARENA_PUBLISH memory_order_release
#endif

static _Atomic(owner_list *) owner_dead_top; /* the stack of dead lists, linked by `next` */
static sem_t owner_dead_wake;                /* posted when the stack stops being empty, and to stop the reclaimer */

/* The destructor of every user object. After the exchange succeeded the list is the reclaimer's: not a byte of it may be
 * touched. Posting only for the first list of a batch keeps 10,000 deaths from costing 10,000 wake-ups. */
static void owner_list_died(void *data) {
    owner_list *list = (owner_list *)data;
    owner_list *top = atomic_load_explicit(&owner_dead_top, memory_order_relaxed);
    do {
        list->next = top;
        /* release: `next` before the list itself; pairs with the acquire in owner_dead_take() */
    } while (!atomic_compare_exchange_weak_explicit(&owner_dead_top, &top, list, ARENA_PUBLISH, memory_order_relaxed));
    if (!top) sem_post(&owner_dead_wake);
}

/* relaxed: a hint; whoever acts on it goes through owner_dead_take(). */
static inline bool owner_dead_any(void) { return atomic_load_explicit(&owner_dead_top, memory_order_relaxed) != NULL; }

/* Nothing is dead. At the start of a process: also of a forked one, whose parent's dead are none of its business. */
static inline void owner_dead_reset(void) {
    atomic_store_explicit(&owner_dead_top, NULL, memory_order_relaxed); /* one thread: nobody to pair with */
    sem_init(&owner_dead_wake, 0, 0);
}

/* All dead lists, the first to die first. */
static inline owner_list *owner_dead_take(void) {
    if (!owner_dead_any()) return NULL;
    /* acquire: pairs with the release in owner_list_died() */
    owner_list *list = atomic_exchange_explicit(&owner_dead_top, NULL, memory_order_acquire);
    owner_list *first = NULL;
    while (list) {
        owner_list *below = list->next;
        list->next = first;
        first = list;
        list = below;
    }
    return first;
}

/* Waits for a death, for at most `seconds` (without end if negative). Without the GIL. */
static inline void owner_dead_wait(double seconds) {
    if (seconds < 0) {
        while (sem_wait(&owner_dead_wake) && errno == EINTR) {
        }
        return;
    }
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    long nanoseconds = until.tv_nsec + (long)((seconds - (double)(time_t)seconds) * 1e9);
    until.tv_sec += (time_t)seconds + nanoseconds / 1000000000;
    until.tv_nsec = nanoseconds % 1000000000;
    while (sem_timedwait(&owner_dead_wake, &until) && errno == EINTR) {
    }
}

#endif
