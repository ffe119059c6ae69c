# cython: language_level=3
"""Scratch by slot: the request path of `arena.workspace`, and what ties a slot's block to the graphs that use it.

It owns the blocks of a manager's slots, the views of them that were asked for before, and the note of which capture holds
which block. A request that was seen before on the same block costs one cheap torch operation a tensor, or none. A block that
a graph uses is retained by that graph, so a slot that grows merely lets go of it: it lives exactly as long as its last graph
or view. Any thread may call, with the GIL; growth gives the GIL up and is one at a time in each manager.
"""

cimport cython
from cpython.dict cimport PyDict_GetItem
from cpython.list cimport PyList_New
from cpython.long cimport PyLong_CheckExact, PyLong_FromVoidPtr
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_REFCNT
from cpython.tuple cimport PyTuple_CheckExact
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc

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
    int64_t PyLong_AsLongLong(object value) except? -1
    int PyContextVar_Get(object var, PyObject *instead, PyObject **value) except -1
    int PyContextVar_CheckExact(object value)
    unsigned long PyThread_get_thread_ident()

cdef extern from "workspace.h":
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
        int64_t words[1]
    bint modes_known()
    unsigned int modes_now()
    void modes_forget()
    int64_t (*dispatch_modes)()
    int find_torch_symbols()
    int view_mark_set(view_mark *mark, void *handle)
    bint marks_hold(const request *known)
    uint64_t words_hash(const int64_t *words, size_t count)
    void request_free(request *known)
    request **request_place(request **table, uint64_t hash, const int64_t *words, size_t count)

log = logging.getLogger("arena")

cdef object detach = torch._C.TensorBase.detach
cdef object exact_tensor = torch.Tensor
cdef object grad_mode = torch.is_grad_enabled
cdef object inference_mode = torch.is_inference_mode_enabled
cdef object dispatch_depth = torch._C._len_torch_dispatch_stack
cdef object tensor_handle = torch._C._aoti.unsafe_alloc_void_ptr_from_tensor if hasattr(torch._C, "_aoti") else None
cdef bint markable = find_torch_symbols() and tensor_handle is not None

ALIGNMENT = 256
cdef enum:
    ALIGN = 256
cdef int64_t LARGEST = 2**63 - 1 - ALIGN

CAN_REUSE = markable


cdef void check_modes():
    """The byte that modes_now() reads means what we think, or Python is asked from now on."""
    if not modes_known():
        return
    with torch.inference_mode(False), torch.enable_grad():
        right = modes_now() == MODE_GRAD
    with torch.inference_mode(False), torch.no_grad():
        right = right and modes_now() == 0
    with torch.inference_mode():
        right = right and modes_now() & MODE_INFERENCE
    if not right:
        modes_forget()


