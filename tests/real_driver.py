"""The installed CUDA driver behind the Python face of `arena.testing`, so that one test body serves both.

It owns the bindings (ctypes over libcuda.so.1: no torch, no headers, the GIL released in every call) and a few lines of
C, compiled when first needed, for what the driver itself calls: the destructor that notes that it ran, and the host
function that keeps a launch running until a gate opens. No callback enters Python. Tests call it from any thread; a
thread needs a context of its own (`with driver.device(0)`). Two things differ from the simulator: `owners` cannot be
asked of a real driver, and `destructors` shows only objects made through this face.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

HELPER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { DESTRUCTORS = 1 << 16, LAUNCHES = 1024 };
static struct { long object, thread; atomic_int written; } ran[DESTRUCTORS];
static atomic_long running;
static int loud = -1;

void speak(int fd) { loud = fd; }

/* Notes its object, in order. Where loud, says so at once: a process that is ending can tell nobody else. */
void destructor(void *object) {
    long at = atomic_fetch_add(&running, 1);
    if (loud >= 0) {
        int (*initialized)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "Py_IsInitialized");
        char text[64];
        int alive = initialized ? initialized() : -1;
        int n = snprintf(text, sizeof text, "destructor %ld initialized %d\n", (long)object, alive);
        if (write(loud, text, n) != n) abort();
    }
    if (at >= DESTRUCTORS) return;
    ran[at].object = (long)object;
    ran[at].thread = syscall(SYS_gettid);
    atomic_store_explicit(&ran[at].written, 1, memory_order_release);
}

/* The `at`-th destructor that ran: its object (never 0) and thread, or 0 if there is none yet. */
long ran_object(long at, long *thread) {
    if (at >= DESTRUCTORS || !atomic_load_explicit(&ran[at].written, memory_order_acquire)) return 0;
    *thread = ran[at].thread;
    return ran[at].object;
}

/* A destructor that breaks the rule: it calls the driver, and keeps the status. */
static int (*forbidden)(void);
static atomic_int answer = -1;
void forbid(void *function) { forbidden = (int (*)(void))function; atomic_store(&answer, -1); }
void forbidden_destructor(void *object) { (void)object; atomic_store(&answer, forbidden()); }
int forbidden_answer(void) { return atomic_load(&answer); }

/* For the time after Python: libc's exit handlers run once the interpreter is gone. */
static int (*last_call)(void *);
static void *last_argument;
static void at_exit(void) { last_call(last_argument); }
void call_at_exit(void *function, void *argument) {
    last_call = (int (*)(void *))function;
    last_argument = argument;
    atexit(at_exit);
}

/* What launches of one template wait for, in launch order. Never freed: a late host function may still look. */
typedef struct { atomic_int *gate; double seconds; } launch;
typedef struct { pthread_mutex_t lock; unsigned long head, tail; launch launches[LAUNCHES]; } queue;

queue *queue_new(void) {
    queue *q = calloc(1, sizeof *q);
    if (!q) abort();
    pthread_mutex_init(&q->lock, NULL);
    return q;
}

int queue_push(queue *q, atomic_int *gate, double seconds) {
    pthread_mutex_lock(&q->lock);
    int full = q->tail - q->head == LAUNCHES;
    if (!full) q->launches[q->tail++ % LAUNCHES] = (launch){gate, seconds};
    pthread_mutex_unlock(&q->lock);
    return full;
}

/* For the launch that the driver refused. */
void queue_take_back(queue *q) {
    pthread_mutex_lock(&q->lock);
    if (q->tail != q->head) q->tail--;
    pthread_mutex_unlock(&q->lock);
}

atomic_int *gate_new(void) {
    atomic_int *gate = calloc(1, sizeof *gate);
    if (!gate) abort();
    return gate;
}
void gate_open(atomic_int *gate) { atomic_store(gate, 1); }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Host node of every template: the launch runs for as long as this does, at most ten seconds. Nothing queued: no wait
 * (a template launched as another one's child). */
void wait_for_gate(void *argument) {
    queue *q = argument;
    launch next = {NULL, 0};
    pthread_mutex_lock(&q->lock);
    if (q->head != q->tail) next = q->launches[q->head++ % LAUNCHES];
    pthread_mutex_unlock(&q->lock);
    double start = now(), t = start;
    while (t < start + 10 && ((next.gate && !atomic_load(next.gate)) || t < start + next.seconds)) {
        usleep(200);
        t = now();
    }
}

void nothing(void *argument) { (void)argument; }
"""

