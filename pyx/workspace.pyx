# cython: language_level=3, embedsignature=True, embedsignature.format=clinic
"""Scratch by slot: the request path of `arena.workspace`, and what ties a slot's block to the graphs that use it.

It owns the blocks of a manager's slots, the views of them that were asked for before, and the note of which capture holds
which block. A request that was seen before on the same block costs one cheap torch operation a tensor, or none. A block that
a graph uses is retained by that graph, so a slot that grows merely lets go of it: it lives exactly as long as its last graph
or view. Any thread may call, with the GIL; growth gives the GIL up and is one at a time in each manager.
"""

cimport cython
from cpython.dict cimport PyDict_GetItem
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.list cimport PyList_New
from cpython.long cimport PyLong_CheckExact
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_REFCNT
from cpython.tuple cimport PyTuple_CheckExact
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free

from arena._registry cimport current_capture, retain_on

import logging
import os
import sys
import threading
import weakref
from contextvars import ContextVar
from operator import index as as_index

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from arena import _registry


cdef extern from "Python.h":
    int PyList_Check(object value)
    int PyTuple_Check(object value)
    void PyList_SET_ITEM(object target, Py_ssize_t index, object value)  # steals: incremented before
    PyObject *PyTuple_GET_ITEM(object source, Py_ssize_t index)
    PyObject *PyList_GET_ITEM(object source, Py_ssize_t index)
    Py_ssize_t PyTuple_GET_SIZE(object source)
    Py_ssize_t PyList_GET_SIZE(object source)
    Py_ssize_t PyDict_GET_SIZE(object source)
    object PyObject_CallOneArg(object call, object argument)
    object PyObject_CallNoArgs(object call)
    int64_t PyLong_AsLongLongAndOverflow(object value, int *overflow)  # of an int: cannot fail
    int PyContextVar_Get(object var, PyObject *instead, PyObject **value) except -1
    int PyContextVar_CheckExact(object value)
    PyObject *PyDict_GetItemWithError(object source, object key) except? NULL
    Py_ssize_t PyLong_AsSsize_t(object value) except? -1
    object PyTuple_New(Py_ssize_t count)
    void PyTuple_SET_ITEM(object target, Py_ssize_t index, object value)  # steals
    void Py_XDECREF(PyObject *value)
    ctypedef PyObject *(*PyCFunction)(PyObject *, PyObject *) except NULL
    ctypedef struct PyTypeObject:
        pass
    ctypedef struct PyMethodDef:
        const char *ml_name
        PyCFunction ml_meth
        int ml_flags
        const char *ml_doc
    int METH_FASTCALL, METH_KEYWORDS
    unsigned long PyThread_get_thread_ident()

cdef extern from "workspace.h":
    int ARENA_DEBUG
    int replace_method(PyTypeObject *kind, PyMethodDef *method) except -1
    PyObject *const *tuple_items(object source)
    PyObject *call_method(object method, PyObject *self, PyObject *const *args, size_t count, PyObject *names) except NULL
    int KEPT_DIMS
    uint64_t dict_version(object names)
    ctypedef struct kept_tensor:
        PyObject *tensor
    int kept_set(kept_tensor *kept, void *handle, object tensor, object dtype, object shape)
    bint kept_is(const kept_tensor *kept, PyObject *shape, PyObject *dtype)
    void kept_drop(kept_tensor *kept)
    bint overflows_times "__builtin_mul_overflow"(int64_t, int64_t, int64_t *)
    bint overflows_plus "__builtin_add_overflow"(int64_t, int64_t, int64_t *)
    int REQUEST_WORDS, REQUEST_PLACES, REQUEST_ROOM
    int MODE_GRAD, MODE_INFERENCE
    ctypedef struct view_mark:
        void *handle
    ctypedef struct request:
        uint64_t hash
        size_t count
        size_t views
        void *tensors
        view_mark *marks
        bint shared
    bint modes_known()
    unsigned int modes_now()
    void modes_at(size_t offset)
    void modes_forget()
    int64_t (*dispatch_modes)()
    int find_torch_symbols()
    int view_mark_set(view_mark *mark, void *handle)
    bint marks_hold(const request *known)
    uint64_t words_hash(const int64_t *words, size_t count)
    request *request_new(uint64_t hash, const int64_t *words, size_t count, size_t views, bint marked)
    void request_free(request *known)
    request **request_place(request **table, uint64_t hash, const int64_t *words, size_t count)

