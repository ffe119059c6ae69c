# Which slot a thread works on: vLLM's own ubatch ids, read without a call where its function is its own. Called with the GIL.

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
