/* Owner lists: what one capture retains, how a list is found by its capture, and how its death is told. Every atomic of the
 * project is in this file. Three kinds of caller meet here:
 *
 *   with the GIL     all that is not named below. What only they touch, the GIL guards.
 *   without the GIL  opaque owners come so, on any thread. What these touch (the index, and in a list `object`, `sealed` and
 *                    the opaque owners) is guarded by one small lock, which callers with the GIL take for these fields too.
 *   the driver       calls owner_list_died() on any thread, at any time: no lock, no allocation, neither Python nor CUDA.
 *
 * The hot path, a Python owner into a list that is open, takes no lock: its entries are the GIL's, and what the other side
 * needs of them is `count` alone, to know which owners came before its own.
 */
#ifndef ARENA_OWNERS_H
#define ARENA_OWNERS_H

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
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

/* One owner that came without the GIL. */
typedef struct opaque_entry {
    owner_entry owner;
    size_t before; /* how many of `entries` were retained before it */
} opaque_entry;

/* The owners of one capture, in the order in which they were retained: those with the GIL in `entries`, the opaque ones beside
 * them, each with its place among the others.
 * cursor <= count <= capacity, and so for the opaque ones; the cursors > 0 only after death; capacity == count once sealed
 * (or both small); `before` never falls from one opaque owner to the next, and is never above count.
 * A list is in one place: the index (alive), the dead stack, or the reclaimer's queue. Fields are the GIL's or, marked L, the
 * lock's; a reader with the GIL needs no lock for `sealed`, which is only written with both.
 */
typedef struct owner_list {
    struct owner_list *next;  /* below it on the dead stack, or behind it in the queue */
    struct owner_list *chain; /* next in its bucket of the index */
    uint64_t capture;         /* the capture's id: unique in the process, zero never */
    owner_entry *entries;     /* count of them are set */
    size_t count;             /* owners retained with the GIL; read without it in owner_list_append_opaque() */
    size_t capacity;          /* room in `entries` */
    size_t cursor;            /* of these, released */
    opaque_entry *opaque;     /* L: opaque_count of them are set */
    size_t opaque_count;      /* L: owners retained without the GIL */
    size_t opaque_capacity;   /* L: room in `opaque` */
    size_t opaque_cursor;     /* of these, released */
    void *context;            /* CUcontext that was current when the list was made, or NULL */
    void *graph;              /* CUgraph under capture: not to be touched after the end of the capture */
    void *object;             /* L: CUuserObject, or NULL while no owner was retained; see owner_list_attached() */
    void *scopes;             /* managed capture: the scope stack of the thread that began it, borrowed */
    double began;             /* seconds since 1970: when it was managed, or else its first owner retained */
    void *code;               /* the code object that did so (one strong reference), or NULL: not known; see replace_managed() */
    uint64_t pool[2];         /* the id of its graph's memory pool; zeros: not known */
    int line;                 /* in `code` */
    bool managed;             /* a reference to `object` is kept on the CPU side too */
    bool sealed;              /* L: takes no more owners */
    bool ended;               /* L: sealed, and the capture is over: the next one of this id begins a new list */
    bool indexed;             /* L: in the index */
    bool died;                /* its destructor has run: set by the driver, see owner_list_is_dead() */
} owner_list;

/* ---- the lock ---- */

static _Atomic bool owner_locked;
#if ARENA_DEBUG
static __thread bool owner_locked_here;
#endif

/* One for the process, held for a look-up and an append, and once in a capture for the three driver calls that attach a list
 * to its graph. Whoever holds it waits for nobody: it runs no Python, and a destructor that the driver calls meanwhile takes
 * no lock. So it may be taken with the GIL and without. Not from inside a destructor; not twice. */
static inline void owner_lock(void) {
#if ARENA_DEBUG
    ARENA_ASSERT(!owner_locked_here);
    owner_locked_here = true;
#endif
    unsigned tries = 0;
    /* acquire: what the last holder wrote; pairs with the release in owner_unlock() */
    while (atomic_exchange_explicit(&owner_locked, true, memory_order_acquire)) {
        do { /* relaxed: the exchange above is what counts */
            if (++tries > 256) nanosleep(&(struct timespec){0, 20000}, NULL); /* the holder may be of lower priority than we */
            else if (tries > 32) sched_yield();
        } while (atomic_load_explicit(&owner_locked, memory_order_relaxed));
    }
}