log = logging.getLogger("arena")

cdef object detach = torch._C.TensorBase.detach
cdef object as_strided = torch._C.TensorBase.as_strided
cdef object exact_tensor = torch.Tensor
cdef object grad_mode = torch.is_grad_enabled
cdef object inference_mode = torch.is_inference_mode_enabled
cdef object dispatch_depth = torch._C._len_torch_dispatch_stack
cdef object tensor_handle = torch._C._aoti.unsafe_alloc_void_ptr_from_tensor if hasattr(torch._C, "_aoti") else None
cdef bint markable = find_torch_symbols() and tensor_handle is not None

cdef object dtype_type = torch.dtype

cdef enum:
    ALIGN = 256


cdef bint modes_are_read():
    """Whether modes_now() follows the modes, as Python sets them."""
    with torch.inference_mode(False), torch.enable_grad():
        right = modes_now() == MODE_GRAD
    with torch.inference_mode(False), torch.no_grad():
        right = right and modes_now() == 0
    with torch.inference_mode():
        return right and modes_now() == MODE_INFERENCE


cdef void find_modes():
    for offset in (0, 24):
        if modes_known():
            modes_at(offset)
            if modes_are_read():
                return
    modes_forget()  # Python is asked


find_modes()


cdef inline unsigned int modes():
    if modes_known():
        return modes_now()
    return (MODE_GRAD if grad_mode() else 0) | (MODE_INFERENCE if inference_mode() else 0)


cdef inline bint dispatching() except -1:
    """Whether somebody (FakeTensorMode, say) sees every torch operation of this thread: nothing of it may be kept."""
    return dispatch_modes() > 0 if dispatch_modes != NULL else dispatch_depth() > 0


# ---- blocks and slots ----

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
        cdef request *known
        if self.known == 0:
            return
        self.known = 0
        for i in range(REQUEST_PLACES):
            known, self.table[i] = self.table[i], NULL
            if known != NULL:
                drop(known)

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
        cdef Block before = self.block
        self.block = None  # before the rest, which may let other threads run: they keep no views of it then
        self.forget()
        if before is not None and before.base is not base:
            self.retired = [former for former in self.retired if not former[0].expired()]
            self.retired.append((StorageWeakRef(before.storage), weakref.ref(before), before.nbytes, before.site))
        before = None
        if base is not None:
            self.block = Block(base)
        return 0

    cdef list remember(self, Block block, const int64_t *words, size_t count, list views, bint reuse):
        """Keeps what answers that request of `block`, from the second time on: many requests never come again. Returns what to
        hand out. Without memory nothing is kept."""
        cdef uint64_t hash = words_hash(words, count)
        cdef request *known
        cdef request **place
        cdef bint again
        cdef tuple kept
        if self.table == NULL:
            self.table = <request **>calloc(REQUEST_PLACES, sizeof(request *))
            if self.table == NULL:
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
                views = fresh(kept)
        if self.known == REQUEST_ROOM and request_place(self.table, hash, words, count)[0] == NULL:
            self.forget()
        # torch's operations, and the end of a tensor, let other threads run: the slot may have grown meanwhile.
        if self.block is not block:
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


# ---- which slot ----

cdef object ubatch_name = "dbo_current_ubatch_id"
cdef object lane_name = "_workspace_lane"
cdef object threads_name = "_THREAD_ID_TO_CONTEXT"
cdef object ubatching_name = "vllm.v1.worker.ubatching"
cdef dict loaded = sys.modules
cdef dict ubatching = None        # that module's names, once it is loaded
cdef object ubatching_asks = None  # its function, if it does what we do in its place
cdef Py_ssize_t looked = 0         # modules that were loaded when we looked last
workspace_ubatch_id = ContextVar("arena_workspace_ubatch_id", default=None)  # wins over what the thread works on
cdef object override = workspace_ubatch_id


def dbo_current_ubatch_id():
    """The ubatch that the calling thread works on: vLLM's, where its ubatching is loaded; else 0."""
    if ubatching is None and not find_ubatching():
        return 0
    return ubatch_of_thread() if ubatching_asks is not None else ubatching[ubatch_name]()


cdef object own_ubatch = dbo_current_ubatch_id


