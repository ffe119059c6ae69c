from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, final

Mode = Literal["global", "thread_local", "relaxed"]

__all__ = [
    "Capture",
    "Destructor",
    "Driver",
    "Error",
    "Event",
    "Exec",
    "Graph",
    "Mode",
    "Stream",
    "UserObject",
    "simulated_driver",
]

class Error(RuntimeError):
    """A driver call that did not succeed; `code` is the CUresult."""

    def __init__(self, call: str, code: int) -> None: ...
    @property
    def code(self) -> int: ...

class Destructor(NamedTuple):
    """One user object's destructor that ran."""

    tag: object
    """What `UserObject(tag)` was given; None for objects that the code under test made itself."""
    thread: Literal["caller", "driver"]
    """"caller": inside a call made by one of the program's threads; "driver": on a thread of the driver."""
    thread_id: int
    """The operating system's thread id (`threading.get_native_id()`)."""

@final
class UserObject:
    """A CUuserObject with one reference, whose destructor is noted in `Driver.destructors`."""

    handle: int
    tag: object
    def retain(self, count: int = 1) -> None: ...
    def release(self, count: int = 1) -> None: ...
    @property
    def destroyed(self) -> bool: ...

@final
class Graph:
    """A template (CUgraph). Handles are recycled after `destroy()`."""

    handle: int
    @property
    def owners(self) -> int:
        """How many different user objects this graph itself holds."""
    def add_node(self, name: str = "kernel", *parameters: int | bytes) -> None:
        """Adds one kernel node; what it says of itself as for `Stream.kernel`."""
    def add_child(self, child: Graph) -> None: ...
    def add_conditional(self) -> Graph:
        """Adds a conditional node and returns its body, to be filled by `Stream.capture(into=body)`."""
    def clone(self) -> Graph: ...
    def instantiate(self) -> Exec: ...
    def retain(self, obj: UserObject, count: int = 1, *, move: bool = False) -> None: ...
    def release(self, obj: UserObject, count: int = 1) -> None: ...
    def destroy(self) -> None: ...

@final
class Exec:
    """An executable (CUgraphExec)."""

    handle: int
    @property
    def owners(self) -> int:
        """How many different user objects this executable holds, those of children and bodies included."""
    def launch(self, stream: Stream, *, seconds: float = 0.0, until: Event | None = None) -> None: ...
    def update(self, graph: Graph) -> None: ...
    def destroy(self) -> None: ...

@final
class Event:
    """A CUevent; or, never recorded but `set()` by the test, the gate of `Exec.launch(until=...)`."""

    handle: int
    def record(self, stream: Stream) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def set(self) -> None:
        """Opens the gate, for good."""
    def destroy(self) -> None: ...

@final
class Capture:
    """What `Stream.capture()` yields."""

    def __enter__(self) -> Capture: ...
    def __exit__(self, *exc: object) -> None: ...
    @property
    def id(self) -> int: ...
    @property
    def graph(self) -> Graph: ...

@final
class Stream:
    """A CUstream. Entered as a context manager it is the calling thread's current stream.

    A real driver crashes on a destroyed stream; the simulated one raises `Error` with code 400. In both a handle that
    was given out again answers for the other stream, and so does the object that was destroyed.
    """

    handle: int
    device: int
    def __cuda_stream__(self) -> tuple[int, int]: ...
    def __enter__(self) -> Stream: ...
    def __exit__(self, *exc: object) -> None: ...
    def capture(self, mode: Mode = "global", *, into: Graph | None = None) -> AbstractContextManager[Capture]:
        """Captures the body of the `with`; this stream is the current one meanwhile."""
    def begin_capture(self, mode: Mode = "global", *, into: Graph | None = None) -> None: ...
    def end_capture(self) -> Graph: ...
    def kernel(self, name: str = "kernel", *parameters: int | bytes, packed: bool = False) -> None:
        """One unit of work: a node where the stream is capturing, else nothing that can be seen.

        An audit reads `name` and `parameters`: an int for 8 bytes, a bytes object for a struct by value;
        `packed`: told as one block.
        """
    def copy(self, to: int, source: int, length: int, *, to_host: bool = False, from_host: bool = False) -> None:
        """cuMemcpyAsync: a node where the stream is capturing. Nothing is copied."""
    def fill(self, to: int, length: int) -> None:
        """cuMemsetD8Async: a node where the stream is capturing. Nothing is filled."""
    def wait(self, other: Stream | Event) -> None:
        """Work that comes later on this stream waits for `other`; forks or joins a capture."""
    def invalidate(self) -> None:
        """Breaks the capture that this stream takes part in, as an illegal call would."""
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def destroy(self) -> None: ...

# Driver has methods of these names.
_Error = Error
_Event = Event
_Graph = Graph
_Stream = Stream
_UserObject = UserObject

@final
class Driver:
    """What `simulated_driver()` yields: CUDA's nouns, and the switches that a test turns."""

    Error: type[_Error]
    destructors: list[Destructor]
    """Every destructor that ran, in order (objects of the code under test included)."""
    @property
    def legacy(self) -> _Stream:
        """The legacy NULL stream."""
    def Stream(self, *, blocking: bool = False, device: int | None = None) -> _Stream: ...
    def Event(self) -> _Event: ...
    def Graph(self) -> _Graph: ...
    def UserObject(self, tag: object = None) -> _UserObject: ...
    def device(self, index: int) -> AbstractContextManager[None]:
        """Makes that device's context the calling thread's current one (there are two devices)."""
    def no_context(self) -> AbstractContextManager[None]: ...
    def thread_mode(self, mode: Mode) -> AbstractContextManager[None]:
        """cuThreadExchangeStreamCaptureMode around the body."""
    def call(self, name: str, stream: _Stream | None = None) -> int:
        """Makes one bare driver call that a capture may forbid, and returns its status.

        `cuMemAlloc`, `cuMemFree`, `cuCtxGetDevice`, `cuCtxSynchronize`, `cuCtxRecordEvent`, `cuStreamCreate`,
        `cuEventCreate`, `cuUserObjectCreate`, `cuGraphCreate`; and on `stream`: `cuStreamQuery`, `cuStreamSynchronize`,
        `cuStreamGetId`, `cuStreamGetFlags`, `cuStreamGetDevice`, `cuStreamGetCtx`, `cuStreamGetPriority`,
        `cuLaunchHostFunc`.
        """
    def query(self, stream: _Stream) -> tuple[int, int, int, int]:
        """cuStreamGetCaptureInfo: (result, status, capture id, graph handle)."""
    def reset_context(self) -> None:
        """cuDevicePrimaryCtxReset of the current device: its graphs, executables, streams and events are gone."""
    # The simulator's own: no real driver has these.
    def plant(self, size: int, *, host: bool = False) -> int:
        """Plants an allocation of the driver's own: an address that pointers can point to. Nothing lies there."""
    def unplant(self, address: int) -> None:
        """Frees what `plant` returned."""
    def fail(self, symbol: str, nth: int = 1, code: int = 2) -> None:
        """Makes the nth call from now of one of the table's symbols return `code` and do nothing else."""
    def calls(self, symbol: str) -> int:
        """How many calls of one of the table's symbols were made so far, those made through these classes included."""

def simulated_driver() -> AbstractContextManager[Driver]:
    """Puts a simulated driver in the place of the installed one, for the whole process and the body of the `with`."""