static inline void owner_unlock(void) {
#if ARENA_DEBUG
    owner_locked_here = false;
#endif
    /* release: pairs with the acquire in owner_lock() */
    atomic_store_explicit(&owner_locked, false, memory_order_release);
}

/* In a forked child, whose parent's other threads may have held it. relaxed: one thread. */
static inline void owner_lock_reset(void) {
#if ARENA_DEBUG
    owner_locked_here = false;
#endif
    atomic_store_explicit(&owner_locked, false, memory_order_relaxed);
}

/* ---- the list ---- */

/* Of a list in hand: with the GIL, and with the lock if it is in the index. */
static inline void owner_list_check(const owner_list *list) {
    (void)list;
    ARENA_ASSERT(list->cursor <= list->count);
    ARENA_ASSERT(list->count <= list->capacity);
    ARENA_ASSERT((list->capacity == 0) == (list->entries == NULL));
    ARENA_ASSERT(list->opaque_cursor <= list->opaque_count);
    ARENA_ASSERT(list->opaque_count <= list->opaque_capacity);
    ARENA_ASSERT((list->opaque_capacity == 0) == (list->opaque == NULL));
    ARENA_ASSERT(list->sealed || !list->ended);
#if ARENA_DEBUG
    for (size_t i = list->opaque_cursor; i < list->opaque_count; i++) {
        ARENA_ASSERT(list->opaque[i].owner.object && list->opaque[i].owner.release);
        ARENA_ASSERT(list->opaque[i].before <= list->count && (!i || list->opaque[i - 1].before <= list->opaque[i].before));
    }
    for (size_t i = list->cursor; i < list->count; i++) ARENA_ASSERT(list->entries[i].object);
#endif
}

static inline owner_list *owner_list_new(uint64_t capture) {
    owner_list *list = (owner_list *)calloc(1, sizeof *list);
    if (list) list->capture = capture;
    return list;
}

static inline void owner_list_free(owner_list *list) {
    ARENA_ASSERT(!list->indexed && list->cursor == list->count && list->opaque_cursor == list->opaque_count && !list->code);
    free(list->entries);
    free(list->opaque);
    free(list);
}

/* The capacity for `more` than count, or 0 if there is none so large. Grows by half, so that a list never keeps more than 24
 * bytes an owner (but for the first few). */
static inline size_t owner_capacity(size_t count, size_t capacity, size_t more) {
    if (more > SIZE_MAX / sizeof(opaque_entry) - count) return 0;
    capacity += capacity / 2;
    if (capacity < count + more) capacity = count + more;
    return capacity < 4 ? 4 : capacity;
}

/* Room for `more` owners. */
static inline int owner_list_reserve(owner_list *list, size_t more) {
    if (more <= list->capacity - list->count) return 0;
    size_t capacity = owner_capacity(list->count, list->capacity, more);
    owner_entry *entries = capacity ? (owner_entry *)realloc(list->entries, capacity * sizeof *entries) : NULL;
    if (!entries) return -1;
    list->entries = entries;
    list->capacity = capacity;
    return 0;
}

/* Cannot fail: there is room. */
static inline void owner_list_append(owner_list *list, void *object, owner_release release) {
    ARENA_ASSERT(object && !list->sealed && list->count < list->capacity);
    list->entries[list->count] = (owner_entry){object, release};
    /* relaxed: a place in the order, no more; pairs with the load in owner_list_append_opaque() */
    __atomic_store_n(&list->count, list->count + 1, __ATOMIC_RELAXED);
}

/* Room for `more` opaque owners. With the lock. */
static inline int owner_list_reserve_opaque(owner_list *list, size_t more) {
    if (more <= list->opaque_capacity - list->opaque_count) return 0;
    size_t capacity = owner_capacity(list->opaque_count, list->opaque_capacity, more);
    opaque_entry *opaque = capacity ? (opaque_entry *)realloc(list->opaque, capacity * sizeof *opaque) : NULL;
    if (!opaque) return -1;
    list->opaque = opaque;
    list->opaque_capacity = capacity;
    return 0;
}

