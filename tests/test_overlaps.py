"""A watch says who else has these bytes: views that outlive their bytes, and streams that nothing orders. Here with streams
that stand in for torch's, and captures of the simulated driver; test_overlaps_gpu.py has real ones. Each scenario is also
seen without what makes it wrong: then nothing is said."""

import gc
import os
import threading
import warnings
import weakref

import pytest
from conftest import run_python

import arena

torch = pytest.importorskip("torch")

from arena import overlaps, workspace  # noqa: E402
from arena.overlaps import OverlapError, OverlapWarning, watch  # noqa: E402
from arena.workspace import WorkspaceManager, use_workspace_lane, use_workspace_ubatch_id  # noqa: E402

SPEC = ((256,), torch.float32)


class Event:
    """What torch.cuda.Event is to the watch."""

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


class Stream:
    """What torch.cuda.Stream is to the watch; `busy` until the test says otherwise."""

    def __init__(self, name):
        self.name, self.busy = name, True

    def __repr__(self):
        return f"stream {self.name}"

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def synchronize(self):
        pass

    def query(self):
        return not self.busy


class Streams:
    """The current stream, as torch's would be."""

    def __init__(self):
        self.one, self.two, self.three = Stream("one"), Stream("two"), Stream("three")
        self.current = self.one

    def __call__(self, device):
        return self.current

    def request(self, stream, manager, *specs):
        self.current = stream
        return manager.get_simultaneous(*(specs or (SPEC,)))


@pytest.fixture
def manager():
    return WorkspaceManager(torch.device("cpu"), 2, 2)


@pytest.fixture
def found():
    return []


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.setattr(overlaps, "PATCHED", [*overlaps.PATCHED, (Event, overlaps.EVENT), (Stream, overlaps.STREAM)])
    return Streams()


@pytest.fixture
def watched(manager, streams, found):
    with watch(manager, report=found.append, current_stream=streams) as watching:
        yield watching


def site(*names):
    """What a call site of this file begins and ends with."""
    return lambda text: text.startswith("test_overlaps.py:") and text.endswith(names)


# ---- views that outlive their bytes ----


def test_a_view_kept_over_two_requests_is_reported_with_both_call_sites(manager, watched, found):
    def first():
        return manager.get_simultaneous(SPEC)

    def second():
        return manager.get_simultaneous(SPEC)

    kept = first()
    second()
    assert found == []  # whoever asks in a loop still has the old one now
    manager.get_simultaneous(((1,), torch.uint8))
    (overlap,) = found
    assert overlap.kind == "alive"
    assert (overlap.ubatch, overlap.lane, overlap.bytes) == (0, 0, (0, 1024))
    assert site(":first")(overlap.earlier.site)
    assert site(":second")(overlap.later.site)
    assert str(overlap) == (
        f"workspace slot (ubatch 0, lane 0): the view made at {overlap.earlier.site} on stream one is still alive, but its "
        f"bytes 0 to 1024 were handed out again at {overlap.later.site} on stream one"
    )
    manager.get_simultaneous(SPEC)
    assert len(found) == 1  # each view once
    assert kept


def test_a_view_that_was_let_go_of_in_time_is_not_reported(manager, watched, found):
    kept = manager.get_simultaneous(SPEC)
    manager.get_simultaneous(SPEC)
    del kept
    manager.get_simultaneous(SPEC)
    assert watched.check() == found == []


def test_a_loop_that_reuses_its_variable_is_not_reported(manager, watched, found):
    for _ in range(5):
        view = manager.get_simultaneous(SPEC)
    assert view
    assert found == []


def test_a_view_made_of_a_view_counts(manager, watched, found):
    part = manager.get_simultaneous(SPEC)[0][64:].view(torch.int32).reshape(4, 48)
    manager.get_simultaneous(SPEC)
    manager.get_simultaneous(SPEC)
    assert [each.kind for each in found] == ["alive"]
    del part


