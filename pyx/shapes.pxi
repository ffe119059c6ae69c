# What a request asks for, as words, checked and placed; and what is handed out for it. Called with the GIL.

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
