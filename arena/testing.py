"""A CUDA driver without a device, to test lifetimes of owners and graphs anywhere.

Inside `simulated_driver()` the whole of `arena` talks to a driver that behaves as the real one was measured to: user
objects, templates and executables, launches that take time, captures and all that breaks them, a thread that runs late
destructors. One can be open in a process at a time, for all its threads:

    import arena
    from arena.testing import simulated_driver

    with simulated_driver() as cuda:
        stream, gate = cuda.Stream(), cuda.Event()
        with stream, stream.capture() as capture:
            arena.retain(scratch)
            stream.kernel()
        replay = capture.graph.instantiate()
        capture.graph.destroy()
        replay.launch(stream, until=gate)
        replay.destroy()  # returns at once; `scratch` stays until the launch has ended
        gate.set()

On the way out launches end, graphs and executables are destroyed, and `arena.reclaim()` releases what they held.
"""

from typing import Literal, final

from arena._simulator import (
    Capture,
    Destructor,
    Driver,
    Error,
    Event,
    Exec,
    Graph,
    Stream,
    UserObject,
    close_driver,
    finish_driver,
    open_driver,
)

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

# A union, as type checkers understand the stub: they compare the two.
Mode = Literal["global"] | Literal["thread_local"] | Literal["relaxed"]


@final
class _SimulatedDriver:
    # A class, since the process may end inside the `with`: a generator would be closed then, and run destructors that
    # the end of a process does not run.

    def __enter__(self):
        self._driver = open_driver()
        return self._driver

    def __exit__(self, kind, error, traceback):
        try:
            finish_driver()
            from arena import reclaim  # not at the top: importing this module takes the extension alone

            reclaim(1.0)  # for what another thread is releasing just now
        finally:
            close_driver(self._driver)


def simulated_driver():
    """Puts a simulated driver in the place of the installed one, for the whole process and the body of the `with`.

    On the way out every gate is opened, open captures are ended, every graph and executable is destroyed (their
    destructors run), the driver's thread stops, and `arena.reclaim()` is called; then the installed driver is back.

    Returns:
        A context manager that yields the `Driver`.

    Raises:
        RuntimeError: On entry, if one is open already.
    """
    return _SimulatedDriver()