def test_bytes_that_nobody_was_given_again_are_still_their_owners(manager, watched, found):
    low, high = manager.get_simultaneous(SPEC, SPEC)
    del low
    for _ in range(3):
        manager.get_simultaneous(SPEC)  # the lower half
    assert found == []
    for _ in range(2):
        manager.get_simultaneous(SPEC, ((1,), torch.uint8))
    assert [each.bytes for each in found] == [(1024, 1025)]
    del high


def test_growth_leaves_old_views_their_bytes(manager, watched, found):
    old = manager.get_simultaneous(SPEC)[0].fill_(3)
    for _ in range(3):
        manager.get_simultaneous(((4096,), torch.float32))
    assert found == []
    assert old.unique().tolist() == [3]


@pytest.mark.parametrize("other", [use_workspace_lane, use_workspace_ubatch_id])
def test_another_slot_has_other_bytes(manager, watched, found, other):
    manager.reserve_all(SPEC)
    kept = manager.get_simultaneous(SPEC)
    with other(1):
        for _ in range(3):
            manager.get_simultaneous(SPEC)
    assert kept
    assert found == []
    with other(1):
        kept = manager.get_simultaneous(SPEC)
        for _ in range(2):
            manager.get_simultaneous(SPEC)
    assert [(each.ubatch, each.lane) for each in found] == [(0, 1) if other is use_workspace_lane else (1, 0)]


def test_check_tells_at_once(manager, watched, found):
    kept = manager.get_simultaneous(SPEC)
    assert watched.check() == []
    again = manager.get_simultaneous(SPEC)
    assert watched.check() == found == watched.found
    assert [each.kind for each in found] == ["alive"]
    del kept, again
    assert watched.check() == []


class Binding:
    def __init__(self, scratch):
        self.parts = {"scratch": scratch}


class Declared:
    """An owner whose parts stand for it."""

    __slots__ = ("scratch",)

    def __init__(self, scratch):
        self.scratch = scratch

    def __cuda_owners__(self):
        return (self.scratch,)


@pytest.mark.parametrize("owner", [lambda view: view, Binding, Declared], ids=["view", "binding", "declared"])
def test_a_stale_view_that_is_retained_is_reported(simulated, manager, watched, found, owner):
    def made():
        return manager.get_simultaneous(SPEC)[0]

    def retains(view):
        return arena.retain(owner(view))

    with simulated.Stream().capture() as capture:
        first = made()
        assert retains(first)
        second = made()
        assert retains(second)
        assert found == []  # each in time
        assert retains(first)
    (overlap,) = found
    assert overlap.kind == "retained"
    assert site(":made")(overlap.earlier.site)
    assert site(":made")(overlap.later.site)
    assert site(":retains")(overlap.site)
    assert f"was retained at {overlap.site}" in str(overlap)
    capture.graph.destroy()


def test_a_stale_view_is_not_fit_to_be_retained_outside_captures_either(manager, watched, found):
    first = manager.get_simultaneous(SPEC)[0]
    arena.retain(Binding(first))
    assert found == []
    second = manager.get_simultaneous(SPEC)[0]
    arena.retain(Binding(first))
    assert [each.kind for each in found] == ["retained"]
    assert second is not None


def test_owners_are_asked_what_stands_for_them_no_more_often_than_promised(manager, watched):
    asked = []

    class Asked:
        def __cuda_owners__(self):
            asked.append(1)
            return ()

    arena.retain(Asked())
    assert asked == []


def test_a_stale_view_that_is_used_is_reported(manager, watched, found):
    first = manager.get_simultaneous(SPEC)[0]
    overlaps.used(first)
    second = manager.get_simultaneous(SPEC)[0]
    overlaps.used(second, torch.empty(3))
    assert found == []
    overlaps.used(second, first[3:5])
    assert [each.kind for each in found] == ["used"]
    assert site(":test_a_stale_view_that_is_used_is_reported")(found[0].site)