cdef bint find_ubatching() except -1:
    """vLLM's module, if somebody imported it: it is never imported from here."""
    global ubatching, ubatching_asks, looked
    cdef PyObject *module
    if PyDict_GET_SIZE(loaded) == looked:
        return False
    module = PyDict_GetItem(loaded, ubatching_name)
    if module == NULL:
        looked = PyDict_GET_SIZE(loaded)
        return False
    names = vars(<object>module)
    function = names.get(ubatch_name)
    if function is None:
        return False  # half imported
    code = getattr(function, "__code__", None)
    if code is not None and set(code.co_names) == {"len", threads_name, "threading", "get_ident"}:
        ubatching_asks = function
    ubatching = names
    return True


cdef Py_ssize_t ubatch_of_thread() except? -1:
    """What vLLM's own function does: no thread has an ubatch, or this one must."""
    cdef PyObject *found = PyDict_GetItemWithError(ubatching, threads_name)
    if found == NULL or PyDict_GET_SIZE(<object>found) == 0:
        return 0
    return (<dict>found)[PyThread_get_thread_ident()]


# ---- the request path ----

cdef class Requests:
    """The request path, in front of the class that grows the slots.

    A concrete manager is `class WorkspaceManager(Requests, X)`. X has vLLM's `__init__`, `_ensure_workspace_size`,
    `get_persistent_resource` and the rest; `namespace` is the globals of the module that callers patch; `own_ids` says that
    X finds a slot as 0.33 does, by `_workspace_lane` and `dbo_current_ubatch_id` in there.
    """

    cdef Slots blocks
    cdef list resources
    cdef dict names                 # the globals of `namespace`
    cdef uint64_t looked            # their version when the next two were looked up; 0: look
    cdef PyObject *lane_now         # what _workspace_lane is; theirs
    cdef PyObject *ubatch_now       # what dbo_current_ubatch_id is; theirs
    cdef public Py_ssize_t _num_lanes
    cdef public bint reuse_views
    cdef public bint strict
    cdef public object watch        # None, or what is told of each request: see arena.overlaps
    cdef object growing             # one growth at a time
    cdef bint asks                  # the driver can say what is capturing
    cdef bint own_ids               # the class behind has no other way to find the slot than slot_index()
    cdef uint64_t walked            # the capture that `held` is of
    cdef set held                   # addresses of storages of persistent resources that it retained
    cdef object __weakref__

    def __cinit__(self, *args, **kwargs):
        self.growing = threading.RLock()
        self.names = type(self).namespace
        self.asks = True
        self.own_ids = type(self).own_ids
        managers.add(self)
        if retain_current not in _registry.begin_hooks:
            _registry.begin_hooks.append(retain_current)

    @property
    def _current_workspaces(self):
        return self.blocks

    @_current_workspaces.setter
    def _current_workspaces(self, tensors):
        self.blocks = Slots(tensors)

    @property
    def _persistent_resources(self):
        return self.resources

    @_persistent_resources.setter
    def _persistent_resources(self, resources):
        cdef Slot slot
        self.resources = resources
        for slot in self.blocks.slots if self.blocks is not None else ():
            slot.kept.clear()

    def get_simultaneous(self, *shapes_and_dtypes):
        """Views of one slot, valid until the next request on it.

        Args:
            *shapes_and_dtypes: (shape, dtype) pairs; a shape is any sequence of ints.

        Returns:
            A list of tensors, one for each pair, contiguous, uninitialised, each aligned to 256 bytes, none overlapping.

        Raises:
            AssertionError: The slot is too small and the workspace is locked.
            ValueError: A size is negative, or the request is larger than an address space.
            torch.OutOfMemoryError: There is no memory to grow; the slot is what it was.
        """
        return self.first(shapes_and_dtypes)  # but see serve_call()

    def try_get_simultaneous(self, *shapes_and_dtypes):
        """As `get_simultaneous`, but None where the workspace is locked and the slot too small. Nothing changes then."""
        if self._locked and bytes_needed(shapes_and_dtypes) > self.available_bytes():
            return None
        return self.get_simultaneous(*shapes_and_dtypes)

    def available_bytes(self):
        """The size of the current slot. Nothing is allocated."""
        cdef Slot slot = <Slot>self.blocks.slots[self.slot_index()]
        return slot.block.nbytes if slot.block is not None else 0

    def _get_workspace_id(self):
        """The current slot's place in the list of slots."""
        return self.slot_index()

    def get_persistent_resource(self, key, factory):
        """The resource that is kept for `key` in the current slot; `factory()` makes it the first time.

        Raises:
            AssertionError: There is none, and the workspace is locked.
        """
        cdef PyObject *found = PyDict_GetItemWithError(self.resources_here(self.slot_index()), key)
        resource = <object>found if found != NULL else super().get_persistent_resource(key, factory)
        if self.asks:
            self.cover_resource(resource)
        return resource

    def get_persistent(self, key, shape, dtype, *, zero_init=False):
        """A tensor of fixed shape that is kept for `key` in the current slot, zeroed (or not) when it is made.

        Raises:
            ValueError: It exists with another shape or dtype.
            AssertionError: There is none, and the workspace is locked.
        """
        found = super().get_persistent(key, shape, dtype, zero_init=zero_init)
        (<Slot>self.blocks.slots[self.slot_index()]).keep(key, found, shape, dtype)
        return found

    cdef inline dict resources_here(self, Py_ssize_t index):
        return <dict>PyList_GET_ITEM(self.resources, index)

    cdef Py_ssize_t slot_index(self) except -1:
        cdef Py_ssize_t lane, ubatch, index
        if self.own_ids:
            if self.looked == 0 or self.looked != dict_version(self.names):
                self.look()
            lane = context_int(self.lane_now)
            if lane >= self._num_lanes:
                raise RuntimeError(
                    f"Workspace lane {lane} is not configured; manager has {self._num_lanes} lane(s).")
            ubatch = context_int(<PyObject *>override)
            index = (ubatch if ubatch >= 0 else self.ubatch_here()) * self._num_lanes + lane
        else:
            index = super(Requests, self)._get_workspace_id()
        if not 0 <= index < PyList_GET_SIZE(self.blocks.slots):
            raise IndexError(f"workspace slot {index}: the manager has {len(self.blocks.slots)}")
        return index

    cdef inline Py_ssize_t ubatch_here(self) except? -1:
        """What the function says that the module has now; without a call if it is vLLM's own, or ours."""
        if self.ubatch_now == <PyObject *>own_ubatch:
            if ubatching is None and not find_ubatching():
                return 0
            if ubatching_asks is not None:
                return ubatch_of_thread()
        elif ubatching_asks is not None and self.ubatch_now == <PyObject *>ubatching_asks:
            return ubatch_of_thread()
        elif ubatching is None:
            find_ubatching()
        return PyObject_CallNoArgs(<object>self.ubatch_now)

    cdef int look(self) except -1:
        self.lane_now = self.name(lane_name)
        self.ubatch_now = self.name(ubatch_name)
        self.looked = dict_version(self.names)
        return 0

    cdef PyObject *name(self, object name) except NULL:
        cdef PyObject *found = PyDict_GetItemWithError(self.names, name)
        if found == NULL:
            raise NameError(f"{name} is gone from {self.names.get('__name__')}")
        return found

    cdef list serve(self, PyObject *const *specs, Py_ssize_t given):
        """A request that was seen before on the slot's block; None: it was not."""
        cdef int64_t[128] words
        cdef Py_ssize_t count = flatten(specs, given, words)
        cdef Slot slot
        cdef Block block
        cdef request *known
        cdef list served
        if count < 0:
            return None
        slot = <Slot>PyList_GET_ITEM(self.blocks.slots, self.slot_index())
        block = slot.block
        if block is None or slot.known == 0 or dispatching():
            return None
        words[0] = modes()
        known = request_place(slot.table, words_hash(words, count), words, count)[0]
        if known == NULL or known.tensors == NULL:
            return None
        if known.marks != NULL and not marks_hold(known):  # somebody changed the tensor that we had given out
            if not known.shared:
                raise AssertionError("a kept view has changed that nobody was given: was the block itself resized?")
            return None
        served = same(<tuple>known.tensors) if known.shared else fresh(<tuple>known.tensors)
        if self.asks:
            self.cover(block)
        return served

    cdef list first(self, tuple given):
        """A request that no kept view answers."""
        cdef int64_t[128] words
        cdef Py_ssize_t count
        cdef int64_t total = -1
        cdef int64_t[64] starts
        cdef Py_ssize_t i
        cdef Slot slot = <Slot>self.blocks.slots[self.slot_index()]
        cdef Block block = slot.block
        cdef list served = []
        cdef list offsets = None
        cdef unsigned int now = modes()
        # What is made under somebody's mode (FakeTensorMode) stays in no slot and in no table.
        cdef bint keep = not dispatching()
        # Where gradients are recorded, a view that was handed out may have a history.
        cdef bint reuse = self.reuse_views and markable and not now & MODE_GRAD
        cdef tuple specs = given
        count = flatten(tuple_items(given), PyTuple_GET_SIZE(given), words)
        if count >= 0:
            total = place_plain(given, words, starts)
        if total < 0:  # or it is wrong, and this says how
            specs = normal(given)
            offsets = place(specs)
            total = offsets.pop()
            count = flatten_normal(specs, words)
        if total > (block.nbytes if block is not None else 0):
            block = None  # or growing could not free it
            if keep:
                block = self.grow(slot, total, specs)
            elif self._locked:
                block = Block(self._ensure_workspace_size(total))
            else:
                block = Block(torch.empty((total,), dtype=torch.uint8, device=self._device))
        elif block is None:  # nothing but empty tensors, and no block yet
            return [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in specs]
        for i in range(PyTuple_GET_SIZE(specs)):
            spec = <object>PyTuple_GET_ITEM(specs, i)
            served.append(block.view(
                <object>PyTuple_GET_ITEM(spec, 1), now, <tuple>PyTuple_GET_ITEM(spec, 0),
                starts[i] if offsets is None else <int64_t>offsets[i], keep))
        if keep and count > 0 and slot.block is block and all_exact(served):
            words[0] = now
            served = slot.remember(block, words, count, served, reuse)
        if self.asks:
            self.cover(block)
        if self.watch is not None:
            self.watch(self, slot, specs, served)
        return served

    cdef Block grow(self, Slot slot, int64_t total, tuple specs):
        """The slot's block, grown to `total` bytes. Fails without loss: the slot then has its old size."""
        cdef int64_t before
        cdef Py_ssize_t index
        if _registry.pending() and not _registry.capture_open():
            _registry.reclaim()  # a block whose last graph is dead must not stand beside the larger one
        with self.growing:
            before = slot.block.nbytes if slot.block is not None else 0
            if before >= total:  # another thread was faster
                return slot.block
            if self.strict and not self._locked:
                self.refuse_growth(slot, total)
            weak = StorageWeakRef(slot.block.storage) if before else None
            index = self.blocks.slots.index(slot)
            try:
                base = self._ensure_workspace_size(total)
            except BaseException:
                if self.blocks[index] is None and before:
                    self.blocks[index] = self.former(weak, before)
                raise
            if slot.block is None or slot.block.base is not base:
                self.blocks[index] = base
            slot.block.site = call_site()
            if slot.high is None or total > slot.high[0]:
                slot.high = (total, specs, slot.block.site)
            return slot.block

    cdef object former(self, object weak, int64_t nbytes):
        """The memory that a failed growth let go of: the same where something holds it, else fresh, else None."""
        storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
        if storage is not None:
            return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (nbytes,), (1,))
        try:
            with self._alloc_context():
                return torch.empty((nbytes,), dtype=torch.uint8, device=self._device)
        except Exception:
            log.warning("a workspace slot of %d bytes is empty: growing it failed, and so did going back", nbytes)
            return None

    cdef int refuse_growth(self, Slot slot, int64_t total) except -1:
        cdef uint64_t capture = 0
        cdef void *stream = NULL
        cdef int i
        cdef Block block = slot.block
        before = slot.block.nbytes if slot.block is not None else 0
        what = f"the workspace would grow from {before} to {total} bytes for '{call_site()}'"
        if current_capture(&stream, &capture):
            raise RuntimeError(f"strict workspace: {what} inside {named(capture)}; size it before")
        if block is not None and Py_REFCNT(block) > 2:  # more than the slot and this function: a graph's list
            graphs = " and ".join([named(each) for each in sorted([block.captures[i] for i in range(8) if block.captures[i]])])
            raise RuntimeError(f"strict workspace: {what}, but a graph of {graphs} uses its block")
        return 0

    cdef int cover(self, Block block) except -1:
        """A capture that is served a block retains it: that one, though another thread may have grown the slot since."""
        cdef uint64_t capture
        cdef void *stream
        try:
            if current_capture(&stream, &capture):
                block.retain_for(capture, stream, False)
        except Exception as error:
            self.cannot_cover(error)
        return 0

    cdef int cover_resource(self, object resource) except -1:
        cdef uint64_t capture
        cdef void *stream
        try:
            if current_capture(&stream, &capture):
                self.retain_resource(resource, capture, stream)
        except Exception as error:
            self.cannot_cover(error)
        return 0

    cdef int retain_resource(self, object resource, uint64_t capture, void *stream) except -1:
        """The resource and the storages in it as they are now: it may come to hold others later."""
        if self.walked != capture:
            self.walked = capture
            self.held = set()
        if id(resource) not in self.held:
            retain_on(resource, stream)
            self.held.add(id(resource))
        for tensor in tensors_in(resource):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.held:
                retain_on(storage, stream)
                self.held.add(storage._cdata)
        return 0

    cdef int cannot_cover(self, object error) except -1:
        """Nobody's capture fails because we could not hold on to something; but it is said."""
        if isinstance(error, _registry.CaptureError):
            log.warning("a capture was served scratch that it does not retain: %s", error)
        else:
            log.warning("the workspace does not retain what captures use: %s", error)
            self.asks = driver_usable()  # one failed call is no reason never to ask again
        return 0

    cdef int cover_all(self, uint64_t capture, void *stream) except -1:
        cdef Slot slot
        if self.blocks is None:
            return 0
        self.walked = 0
        for slot in self.blocks.slots:
            if slot.block is not None:
                slot.block.retain_for(capture, stream, True)
        for resources in self.resources or ():
            for resource in list(resources.values()):
                self.retain_resource(resource, capture, stream)
        return 0


