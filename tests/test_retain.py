"""What `retain` and `capture_id` promise. Each test runs on the simulated driver and on the installed one, unless it says why
not; each promise about safety stands beside its negative control.
"""

import gc
import threading
import weakref

import pytest
from conftest import stays, until

import arena


class Owner:
    """Something that owns memory; a weak reference tells whether it lives."""


class Unhashable:
    __hash__ = None

    def __eq__(self, other):
        raise AssertionError("owners are never compared")


def captured(stream, *owners, mode="global"):
    """A template whose capture retained `owners`."""
    with stream.capture(mode) as capture:
        stream.kernel()
        for owner in owners:
            assert arena.retain(owner, stream)
    return capture.graph


def gone(reference, seconds=5):
    return until(lambda: reference() is None, seconds)


def test_an_owner_lives_as_long_as_the_executable(cuda):
    owner = Owner()
    alive = weakref.ref(owner)
    stream = cuda.Stream()
    graph = captured(stream, owner)
    del owner
    executable = graph.instantiate()
    graph.destroy()
    executable.launch(stream)
    stream.synchronize()
    assert stays(lambda: alive() is not None)
    executable.destroy()
    assert gone(alive)


def test_without_retain_the_owner_dies_before_the_first_replay(cuda):
    """The negative control of this file."""
    owner = Owner()
    alive = weakref.ref(owner)
    stream = cuda.Stream()
    graph = captured(stream)
    del owner
    executable = graph.instantiate()
    assert alive() is None
    executable.destroy()
    graph.destroy()


def test_an_owner_lives_until_a_launch_in_flight_has_ended(cuda):
    owner = Owner()
    alive = weakref.ref(owner)
    stream = cuda.Stream()
    graph = captured(stream, owner)
    del owner
    executable = graph.instantiate()
    graph.destroy()
    gate = cuda.Event()
    executable.launch(stream, until=gate)
    executable.destroy()
    assert stays(lambda: alive() is not None)
    gate.set()
    stream.synchronize()
    assert gone(alive)


def test_clone_child_and_second_executable_each_hold_the_owner(cuda):
    stream = cuda.Stream()
    for derive in ("clone", "child", "second"):
        owner = Owner()
        alive = weakref.ref(owner)
        graph = captured(stream, owner)
        del owner
        if derive == "clone":
            other = graph.clone()
        elif derive == "child":
            other = cuda.Graph()
            other.add_child(graph)
        else:
            graph.instantiate().destroy()
            other = graph.instantiate()
        graph.destroy()
        assert stays(lambda alive=alive: alive() is not None), derive
        other.destroy()
        assert gone(alive), derive


def test_an_updated_executable_holds_the_new_owners_and_lets_the_old_go(cuda):
    stream = cuda.Stream()
    old, new = Owner(), Owner()
    old_alive, new_alive = weakref.ref(old), weakref.ref(new)
    first, second = captured(stream, old), captured(stream, new)
    del old, new
    executable = first.instantiate()
    first.destroy()
    executable.update(second)
    second.destroy()
    assert gone(old_alive)
    assert stays(lambda: new_alive() is not None)
    executable.destroy()
    assert gone(new_alive)


def test_not_capturing_keeps_nothing(cuda):
    stream = cuda.Stream()
    owner = Owner()
    alive = weakref.ref(owner)
    before = arena.stats().retained
    assert arena.retain(owner, stream) is False
    assert arena.capture_id(stream) is None
    assert arena.stats().retained == before
    del owner
    assert alive() is None


def test_one_user_object_per_graph_however_many_owners(simulated):
    stream = simulated.Stream()
    graph = captured(stream, *range(1000))
    assert graph.owners == 1
    executable = graph.instantiate()
    assert executable.owners == 1
    assert arena.stats().lists == 1
    assert arena.stats().owners == 1000
    executable.destroy()
    graph.destroy()


def test_the_same_owner_a_thousand_times_is_kept_and_released_a_thousand_times(cuda):
    owner = Owner()
    alive = weakref.ref(owner)
    before = arena.stats()
    graph = captured(cuda.Stream(), *[owner] * 1000)
    del owner
    assert arena.stats().owners == before.owners + 1000
    assert alive() is not None
    graph.destroy()
    assert gone(alive)
    assert until(lambda: arena.stats().released == before.released + 1000)