def test_asked_to_raise_the_request_fails_and_hands_out_nothing(manager):
    with watch(manager, report="raise", poison=7) as watching:
        kept = manager.get_simultaneous(SPEC)[0]
        again = manager.get_simultaneous(SPEC)[0].fill_(1)
        with pytest.raises(OverlapError, match="is still alive, but its bytes 0 to 1024 were handed out again"):
            manager.get_simultaneous(SPEC)
        assert again.unique().tolist() == [1]  # and nobody poisoned it
        with pytest.raises(OverlapError, match="was retained at"):
            arena.retain(kept)
        with pytest.raises(OverlapError, match="was used at"):
            overlaps.used(kept)
        assert len(watching.found) == 3
        arena.retain(again)
        manager.get_simultaneous(SPEC)  # each view once


def test_warnings_come_once_for_each_pair_of_call_sites(manager):
    def made():
        return manager.get_simultaneous(SPEC)

    with watch(manager), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        kept = [made() for _ in range(10)]
        kept.append(manager.get_simultaneous(SPEC))
        manager.get_simultaneous(SPEC)
    assert [each.category for each in seen] == [OverlapWarning] * 2


def test_what_a_capture_retained_in_time_may_live_as_long_as_its_graph(simulated, manager, watched, found):
    with simulated.Stream().capture() as capture:
        for _ in range(4):
            arena.retain(Binding(manager.get_simultaneous(SPEC)[0]))
    assert watched.check() == found == []
    capture.graph.destroy()


def test_what_python_alone_keeps_is_reported_inside_a_capture_too(simulated, manager, watched, found):
    """The control: the same without retaining."""
    with simulated.Stream().capture() as capture:
        kept = [Binding(manager.get_simultaneous(SPEC)[0]) for _ in range(4)]
        inside = arena.capture_id()
    assert {each.kind for each in found} == {"alive"}
    assert found[0].earlier.capture == inside
    assert f"in capture {inside} is still alive" in str(found[0])
    del kept
    capture.graph.destroy()


# ---- streams ----

ORDERINGS = {
    "wait_stream": lambda one, two: two.wait_stream(one),
    "wait_event": lambda one, two: two.wait_event(one.record_event()),
    "event": lambda one, two: recorded(one).wait(two),
    "stream.synchronize": lambda one, two: one.synchronize(),
    "event.synchronize": lambda one, two: recorded(one).synchronize(),
    "event.query": lambda one, two: recorded(one).query(),
    "stream.query": lambda one, two: setattr(one, "busy", False) or one.query(),
    "idle": lambda one, two: setattr(one, "busy", False),
    "an event that was recorded unseen": lambda one, two: two.wait_event(Event()),
}


def recorded(stream):
    event = Event()
    event.record(stream)
    return event


def test_a_second_stream_without_an_ordering_is_reported_with_both(manager, streams, watched, found):
    def target():
        manager.get_simultaneous(SPEC)

    def draft():
        streams.current = streams.two
        manager.get_simultaneous(SPEC)

    target()
    draft()
    (overlap,) = found
    assert overlap.kind == "unordered"
    assert (overlap.earlier.stream, overlap.later.stream) == (streams.one, streams.two)
    assert site(":target")(overlap.earlier.site)
    assert site(":draft")(overlap.later.site)
    assert str(overlap) == (
        f"workspace slot (ubatch 0, lane 0): bytes 0 to 1024, used at {overlap.earlier.site} on stream one, are used at "
        f"{overlap.later.site} on stream two, and nothing orders the second stream behind the first: make it wait, or use "
        "another lane"
    )


@pytest.mark.parametrize("how", ORDERINGS)
def test_a_second_stream_that_comes_behind_the_first_is_not_reported(manager, streams, watched, found, how):
    for _ in range(3):
        streams.request(streams.one, manager)
        ORDERINGS[how](streams.one, streams.two)
        streams.request(streams.two, manager)
        ORDERINGS[how](streams.two, streams.one)
    assert found == []


NOT_ORDERINGS = {
    "the wrong way round": lambda one, two: one.wait_stream(two),
    "recorded, but nobody waits": lambda one, two: recorded(one),
    "still busy": lambda one, two: one.query(),
    "the other is synchronized": lambda one, two: two.synchronize(),
    "an event of another stream": lambda one, two: recorded(Stream("other")).wait(two),
    "somebody else waits": lambda one, two: Stream("other").wait_stream(one),
}