# get_simultaneous() as the interpreter calls it: without a tuple of the arguments where the request was seen before.

cdef PyObject *serve_call(PyObject *self, PyObject *const *args, Py_ssize_t count) except NULL:
    cdef Requests manager = <Requests>self
    served = manager.serve(args, count) if manager.watch is None else None
    if served is None:
        served = manager.first(tuple([<object>args[i] for i in range(count)]))
    Py_INCREF(served)
    return <PyObject *>served


# The same for the other two: keywords, and what was not asked for before, go to the methods above.

cdef PyObject *resource_call(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names) except NULL:
    cdef Requests manager = <Requests>self
    cdef PyObject *found = NULL
    if count == 2 and names == NULL:
        found = PyDict_GetItemWithError(manager.resources_here(manager.slot_index()), <object>args[0])
    if found == NULL:
        return call_method(resource_slow, self, args, count, names)
    Py_INCREF(<object>found)
    if manager.asks:
        manager.cover_resource(<object>found)
    return found


cdef bint only_zero_init(object names) except -1:
    return PyTuple_GET_SIZE(names) == 1 and <object>PyTuple_GET_ITEM(names, 0) == "zero_init"


cdef PyObject *persistent_call(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names) except NULL:
    cdef Requests manager = <Requests>self
    cdef PyObject *found = NULL
    cdef Py_ssize_t index
    if count == 3 and (names == NULL or only_zero_init(<object>names)):
        index = manager.slot_index()
        found = (<Slot>PyList_GET_ITEM(manager.blocks.slots, index)).persistent(
            manager.resources_here(index), <object>args[0], args[1], args[2])
    if found == NULL:
        return call_method(persistent_slow, self, args, count, names)
    Py_INCREF(<object>found)
    if manager.asks:
        manager.cover_resource(<object>found)
    return found