def test_owners_are_neither_hashed_nor_compared(cuda):
    stream = cuda.Stream()
    graph = captured(stream, Unhashable(), Unhashable(), {}, [])
    assert arena.stats().owners >= 4
    graph.destroy()


def test_owners_are_released_in_the_order_of_retention(cuda):
    order = []
    owners = [Owner() for _ in range(100)]
    for number, owner in enumerate(owners):
        weakref.finalize(owner, order.append, number)
    graph = captured(cuda.Stream(), *owners)
    owners.clear()
    del owner
    graph.destroy()
    assert until(lambda: len(order) == 100)
    assert order == list(range(100))


def test_none_is_refused(cuda):
    stream = cuda.Stream()
    with pytest.raises(TypeError, match="not None"):
        arena.retain(None, stream)
    with stream.capture() as capture, pytest.raises(TypeError, match="not None"):
        arena.retain(None, stream)
    capture.graph.destroy()


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        ("7", TypeError),
        (1.5, TypeError),
        (object(), TypeError),
        (-1, ValueError),
        (1 << 64, ValueError),
        (True, TypeError),
    ],
)
def test_what_is_no_stream_is_refused_by_name(stream, error):
    with pytest.raises(error, match=r"stream"):
        arena.retain(Owner(), stream)
    with pytest.raises(error, match=r"stream"):
        arena.capture_id(stream)


def test_a_stream_may_be_an_int_or_any_object_that_carries_a_handle(cuda):
    stream = cuda.Stream()

    class Torch:
        cuda_stream = stream.handle

    with stream.capture() as capture:
        for form in (stream.handle, stream, Torch()):
            assert arena.retain(Owner(), form)
            assert arena.capture_id(form) == capture.id
    capture.graph.destroy()


def test_a_closed_stream_object_is_refused(simulated):
    """A raw handle cannot be checked: on a real driver it is undefined behaviour. cuda.core's closed streams: test_torch."""
    stream = simulated.Stream()
    stream.destroy()
    with pytest.raises((simulated.Error, arena.DriverError), match="400"):
        arena.retain(Owner(), stream)


def test_without_a_stream_the_current_one_is_asked(simulated):
    stream, other = simulated.Stream(), simulated.Stream()
    assert arena.retain(Owner()) is False
    with stream.capture() as capture:
        assert arena.retain(Owner())
        with other:
            assert arena.retain(Owner()) is False
        assert arena.capture_id() == capture.id
    assert arena.capture_id() is None
    capture.graph.destroy()


def test_all_streams_and_threads_of_a_capture_share_one_list(cuda):
    before = arena.stats().lists
    main, side = cuda.Stream(), cuda.Stream()
    answers = []

    def work():
        with cuda.device(0):
            answers.append((arena.retain(Owner(), side), arena.capture_id(side)))

    with main.capture() as capture:
        main.kernel()
        assert arena.retain(Owner(), main)
        side.wait(main)
        side.kernel()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert answers == [(True, arena.capture_id(main))]
        assert arena.stats().lists == before + 1
        main.wait(side)
    capture.graph.destroy()


def test_two_captures_at_once_do_not_mix(cuda):
    first, second = cuda.Stream(), cuda.Stream()
    owners = [Owner() for _ in range(40)]
    alive = [weakref.ref(owner) for owner in owners]
    with first.capture("relaxed") as one, second.capture("relaxed") as two:
        for number, owner in enumerate(owners):
            assert arena.retain(owner, (first, second)[number % 2])
        assert arena.capture_id(first) == one.id != two.id == arena.capture_id(second)
    owners.clear()
    del owner
    one.graph.destroy()
    assert until(lambda: all(each() is None for each in alive[0::2]))
    assert all(each() is not None for each in alive[1::2])
    two.graph.destroy()
    assert until(lambda: all(each() is None for each in alive))


