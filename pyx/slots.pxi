# Blocks, slots and the views that answer a request again: what a manager's slots are made of. Called with the GIL, which is
# given up nowhere in here but where dropping a tensor runs somebody's finalizer.

@cython.final
cdef class Block:
    """The memory of a slot. Retained by every capture that it was served in; views hold its storage, not it."""

    cdef readonly object base          # the slot's tensor
    cdef readonly object storage       # what holds the bytes, whatever becomes of the tensor
    cdef readonly int64_t nbytes
    cdef readonly object site          # who asked for it: "file:line:function", or None
    cdef list typed                    # by modes, dtype -> (base as that dtype, its storage offset, its item's size)
    cdef uint64_t[8] captures          # the last that retained it: one may not be asked twice
    cdef unsigned int turn             # of `captures`, to be replaced next
    cdef object __weakref__

    def __init__(self, base):
        self.base = base
        self.storage = base.untyped_storage()
        self.nbytes = base.numel() * base.element_size()
        self.typed = [{} for _ in range(4)]

    def __repr__(self):
        return f"<workspace block of {self.nbytes} bytes at {self.base.data_ptr():#x}>"

    cdef int retain_for(self, uint64_t capture, void *stream, bint begins) except -1:
        """Once per capture; `begins`: it has just begun, though an earlier one into the same graph had its id."""
        cdef int i
        for i in range(8):
            if self.captures[i] == capture:
                if not begins:
                    return 0
                self.captures[i] = 0
        if retain_on(self, stream):
            self.captures[self.turn] = capture
            self.turn = (self.turn + 1) % 8
        return 0

    cdef object view(self, object dtype, unsigned int modes, tuple shape, int64_t offset, bint keep):
        """A contiguous view, `offset` bytes into the block. Unless `keep`, nothing that is made on the way is kept."""
        cdef Py_ssize_t i
        cdef int64_t stride = 1
        cdef int64_t size
        cdef object each
        cdef PyObject *known = PyDict_GetItemWithError(<dict>self.typed[modes], dtype) if keep else NULL
        cdef tuple base = <tuple>known if known != NULL else self.base_as(dtype, modes, keep)
        cdef tuple strides = PyTuple_New(PyTuple_GET_SIZE(shape))
        for i in range(PyTuple_GET_SIZE(shape) - 1, -1, -1):
            each = stride
            Py_INCREF(each)
            PyTuple_SET_ITEM(strides, i, each)
            size = <object>PyTuple_GET_ITEM(shape, i)
            stride *= size or 1
        return as_strided(base[0], shape, strides, <int64_t>base[1] + offset // <int64_t>base[2])

    cdef tuple base_as(self, object dtype, unsigned int modes, bint keep):
        size = dtype.itemsize
        whole = self.base if self.nbytes % size == 0 else self.base[: self.nbytes // size * size]
        typed = whole.view(dtype)
        base = (typed, typed.storage_offset(), size)
        if keep and type(typed) is exact_tensor:
            (<dict>self.typed[modes])[dtype] = base
        return base


@cython.final
cdef class Kept:
    """A persistent tensor that was asked for, as it was then."""

    cdef kept_tensor tensor
    cdef uint64_t version  # of the slot's resources when it was found in them; 0: look

    def __dealloc__(self):
        if self.tensor.tensor != NULL:
            kept_drop(&self.tensor)


@cython.final
cdef class Slot:
    """One (ubatch, lane): its block, and the requests that were seen on it."""

    cdef Block block            # None while the slot is empty
    cdef request **table        # of REQUEST_PLACES, or NULL
    cdef size_t known           # requests in it
    cdef dict kept              # key -> Kept: persistent tensors that were asked for
    cdef readonly list retired  # (StorageWeakRef, weakref of the Block, bytes, site) of former blocks that may still live
    cdef readonly object high   # the largest request: (bytes, ((shape, dtype), ...), site), or None

    def __cinit__(self):
        self.retired = []
        self.kept = {}

    def __dealloc__(self):
        self.forget()
        free(self.table)

    @property
    def current(self):
        """The Block, or None."""
        return self.block

    cdef void forget(self):
        """Drops the views of every request."""
        cdef int i
        cdef request **table = self.table
        if self.known == 0:
            return
        self.known = 0
        self.table = NULL  # out of reach first: the end of a view may run code that asks this slot again
        for i in range(REQUEST_PLACES):
            if table[i] != NULL:
                drop(table[i])
        free(table)

    cdef bint has_table(self):
        """False: there is no memory for one."""
        if self.table == NULL:
            self.table = <request **>calloc(REQUEST_PLACES, sizeof(request *))
        return self.table != NULL

    cdef PyObject *persistent(self, dict resources, object key, PyObject *shape, PyObject *dtype) except? NULL:
        """The tensor of that key, if it was asked for before with that shape and dtype and has not changed; else NULL."""
        cdef PyObject *known = PyDict_GetItemWithError(self.kept, key)
        cdef PyObject *found
        cdef Kept kept
        cdef uint64_t version
        if known == NULL:
            return NULL
        kept = <Kept>known
        version = dict_version(resources)
        if version == 0 or version != kept.version:
            found = PyDict_GetItemWithError(resources, (torch_tensor, key))
            if found != kept.tensor.tensor:  # somebody replaced it
                del self.kept[key]
                return NULL
            kept.version = version
        return kept.tensor.tensor if kept_is(&kept.tensor, shape, dtype) else NULL

    cdef int keep(self, object key, object found, object shape, object dtype) except -1:
        """Next time it is found sooner. Nothing is kept where there is no memory for it."""
        cdef Kept kept
        if not markable or type(found) is not exact_tensor or type(shape) is not tuple or len(shape) > KEPT_DIMS:
            return 0
        if not all_ints(shape):
            return 0
        kept = Kept.__new__(Kept)
        if kept_set(&kept.tensor, PyCapsule_GetPointer(tensor_handle(found), NULL), found, dtype, shape) == 0:
            self.kept[key] = kept
        return 0

    cdef int take(self, object base) except -1:
        """`base` (a tensor or None) is the slot's memory from now on."""
        cdef Block block = Block(base) if base is not None else None
        cdef Block before = self.block
        # Before the rest, which may run code that asks or sets this slot again: what is kept from here on is the new block's.
        self.block = block
        self.forget()
        if before is not None and before.base is not base:
            self.retired = [former for former in self.retired if not former[0].expired()]
            self.retired.append((StorageWeakRef(before.storage), weakref.ref(before), before.nbytes, before.site))
        return 0

    cdef list remember(self, Block block, const int64_t *words, size_t count, list views, bint reuse):
        """Keeps what answers that request of `block`, from the second time on: many requests never come again. Returns what to
        hand out. Without memory nothing is kept."""
        cdef uint64_t hash = words_hash(words, count)
        cdef request *known
        cdef request **place
        cdef bint again
        cdef tuple kept
        if not self.has_table():
            return views
        again = request_place(self.table, hash, words, count)[0] != NULL
        known = request_new(hash, words, count, len(views), again and (reuse or ARENA_DEBUG))
        if known == NULL:
            return views
        if again:
            kept = tuple(views)
            if known.marks != NULL and not mark(known, kept):
                request_free(known)
                return views
            Py_INCREF(kept)
            known.tensors = <void *>kept
            known.shared = reuse
            if not reuse:
                try:
                    views = fresh(kept)
                except BaseException:  # somebody's torch function mode, say
                    drop(known)
                    raise
        if self.known == REQUEST_ROOM and request_place(self.table, hash, words, count)[0] == NULL:
            self.forget()
        # torch's operations, and the end of a tensor, let other threads run: the slot may have grown meanwhile.
        if self.block is not block or not self.has_table():
            drop(known)
            return views
        place = request_place(self.table, hash, words, count)
        if place[0] != NULL:
            known, place[0] = place[0], known
            drop(known)
        else:
            place[0] = known
            self.known += 1
        return views


cdef bint mark(request *known, tuple views):
    cdef size_t i
    for i in range(known.views):
        if view_mark_set(&known.marks[i], PyCapsule_GetPointer(tensor_handle(views[i]), NULL)):
            return False
    return True


cdef void drop(request *known):
    cdef PyObject *tensors = <PyObject *>known.tensors
    request_free(known)
    Py_XDECREF(tensors)


cdef class Slots(list):
    """A manager's current blocks, as the list of tensors (or None) that its other code reads and sets."""

    cdef list slots

    def __init__(self, tensors):
        cdef Slot slot
        super().__init__(tensors)
        self.slots = []
        for base in tensors:
            slot = Slot()
            slot.take(base)
            self.slots.append(slot)

    def __setitem__(self, index, value):
        list.__setitem__(self, index, value)
        for each in range(len(self.slots))[index] if isinstance(index, slice) else (index,):
            (<Slot>self.slots[each]).take(self[each])

    @property
    def parts(self):
        """The `Slot` of each."""
        return self.slots