@pytest.mark.parametrize("how", NOT_ORDERINGS)
def test_what_orders_nothing_is_no_excuse(manager, streams, watched, found, how):
    streams.request(streams.one, manager)
    NOT_ORDERINGS[how](streams.one, streams.two)
    streams.request(streams.two, manager)
    assert [each.kind for each in found] == ["unordered"]


def test_what_is_waited_for_is_what_came_before_the_record(manager, streams, watched, found):
    event = recorded(streams.one)
    streams.request(streams.one, manager)
    streams.two.wait_event(event)
    streams.request(streams.two, manager)
    assert len(found) == 1


def test_an_ordering_passes_through_a_third_stream(manager, streams, watched, found):
    streams.request(streams.one, manager)
    streams.three.wait_stream(streams.one)
    streams.two.wait_stream(streams.three)
    streams.request(streams.two, manager)
    assert found == []
    streams.request(streams.three, manager)
    assert [(str(each.earlier.stream), str(each.later.stream)) for each in found] == [("stream two", "stream three")]


def test_a_device_that_was_synchronized_has_ended_everything(manager, streams, watched, found, monkeypatch):
    streams.request(streams.one, manager)
    overlaps._order.ended(overlaps._order.everything())
    streams.request(streams.two, manager)
    assert found == []


@pytest.mark.parametrize("module", [torch.cuda, torch.accelerator], ids=["torch.cuda", "torch.accelerator"])
def test_torchs_synchronize_is_seen(manager, streams, found, monkeypatch, module):
    monkeypatch.setattr(module, "synchronize", lambda device=None: "torch's own")
    with watch(manager, report=found.append, current_stream=streams):
        streams.request(streams.one, manager)
        assert module.synchronize() == "torch's own"
        streams.request(streams.two, manager)
    assert found == []


def test_a_synchronize_that_failed_orders_nothing(manager, streams, found, monkeypatch):
    def fails(device=None):
        raise RuntimeError("no device")

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    with watch(manager, report=found.append, current_stream=streams):
        streams.request(streams.one, manager)
        with pytest.raises(RuntimeError, match="no device"):
            torch.cuda.synchronize()
        streams.request(streams.two, manager)
    assert len(found) == 1


def test_lanes_need_no_ordering(manager, streams, watched, found):
    for _ in range(3):
        streams.request(streams.one, manager)
        with use_workspace_lane(1):
            streams.request(streams.two, manager)
    assert found == []


def test_every_pair_of_interleaved_streams_is_reported_once(manager, streams, watched, found):
    for _ in range(50):
        streams.request(streams.one, manager)
        streams.request(streams.two, manager)
    assert sorted((str(each.earlier.stream), str(each.later.stream)) for each in found) == [
        ("stream one", "stream two"),
        ("stream two", "stream one"),
    ]


def test_a_view_used_on_a_second_stream_is_reported(manager, streams, watched, found):
    view = streams.request(streams.one, manager)[0]
    streams.current = streams.two
    overlaps.used(view)
    assert [each.kind for each in found] == ["unordered"]
    streams.two.wait_stream(streams.one)
    overlaps.used(view)
    streams.current = streams.one  # which does not come behind what stream two does with it now
    overlaps.used(view)
    assert [str(each.later.stream) for each in found] == ["stream two", "stream one"]


def test_one_use_of_a_part_does_not_hide_the_rest(manager, streams, watched, found):
    low, high = streams.request(streams.one, manager, SPEC, SPEC)
    overlaps.used(high)
    streams.request(streams.two, manager)  # the lower half
    assert len(found) == 1
    assert low is not None


def test_asked_to_raise_the_second_stream_gets_nothing(manager, streams):
    with watch(manager, report="raise", current_stream=streams):
        streams.request(streams.one, manager)
        for _ in range(2):
            with pytest.raises(OverlapError, match=r"on stream one, are used at .* on stream two"):
                streams.request(streams.two, manager)
        streams.request(streams.one, manager)