def test_a_conditional_body_has_a_list_of_its_own_held_by_the_parent(cuda):
    before = arena.stats().lists
    stream = cuda.Stream()
    graph = cuda.Graph()
    body = graph.add_conditional()
    owner = Owner()
    alive = weakref.ref(owner)
    with stream.capture(into=body):
        stream.kernel()
        assert arena.retain(owner, stream)
    del owner
    assert arena.stats().lists == before + 1
    executable = graph.instantiate()
    graph.destroy()
    assert stays(lambda: alive() is not None)
    executable.destroy()
    assert gone(alive)


def test_a_second_capture_into_the_same_graph_extends_its_list(cuda):
    stream = cuda.Stream()
    graph = cuda.Graph()
    first, second = Owner(), Owner()
    alive = [weakref.ref(first), weakref.ref(second)]
    before = arena.stats().lists
    ids = []
    for owner in (first, second):
        with stream.capture(into=graph) as capture:
            stream.kernel()
            assert arena.retain(owner, stream)
            ids.append(capture.id)
    del first, second, owner
    assert ids[0] == ids[1]
    assert arena.stats().lists == before + 1
    assert stays(lambda: all(each() is not None for each in alive))
    graph.destroy()
    assert until(lambda: all(each() is None for each in alive))


def test_a_recycled_graph_handle_does_not_inherit_owners(cuda):
    """Lists are found by capture id; by handle, this would find a dead one."""
    stream = cuda.Stream()
    handles = set()
    for _ in range(50):
        owner = Owner()
        alive = weakref.ref(owner)
        graph = captured(stream, owner)
        handles.add(graph.handle)
        del owner
        graph.destroy()
        assert gone(alive)
    assert len(handles) < 50


def test_an_invalidated_capture_takes_no_owner_and_lets_the_earlier_go(cuda):
    stream = cuda.Stream()
    early, late = Owner(), Owner()
    alive = [weakref.ref(early), weakref.ref(late)]
    with pytest.raises(cuda.Error) as raised, stream.capture():
        stream.kernel()
        assert arena.retain(early, stream)
        stream.invalidate()
        with pytest.raises(arena.CaptureError, match="invalidated"):
            arena.retain(late, stream)
        with pytest.raises(arena.CaptureError, match="invalidated"):
            arena.capture_id(stream)
    assert raised.value.code == 901
    del early, late
    assert until(lambda: all(each() is None for each in alive))
    graph = captured(stream, Owner())  # the next capture starts empty
    graph.destroy()


def test_an_unjoined_capture_lets_its_owners_go(cuda):
    stream, side = cuda.Stream(), cuda.Stream()
    owner = Owner()
    alive = weakref.ref(owner)
    with pytest.raises(cuda.Error), stream.capture():
        stream.kernel()
        side.wait(stream)
        side.kernel()
        assert arena.retain(owner, side)
    del owner
    assert gone(alive)


def test_python_exceptions_in_a_capture_leave_the_owners_to_the_graph(cuda):
    stream = cuda.Stream()
    owner = Owner()
    alive = weakref.ref(owner)
    with pytest.raises(ZeroDivisionError), stream.capture() as capture:
        stream.kernel()
        arena.retain(owner, stream)
        1 / 0  # noqa: B018
    del owner
    gc.collect()
    assert alive() is not None
    capture.graph.destroy()
    assert gone(alive)


def test_threads_that_retain_and_exit_leave_their_owners(cuda):
    stream = cuda.Stream()
    alive = []

    def work():
        with cuda.device(0):
            owner = Owner()
            alive.append(weakref.ref(owner))
            assert arena.retain(owner, stream)

    with stream.capture("relaxed") as capture:
        stream.kernel()
        for _ in range(8):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    assert len(alive) == 8
    assert all(each() is not None for each in alive)
    capture.graph.destroy()
    assert until(lambda: all(each() is None for each in alive))


def test_graphs_that_share_an_owner_release_it_with_the_last_of_them(cuda):
    stream = cuda.Stream()
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        owner = Owner()
        alive = weakref.ref(owner)
        graphs = [captured(stream, owner) for _ in range(3)]
        del owner
        for number in order[:2]:
            graphs[number].destroy()
            assert stays(lambda alive=alive: alive() is not None, 0.02)
        graphs[order[2]].destroy()
        assert gone(alive)


