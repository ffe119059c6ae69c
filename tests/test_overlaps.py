"""A watch says who else has these bytes: views that outlive their bytes, and streams that nothing orders. Here with streams
that stand in for torch's, and captures of the simulated driver; test_overlaps_gpu.py has real ones, and the watch itself is in
test_overlaps_watch.py. Each scenario is also seen without what makes it wrong: then nothing is said."""

import warnings

import pytest

import arena

torch = pytest.importorskip("torch")

import watch_rig  # noqa: E402
from watch_rig import SPEC, Event, Stream  # noqa: E402

from arena import ordering, overlaps, workspace  # noqa: E402
from arena.overlaps import OverlapError, OverlapWarning, watch  # noqa: E402
from arena.workspace import use_workspace_lane, use_workspace_ubatch_id  # noqa: E402

manager, found, streams, watched = watch_rig.manager, watch_rig.found, watch_rig.streams, watch_rig.watched  # fixtures


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


def test_call_sites_are_outside_this_package(manager, watched, found):
    kept = manager.try_get_simultaneous(SPEC)
    for _ in range(2):
        workspace.WorkspaceManager.get_simultaneous(manager, SPEC)
    assert site(":test_call_sites_are_outside_this_package")(found[0].earlier.site)
    assert kept


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
    ordering.order.ended(ordering.order.everything())
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
