"""What `reclaim()` and the reclaimer's thread promise: who releases, when, in which capture mode and context, and that
nothing an owner does while it goes can stop the rest."""

import gc
import sys
import threading
import time
import weakref

import pytest
from conftest import until

import arena
from arena._registry import begin


class Owner:
    """Something that owns memory."""


class Last:
    """An owner that does something when it goes."""

    def __init__(self, action):
        self.action = action

    def __del__(self):
        self.action()


def captured(stream, *owners, mode="global"):
    with stream.capture(mode) as capture:
        stream.kernel()
        for owner in owners:
            assert arena.retain(owner, stream)
    return capture.graph


class Hold:
    """Keeps the reclaimer's thread from releasing: a managed capture is open. Leaving ends it."""

    def __init__(self, cuda):
        self.stream = cuda.Stream()

    def __enter__(self):
        self.stream.begin_capture("relaxed")
        self.capture = begin(self.stream)
        return self

    def __exit__(self, *exc):
        self.capture.seal()
        graph = self.stream.end_capture()
        self.capture.drop()
        graph.destroy()


def test_the_thread_releases_by_itself(cuda):
    alive = weakref.ref(owner := Owner())
    graph = captured(cuda.Stream(), owner)
    del owner
    graph.destroy()
    assert until(lambda: alive() is None)


def test_reclaim_releases_at_once_and_says_how_many(cuda):
    order = []
    graphs = [captured(cuda.Stream(), *[Last(lambda n=n: order.append(n)) for n in range(10)]) for _ in range(3)]
    with Hold(cuda):  # the thread would be faster now and then
        for graph in graphs:
            graph.destroy()
        assert arena.reclaim() == 0
        assert arena.stats().dead == 30
    assert arena.reclaim(5) + len(order) >= 30
    assert order == list(range(10)) * 3


def test_owners_go_on_the_thread_that_reclaims_and_nowhere_else(cuda):
    """Never on the driver's: its thread may run nothing but the destructor."""
    threads = set()
    drivers = set()
    for _ in range(20):
        graph = captured(cuda.Stream(), Last(lambda: threads.add(threading.get_native_id())))
        executable = graph.instantiate()
        graph.destroy()
        executable.destroy()
        arena.reclaim(5)
        drivers |= {each.thread_id for each in cuda.destructors if each.thread == "driver"}
    assert until(lambda: threads)
    assert not threads & drivers


@pytest.mark.parametrize("timeout", [-1, float("nan"), -0.001])
def test_a_timeout_that_is_no_time_is_refused(timeout):
    with pytest.raises(ValueError, match="not a number of seconds"):
        arena.reclaim(timeout)
    with pytest.raises(TypeError):
        arena.reclaim("soon")


def test_reclaim_with_a_timeout_waits_for_the_drivers_late_destructor(cuda):
    alive = weakref.ref(owner := Owner())
    graph = captured(cuda.Stream(), owner)
    del owner
    executable = graph.instantiate()
    graph.destroy()
    executable.destroy()
    arena.reclaim(5)
    assert alive() is None


def test_reclaim_with_a_timeout_does_not_wait_for_living_graphs(cuda):
    graph = captured(cuda.Stream(), Owner())
    start = time.monotonic()
    assert arena.reclaim(5) == 0
    assert time.monotonic() - start < 1
    graph.destroy()


def test_reclaim_waits_no_longer_than_it_was_told(cuda):
    graph = captured(cuda.Stream(), Owner())
    with Hold(cuda):
        graph.destroy()
        start = time.monotonic()
        assert arena.reclaim(0.05) == 0
        assert 0.04 < time.monotonic() - start < 1


def test_reclaim_waits_for_what_another_thread_is_releasing(cuda):
    entered, leave = threading.Event(), threading.Event()

    def slow():
        entered.set()
        leave.wait(5)

    graph = captured(cuda.Stream(), Last(slow))
    graph.destroy()
    assert entered.wait(5)
    before = arena.stats().released
    threading.Timer(0.05, leave.set).start()
    arena.reclaim(5)
    assert arena.stats().released == before + 1


def test_an_owner_whose_del_raises_is_reported_and_the_rest_still_go(cuda, monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: reported.append(what.exc_type))
    alive = weakref.ref(last := Owner())
    graph = captured(cuda.Stream(), Last(lambda: 1 / 0), Last(lambda: [][0]), last)
    del last
    graph.destroy()
    arena.reclaim(5)
    assert until(lambda: alive() is None)
    assert reported == [ZeroDivisionError, IndexError]


def test_an_owner_may_reclaim_while_it_goes_and_order_is_kept(cuda):
    order = []

    def reclaims(number):
        arena.reclaim()
        order.append(number)

    graph = captured(cuda.Stream(), *[Last(lambda n=n: reclaims(n)) for n in range(20)])
    graph.destroy()
    arena.reclaim(5)
    assert until(lambda: len(order) == 20)
    # Each releases the later ones before it has finished itself: every owner went once, the last finished first.
    assert sorted(order) == list(range(20))


def test_an_owner_that_reclaims_with_a_timeout_does_not_wait_for_itself(cuda):
    took = []

    def reclaims():
        start = time.monotonic()
        arena.reclaim(3)
        took.append(time.monotonic() - start)

    captured(cuda.Stream(), Last(reclaims)).destroy()
    assert until(lambda: took)
    assert took[0] < 1