check_modes()


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
    cdef dict typed                    # (dtype, modes) -> (base as that dtype, its storage offset)
    cdef uint64_t[8] captures          # the last that retained it: one may not be asked twice
    cdef unsigned int turn             # of `captures`, to be replaced next
    cdef object __weakref__

    def __init__(self, base):
        self.base = base
        self.storage = base.untyped_storage()
        self.nbytes = base.numel() * base.element_size()
        self.typed = {}

    def __repr__(self):
        return f"<workspace block of {self.nbytes} bytes at {self.base.data_ptr():#x}>"

    cdef int retain_for(self, uint64_t capture, void *stream) except -1:
        """Once per capture."""
        cdef int i
        for i in range(8):
            if self.captures[i] == capture:
                return 0
        if retain_on(self, stream):
            self.captures[self.turn] = capture
            self.turn = (self.turn + 1) % 8
        return 0

    cdef object view(self, object dtype, unsigned int modes, const int64_t *shape, int64_t dim, int64_t offset):
        """A contiguous view, `offset` bytes into the block."""
        cdef int64_t i, stride = 1
        cdef tuple base = self.typed.get((dtype, modes))
        if base is None:
            size = dtype.itemsize
            whole = self.base if self.nbytes % size == 0 else self.base[: self.nbytes // size * size]
            typed = whole.view(dtype)
            base = (typed, typed.storage_offset(), size)
            self.typed[(dtype, modes)] = base
        sizes = [None] * dim
        strides = [None] * dim
        for i in range(dim - 1, -1, -1):
            sizes[i] = shape[i]
            strides[i] = stride
            stride *= shape[i] if shape[i] else 1
        return base[0].as_strided(sizes, strides, base[1] + offset // <int64_t>base[2])


@cython.final
cdef class Slot:
    """One (ubatch, lane): its block, and the requests that were seen on it."""

    cdef Block block            # None while the slot is empty
    cdef request **table        # of REQUEST_PLACES, or NULL
    cdef size_t known           # requests in it
    cdef readonly list retired  # (StorageWeakRef, weakref of the Block, bytes, site) of former blocks that may still live
    cdef readonly object high   # the largest request: (bytes, ((shape, dtype), ...), site), or None

    def __cinit__(self):
        self.retired = []

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

    cdef int take(self, object base) except -1:
        """`base` (a tensor or None) is the slot's memory from now on."""
        cdef Block before = self.block
        self.forget()
        self.block = None
        if before is not None and before.base is not base:
            self.retired = [former for former in self.retired if not former[0].expired()]
            self.retired.append((StorageWeakRef(before.storage), weakref.ref(before), before.nbytes, before.site))
        before = None
        if base is not None:
            self.block = Block(base)
        return 0

    cdef int remember(self, uint64_t hash, const int64_t *words, size_t count, list tensors, bint reuse) except -1:
        cdef request *known
        cdef request **place
        cdef size_t i
        if self.table == NULL:
            self.table = <request **>calloc(REQUEST_PLACES, sizeof(request *))
            if self.table == NULL:
                return 0  # served all the same
        if self.known == REQUEST_ROOM:
            self.forget()
        known = <request *>calloc(1, sizeof(request) + count * sizeof(int64_t))
        if known == NULL:
            return 0
        known.hash = hash
        known.count = count
        known.views = len(tensors)
        for i in range(count):
            known.words[i] = words[i]
        if reuse and known.views:
            known.marks = <view_mark *>calloc(known.views, sizeof(view_mark))
            if known.marks == NULL:
                request_free(known)
                return 0
            for i in range(known.views):
                if view_mark_set(&known.marks[i], <void *><size_t>tensor_handle(tensors[i])):
                    request_free(known)
                    return 0
        kept = tuple(tensors)
        Py_INCREF(kept)
        known.tensors = <void *>kept
        place = request_place(self.table, hash, words, count)
        if place[0] != NULL:
            known, place[0] = place[0], known
            drop(known)
        else:
            place[0] = known
            self.known += 1
        return 0


cdef void drop(request *known):
    tensors = <object>known.tensors
    request_free(known)
    Py_DECREF(tensors)


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
cdef object override_name = "_workspace_ubatch_id"
cdef object threads_name = "_THREAD_ID_TO_CONTEXT"
cdef object ubatching_name = "vllm.v1.worker.ubatching"
cdef dict modules = sys.modules
cdef dict ubatching = None        # that module's names, once it is loaded
cdef object ubatching_asks = None  # its function, if it does what we do in its place


def dbo_current_ubatch_id():
    """The ubatch that the calling thread works on: vLLM's, where its ubatching is loaded; else 0."""
    cdef Py_ssize_t ubatch
    if ubatching is None and not find_ubatching():
        return 0
    return ubatch_of_thread() if ubatching_asks is not None else ubatching[ubatch_name]()

cdef object own_ubatch = dbo_current_ubatch_id


cdef bint find_ubatching() except -1:
    """vLLM's module, if somebody imported it: it is never imported from here."""
    global ubatching, ubatching_asks
    cdef PyObject *module = PyDict_GetItem(modules, ubatching_name)
    if module == NULL:
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


cdef Py_ssize_t ubatch_of_thread() except -1:
    """What vLLM's own function does: no thread has an ubatch, or this one must."""
    cdef PyObject *found = PyDict_GetItem(ubatching, threads_name)
    if found == NULL or PyDict_GET_SIZE(<object>found) == 0:
        return 0
    return (<dict>found)[PyThread_get_thread_ident()]


# ---- the request path ----

cdef class Requests:
    """The request path, in front of the class that grows the slots.

    A concrete manager is `class WorkspaceManager(Requests, X)`. X has vLLM's `__init__`, `_ensure_workspace_size`,
    `get_persistent_resource` and the rest; `namespace` names the module whose globals callers may patch.
    """

    cdef Slots blocks
    cdef list resources
    cdef dict names
    cdef public Py_ssize_t _num_lanes
    cdef public bint reuse_views
    cdef public bint strict
    cdef public object watch        # None, or what is told of each request: see arena.overlaps
    cdef object growing             # one growth at a time
    cdef bint asks                  # the driver can say what is capturing
    cdef bint own_ids               # _get_workspace_id is the one that slot_index() stands for
    cdef uint64_t walked            # the capture that `held` is of
    cdef set held                   # addresses of storages of persistent resources that it retained
    cdef object __weakref__

    def __cinit__(self, *args, **kwargs):
        self.growing = threading.RLock()
        self.names = type(self).namespace
        self.asks = True
        self.own_ids = getattr(type(self), "_get_workspace_id", None) in KNOWN_IDS
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
        self.resources = resources

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
        return self.serve(shapes_and_dtypes)

    def try_get_simultaneous(self, *shapes_and_dtypes):
        """As `get_simultaneous`, but None where the workspace is locked and the slot too small. Nothing changes then."""
        cdef int64_t[128] words
        cdef Py_ssize_t count
        if self._locked:
            specs = normal(shapes_and_dtypes)
            if total_bytes(specs) > self.available_bytes():
                return None
        return self.serve(shapes_and_dtypes)

    def available_bytes(self):
        """The size of the current slot. Nothing is allocated."""
        cdef Slot slot = self.slot_here()
        return slot.block.nbytes if slot.block is not None else 0

    def get_persistent_resource(self, key, factory):
        """The resource that is kept for `key` in the current slot; `factory()` makes it the first time.

        Raises:
            AssertionError: There is none, and the workspace is locked.
        """
        cdef dict resources = self.resources[self.slot_index()]
        cdef PyObject *found = PyDict_GetItem(resources, key)
        if found == NULL:
            hash(key)  # PyDict_GetItem is silent about a key that cannot be one
            resource = super().get_persistent_resource(key, factory)
        else:
            resource = <object>found
        if self.asks:
            self.cover_resource(resource)
        return resource

    def get_persistent(self, key, shape, dtype, *, zero_init=False):
        """A tensor of fixed shape that is kept for `key` in the current slot, zeroed (or not) when it is made.

        Raises:
            ValueError: It exists with another shape or dtype.
            AssertionError: There is none, and the workspace is locked.
        """
        return super().get_persistent(key, shape, dtype, zero_init=zero_init)

    cdef Slot slot_here(self):
        cdef Py_ssize_t index = self.slot_index()
        return <Slot>self.blocks.slots[index]

    cdef Py_ssize_t slot_index(self) except -1:
        cdef PyObject *found
        cdef PyObject *value = NULL
        cdef Py_ssize_t lane, ubatch = -1, index
        if not self.own_ids:
            index = self._get_workspace_id()
        else:
            lane = read_context(<object>self.name(lane_name))
            if lane >= self._num_lanes:
                raise RuntimeError(
                    f"Workspace lane {lane} is not configured; manager has {self._num_lanes} lane(s).")
            found = PyDict_GetItem(self.names, override_name)
            if found != NULL:
                ubatch = read_context(<object>found)
            if ubatch < 0:
                found = self.name(ubatch_name)
                if <object>found is own_ubatch and (ubatching is not None or not find_ubatching()):
                    ubatch = 0 if ubatching is None else (
                        ubatch_of_thread() if ubatching_asks is not None else ubatching[ubatch_name]())
                elif ubatching_asks is not None and <object>found is ubatching_asks:
                    ubatch = ubatch_of_thread()
                else:
                    if ubatching is None:
                        find_ubatching()
                    ubatch = PyObject_CallNoArgs(<object>found)
            index = ubatch * self._num_lanes + lane
        if not 0 <= index < PyList_GET_SIZE(self.blocks.slots):
            raise IndexError(f"workspace slot {index}: the manager has {len(self.blocks.slots)}")
        return index

    cdef PyObject *name(self, object name) except NULL:
        cdef PyObject *found = PyDict_GetItem(self.names, name)
        if found == NULL:
            raise NameError(f"{name} is gone from {self.names.get('__name__')}")
        return found

    cdef list serve(self, tuple specs):
        cdef int64_t[128] words
        cdef int64_t *key = words
        cdef Py_ssize_t count = flatten(specs, words, REQUEST_WORDS)
        cdef Slot slot
        cdef request *known
        cdef uint64_t hash
        cdef list served
        if count > 0:
            slot = self.slot_here()
            if slot.known and not dispatching():
                words[0] = modes()
                hash = words_hash(words, count)
                known = request_place(slot.table, hash, words, count)[0]
                if known != NULL:
                    if known.marks == NULL:
                        served = fresh(<object>known.tensors)
                    elif marks_hold(known):
                        served = same(<object>known.tensors)
                    else:
                        return self.first(specs)
                    if self.asks:
                        self.cover(slot)
                    if self.watch is not None:
                        self.watch(self, slot, specs, served)
                    return served
        return self.first(specs)

    cdef list first(self, tuple specs):
        """A request that no kept view answers."""
        cdef int64_t *words
        cdef Py_ssize_t count, i, room
        cdef int64_t total, offset = 0
        cdef Slot slot
        cdef Block block
        cdef unsigned int now = modes()
        cdef bint keep = not dispatching()
        cdef list served = [], kept = []
        cdef bint reuse
        specs = normal(specs)
        total = total_bytes(specs)
        room = 1
        for shape, _ in specs:
            room += 2 + len(shape)
        words = <int64_t *>malloc(room * sizeof(int64_t))
        if words == NULL:
            raise MemoryError(f"no memory to note a request of {len(specs)} tensors")
        try:
            count = flatten(specs, words, room)
            words[0] = now
            slot = self.slot_here()
            block = slot.block
            if total > (block.nbytes if block is not None else 0):
                block = None
                if not keep:  # a block made under somebody's mode must not stay in the slot
                    if self._locked:
                        self._ensure_workspace_size(total)
                    block = Block(torch.empty((total,), dtype=torch.uint8, device=self._device))
                else:
                    block = self.grow(slot, total, specs)
            elif block is None:  # nothing but empty tensors, and no block yet
                return [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in specs]
            keep = keep and count <= REQUEST_WORDS and type(block.base) is exact_tensor
            # Where gradients are recorded, a view that was handed out may have a history.
            reuse = self.reuse_views and markable and not now & MODE_GRAD
            i = 1
            for shape, dtype in specs:
                view = block.view(dtype, now, &words[i + 2], words[i + 1], offset)
                keep = keep and type(view) is exact_tensor
                kept.append(view)
                offset += aligned(bytes_of(shape, dtype))
                i += 2 + words[i + 1]
            if keep and slot.block is block:
                served = kept[:] if reuse else fresh(tuple(kept))
                slot.remember(words_hash(words, count), words, count, kept, reuse)
            else:
                served = kept
        finally:
            free(words)
        if self.asks:
            self.cover(slot)
        if self.watch is not None:
            self.watch(self, slot, specs, served)
        return served

    cdef Block grow(self, Slot slot, int64_t total, tuple specs):
        """The slot's block, grown to `total` bytes. Fails without loss: the slot then has its old size."""
        cdef int64_t before
        cdef Py_ssize_t index
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
            raise RuntimeError(f"strict workspace: {what} inside capture {capture}; size it before")
        if block is not None and Py_REFCNT(block) > 2:  # more than the slot and this function: a graph's list
            graphs = sorted([block.captures[i] for i in range(8) if block.captures[i]])
            raise RuntimeError(f"strict workspace: {what}, but the graphs of captures {graphs} use its block")
        return 0

    cdef int cover(self, Slot slot) except -1:
        """A capture that is served a block retains it."""
        cdef uint64_t capture
        cdef void *stream
        try:
            if current_capture(&stream, &capture) and slot.block is not None:
                slot.block.retain_for(capture, stream)
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
            self.asks = False
        return 0

    cdef int cover_all(self, uint64_t capture, void *stream) except -1:
        cdef Slot slot
        if self.blocks is None:
            return 0
        for slot in self.blocks.slots:
            if slot.block is not None:
                slot.block.retain_for(capture, stream)
        for resources in self.resources or ():
            for resource in list(resources.values()):
                self.retain_resource(resource, capture, stream)
        return 0


managers = weakref.WeakSet()
KNOWN_IDS = []  # the `_get_workspace_id` functions that slot_index() stands for


def retain_current():
    """A managed capture has begun on the current stream: views of what the slots hold now may be used in it."""
    cdef uint64_t capture
    cdef void *stream
    if current_capture(&stream, &capture):
        for manager in list(managers):
            (<Requests>manager).cover_all(capture, stream)


# ---- what a request asks for ----

cdef Py_ssize_t flatten(tuple specs, int64_t *words, Py_ssize_t room) except -2:
    """The request as words, from words[1]; how many in all. -1: not plain (see `normal`) or too long."""
    cdef Py_ssize_t count = 1, i, j, dim
    cdef PyObject *spec
    cdef PyObject *shape
    cdef PyObject *size
    for i in range(PyTuple_GET_SIZE(specs)):
        spec = PyTuple_GET_ITEM(specs, i)
        if not PyTuple_CheckExact(<object>spec) or PyTuple_GET_SIZE(<object>spec) != 2:
            return -1
        shape = PyTuple_GET_ITEM(<object>spec, 0)
        if not PyTuple_Check(<object>shape):
            return -1
        dim = PyTuple_GET_SIZE(<object>shape)
        if count + 2 + dim > room:
            return -1
        words[count] = <int64_t>PyTuple_GET_ITEM(<object>spec, 1)
        words[count + 1] = dim
        count += 2
        for j in range(dim):
            size = PyTuple_GET_ITEM(<object>shape, j)
            if not PyLong_CheckExact(<object>size):
                return -1
            words[count] = PyLong_AsLongLong(<object>size)
            count += 1
    return count


cdef tuple normal(tuple specs):
    """The same with exact tuples and ints, checked."""
    found = []
    for spec in specs:
        try:
            shape, dtype = spec
            shape = tuple([as_index(size) for size in shape])
        except (TypeError, ValueError):
            raise TypeError(f"a workspace request is made of (shape, dtype) pairs, not {spec!r}") from None
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"a workspace request is made of (shape, dtype) pairs; {dtype!r} is not a torch.dtype")
        for size in shape:
            if size < 0:
                raise ValueError(f"a workspace request has the negative size {size} in the shape {shape}")
        if bytes_of(shape, dtype) > LARGEST or max(shape, default=0) > LARGEST:
            raise ValueError(f"a workspace request of shape {shape} and {dtype} needs {bytes_of(shape, dtype)} bytes: more than "
                             f"an address space holds")
        found.append((shape, dtype))
    return tuple(found)


cdef object bytes_of(tuple shape, object dtype):
    count = 1
    for size in shape:
        count *= size
    return count * dtype.itemsize


def bytes_needed(specs):
    """What a request of these (shape, dtype) pairs takes of a slot."""
    return total_bytes(normal(tuple(specs)))


cdef object aligned(object nbytes):
    return (nbytes + (ALIGN - 1)) // ALIGN * ALIGN


cdef object total_bytes(tuple specs):
    total = sum([aligned(bytes_of(shape, dtype)) for shape, dtype in specs])
    if total > LARGEST:
        raise ValueError(f"a workspace request needs {total} bytes: more than an address space holds")
    return total


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
    return list(tensors)


cdef inline Py_ssize_t read_context(object var) except? -2:
    """An int that a ContextVar holds; -1 for None."""
    cdef PyObject *value = NULL
    if PyContextVar_CheckExact(var):
        PyContextVar_Get(var, NULL, &value)
        if value == NULL:
            raise LookupError(f"{var!r} has no value and no default")
        found = <object>value
        Py_DECREF(found)  # the reference that PyContextVar_Get gave us
    else:
        found = var.get()
    return -1 if found is None else found


cdef str call_site():
    """The first Python frame outside this package, as "file:line:function"."""
    frame = sys._getframe()
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith("arena."):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "unknown"


cdef list tensors_in(object resource):
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
