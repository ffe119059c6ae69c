/* What the driver's thread pays when a graph dies: owner_list_died(), timed per call. Run by test_retain.py. */
#include "owners.h"

#include <stdio.h>
#include <string.h>

enum { CALLS = 20000 };
static uint32_t took[CALLS];
static _Atomic int asleep;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void print(const char *label, size_t calls, int64_t clock) {
    qsort(took, calls, sizeof *took, by_value);
    for (size_t i = 0; i < calls; i++) took[i] -= took[i] < clock ? took[i] : (uint32_t)clock;
    printf("destructor, %s: median %u ns, p99 %u ns\n", label, took[calls / 2], took[calls * 99 / 100]);
}

static owner_list *make(size_t owners) {
    owner_list *list = owner_list_new(1);
    if (!list || owner_list_reserve(list, owners)) exit(2);
    for (size_t i = 0; i < owners; i++) owner_list_append(list, list, NULL);
    return list;
}

static void drop(owner_list *list) {
    for (owner_list *after; list; list = after) {
        after = list->next;
        list->cursor = list->count;
        owner_list_free(list);
    }
}

static void *sleeper(void *argument) {
    for (int i = 0; i < *(int *)argument; i++) {
        asleep = 1;
        owner_dead_wait(-1);
        drop(owner_dead_take());
    }
    return NULL;
}

int main(void) {
    int64_t clock = INT64_MAX; /* what reading the clock twice costs */
    for (int i = 0; i < 1000; i++) {
        int64_t a = now(), b = now();
        if (b - a < clock) clock = b - a;
    }
    owner_dead_reset();
    size_t sizes[] = {1, 100000};
    for (int k = 0; k < 2; k++) {
        size_t calls = k ? 200 : CALLS;
        owner_list_died(make(1)); /* the stack is not empty any more: no wake-up below */
        for (size_t i = 0; i < calls; i++) {
            owner_list *list = make(sizes[k]);
            int64_t start = now();
            owner_list_died(list);
            took[i] = (uint32_t)(now() - start);
            if (k) { /* 1.6 MB each */
                drop(owner_dead_take());
                owner_list_died(make(1));
            }
        }
        drop(owner_dead_take());
        char label[64];
        snprintf(label, sizeof label, "%zu owners", sizes[k]);
        print(label, calls, clock);
    }
    while (!sem_trywait(&owner_dead_wake)) {
    }
    int rounds = 2000;
    pthread_t thread;
    pthread_create(&thread, NULL, sleeper, &rounds);
    for (int i = 0; i < rounds; i++) {
        while (!asleep) sched_yield();
        asleep = 0;
        nanosleep(&(struct timespec){0, 100000}, NULL); /* until it really sleeps */
        owner_list *list = make(1);
        int64_t start = now();
        owner_list_died(list);
        took[i] = (uint32_t)(now() - start);
    }
    pthread_join(thread, NULL);
    print("with the wake-up of the sleeping thread", (size_t)rounds, clock);
    return 0;
}