# P: a handle, a pointer, or an output passed by byref().
P, N, U, Z, W = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_ulonglong
SYMBOLS = {
    "cuInit": (U,),
    "cuDeviceGetCount": (P,),
    "cuDevicePrimaryCtxRetain": (P, N),
    "cuDevicePrimaryCtxReset_v2": (N,),
    "cuCtxCreate_v2": (P, U, N),
    "cuCtxGetCurrent": (P,),
    "cuCtxGetDevice": (P,),
    "cuCtxPushCurrent_v2": (P,),
    "cuCtxPopCurrent_v2": (P,),
    "cuCtxSynchronize": (),
    "cuCtxRecordEvent": (P, P),
    "cuGetErrorName": (N, P),
    "cuThreadExchangeStreamCaptureMode": (P,),
    "cuMemAlloc_v2": (P, Z),
    "cuMemFree_v2": (P,),
    "cuMemsetD8Async": (P, ctypes.c_ubyte, Z, P),
    "cuMemcpyDtoH_v2": (P, P, Z),
    "cuMemGetAllocationGranularity": (P, P, N),
    "cuMemAddressReserve": (P, Z, Z, P, W),
    "cuMemAddressFree": (P, Z),
    "cuMemCreate": (P, Z, P, W),
    "cuMemRelease": (W,),
    "cuMemMap": (P, Z, Z, W, W),
    "cuMemUnmap": (P, Z),
    "cuMemSetAccess": (P, Z, P, Z),
    "cuStreamCreate": (P, U),
    "cuStreamDestroy_v2": (P,),
    "cuStreamQuery": (P,),
    "cuStreamSynchronize": (P,),
    "cuStreamWaitEvent": (P, P, U),
    "cuStreamGetId": (P, P),
    "cuStreamGetFlags": (P, P),
    "cuStreamGetDevice": (P, P),
    "cuStreamGetCtx": (P, P),
    "cuStreamGetPriority": (P, P),
    "cuStreamBeginCapture_v2": (P, N),
    "cuStreamBeginCaptureToGraph": (P, P, P, P, Z, N),
    "cuStreamEndCapture": (P, P),
    "cuStreamGetCaptureInfo_v2": (P, P, P, P, P, P),
    "cuLaunchHostFunc": (P, P, P),
    "cuEventCreate": (P, U),
    "cuEventDestroy_v2": (P,),
    "cuEventRecord": (P, P),
    "cuEventQuery": (P,),
    "cuEventSynchronize": (P,),
    "cuGraphCreate": (P, U),
    "cuGraphDestroy": (P,),
    "cuGraphClone": (P, P),
    "cuGraphAddEmptyNode": (P, P, P, Z),
    "cuGraphAddHostNode": (P, P, P, Z, P),
    "cuGraphAddChildGraphNode": (P, P, P, Z, P),
    "cuGraphAddNode_v2": (P, P, P, P, Z, P),
    "cuGraphConditionalHandleCreate": (P, P, P, U, U),
    "cuGraphInstantiateWithFlags": (P, P, W),
    "cuGraphLaunch": (P, P),
    "cuGraphExecUpdate_v2": (P, P, P),
    "cuGraphExecDestroy": (P,),
    "cuUserObjectCreate": (P, P, P, U, U),
    "cuUserObjectRetain": (P, U),
    "cuUserObjectRelease": (P, U),
    "cuGraphRetainUserObject": (P, P, U, U),
    "cuGraphReleaseUserObject": (P, P, U),
}
INVALID_DEVICE, NOT_READY, WRONG_THREAD = 101, 600, 908
MODES = {"global": 0, "thread_local": 1, "relaxed": 2}
NON_BLOCKING, DISABLE_TIMING, NO_DESTRUCTOR_SYNC, MOVE = 1, 2, 1, 1
CONDITIONAL_NODE, CONDITIONAL_IF = 13, 0