/* Cannot fail: there is room. With the lock. The order is that of registration: an append with the GIL that happened before
 * this one is in the count that is read, one that happens after it is not, since a variable is never seen older than what
 * happened before, nor newer than what happens after; and between two that nothing orders either order is right. */
static inline void owner_list_append_opaque(owner_list *list, void *object, owner_release release) {
    ARENA_ASSERT(object && release && !list->sealed && list->opaque_count < list->opaque_capacity);
    /* relaxed: as above; pairs with the store in owner_list_append() */
    size_t before = __atomic_load_n(&list->count, __ATOMIC_RELAXED);
    list->opaque[list->opaque_count++] = (opaque_entry){{object, release}, before};
}

/* Owners of both kinds. Of a list that takes no more. */
static inline size_t owner_list_count(const owner_list *list) { return list->count + list->opaque_count; }

/* Whether all are released; and the next one, in the order of registration, taken off. Of a dead list. */
static inline bool owner_list_empty(const owner_list *list) {
    return list->cursor == list->count && list->opaque_cursor == list->opaque_count;
}
static inline owner_entry owner_list_take(owner_list *list) {
    ARENA_ASSERT(!owner_list_empty(list));
    if (list->opaque_cursor < list->opaque_count && list->opaque[list->opaque_cursor].before <= list->cursor)
        return list->opaque[list->opaque_cursor++].owner;
    return list->entries[list->cursor++];
}

/* Whether a graph was given it. Either kind of caller may be the first to do so; what it wrote before (the context and the
 * graph) is there with the object. acquire: pairs with the release in owner_list_attach(). */
static inline bool owner_list_attached(const owner_list *list) {
    return __atomic_load_n(&list->object, __ATOMIC_ACQUIRE) != NULL;
}
/* With the lock. release: as above. */
static inline void owner_list_attach(owner_list *list, void *object) {
    __atomic_store_n(&list->object, object, __ATOMIC_RELEASE);
}

/* Whether its destructor has run. A caller with the GIL takes the dead off the index first; one without cannot, and must not
 * take a list whose graph has let go of it (and may be capturing again, with the same id) for a living one. acquire: pairs
 * with the release in owner_list_died(). */
static inline bool owner_list_is_dead(const owner_list *list) { return __atomic_load_n(&list->died, __ATOMIC_ACQUIRE); }

/* The list takes no more owners, and who is retaining one without the GIL has done so. With the GIL and the lock. */
static inline void owner_list_seal_locked(owner_list *list) {
    list->sealed = true;
    if (list->opaque_count && list->opaque_count < list->opaque_capacity) {
        opaque_entry *opaque = (opaque_entry *)realloc(list->opaque, list->opaque_count * sizeof *opaque);
        if (opaque) { /* else still the old, larger block */
            list->opaque = opaque;
            list->opaque_capacity = list->opaque_count;
        }
    }
    if (list->count == list->capacity) return;
    if (list->count == 0) {
        free(list->entries);
        list->entries = NULL;
        list->capacity = 0;
        return;
    }
    owner_entry *entries = (owner_entry *)realloc(list->entries, list->count * sizeof *entries);
    if (!entries) return; /* as above */
    list->entries = entries;
    list->capacity = list->count;
}

static inline void owner_list_seal(owner_list *list) {
    owner_lock();
    owner_list_seal_locked(list);
    owner_unlock();
}

/* Seals `mine` and moves its owners of both kinds, in their order, to the end of `theirs`, which is open. In one step: until it
 * is sealed, opaque owners come. With the GIL. 0: done; -1: no memory; 1: something is to be moved and `theirs` is NULL, or
 * `mine` is no longer the list of its capture. But for 0 nothing was changed. */
