# The C declarations of owners.h, for registry.pyx and the tests.

from libc.stdint cimport uint64_t


cdef extern from "owners.h" nogil:
    int ARENA_DEBUG

    ctypedef struct owner_entry:
        void *object
        void (*release)(void *) noexcept

    ctypedef struct opaque_entry:
        owner_entry owner
        size_t before

    ctypedef struct owner_list:
        owner_list *next
        owner_list *chain
        uint64_t capture
        owner_entry *entries
        size_t count
        size_t capacity
        size_t cursor
        opaque_entry *opaque
        size_t opaque_count
        void *context
        void *graph
        void *object
        void *scopes
        double began
        void *code
        uint64_t pool[2]
        int line
        bint managed
        bint sealed
        bint ended
        bint indexed

    ctypedef struct owner_index:
        owner_list **buckets
        size_t size
        size_t count

    ctypedef struct sem_t:
        pass

    sem_t owner_dead_wake

    void owner_lock()
    void owner_unlock()
    void owner_lock_reset()

    void owner_list_check(const owner_list *list)
    owner_list *owner_list_new(uint64_t capture)
    void owner_list_free(owner_list *list)
    int owner_list_reserve(owner_list *list, size_t more)
    void owner_list_append(owner_list *list, void *object, void (*release)(void *) noexcept)
    int owner_list_reserve_opaque(owner_list *list, size_t more)
    int owner_list_join(owner_list *theirs, owner_list *mine)
    void owner_list_append_opaque(owner_list *list, void *object, void (*release)(void *) noexcept)
    size_t owner_list_count(const owner_list *list)
    bint owner_list_empty(const owner_list *list)
    owner_entry owner_list_take(owner_list *list)
    bint owner_list_attached(const owner_list *list)
    void owner_list_attach(owner_list *list, void *object)
    bint owner_list_is_dead(const owner_list *list)
    void owner_list_end(owner_list *list)

    size_t owner_index_all(const owner_index *index, owner_list **all, size_t room)
    size_t owner_list_opaque(const owner_list *list)
    void owner_index_check(const owner_index *index)
    owner_list *owner_index_find_locked(const owner_index *index, uint64_t capture)
    int owner_index_reserve_locked(owner_index *index)
    void owner_index_insert_locked(owner_index *index, owner_list *list)
    void owner_index_remove_locked(owner_index *index, owner_list *list)
    owner_list *owner_index_find(const owner_index *index, uint64_t capture)
    int owner_index_reserve(owner_index *index)
    void owner_index_insert(owner_index *index, owner_list *list)
    void owner_index_remove(owner_index *index, owner_list *list)
    owner_list *owner_index_seal(owner_index *index, uint64_t capture)
    owner_list *owner_index_take_unattached(owner_index *index)

    void *owner_question_now()
    void owner_question_set(void *function)
    const void *owner_gate_word()
    bint owner_gate_any()
    void owner_gate_managed(unsigned int captures)
    void owner_gate_watched(bint watched)
    void owner_gate_met()

    void owner_list_died(void *list)
    void owner_dead_reset()
    bint owner_dead_any()
    owner_list *owner_dead_take()
    void owner_dead_wait(double seconds)

    int sem_init(sem_t *, int, unsigned int)
    int sem_post(sem_t *)