def test_captures_are_compared_with_nothing_that_is_not_in_them(simulated, manager, streams, watched, found):
    streams.request(streams.one, manager)
    with simulated.Stream().capture() as capture:
        streams.request(streams.two, manager)
        assert found == []
        streams.request(streams.three, manager)
        assert [(str(each.earlier.stream), str(each.later.stream)) for each in found] == [("stream two", "stream three")]
        streams.one.wait_stream(streams.three)
        streams.request(streams.one, manager)
    streams.request(streams.one, manager)
    assert len(found) == 1
    capture.graph.destroy()


def test_inside_a_capture_an_idle_stream_orders_nothing_and_is_not_asked(simulated, manager, streams, watched, found):
    asked = []
    streams.one.query = streams.two.query = lambda: asked.append(1) or True
    with simulated.Stream().capture() as capture:
        streams.request(streams.one, manager)
        streams.request(streams.two, manager)
    assert asked == []
    assert len(found) == 1
    capture.graph.destroy()


def test_the_bytes_that_two_graphs_share(simulated, manager, watched):
    """A target whose output is read after its draft model replayed: what lanes are for."""

    def captured(lane, *specs):
        with use_workspace_lane(lane), simulated.Stream().capture() as capture:
            manager.get_simultaneous(*specs)
            graphs.append(capture.graph)
            return arena.capture_id()

    graphs = []
    manager.reserve_all(SPEC, SPEC)
    target = captured(0, SPEC, SPEC)
    draft = captured(1, SPEC)
    assert watched.shared(target, draft) == []
    (overlap,) = watched.shared(target, captured(0, SPEC))
    assert (overlap.kind, overlap.lane, overlap.bytes) == ("captures", 0, (0, 1024))
    assert overlap.earlier.site == overlap.later.site  # the one line above
    assert site(":captured")(overlap.earlier.site)
    assert f"in capture {target} and at" in str(overlap)
    manager.get_simultaneous(((4096,), torch.float32))  # they keep the smaller block
    assert len(watched.shared(target, target)) == 1
    for graph in graphs:
        graph.destroy()


# ---- poison ----


@pytest.mark.parametrize("inference", [False, True])
def test_fresh_bytes_are_poisoned_on_request(manager, inference):
    with torch.inference_mode(inference), watch(manager, poison=0xFF):
        manager.get_simultaneous(SPEC)[0].fill_(1)
        low, high = manager.get_simultaneous(((100,), torch.bfloat16), ((3, 5), torch.int32))
        assert low.isnan().all()
        assert (high == -1).all()
        low.fill_(0)


def test_without_poison_bytes_are_what_they_were(manager):
    with watch(manager):
        manager.get_simultaneous(SPEC)[0].fill_(1)
        assert (manager.get_simultaneous(SPEC)[0] == 1).all()


@pytest.mark.parametrize("asked", [False, True])
def test_captures_are_poisoned_only_where_it_was_asked(simulated, manager, asked):
    manager.get_simultaneous(SPEC)[0].fill_(1)
    with watch(manager, poison=0, poison_captures=asked), simulated.Stream().capture() as capture:
        assert (manager.get_simultaneous(SPEC)[0] == (0 if asked else 1)).all()
    capture.graph.destroy()


def test_a_stale_view_reads_poison(manager):
    with watch(manager, poison=0xFF):
        first = manager.get_simultaneous(SPEC)[0].fill_(1)
        manager.get_simultaneous(SPEC)
        assert first.isnan().all()


# ---- what a watch does to requests ----


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("reuse", [False, True])
def test_watched_views_are_what_unwatched_ones_are(inference, reuse):
    specs = [((4, 8), torch.bfloat16), ((0, 3), torch.int8), ((), torch.float64), ((5,), torch.bool)]
    manager = WorkspaceManager(torch.device("cpu"), reuse_views=reuse)

    def told(views):
        base = manager._current_workspaces[0].data_ptr()
        return [
            (
                each.dtype,
                each.shape,
                each.stride(),
                each.storage_offset(),
                each.untyped_storage().nbytes(),
                each.data_ptr() - base if each.numel() else None,
                each.device,
                each.requires_grad,
                each.is_inference(),
                type(each),
            )
            for each in views
        ]

    with torch.inference_mode(inference):
        plain = told(manager.get_simultaneous(*specs))
        with watch(manager):
            views = manager.get_simultaneous(*specs)
            assert told(views) == plain
            assert manager.get_simultaneous(*specs)[0] is not views[0]
        assert told(manager.get_simultaneous(*specs)) == plain