cdef object resource_slow = Requests.get_persistent_resource
cdef object persistent_slow = Requests.get_persistent
cdef object torch_tensor = torch.Tensor
cdef bytes resource_doc = b"get_persistent_resource(self, key, factory)\n--\n\n" + resource_slow.__doc__.encode()
cdef bytes persistent_doc = (
    b"get_persistent(self, key, shape, dtype, *, zero_init=False)\n--\n\n" + persistent_slow.__doc__.encode())
cdef PyMethodDef resource_method
resource_method.ml_name = "get_persistent_resource"
resource_method.ml_meth = <PyCFunction><void *>resource_call
resource_method.ml_flags = METH_FASTCALL | METH_KEYWORDS
resource_method.ml_doc = resource_doc
cdef PyMethodDef persistent_method
persistent_method.ml_name = "get_persistent"
persistent_method.ml_meth = <PyCFunction><void *>persistent_call
persistent_method.ml_flags = METH_FASTCALL | METH_KEYWORDS
persistent_method.ml_doc = persistent_doc
replace_method(<PyTypeObject *>Requests, &resource_method)
replace_method(<PyTypeObject *>Requests, &persistent_method)


cdef bytes serve_doc = b"get_simultaneous(self, *shapes_and_dtypes)\n--\n\n" + Requests.get_simultaneous.__doc__.encode()
cdef PyMethodDef serve_method
serve_method.ml_name = "get_simultaneous"
serve_method.ml_meth = <PyCFunction><void *>serve_call
serve_method.ml_flags = METH_FASTCALL
serve_method.ml_doc = serve_doc
replace_method(<PyTypeObject *>Requests, &serve_method)


