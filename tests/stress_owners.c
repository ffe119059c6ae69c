/* Drives pyx/owners.h as the registry and the driver do, with a mutex in the place of the GIL. First many lists that one thread
 * makes and several destroy while another takes and frees them; then captures into which threads with the GIL and threads
 * without it retain at once, until they are sealed and die. Built and run by test_native.py under ThreadSanitizer and
 * AddressSanitizer; with ARENA_PUBLISH or another order weakened ThreadSanitizer must object. Exits with 0 if every list came
 * back once, whole and in order, and no wake-up was lost.
 */
#include "owners.h"

#include <stdio.h>

enum { DRIVERS = 4, LISTS = 20000, WINDOW = 512, CAPTURES = 300, WITH = 2, WITHOUT = 3, EACH = 120 };

static owner_list *handed[DRIVERS][LISTS]; /* what each driver thread is to destroy */
static _Atomic size_t ready[DRIVERS];      /* how many of those may be */
static _Atomic size_t taken;               /* lists that came back */
static size_t released;                    /* owners that came back */

static void release(void *object) { released += (size_t)(uintptr_t)object; }

static void *driver(void *argument) {
    size_t me = (size_t)(uintptr_t)argument;
    for (size_t i = 0; i < LISTS; i++) {
        while (atomic_load_explicit(&ready[me], memory_order_acquire) <= i) {
        }
        owner_list_died(handed[me][i]);
    }
    return NULL;
}

static void *reclaimer(void *argument) {
    (void)argument;
    size_t left = DRIVERS * LISTS;
    while (left) {
        owner_dead_wait(-1); /* the only thing that wakes us: a lost post hangs here, and the test's time limit says so */
        for (owner_list *list = owner_dead_take(), *after; list; list = after) {
            after = list->next;
            owner_list_check(list);
            while (!owner_list_empty(list)) {
                owner_entry entry = owner_list_take(list);
                entry.release(entry.object);
            }
            owner_list_free(list);
            left--;
            atomic_fetch_add_explicit(&taken, 1, memory_order_relaxed);
        }
    }
    return NULL;
}

static size_t many_lists(void) {
    pthread_t drivers[DRIVERS], consumer;
    pthread_create(&consumer, NULL, reclaimer, NULL);
    for (size_t i = 0; i < DRIVERS; i++) pthread_create(&drivers[i], NULL, driver, (void *)(uintptr_t)i);
    size_t expected = 0;
    for (size_t n = 0; n < LISTS; n++) {
        for (size_t i = 0; i < DRIVERS; i++) {
            owner_list *list = owner_list_new(n * DRIVERS + i + 1);
            for (size_t owner = 0; owner < n % 9; owner++) {
                if (!list || owner_list_reserve(list, 1)) exit(2);
                owner_list_append(list, (void *)(uintptr_t)(owner + 1), release);
                expected += owner + 1;
            }
            owner_list_seal(list);
            handed[i][n] = list;
            atomic_store_explicit(&ready[i], n + 1, memory_order_release);
        }
        while (n * DRIVERS > atomic_load_explicit(&taken, memory_order_relaxed) + WINDOW * DRIVERS) {
        }
    }
    for (size_t i = 0; i < DRIVERS; i++) pthread_join(drivers[i], NULL);
    pthread_join(consumer, NULL);
    return expected;
}

/* ---- both kinds into one capture ---- */

/* Owners are numbered: (thread + 1) << 32 | how many that thread had retained. What one thread retained, whichever way, must
 * come back in its order; what both kinds of a thread retained, too. */
static pthread_mutex_t gil = PTHREAD_MUTEX_INITIALIZER;
static owner_index lists;
static _Atomic uint64_t capture; /* that is open; 0: none, and what is retained is refused */
static uint64_t refused;         /* guarded by the lock */
static uint64_t accepted;        /* and this */
static uint64_t kept;            /* guarded by the GIL */
static void nothing(void *object) { (void)object; }

static bool retain_without(uint64_t number) {
    uint64_t now = atomic_load_explicit(&capture, memory_order_relaxed); /* the driver's answer: may be old when it is used */
    bool took = false;
    owner_lock();
    owner_list *list = now ? owner_index_find_locked(&lists, now) : NULL;
    if (now == atomic_load_explicit(&capture, memory_order_relaxed) && now && (!list || !list->object)) { /* as attach() */
        bool fresh = !list;
        if (fresh) list = owner_list_new(now);
        if (!list || owner_index_reserve_locked(&lists)) exit(2);
        owner_list_attach(list, list);
        if (fresh) owner_index_insert_locked(&lists, list);
    }
    if (list && !list->sealed && !owner_list_is_dead(list)) {
        if (owner_list_reserve_opaque(list, 1)) exit(2);
        owner_list_append_opaque(list, (void *)(uintptr_t)number, nothing);
        took = true;
        accepted++;
    } else {
        refused++;
    }
    owner_unlock();
    return took;
}