def test_a_watched_view_alone_keeps_its_bytes(manager):
    with watch(manager):
        view = manager.get_simultaneous(SPEC)[0].fill_(5)
        storage = torch.multiprocessing.reductions.StorageWeakRef(manager._current_workspaces[0].untyped_storage())
        block = weakref.ref(manager._current_workspaces.parts[0].current)
        manager.get_simultaneous(((4096,), torch.float32))
        assert block() is None
        assert not storage.expired()
        assert (view == 5).all()
        del view
        assert storage.expired()


def test_a_dead_manager_is_let_go_of():
    manager = WorkspaceManager(torch.device("cpu"))
    with watch(manager) as watching:
        manager.get_simultaneous(SPEC)
        gone = weakref.ref(manager)
        del manager
        gc.collect()
        assert gone() is None
        assert len(watching.slots) == 0


def test_a_request_under_a_fake_mode_is_left_alone(manager, watched, found):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        assert isinstance(manager.get_simultaneous(SPEC)[0], FakeTensor)
    assert manager.watch is watched
    assert type(manager.get_simultaneous(SPEC)[0]) is torch.Tensor


def test_a_watch_that_cannot_go_on_says_so_and_ends(manager, caplog):
    def fails(device):
        raise RuntimeError("no streams today")

    with watch(manager, current_stream=fails):
        assert manager.get_simultaneous(SPEC)[0].shape == (256,)
        assert manager.watch is None
        manager.get_simultaneous(SPEC)
    assert ["not watched any more" in each.message for each in caplog.records] == [True]
    assert "no streams today" in caplog.text


def test_a_use_that_cannot_be_looked_at_fails_nobody(manager, streams, watched, found, monkeypatch, caplog):
    view = manager.get_simultaneous(SPEC)[0]
    monkeypatch.setattr(watched, "current_stream", lambda device: 1 // 0)
    overlaps.used(view)
    assert "is not seen" in caplog.text
    assert found == []


def test_threads_share_one_watch(watched, manager, streams, found):
    def work(lane):
        try:
            with use_workspace_lane(lane):
                for size in range(1, 200):
                    view = manager.get_simultaneous(((size,), torch.float32))[0].fill_(lane)
                    overlaps.used(view)
                    assert (view == lane).all()
        except BaseException as error:
            failed.append(error)

    failed = []
    threads = [threading.Thread(target=work, args=(lane,)) for lane in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == found == []


# ---- off ----


def names_of(owner):
    return {name: value for name, value in vars(owner).items() if name not in ("__dict__", "__weakref__")}


def test_off_nothing_is_there(manager):
    """Release mode: no hook, no patch, no slow way; and after a watch it is so again."""
    owners = [owner for owner, _ in overlaps.PATCHED]
    before = [names_of(owner) for owner in owners]

    def compiled():
        """Whether a request seen before is answered by the compiled way: then, reusing, by the very same object."""
        with torch.no_grad():
            manager.get_simultaneous(SPEC)
            return manager.get_simultaneous(SPEC)[0] is manager.get_simultaneous(SPEC)[0]

    manager.reuse_views = True
    assert manager.watch is None
    assert compiled()
    with watch(manager) as watching:
        assert manager.watch is watching
        assert not compiled()
        assert [names_of(owner) for owner in owners] != before
    assert manager.watch is None
    assert compiled()
    assert [names_of(owner) for owner in owners] == before
    assert overlaps._watches == []


def test_the_module_is_not_even_imported_without_being_asked():
    ended = run_python(
        "import sys, torch, arena.workspace as w\n"
        "m = w.WorkspaceManager(torch.device('cpu')); m.get_simultaneous(((4,), torch.int8))\n"
        "assert m.watch is None and 'arena.overlaps' not in sys.modules",
        timeout=60,
        env={"ARENA_WATCH": "", "ARENA_POISON": ""} if "ARENA_WATCH" in os.environ else None,
    )
    assert ended.returncode == 0, ended.stderr


def test_retain_pays_nothing_once_the_watch_has_ended(manager):
    told = []
    arena._registry.watch_retains(lambda owner, stream: told.append(owner))
    arena.retain("one")
    arena._registry.watch_retains(None)
    arena.retain("two")
    assert told == ["one"]


def test_methods_that_others_patched_since_stay_theirs(manager, monkeypatch):
    own = torch.cuda.Event.record
    watching = watch(manager)
    ours = torch.cuda.Event.record
    theirs = lambda *args: ours(*args)  # noqa: E731
    monkeypatch.setattr(torch.cuda.Event, "record", theirs)
    watching.stop()
    assert torch.cuda.Event.record is theirs
    monkeypatch.undo()
    torch.cuda.Event.record = own


def test_two_watches_end_in_any_order():
    one, two = WorkspaceManager(torch.device("cpu")), WorkspaceManager(torch.device("cpu"))
    own = torch.cuda.Event.record
    first, second = watch(one), watch(two)
    first.stop()
    assert torch.cuda.Event.record is not own
    first.stop()
    second.stop()
    assert torch.cuda.Event.record is own


def test_watching_all_managers(manager):
    with watch() as watching:
        assert manager.watch is watching
    assert manager.watch is None


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"poison": 256}, ValueError, "0 to 255, not 256"),
        ({"report": "shout"}, ValueError, "not 'shout'"),
    ],
)
def test_what_cannot_be_watched_for_is_refused(manager, options, error, match):
    with pytest.raises(error, match=match):
        watch(manager, **options)
    assert manager.watch is None
    assert overlaps._watches == []


