# cython: language_level=3, embedsignature=True, embedsignature.format=clinic
"""Scratch by slot: the request path of `arena.workspace`, and what ties a slot's block to the graphs that use it.

It owns the blocks of a manager's slots, the views of them that were asked for before, and the note of which capture holds
which block. A request that was seen before on the same block costs one cheap torch operation a tensor, or none. A block that
a graph uses is retained by that graph, so a slot that grows merely lets go of it: it lives exactly as long as its last graph
or view. Any thread may call, with the GIL; growth gives the GIL up and is one at a time in each manager. This file holds the
way of a request; slots.pxi what a slot is, lanes.pxi which one it is, shapes.pxi what is asked for and handed out, calls.pxi
how the interpreter calls it.
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


include "slots.pxi"
include "lanes.pxi"


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
    cdef dict held                  # by capture, the last 8: addresses of resources and storages in them that it retained
    cdef object __weakref__

    def __cinit__(self, *args, **kwargs):
        self.growing = threading.RLock()
        self.held = {}
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
        cdef set held = self.held.get(capture)  # by capture: this lets other threads run, which serve others
        if held is None:
            if len(self.held) >= 8:
                self.held.pop(next(iter(self.held)), None)
            held = self.held[capture] = set()
        if id(resource) not in held:
            retain_on(resource, stream)
            held.add(id(resource))
        for tensor in tensors_in(resource):
            storage = tensor.untyped_storage()
            if storage._cdata not in held:
                retain_on(storage, stream)
                held.add(storage._cdata)
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
        self.held.pop(capture, None)  # an earlier capture into the same graph had that id
        for slot in self.blocks.slots:
            if slot.block is not None:
                try:
                    slot.block.retain_for(capture, stream, True)
                except Exception as error:
                    self.cannot_cover(error)
        for resources in self.resources or ():
            for resource in list(resources.values()):
                try:  # each by itself: one that cannot be walked must not cost the graph the others
                    self.retain_resource(resource, capture, stream)
                except Exception as error:
                    self.cannot_cover(error)
        return 0


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


include "shapes.pxi"
include "calls.pxi"
