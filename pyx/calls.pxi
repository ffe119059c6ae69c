# The manager's methods on the request path as the interpreter calls them: straight from its stack, without a tuple of the
# arguments where the request was seen before. Each replaces the method of its name, which serves what this one does not.

cdef PyObject *serve_call(PyObject *self, PyObject *const *args, Py_ssize_t count) except NULL:
    cdef Requests manager = <Requests>self
    served = manager.serve(args, count) if manager.watch is None else None
    if served is None:
        served = manager.first(tuple([<object>args[i] for i in range(count)]))
    Py_INCREF(served)
    return <PyObject *>served


# The other two: keywords, and what was not asked for before, go to the methods of the class.

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