class HostNodeParams(ctypes.Structure):
    _fields_ = [("function", P), ("argument", P)]


class UpdateResult(ctypes.Structure):
    _fields_ = [("result", N), ("node", P), ("source", P)]


class ConditionalParams(ctypes.Structure):
    _fields_ = [("handle", W), ("type", N), ("size", U), ("bodies", ctypes.POINTER(P)), ("context", P)]


class NodeParamsUnion(ctypes.Union):
    _fields_ = [("padding", ctypes.c_longlong * 29), ("conditional", ConditionalParams)]


class NodeParams(ctypes.Structure):
    _fields_ = [("type", N), ("reserved0", N * 3), ("of", NodeParamsUnion), ("reserved2", ctypes.c_longlong)]


class Error(RuntimeError):
    """A driver call that did not succeed; `code` is the CUresult."""

    def __init__(self, name: str, code: int):
        text = ctypes.c_char_p()
        known = driver_library().cuGetErrorName(code, ctypes.byref(text)) == 0
        super().__init__(f"{name} returned {code} ({text.value.decode() if known else 'no known error'})")
        self.code = code


class Destructor(NamedTuple):
    """One user object's destructor that ran."""

    tag: object
    thread: str
    thread_id: int


@functools.cache
def driver_library():
    library = ctypes.CDLL("libcuda.so.1")
    for name, parameters in SYMBOLS.items():
        with suppress(AttributeError):  # an older driver lacks the newest; whoever calls one is told then
            function = getattr(library, name)
            function.argtypes = parameters
            function.restype = N
    return library