static inline int owner_list_join(owner_list *theirs, owner_list *mine) {
    int code = 0;
    owner_lock();
    if (!mine->indexed) code = 1;
    else if (mine->count || mine->opaque_count) {
        if (!theirs) code = 1;
        else if (owner_list_reserve(theirs, mine->count) || owner_list_reserve_opaque(theirs, mine->opaque_count)) code = -1;
        else {
            for (size_t i = 0; i < mine->opaque_count; i++) {
                theirs->opaque[theirs->opaque_count] = mine->opaque[i];
                theirs->opaque[theirs->opaque_count++].before += theirs->count;
            }
            if (mine->count) memcpy(theirs->entries + theirs->count, mine->entries, mine->count * sizeof *mine->entries);
            /* relaxed: as in owner_list_append(); the opaque ones have the lock */
            __atomic_store_n(&theirs->count, theirs->count + mine->count, __ATOMIC_RELAXED);
            mine->count = mine->opaque_count = 0;
        }
    }
    if (!code) owner_list_seal_locked(mine);
    owner_unlock();
    return code;
}

/* The capture of a sealed list is over. */
static inline void owner_list_end(owner_list *list) {
    owner_lock();
    list->ended = true;
    owner_unlock();
}

/* ---- the index: capture id -> list ---- */

/* count == lists reachable from `buckets`; size is a power of two, or zero before the first list. Guarded by the lock. */
typedef struct owner_index {
    owner_list **buckets; /* chains through owner_list.chain */
    size_t size;          /* buckets */
    size_t count;         /* lists */
} owner_index;

/* Ids are small and dense in some drivers: a multiplication spreads them. */
static inline size_t owner_index_bucket(const owner_index *index, uint64_t capture) {
    return (size_t)((capture * 0x9E3779B97F4A7C15u) >> 32) & (index->size - 1);
}

/* With the GIL, since it looks at the lists' own owners. */
static inline void owner_index_check(const owner_index *index) {
    (void)index;
#if ARENA_DEBUG >= 2
    owner_lock();
    size_t count = 0;
    for (size_t i = 0; i < index->size; i++)
        for (const owner_list *list = index->buckets[i]; list; list = list->chain, count++) {
            ARENA_ASSERT(list->indexed && owner_index_bucket(index, list->capture) == i);
            owner_list_check(list);
        }
    ARENA_ASSERT(count == index->count);
    owner_unlock();
#endif
}

/* These four with the lock, for who has it. */
static inline owner_list *owner_index_find_locked(const owner_index *index, uint64_t capture) {
    if (!index->size) return NULL;
    owner_list *list = index->buckets[owner_index_bucket(index, capture)];
    while (list && list->capture != capture) list = list->chain;
    return list;
}