def test_a_stream_of_another_device_than_the_current_is_asked_for_itself(simulated):
    owner = Owner()
    alive = weakref.ref(owner)
    stream = simulated.Stream(device=1)
    with stream.capture() as capture, simulated.device(0):
        assert arena.retain(owner, stream)
    del owner
    executable = capture.graph.instantiate()
    capture.graph.destroy()
    assert stays(lambda: alive() is not None, 0.02)
    executable.destroy()
    assert gone(alive)


def test_no_context_and_the_legacy_stream_mean_not_capturing(cuda):
    stream = cuda.Stream()
    with stream.capture() as capture:
        stream.kernel()
        assert arena.retain(Owner(), cuda.legacy) is False  # the driver answers 906
        assert arena.retain(Owner(), stream)
    with cuda.no_context():
        assert arena.retain(Owner()) is False
    capture.graph.destroy()


# ---- __cuda_owners__ ----


class Binding:
    """An op library's object: scratch to keep, activations not to keep."""

    calls = 0

    def __init__(self):
        self.scratch, self.plan, self.activation = Owner(), Owner(), Owner()

    def __cuda_owners__(self):
        Binding.calls += 1
        return [self.scratch, self.plan]


def test_cuda_owners_stand_for_the_object(cuda):
    binding = Binding()
    kept = [weakref.ref(binding.scratch), weakref.ref(binding.plan)]
    dropped = [weakref.ref(binding), weakref.ref(binding.activation)]
    graph = captured(cuda.Stream(), binding)
    del binding
    assert all(each() is None for each in dropped)
    assert all(each() is not None for each in kept)
    graph.destroy()
    assert until(lambda: all(each() is None for each in kept))


def test_cuda_owners_is_called_only_while_a_capture_is_open(cuda):
    Binding.calls = 0
    assert arena.retain(Binding(), cuda.Stream()) is False
    assert Binding.calls == 0


def test_cuda_owners_is_looked_up_on_the_type(cuda):
    owner = Owner()
    owner.__cuda_owners__ = lambda: 1 / 0
    captured(cuda.Stream(), owner).destroy()


@pytest.mark.parametrize(
    ("owners", "error", "words"),
    [
        (lambda self: None, TypeError, "returned NoneType"),
        (lambda self: 3, TypeError, "returned int"),
        (lambda self: [Owner(), None], TypeError, "returned None among 2"),
        (lambda self: 1 / 0, ZeroDivisionError, "division"),
    ],
)
def test_cuda_owners_that_fail_retain_nothing(cuda, owners, error, words):
    kind = type("Wrong", (), {"__cuda_owners__": owners})
    stream = cuda.Stream()
    before = arena.stats().retained
    with stream.capture() as capture, pytest.raises(error, match=words):
        arena.retain(kind(), stream)
    assert arena.stats().retained == before
    capture.graph.destroy()


def test_cuda_owners_may_be_empty(cuda):
    kind = type("Nothing", (), {"__cuda_owners__": lambda self: ()})
    stream = cuda.Stream()
    before = arena.stats()
    with stream.capture() as capture:
        assert arena.retain(kind(), stream)
    assert arena.stats().lists == before.lists
    capture.graph.destroy()


def test_cuda_owners_that_end_the_capture_retain_nothing(cuda):
    stream = cuda.Stream()
    graphs = []

    class Ends:
        def __cuda_owners__(self):
            graphs.append(stream.end_capture())
            return [Owner()]

    stream.begin_capture()
    stream.kernel()
    before = arena.stats().retained
    assert arena.retain(Ends(), stream) is False
    assert arena.stats().retained == before
    graphs[0].destroy()


# ---- stats ----


def test_stats_sum_up_at_every_moment(cuda):
    def sums_up():
        now = arena.stats()
        return now.retained == now.owners + now.dead + now.released + now.leaked

    stream = cuda.Stream()
    graphs = []
    for number in range(20):
        graphs.append(captured(stream, *range(number)))
        assert sums_up()
    for graph in graphs:
        graph.destroy()
        assert sums_up()
    arena.reclaim(5)
    assert sums_up()
    assert "retained=" in repr(arena.stats())
    with pytest.raises(AttributeError):
        arena.stats().owners = 3