cdef bint driver_usable():
    try:
        _registry.driver_version()
    except _registry.DriverError:
        return False
    return True


managers = weakref.WeakSet()


def retain_current():
    """A managed capture has begun on the current stream: views of what the slots hold now may be used in it."""
    cdef uint64_t capture
    cdef void *stream
    if current_capture(&stream, &capture):
        for manager in list(managers):
            (<Requests>manager).cover_all(capture, stream)


# ---- what a request asks for ----

cdef Py_ssize_t flatten(PyObject *const *specs, Py_ssize_t given, int64_t *words) except -2:
    """The request as words, from words[1]; how many in all. -1: not plain (see `normal`), or too long."""
    cdef Py_ssize_t count = 1, i, j, dim
    cdef PyObject *shape
    cdef PyObject *size
    cdef int overflow = 0
    for i in range(given):
        if not PyTuple_CheckExact(<object>specs[i]) or PyTuple_GET_SIZE(<object>specs[i]) != 2:
            return -1
        shape = PyTuple_GET_ITEM(<object>specs[i], 0)
        if not PyTuple_Check(<object>shape):
            return -1
        dim = PyTuple_GET_SIZE(<object>shape)
        if count + 2 + dim > REQUEST_WORDS:
            return -1
        words[count] = <int64_t>PyTuple_GET_ITEM(<object>specs[i], 1)
        words[count + 1] = dim
        count += 2
        for j in range(dim):
            size = PyTuple_GET_ITEM(<object>shape, j)
            if not PyLong_CheckExact(<object>size):
                return -1
            words[count] = PyLong_AsLongLongAndOverflow(<object>size, &overflow)
            if overflow:
                return -1
            count += 1
    return count