@functools.cache
def helper():
    with tempfile.TemporaryDirectory() as folder:
        source, shared = Path(folder, "helper.c"), Path(folder, "helper.so")
        source.write_text(HELPER)
        compiler = ["gcc", "-O1", "-Wall", "-shared", "-fPIC", "-pthread", "-o", str(shared), str(source), "-ldl"]
        subprocess.run(compiler, check=True)
        library = ctypes.CDLL(str(shared))  # stays mapped when the folder is gone
    for name, result, *parameters in (
        ("speak", None, N),
        ("ran_object", ctypes.c_long, ctypes.c_long, P),
        ("forbid", None, P),
        ("forbidden_answer", N),
        ("call_at_exit", None, P, P),
        ("queue_new", P),
        ("queue_push", N, P, P, ctypes.c_double),
        ("queue_take_back", None, P),
        ("gate_new", P),
        ("gate_open", None, P),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, parameters
    return library


def address(function) -> int:
    return ctypes.cast(function, P).value


program_threads: set[int] = set()  # every thread that called the driver through this face
object_numbers = itertools.count(1)


def ask(name: str, *arguments) -> int:
    """Makes one driver call and returns its status."""
    program_threads.add(threading.get_native_id())
    return getattr(driver_library(), name)(*arguments)


def do(name: str, *arguments) -> None:
    """Makes one driver call that has to succeed."""
    status = ask(name, *arguments)
    if status:
        raise Error(name, status)


def made(name: str, *arguments) -> int:
    """Makes one driver call that returns a handle through its first parameter."""
    handle = P()
    do(name, ctypes.byref(handle), *arguments)
    return handle.value or 0


def device_count() -> int:
    do("cuInit", 0)
    count = N()
    do("cuDeviceGetCount", ctypes.byref(count))
    return count.value


def available() -> tuple[bool, str]:
    """Whether there is a device, and if not, why. Initialises nothing where there is no driver."""
    try:
        driver_library()
    except OSError as error:
        return False, f"no CUDA driver: {error}"
    try:
        count = device_count()
    except Error as error:
        return False, str(error)
    return (True, "") if count else (False, "the CUDA driver sees no device")


class UserObject:
    """A CUuserObject with one reference, whose destructor is noted in `Driver.destructors`."""

    def __init__(self, driver: Driver, tag: object):
        self.tag = tag
        self._driver = driver
        self._number = next(object_numbers)
        driver._tags[self._number] = tag
        destructor = address(helper().destructor)
        self.handle = made("cuUserObjectCreate", self._number, destructor, 1, NO_DESTRUCTOR_SYNC)

    def retain(self, count: int = 1) -> None:
        do("cuUserObjectRetain", self.handle, count)

    def release(self, count: int = 1) -> None:
        do("cuUserObjectRelease", self.handle, count)

    @property
    def destroyed(self) -> bool:
        return any(number == self._number for number, _ in ran())


class Graph:
    """A template. `queue` is what its launches wait for; a conditional body has none, and belongs to its parent."""

    def __init__(self, driver: Driver, handle: int, queue: int | None, *, body: bool = False):
        self.handle = handle
        self._driver = driver
        self._queue = queue
        self._alive = not body
        driver._made.append(self)

    @property
    def owners(self) -> int:
        raise NotImplementedError("a real driver cannot be asked what a graph holds")

    def add_node(self) -> None:
        made("cuGraphAddEmptyNode", self.handle, None, 0)

    def add_child(self, child: Graph) -> None:
        made("cuGraphAddChildGraphNode", self.handle, None, 0, child.handle)

    def add_conditional(self) -> Graph:
        context = made("cuCtxGetCurrent")
        condition = W()
        do("cuGraphConditionalHandleCreate", ctypes.byref(condition), self.handle, context, 0, 0)
        parameters = NodeParams(type=CONDITIONAL_NODE)
        parameters.of.conditional.handle = condition.value
        parameters.of.conditional.type = CONDITIONAL_IF
        parameters.of.conditional.size = 1
        parameters.of.conditional.context = context
        made("cuGraphAddNode_v2", self.handle, None, None, 0, ctypes.byref(parameters))
        return Graph(self._driver, parameters.of.conditional.bodies[0], None, body=True)

    def clone(self) -> Graph:
        return Graph(self._driver, made("cuGraphClone", self.handle), self._queue)

    def instantiate(self) -> Exec:
        return Exec(self._driver, made("cuGraphInstantiateWithFlags", self.handle, 0), self._queue)

    def retain(self, obj: UserObject, count: int = 1, *, move: bool = False) -> None:
        do("cuGraphRetainUserObject", self.handle, obj.handle, count, MOVE if move else 0)

    def release(self, obj: UserObject, count: int = 1) -> None:
        do("cuGraphReleaseUserObject", self.handle, obj.handle, count)

    def destroy(self) -> None:
        do("cuGraphDestroy", self.handle)
        self._alive = False


class Exec:
    """An executable. Its launches wait for what the queue of the template it was last made from says."""

    def __init__(self, driver: Driver, handle: int, queue: int | None):
        self.handle = handle
        self._queue = queue
        self._alive = True
        driver._made.append(self)

    @property
    def owners(self) -> int:
        raise NotImplementedError("a real driver cannot be asked what an executable holds")

    def launch(self, stream: Stream, *, seconds: float = 0.0, until: Event | None = None) -> None:
        if self._queue is None:
            raise NotImplementedError("a graph made by others has no node that could wait")
        # Every launch queues its wait, an empty one too: else the next launch's wait would be taken for this one's.
        if helper().queue_push(self._queue, until.gate if until else None, seconds):
            raise OverflowError("more launches in flight than a queue holds")
        status = ask("cuGraphLaunch", self.handle, stream.handle)
        if status:
            helper().queue_take_back(self._queue)
            raise Error("cuGraphLaunch", status)

    def update(self, graph: Graph) -> None:
        result = UpdateResult()
        do("cuGraphExecUpdate_v2", self.handle, graph.handle, ctypes.byref(result))
        self._queue = graph._queue  # the host node's argument is among what was updated

    def destroy(self) -> None:
        do("cuGraphExecDestroy", self.handle)
        self._alive = False


class Event:
    """A CUevent without timing; or, never recorded but `set()` by the test, the gate of `Exec.launch(until=...)`."""

    def __init__(self, driver: Driver):
        self.handle = made("cuEventCreate", DISABLE_TIMING)
        self.gate = helper().gate_new()
        self._alive = True
        driver._made.append(self)

    def record(self, stream: Stream) -> None:
        do("cuEventRecord", self.handle, stream.handle)

    def query(self) -> bool:
        return ready("cuEventQuery", self.handle)

    def synchronize(self) -> None:
        do("cuEventSynchronize", self.handle)

    def set(self) -> None:
        helper().gate_open(self.gate)

    def destroy(self) -> None:
        do("cuEventDestroy_v2", self.handle)
        self._alive = False


class Capture:
    """What `Stream.capture()` yields."""

    def __init__(self, id: int, graph: Graph):
        self.id = id
        self.graph = graph


class Stream:
    """A CUstream. Entered, it is the thread's current stream: torch's, where torch is loaded."""

    def __init__(self, driver: Driver, handle: int, device: int):
        self.handle = handle
        self.device = device
        self._driver = driver
        self._alive = handle != 0
        self._capture: Capture | None = None  # the capture begun on this stream
        self._entered = threading.local()
        driver._made.append(self)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def __enter__(self) -> Stream:
        torch = sys.modules.get("torch")
        if torch is None:
            current = nullcontext()
        elif self.handle:
            current = torch.cuda.stream(torch.cuda.ExternalStream(self.handle, device=self.device))
        else:
            current = torch.cuda.stream(torch.cuda.default_stream(self.device))
        current.__enter__()
        self._entered.__dict__.setdefault("stack", []).append(current)
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered.stack.pop().__exit__(*exc)

    @contextmanager
    def capture(self, mode: str = "global", *, into: Graph | None = None):
        with self:
            self.begin_capture(mode, into=into)
            try:
                yield self._capture
            except BaseException:
                with suppress(Error):
                    self.end_capture()
                raise
            self.end_capture()

    def begin_capture(self, mode: str = "global", *, into: Graph | None = None) -> None:
        if into is None:
            do("cuStreamBeginCapture_v2", self.handle, MODES[mode])
            queue = helper().queue_new()
            do("cuLaunchHostFunc", self.handle, address(helper().wait_for_gate), queue)
        else:
            do("cuStreamBeginCaptureToGraph", self.handle, into.handle, None, None, 0, MODES[mode])
        _, _, id, handle = self._driver.query(self)
        self._capture = Capture(id, into or Graph(self._driver, handle, queue))

    def end_capture(self) -> Graph:
        handle = P()
        status = ask("cuStreamEndCapture", self.handle, ctypes.byref(handle))
        if status == WRONG_THREAD:  # it goes on
            raise Error("cuStreamEndCapture", status)
        capture, self._capture = self._capture, None
        if status:
            if capture:
                capture.graph._alive = False  # the driver destroyed it
            raise Error("cuStreamEndCapture", status)
        if capture and capture.graph.handle == handle.value:
            return capture.graph
        return Graph(self._driver, handle.value, None)

    def kernel(self) -> None:
        do("cuMemsetD8Async", self._driver._scratch[self.device], 0, 1, self.handle)

    def wait(self, other: Stream | Event) -> None:
        if isinstance(other, Event):
            do("cuStreamWaitEvent", self.handle, other.handle, 0)
            return
        event = made("cuEventCreate", DISABLE_TIMING)
        do("cuEventRecord", event, other.handle)
        do("cuStreamWaitEvent", self.handle, event, 0)
        do("cuEventDestroy_v2", event)

    def invalidate(self) -> None:
        if not ask("cuStreamSynchronize", self.handle):
            raise AssertionError(f"stream {self.handle:#x} was not capturing: synchronizing it was legal")

    def query(self) -> bool:
        return ready("cuStreamQuery", self.handle)

    def synchronize(self) -> None:
        do("cuStreamSynchronize", self.handle)

    def destroy(self) -> None:
        do("cuStreamDestroy_v2", self.handle)
        self._alive = False


def ready(name: str, handle: int) -> bool:
    status = ask(name, handle)
    if status not in (0, NOT_READY):
        raise Error(name, status)
    return status == 0


def ran():
    """Object number and thread of every destructor that ran in this process, in order."""
    thread = ctypes.c_long()
    for at in itertools.count():
        number = helper().ran_object(at, ctypes.byref(thread))
        if not number:
            return
        yield number, thread.value


@functools.cache
def context(index: int) -> int:
    """The primary context of a device, kept for the life of the process; making one takes a tenth of a second.

    Where there is one device only, index 1 is a second context of device 0: what matters to an event is the context.
    """
    if index < device_count():
        return made("cuDevicePrimaryCtxRetain", index)
    if index > 1:
        raise Error("cuDevicePrimaryCtxRetain", INVALID_DEVICE)
    created = made("cuCtxCreate_v2", 0, 0)
    do("cuCtxPopCurrent_v2", ctypes.byref(P()))
    return created


class Driver:
    """What `real_driver()` yields. A plain class, not a generator: it must not close itself when the process ends."""

    Error = Error

    def __init__(self):
        self._tags: dict[int, object] = {}
        self._made: list[Stream | Event | Graph | Exec] = []
        self._scratch: dict[int, int] = {}  # device -> memory for kernel(); a capture must not allocate
        self._spare: list[int] = []  # what call("cuMemFree") frees
        self.library = driver_library()

    def __enter__(self) -> Driver:
        helper()
        do("cuInit", 0)
        do("cuCtxPushCurrent_v2", context(0))
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.init()
        self._scratch[0] = made("cuMemAlloc_v2", 256)
        self._spare = [made("cuMemAlloc_v2", 256) for _ in range(4)]
        return self

    def __exit__(self, *exc: object) -> None:
        """Destroys what the test left, the running launches first; the objects it still holds are left alone."""
        for kind, end in ((Event, Event.set), (Stream, lambda stream: stream._capture and stream.end_capture())):
            for thing in self._made:
                if isinstance(thing, kind) and thing._alive:
                    with suppress(Error):
                        end(thing)
        ask("cuCtxSynchronize")
        for kind in (Exec, Graph, Event, Stream):
            for thing in self._made:
                if isinstance(thing, kind) and thing._alive:
                    with suppress(Error):
                        thing.destroy()
        for memory in [*self._spare, self._scratch.get(0)]:
            ask("cuMemFree_v2", memory)
        do("cuCtxPopCurrent_v2", ctypes.byref(P()))

    @property
    def destructors(self) -> list[Destructor]:
        """Every destructor of an object made through this face, in order."""
        return [
            Destructor(self._tags[number], "caller" if thread in program_threads else "driver", thread)
            for number, thread in ran()
            if number in self._tags
        ]

    @property
    def legacy(self) -> Stream:
        return Stream(self, 0, 0)

    def Stream(self, *, blocking: bool = False, device: int | None = None) -> Stream:
        if device is not None:
            with self.device(device):
                return self.Stream(blocking=blocking)
        current = made("cuCtxGetCurrent")
        handle = made("cuStreamCreate", 0 if blocking else NON_BLOCKING)
        return Stream(self, handle, next(index for index in self._scratch if context(index) == current))

    def Event(self) -> Event:
        return Event(self)

    def Graph(self) -> Graph:
        graph = Graph(self, made("cuGraphCreate", 0), helper().queue_new())
        node = HostNodeParams(address(helper().wait_for_gate), graph._queue)
        made("cuGraphAddHostNode", graph.handle, None, 0, ctypes.byref(node))
        return graph

    def UserObject(self, tag: object = None) -> UserObject:
        return UserObject(self, tag)

    @contextmanager
    def device(self, index: int):
        do("cuCtxPushCurrent_v2", context(index))
        try:
            if index not in self._scratch:
                self._scratch[index] = made("cuMemAlloc_v2", 256)
            yield
        finally:
            do("cuCtxPopCurrent_v2", ctypes.byref(P()))

    @contextmanager
    def no_context(self):
        popped = []
        while made("cuCtxGetCurrent"):
            popped.append(made("cuCtxPopCurrent_v2"))
        try:
            yield
        finally:
            for handle in reversed(popped):
                do("cuCtxPushCurrent_v2", handle)

    @contextmanager
    def thread_mode(self, mode: str):
        exchanged = N(MODES[mode])
        do("cuThreadExchangeStreamCaptureMode", ctypes.byref(exchanged))
        try:
            yield
        finally:
            do("cuThreadExchangeStreamCaptureMode", ctypes.byref(exchanged))

    def call(self, name: str, stream: Stream | None = None) -> int:
        """Makes one bare driver call and returns its status. What it makes is left to the end of the process."""
        out = ctypes.byref(W())
        if name == "cuMemAlloc":
            return ask("cuMemAlloc_v2", out, 256)
        if name == "cuMemFree":
            status = ask("cuMemFree_v2", self._spare[-1])
            if not status:
                self._spare.pop()
            return status
        if name == "cuCtxRecordEvent":
            return ask(name, made("cuCtxGetCurrent"), self.Event().handle)
        if name == "cuUserObjectCreate":
            return ask(name, out, None, address(helper().nothing), 1, NO_DESTRUCTOR_SYNC)
        if name == "cuStreamCreate":
            return ask(name, out, NON_BLOCKING)
        if name == "cuEventCreate":
            return ask(name, out, DISABLE_TIMING)
        if name == "cuGraphCreate":
            return ask(name, out, 0)
        if name == "cuCtxGetDevice":
            return ask(name, out)
        if name == "cuCtxSynchronize":
            return ask(name)
        if stream is None:
            raise ValueError(f"{name} needs a stream")
        if name == "cuLaunchHostFunc":
            return ask(name, stream.handle, address(helper().nothing), None)
        if name in ("cuStreamQuery", "cuStreamSynchronize"):
            return ask(name, stream.handle)
        return ask(name, stream.handle, out)

    def query(self, stream: Stream) -> tuple[int, int, int, int]:
        status, id, graph = N(), W(), P()
        outputs = ctypes.byref(status), ctypes.byref(id), ctypes.byref(graph)
        result = ask("cuStreamGetCaptureInfo_v2", stream.handle, *outputs, None, None)
        return result, status.value, id.value, graph.value or 0

    def reset_context(self) -> None:
        """cuDevicePrimaryCtxReset of the current device. Nothing made before it may be touched again."""
        device = N()
        do("cuCtxGetDevice", ctypes.byref(device))
        do("cuDevicePrimaryCtxReset_v2", device)
        self._made.clear()
        self._spare.clear()

    def speak(self, fd: int) -> None:
        """From now on each destructor that runs writes a line there, whatever state the process is in."""
        helper().speak(fd)


def real_driver() -> Driver:
    """The primary context of device 0, current on this thread for the body of the `with`."""
    return Driver()


def open_driver(face: str):
    """The driver of that name, "simulated" or "real", as a context manager: how a subprocess gets its face."""
    if face == "real":
        return real_driver()
    from arena.testing import simulated_driver

    return simulated_driver()