def test_an_owner_may_retain_again_while_it_goes(cuda):
    stream = cuda.Stream()
    alive = weakref.ref(second := Owner())
    graphs = []

    def retains(owners=[second]):  # noqa: B006
        with cuda.device(0):
            graphs.append(captured(stream, owners.pop(), mode="relaxed"))

    del second
    captured(stream, Last(retains)).destroy()
    assert until(lambda: graphs)
    assert alive() is not None
    graphs[0].destroy()
    assert until(lambda: alive() is None)


def test_an_owner_may_destroy_a_graph_while_it_goes(cuda):
    stream = cuda.Stream()
    alive = weakref.ref(second := Owner())
    graph = captured(stream, second)
    del second
    captured(stream, Last(graph.destroy)).destroy()
    assert until(lambda: alive() is None)


def test_owners_go_in_relaxed_mode_so_that_no_capture_breaks(cuda):
    """Freeing memory in any other mode breaks every global-mode capture of the process: see the control below."""
    statuses = []
    graph = captured(cuda.Stream(), Last(lambda: statuses.append(cuda.call("cuMemAlloc"))))
    stream = cuda.Stream()
    with stream.capture("global") as capture:
        stream.kernel()
        graph.destroy()
        assert until(lambda: statuses)
        arena.reclaim(5)
    assert statuses == [0]
    capture.graph.destroy()


def test_the_same_call_outside_relaxed_mode_breaks_the_capture(cuda):
    stream = cuda.Stream()
    with pytest.raises(cuda.Error), stream.capture("global"):
        stream.kernel()
        assert cuda.call("cuMemAlloc") != 0


def test_reclaim_leaves_the_capture_mode_and_context_of_its_thread_as_they_were(simulated):
    with simulated.device(1):
        graph = captured(simulated.Stream(device=1), Owner())
    with Hold(simulated):
        graph.destroy()
    with simulated.thread_mode("thread_local"), simulated.no_context():
        arena.reclaim(5)
        assert simulated.query(simulated.legacy)[0] == 201  # still no context
        stream = simulated.Stream(device=0)
        with pytest.raises(simulated.Error), simulated.device(0), stream.capture("global"):
            assert simulated.call("cuMemAlloc") == 900  # still not relaxed


def test_owners_go_in_the_context_of_their_list(simulated):
    devices = []

    def look():
        with simulated.Stream() as stream:  # made on the current device
            devices.append(stream.device)

    graphs = []
    for device in (0, 1, 1, 0):
        with simulated.device(device):
            graphs.append(captured(simulated.Stream(device=device), Last(look)))
    with Hold(simulated):
        for graph in graphs:
            graph.destroy()
    arena.reclaim(5)
    assert until(lambda: len(devices) == 4)
    assert devices == [0, 1, 1, 0]


def test_the_thread_waits_while_a_managed_capture_is_open(cuda):
    alive = weakref.ref(owner := Owner())
    graph = captured(cuda.Stream(), owner)
    del owner
    with Hold(cuda):
        graph.destroy()
        assert not until(lambda: alive() is None, 0.05)
    assert until(lambda: alive() is None)


def test_ten_thousand_deaths_at_once(cuda):
    before = arena.stats().released
    stream = cuda.Stream()
    graphs = [captured(stream, Owner()) for _ in range(10_000)]
    for graph in graphs:
        graph.destroy()
    arena.reclaim(10)
    assert arena.stats().released == before + 10_000
    assert arena.stats().dead == 0


def test_owners_are_invisible_to_the_garbage_collector_while_kept(cuda):
    stream = cuda.Stream()
    owners = [str(number) for number in range(1000)]  # not tracked themselves
    gc.collect()
    before = len(gc.get_objects())
    graph = captured(stream, *owners)
    tracked = len(gc.get_objects()) - before
    assert tracked < 30
    graph.destroy()


def test_many_threads_capture_retain_destroy_and_reclaim_at_once(cuda):
    """GIL against driver lock: nothing hangs, and the sums are right at the end."""
    before = arena.stats()
    errors = []
    stop = time.monotonic() + 1.5

    def capture():
        try:
            with cuda.device(0), cuda.thread_mode("relaxed"):
                stream = cuda.Stream()
                while time.monotonic() < stop:
                    graph = captured(stream, *[Owner() for _ in range(5)], mode="relaxed")
                    executable = graph.instantiate()
                    executable.launch(stream)
                    graph.destroy()
                    executable.destroy()
        except Exception as error:
            errors.append(error)

    def others():
        with cuda.device(0), cuda.thread_mode("relaxed"):
            while time.monotonic() < stop:
                arena.reclaim(0.001)
                gc.collect()
                arena.stats()

    threads = [threading.Thread(target=work) for work in (capture, capture, capture, others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert errors == []
    assert until(lambda: arena.reclaim(1) >= 0 and arena.stats().owners == before.owners)
    assert arena.stats().dead == 0


def test_a_managed_capture_that_opens_during_the_release_makes_the_rest_wait(cuda):
    stream = cuda.Stream()
    captures = []

    def opens():
        with cuda.device(0):
            stream.begin_capture("relaxed")
            captures.append(begin(stream))

    owners = [Last(opens), Owner(), Owner(), Owner()]
    alive = [weakref.ref(owner) for owner in owners[1:]]
    graph = captured(cuda.Stream(), *owners)
    del owners
    graph.destroy()
    assert until(lambda: captures)
    assert not until(lambda: any(each() is None for each in alive), 0.05)
    captures[0].seal()
    stream.end_capture().destroy()
    assert until(lambda: all(each() is None for each in alive))