static bool retain_with(uint64_t number) {
    bool took = false;
    pthread_mutex_lock(&gil);
    uint64_t now = atomic_load_explicit(&capture, memory_order_relaxed);
    owner_list *list = now ? owner_index_find(&lists, now) : NULL;
    if (list && !list->sealed && owner_list_attached(list)) {
        if (owner_list_reserve(list, 1)) exit(2);
        owner_list_append(list, (void *)(uintptr_t)number, NULL); /* no lock */
        took = true;
        kept++;
    }
    pthread_mutex_unlock(&gil);
    return took;
}

static _Atomic int round_now, busy;

static void *retainer(void *argument) {
    uint64_t me = (uint64_t)(uintptr_t)argument;
    for (int round = 1; round <= CAPTURES; round++) {
        while (atomic_load_explicit(&round_now, memory_order_acquire) < round) sched_yield();
        for (uint64_t i = 0; i < EACH; i++) {
            uint64_t number = (me + 1) << 32 | i;
            if (me < WITH && i % 3) retain_with(number); /* a thread with the GIL retains both kinds */
            else retain_without(number);
        }
        atomic_fetch_sub_explicit(&busy, 1, memory_order_release);
    }
    return NULL;
}

static void both_kinds(void) {
    pthread_t threads[WITH + WITHOUT];
    uint64_t back = 0;
    for (uintptr_t i = 0; i < WITH + WITHOUT; i++) pthread_create(&threads[i], NULL, retainer, (void *)i);
    for (uint64_t round = 1; round <= CAPTURES; round++) {
        if (round % 2) { /* a managed capture has a list from its begin, without an object */
            owner_list *list = owner_list_new(round);
            if (!list || owner_index_reserve(&lists)) exit(2);
            owner_index_insert(&lists, list);
        }
        atomic_store_explicit(&capture, round, memory_order_relaxed);
        atomic_store_explicit(&busy, WITH + WITHOUT, memory_order_relaxed);
        atomic_store_explicit(&round_now, (int)round, memory_order_release);
        for (int i = 0; i < (int)(round % 7) * 40; i++) sched_yield();
        if (round % 5 == 0)
            while (atomic_load_explicit(&busy, memory_order_acquire)) sched_yield(); /* everything gets in */
        pthread_mutex_lock(&gil);
        owner_index_seal(&lists, round);
        owner_lock(); /* in the place of the driver's own: who attaches now either did so before the end or is refused */
        atomic_store_explicit(&capture, 0, memory_order_relaxed);
        owner_list *list = owner_index_find_locked(&lists, round);
        owner_unlock();
        pthread_mutex_unlock(&gil);
        if (list) owner_list_died(list);
        pthread_mutex_lock(&gil);
        for (owner_list *dead = owner_dead_take(), *after; dead; dead = after) { /* as drain() and release_some() */
            after = dead->next;
            owner_index_remove(&lists, dead);
            uint64_t last[WITH + WITHOUT] = {0};
            size_t count = owner_list_count(dead), came = 0;
            owner_list_check(dead);
            while (!owner_list_empty(dead)) {
                uint64_t number = (uint64_t)(uintptr_t)owner_list_take(dead).object;
                uint64_t thread = (number >> 32) - 1, which = (number & 0xffffffff) + 1;
                if (thread >= WITH + WITHOUT || which <= last[thread]) {
                    fprintf(stderr, "out of order: %lu after %lu of thread %lu\n", which, last[thread], thread);
                    exit(3);
                }
                last[thread] = which;
                came++;
            }
            if (came != count) exit(4);
            back += came;
            owner_list_free(dead);
        }
        pthread_mutex_unlock(&gil);
        while (atomic_load_explicit(&busy, memory_order_acquire)) sched_yield();
    }
    for (int i = 0; i < WITH + WITHOUT; i++) pthread_join(threads[i], NULL);
    owner_list *late = owner_dead_take();
    if (late || back != kept + accepted || !refused || !accepted || !kept) {
        fprintf(stderr, "%lu came back of %lu and %lu, %lu refused\n", back, kept, accepted, refused);
        exit(5);
    }
    free(lists.buckets);
    printf("%d captures, %lu owners with the GIL and %lu without, %lu refused\n", CAPTURES, kept, accepted, refused);
}

int main(void) {
    owner_dead_reset();
    size_t expected = many_lists();
    if (released != expected || owner_dead_any()) {
        fprintf(stderr, "released %zu of %zu\n", released, expected);
        return 1;
    }
    printf("%d lists, %zu owners\n", DRIVERS * LISTS, released);
    owner_dead_reset();
    both_kinds();
    return 0;
}