cdef Py_ssize_t flatten_normal(tuple specs, int64_t *words) except -2:
    return flatten(tuple_items(specs), PyTuple_GET_SIZE(specs), words)


cdef tuple normal(tuple specs):
    """The same request with exact tuples and ints, checked."""
    cdef list found = []
    for spec in specs:
        try:
            shape, dtype = spec
            if type(shape) is not tuple or not all_ints(shape):
                shape = tuple([as_index(size) for size in shape])
        except (TypeError, ValueError):
            raise TypeError(f"a workspace request is made of (shape, dtype) pairs, not {spec!r}") from None
        if type(dtype) is not dtype_type:
            raise TypeError(f"a workspace request is made of (shape, dtype) pairs; {dtype!r} is not a torch.dtype")
        found.append((shape, dtype))
    return tuple(found)


cdef bint all_ints(tuple values):
    for value in values:
        if not PyLong_CheckExact(value):
            return False
    return True


cdef bint all_exact(list tensors):
    for each in tensors:
        if type(each) is not exact_tensor:
            return False
    return True


cdef int64_t place_plain(tuple specs, const int64_t *words, int64_t *starts) except -2:
    """`place` for a request that `flatten` took, by its words; -1: it is not plain, or not right."""
    cdef Py_ssize_t i, j
    cdef int64_t nbytes, total = 0
    cdef object spec
    words += 1
    for i in range(PyTuple_GET_SIZE(specs)):
        spec = <object>PyTuple_GET_ITEM(specs, i)
        if type(<object>PyTuple_GET_ITEM(spec, 1)) is not dtype_type:
            return -1
        if not PyTuple_CheckExact(<object>PyTuple_GET_ITEM(spec, 0)):
            return -1
        starts[i] = total
        nbytes = dtype_size(<object>PyTuple_GET_ITEM(spec, 1))
        for j in range(words[1]):
            if words[2 + j] < 0 or overflows_times(nbytes, words[2 + j], &nbytes):
                return -1
        words += 2 + words[1]
        if overflows_plus(nbytes, ALIGN - 1, &nbytes) or overflows_plus(total, nbytes // ALIGN * ALIGN, &total):
            return -1
    return total


cdef list place(tuple specs):
    """Where each tensor of a normal request begins, in bytes; and, last, what they take in all."""
    cdef int64_t nbytes, total = 0
    cdef list offsets = []
    for shape, dtype in specs:
        offsets.append(total)
        nbytes = dtype_size(dtype)
        try:
            for size in shape:
                if size < 0:
                    raise ValueError(f"a workspace request has the negative size {size} in the shape {shape}")
                nbytes = times(nbytes, size)
            total = plus(total, plus(nbytes, ALIGN - 1) // ALIGN * ALIGN)
        except OverflowError:
            raise ValueError(
                f"a workspace request of shape {shape} and {dtype} needs more bytes than an address space holds") from None
    offsets.append(total)
    return offsets


cdef inline int64_t times(int64_t a, int64_t b) except? -1:
    cdef int64_t product
    if overflows_times(a, b, &product):
        raise OverflowError
    return product


cdef inline int64_t plus(int64_t a, int64_t b) except? -1:
    cdef int64_t sum
    if overflows_plus(a, b, &sum):
        raise OverflowError
    return sum


cdef dict dtype_sizes = {}

cdef inline int64_t dtype_size(object dtype) except -1:
    cdef PyObject *known = PyDict_GetItemWithError(dtype_sizes, dtype)
    if known == NULL:
        dtype_sizes[dtype] = dtype.itemsize
        return dtype.itemsize
    return <object>known


def bytes_needed(specs):
    """What a request of these (shape, dtype) pairs takes of a slot."""
    return place(normal(tuple(specs)))[-1]


# ---- handing out ----

cdef list fresh(tuple tensors):
    """New tensor objects over the kept views, which nobody else ever sees."""
    cdef Py_ssize_t i, count = PyTuple_GET_SIZE(tensors)
    cdef list served = PyList_New(count)
    for i in range(count):
        view = PyObject_CallOneArg(detach, <object>PyTuple_GET_ITEM(tensors, i))
        Py_INCREF(view)
        PyList_SET_ITEM(served, i, view)
    return served


cdef list same(tuple tensors):
    cdef Py_ssize_t i, count = PyTuple_GET_SIZE(tensors)
    cdef list served = PyList_New(count)
    for i in range(count):
        Py_INCREF(<object>PyTuple_GET_ITEM(tensors, i))
        PyList_SET_ITEM(served, i, <object>PyTuple_GET_ITEM(tensors, i))
    return served


cdef inline Py_ssize_t context_int(PyObject *var) except? -2:
    """The int that a ContextVar holds; -1 for None."""
    cdef PyObject *value = NULL
    cdef Py_ssize_t number
    if not PyContextVar_CheckExact(<object>var):  # replaced by something like it
        got = (<object>var).get()
        return -1 if got is None else got
    PyContextVar_Get(<object>var, NULL, &value)
    if value == NULL:
        raise LookupError(f"{<object>var!r} has no value and no default")
    number = -1 if value == <PyObject *>None else PyLong_AsSsize_t(<object>value)
    Py_DECREF(<object>value)
    return number


cdef str named(uint64_t capture):
    """A capture by its id, and by its name or where it began if that is known."""
    from arena import captures

    noted = captures.of(capture)
    return f"capture {capture}" if noted is None else f"capture {capture} ({noted.name})"


cdef str call_site():
    """The first Python frame outside this package, as "file:line:function"."""
    frame = sys._getframe()
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith("arena."):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "unknown"


cpdef list tensors_in(object resource):
    """The tensors that a persistent resource is made of: itself, or what its containers and attributes hold."""
    found, seen, waiting = [], set(), [resource]
    while waiting and len(seen) < 10_000:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, dict):
            waiting.extend(each.values())
        elif isinstance(each, (list, tuple, set, frozenset)):
            waiting.extend(each)
        elif not isinstance(each, (type, str, bytes, int, float)) and not callable(each):
            waiting.extend(vars(each).values() if hasattr(each, "__dict__") else ())
            for kind in type(each).__mro__:
                for name in getattr(kind, "__slots__", ()):
                    waiting.append(getattr(each, name, None))
    return found