static inline int owner_index_reserve_locked(owner_index *index) {
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

static inline void owner_index_remove_locked(owner_index *index, owner_list *list) {
    if (!list->indexed) return;
    owner_list **link = &index->buckets[owner_index_bucket(index, list->capture)];
    while (*link != list) link = &(*link)->chain;
    *link = list->chain;
    list->chain = NULL;
    list->indexed = false;
    index->count--;
}

/* In the place of another of the same capture, which lives on by its object. */
static inline void owner_index_insert_locked(owner_index *index, owner_list *list) {
    ARENA_ASSERT(!list->indexed);
    owner_list *before = owner_index_find_locked(index, list->capture);
    if (before) owner_index_remove_locked(index, before);
    size_t bucket = owner_index_bucket(index, list->capture);
    list->chain = index->buckets[bucket];
    index->buckets[bucket] = list;
    index->count++;
    list->indexed = true;
}

/* What is found stays there for as long as the caller keeps the GIL: only with it are lists freed. */
static inline owner_list *owner_index_find(const owner_index *index, uint64_t capture) {
    owner_lock();
    owner_list *list = owner_index_find_locked(index, capture);
    owner_unlock();
    return list;
}

/* Room for one more list. A table that cannot grow serves on with longer chains; only the first one can fail. */
static inline int owner_index_reserve(owner_index *index) {
    owner_lock();
    int failed = owner_index_reserve_locked(index);
    owner_unlock();
    return failed;
}

static inline void owner_index_insert(owner_index *index, owner_list *list) {
    owner_lock();
    owner_index_insert_locked(index, list);
    owner_unlock();
}

static inline void owner_index_remove(owner_index *index, owner_list *list) {
    owner_lock();
    owner_index_remove_locked(index, list);
    owner_unlock();
}

/* Seals the list of that capture; NULL if there is none. In one step: until it is sealed, who attaches it without the GIL may
 * put another in its place. */
static inline owner_list *owner_index_seal(owner_index *index, uint64_t capture) {
    owner_lock();
    owner_list *list = owner_index_find_locked(index, capture);
    if (list) owner_list_seal_locked(list);
    owner_unlock();
    return list;
}

/* A list that no graph was given, taken out; NULL if there is none. */
static inline owner_list *owner_index_take_unattached(owner_index *index) {
    owner_lock();
    for (size_t i = 0; i < index->size; i++)
        for (owner_list *list = index->buckets[i]; list; list = list->chain)
            if (!list->object) {
                owner_index_remove_locked(index, list);
                owner_unlock();
                return list;
            }
    owner_unlock();
    return NULL;
}

/* All lists that a graph was given, at most `room`; how many there are. They stay as long as the caller keeps the GIL. */
static inline size_t owner_index_all(const owner_index *index, owner_list **all, size_t room) {
    size_t count = 0;
    owner_lock();
    for (size_t i = 0; i < index->size; i++)
        for (owner_list *list = index->buckets[i]; list; list = list->chain)
            if (list->object && count++ < room) all[count - 1] = list;
    owner_unlock();
    return count;
}

/* How many opaque owners a list has now. */
static inline size_t owner_list_opaque(const owner_list *list) {
    owner_lock();
    size_t count = list->opaque_count;
    owner_unlock();
    return count;
}

/* ---- what is looked at without the lock ---- */

/* The driver's cuStreamGetCaptureInfo, or NULL while the driver may not be called. Set with the lock, when all that belongs
 * to it is in place. */
static _Atomic(void *) owner_question;

/* acquire: pairs with the release in owner_question_set(), before which the driver's table was filled */
static inline void *owner_question_now(void) { return atomic_load_explicit(&owner_question, memory_order_acquire); }
static inline void owner_question_set(void *function) {
    atomic_store_explicit(&owner_question, function, memory_order_release);
}

/* 0: no capture is open, as far as torch's are concerned. Else one may be: how many managed ones are open, and a bit for each
 * reason why there may be others. It is alone in its cache line, since every op of every thread looks at it.
 * relaxed, all of it: whoever is told of a capture, by whatever orders the two threads, is told of what was set before it
 * too, and nothing else is read on the strength of it. Read by the gate in arena.h. */
#define OWNER_UNWATCHED 0x40000000u /* torch's captures are not seen to begin */
#define OWNER_UNSEEN 0x80000000u    /* one was met that had not been seen to begin; for good */
static _Alignas(64) _Atomic unsigned owner_gate[16] = {OWNER_UNWATCHED};

static inline const void *owner_gate_word(void) { return (const void *)owner_gate; }
static inline bool owner_gate_any(void) { return atomic_load_explicit(owner_gate, memory_order_relaxed) != 0; }
static inline void owner_gate_managed(unsigned captures) { /* with the GIL */
    unsigned now = atomic_load_explicit(owner_gate, memory_order_relaxed);
    const unsigned reasons = OWNER_UNWATCHED | OWNER_UNSEEN;
    while (!atomic_compare_exchange_weak_explicit(
        owner_gate, &now, (now & reasons) | captures, memory_order_relaxed, memory_order_relaxed)) {
    }
}
static inline void owner_gate_watched(bool watched) {
    if (watched) atomic_fetch_and_explicit(owner_gate, ~OWNER_UNWATCHED, memory_order_relaxed);
    else atomic_fetch_or_explicit(owner_gate, OWNER_UNWATCHED, memory_order_relaxed);
}
/* A capture was met that is not managed. Beside a managed one the gate says maybe anyway, and it may be a part of that. */
static inline void owner_gate_met(void) {
    if (!atomic_load_explicit(owner_gate, memory_order_relaxed))
        atomic_fetch_or_explicit(owner_gate, OWNER_UNSEEN, memory_order_relaxed);
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
    __atomic_store_n(&list->died, true, __ATOMIC_RELEASE); /* release: pairs with the acquire in owner_list_is_dead() */
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
