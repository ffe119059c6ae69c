/* Drives pyx/owners.h as the registry and the driver do: one thread makes lists and, with a mutex in the place of the GIL,
 * takes the dead and frees them; several threads run destructors. Built and run by test_native.py under ThreadSanitizer
 * and AddressSanitizer; with ARENA_PUBLISH weakened ThreadSanitizer must object. Exits with 0 if every list came back
 * once, whole, and no wake-up was lost.
 */
#include "owners.h"

#include <stdio.h>

enum { DRIVERS = 4, LISTS = 20000, WINDOW = 512 };

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
            while (list->cursor < list->count) {
                owner_entry entry = list->entries[list->cursor++];
                entry.release(entry.object);
            }
            owner_list_free(list);
            left--;
            atomic_fetch_add_explicit(&taken, 1, memory_order_relaxed);
        }
    }
    return NULL;
}

int main(void) {
    owner_dead_reset();
    pthread_t drivers[DRIVERS], consumer;
    pthread_create(&consumer, NULL, reclaimer, NULL);
    for (size_t i = 0; i < DRIVERS; i++) pthread_create(&drivers[i], NULL, driver, (void *)(uintptr_t)i);
    size_t expected = 0;
    for (size_t n = 0; n < LISTS; n++) {
        for (size_t i = 0; i < DRIVERS; i++) {
            owner_list *list = owner_list_new(n * DRIVERS + i + 1);
            for (size_t owner = 0; owner < n % 9; owner++) {
                if (!list || owner_list_reserve(list, 1)) return 2;
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
    if (released != expected || owner_dead_any()) {
        fprintf(stderr, "released %zu of %zu\n", released, expected);
        return 1;
    }
    printf("%d lists, %zu owners\n", DRIVERS * LISTS, released);
    return 0;
}