def test_a_manager_has_one_watch(manager, watched):
    with pytest.raises(RuntimeError, match="is watched already"):
        watch(manager)
    assert manager.watch is watched


# ---- by the environment ----


@pytest.mark.parametrize(
    ("environment", "report", "poison"),
    [
        ({"ARENA_WATCH": "1"}, "warn", None),
        ({"ARENA_WATCH": "warn", "ARENA_POISON": "0xFF"}, "warn", 255),
        ({"ARENA_WATCH": "raise"}, "raise", None),
        ({"ARENA_POISON": "17"}, "warn", 17),
    ],
)
def test_a_manager_is_watched_from_the_start_where_the_environment_asks(monkeypatch, environment, report, poison):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    manager = WorkspaceManager(torch.device("cpu"))
    try:
        assert (manager.watch.report, manager.watch.poison) == (report, poison)
        assert manager.get_simultaneous(SPEC)[0].shape == (256,)
    finally:
        manager.watch.stop()


@pytest.mark.parametrize("environment", [{}, {"ARENA_WATCH": "0"}, {"ARENA_WATCH": ""}])
def test_and_not_where_it_does_not(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert WorkspaceManager(torch.device("cpu")).watch is None


@pytest.mark.parametrize(
    ("environment", "match"),
    [
        ({"ARENA_WATCH": "loud"}, "ARENA_WATCH is 0, 1, warn or raise, not 'loud'"),
        ({"ARENA_POISON": "nan"}, "ARENA_POISON is the value of a byte, as 0xFF, not 'nan'"),
        ({"ARENA_POISON": "0x100"}, "0 to 255, not 256"),
    ],
)
def test_an_environment_that_says_something_else_is_refused(monkeypatch, environment, match):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=match):
        WorkspaceManager(torch.device("cpu"))


def test_call_sites_are_outside_this_package(manager, watched, found):
    kept = manager.try_get_simultaneous(SPEC)
    for _ in range(2):
        workspace.WorkspaceManager.get_simultaneous(manager, SPEC)
    assert site(":test_call_sites_are_outside_this_package")(found[0].earlier.site)
    assert kept
