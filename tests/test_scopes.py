"""What `collect()` and `suspend()` promise: who sees what is retained, and for how long."""

import threading
import weakref

import pytest
from conftest import until

import arena


class Owner:
    """Something that owns memory."""


def test_a_scope_gets_what_is_retained_in_order_with_duplicates():
    first, second = Owner(), Owner()
    with arena.collect() as owners:
        assert type(owners) is list
        assert arena.retain(first)
        assert arena.retain(second)
        assert arena.retain(first)
    assert [id(each) for each in owners] == [id(first), id(second), id(first)]
    assert arena.retain(first) is False
    assert len(owners) == 3


def test_the_innermost_scope_alone_gets_it():
    with arena.collect() as outer:
        arena.retain(1)
        with arena.collect() as inner:
            arena.retain(2)
        arena.retain(3)
    assert (outer, inner) == ([1, 3], [2])


def test_suspension_hides_the_outer_scopes_only():
    with arena.collect() as outer:
        with arena.suspend() as nothing:
            assert nothing is None
            assert arena.retain(1) is False
            with arena.collect() as inner:
                assert arena.retain(2)
        assert arena.retain(3)
    assert (outer, inner) == ([3], [2])


def test_scopes_are_restored_on_exceptions():
    with arena.collect() as outer:
        with pytest.raises(ZeroDivisionError), arena.collect() as inner:
            arena.retain(1)
            1 / 0  # noqa: B018
        arena.retain(2)
    assert (outer, inner) == ([2], [1])
    assert arena.retain(3) is False


def test_scopes_may_end_out_of_order():
    """Generators do this."""
    outer, inner = arena.collect(), arena.collect()
    first, second = outer.__enter__(), inner.__enter__()
    outer.__exit__(None, None, None)
    arena.retain(1)
    inner.__exit__(None, None, None)
    assert (first, second) == ([], [1])
    assert arena.retain(2) is False


def test_a_scope_is_open_once_at_a_time():
    scope = arena.collect()
    with scope, pytest.raises(RuntimeError, match="already open"):
        scope.__enter__()
    with pytest.raises(RuntimeError, match="not open"):
        scope.__exit__(None, None, None)


def test_a_scope_sees_its_own_thread_only():
    other = []
    with arena.collect() as owners:
        thread = threading.Thread(target=lambda: other.append(arena.retain(1)))
        thread.start()
        thread.join()
    assert owners == []
    assert other == [False]


def test_a_thread_that_dies_with_an_open_scope_disturbs_nobody():
    thread = threading.Thread(target=lambda: arena.collect().__enter__())
    thread.start()
    thread.join()
    assert arena.retain(1) is False


def test_the_graph_retains_what_a_scope_gets(cuda):
    owner = Owner()
    alive = weakref.ref(owner)
    stream = cuda.Stream()
    with stream.capture() as capture:
        with arena.collect() as owners:
            assert arena.retain(owner, stream)
        assert owners == [owner]
    owners.clear()
    del owner
    assert alive() is not None
    capture.graph.destroy()
    assert until(lambda: alive() is None)


def test_suspension_does_not_keep_the_graph_from_retaining(cuda):
    owner = Owner()
    alive = weakref.ref(owner)
    stream = cuda.Stream()
    with arena.collect() as owners, stream.capture() as capture, arena.suspend():
        assert arena.retain(owner, stream)
    assert owners == []
    del owner
    assert alive() is not None
    capture.graph.destroy()
    assert until(lambda: alive() is None)


def test_a_worker_of_an_unmanaged_capture_reaches_the_graph_but_not_the_scope(cuda):
    owner = Owner()
    alive = weakref.ref(owner)
    stream = cuda.Stream()
    answers = []

    def work():
        with cuda.device(0):
            answers.append(arena.retain(owner, stream))  # noqa: F821

    with arena.collect() as owners, stream.capture() as capture:
        stream.kernel()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert answers == [True]
    assert owners == []
    del owner
    assert alive() is not None
    capture.graph.destroy()
    assert until(lambda: alive() is None)


def test_a_scope_gets_what_cuda_owners_returns():
    class Binding:
        def __cuda_owners__(self):
            return ("scratch", "plan")

    with arena.collect() as owners:
        arena.retain(Binding())
    assert owners == ["scratch", "plan"]


def test_what_the_driver_refuses_no_scope_gets(simulated):
    stream = simulated.Stream()
    with stream.capture() as capture, arena.collect() as owners:
        with pytest.raises(arena.DriverError):
            simulated.fail("cuUserObjectCreate")
            arena.retain(1, stream)
    assert owners == []
    capture.graph.destroy()
