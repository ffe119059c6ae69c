"""A watch on a real GPU: two streams that nothing orders are seen before their bytes go wrong, an ordering by whatever means
is believed, and nobody's capture is broken by being watched. The rules one by one are in test_overlaps.py."""

import threading
import weakref

import pytest
from conftest import run_python, until

import arena

torch = pytest.importorskip("torch")

from arena import overlaps  # noqa: E402
from arena.overlaps import OverlapError, watch  # noqa: E402
from arena.workspace import WorkspaceManager, use_workspace_lane  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

SIZE = 1 << 16
SPEC = ((SIZE,), torch.float32)


def spin(milliseconds):
    """Keeps the current stream busy for about that long."""
    torch.cuda._sleep(int(milliseconds * 1.9e6))


@pytest.fixture
def manager():
    manager = WorkspaceManager(torch.device("cuda"), 1, 2)
    manager.reserve_all(SPEC)
    torch.cuda.synchronize()
    yield manager
    torch.cuda.synchronize()


@pytest.fixture
def found():
    return []


@pytest.fixture
def watched(manager, found):
    with watch(manager, report=found.append) as watching:
        yield watching


@pytest.fixture
def streams(manager):
    return torch.cuda.Stream(), torch.cuda.Stream()


def request(manager, stream, milliseconds=0.0):
    with torch.cuda.stream(stream):
        view = manager.get_simultaneous(SPEC)[0]
        if milliseconds:
            spin(milliseconds)
    return view


def test_a_second_stream_while_the_first_is_busy_is_reported(manager, streams, watched, found):
    one, two = streams
    request(manager, one, 50)
    request(manager, two)
    (overlap,) = found
    assert overlap.kind == "unordered"
    assert (overlap.earlier.stream, overlap.later.stream) == (one, two)
    assert f"stream {one.cuda_stream:#x} of cuda:0" in str(overlap)
    assert f"stream {two.cuda_stream:#x} of cuda:0" in str(overlap)
    assert str(overlap).count("test_overlaps_gpu.py:") == 2


def unseen_event(one, two):
    """An event of the kind that vLLM's ubatches use: its record is not seen, the wait is."""
    event = torch.Event(device="cuda")
    event.record(one)
    two.wait_event(event)


def item(one, two):
    with torch.cuda.stream(one):
        torch.ones(1, device="cuda").item()


ORDERINGS = {
    "wait_stream": lambda one, two: two.wait_stream(one),
    "wait_event": lambda one, two: two.wait_event(one.record_event()),
    "event.wait": lambda one, two: one.record_event().wait(two),
    "torch.Event": unseen_event,
    "stream.synchronize": lambda one, two: one.synchronize(),
    "event.synchronize": lambda one, two: one.record_event().synchronize(),
    "torch.cuda.synchronize": lambda one, two: torch.cuda.synchronize(),
    "torch.accelerator.synchronize": lambda one, two: torch.accelerator.synchronize(),
    "stream.query": lambda one, two: until(one.query),
    "item": item,  # not seen, but the stream is idle then
}


@pytest.mark.parametrize("how", ORDERINGS)
def test_a_second_stream_that_comes_behind_the_first_is_not_reported(manager, streams, watched, found, how):
    one, two = streams
    for _ in range(3):
        request(manager, one, 5)
        ORDERINGS[how](one, two)
        request(manager, two, 5)
        ORDERINGS[how](two, one)
    assert [str(each) for each in found] == []


def test_a_generic_stream_is_the_same_stream(manager, streams, watched, found):
    one, two = streams
    generic = torch.Stream(stream_id=one.stream_id, device_index=one.device_index, device_type=one.device_type)
    request(manager, one, 20)
    two.wait_stream(generic)
    request(manager, two)
    assert [str(each) for each in found] == []


def interleaved(manager, streams, lanes, repeats=100):
    """How many of the launches on two streams read what the other stream wrote into their scratch."""
    results = []
    for turn in range(repeats):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream), use_workspace_lane(number if lanes else 0):
                scratch = manager.get_simultaneous(SPEC)[0]
                value = 2 * turn + number
                scratch.fill_(value)
                spin(0.5)  # longer than the host needs for the other's launches
                results.append((value, scratch.clone()))
                del scratch
    torch.cuda.synchronize()
    return sum((result != value).any().item() for value, result in results)


def test_one_scratch_on_two_streams_goes_wrong_and_is_reported(manager, streams, watched, found):
    assert interleaved(manager, streams, lanes=False) > 0
    assert {each.kind for each in found} == {"unordered"}


def test_a_scratch_for_each_stream_does_not(manager, streams, watched, found):
    assert interleaved(manager, streams, lanes=True) == 0
    assert [str(each) for each in found] == []


def test_asked_to_raise_the_second_stream_gets_nothing(manager, streams):
    one, two = streams
    with watch(manager, report="raise"):
        request(manager, one, 50)
        with pytest.raises(OverlapError, match=f"stream {two.cuda_stream:#x}"):
            request(manager, two)


def test_a_view_used_on_a_second_stream_is_reported(manager, streams, watched, found):
    one, two = streams
    view = request(manager, one, 50)
    with torch.cuda.stream(two):
        overlaps.used(view)
    assert [each.kind for each in found] == ["unordered"]


def test_fresh_bytes_are_poisoned_on_the_stream_that_gets_them(manager, streams):
    one, _ = streams
    with watch(manager, poison=0xFF), torch.cuda.stream(one):
        for _ in range(3):
            spin(2)
            view = manager.get_simultaneous(SPEC)[0]
            assert view.isnan().all().item()
            view.fill_(1)


@pytest.mark.parametrize("asked", [False, True])
def test_a_watched_capture_replays_as_ever_and_poisons_where_asked(manager, asked):
    out = torch.zeros(SIZE, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with watch(manager, poison=0xFF, poison_captures=asked), torch.cuda.graph(graph):
        scratch = manager.get_simultaneous(SPEC)[0]
        out.copy_(scratch)
        del scratch
    with torch.inference_mode():
        manager.get_simultaneous(SPEC)[0].fill_(3)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert (out.isnan() if asked else out == 3).all().item()
    graph.reset()
    arena.reclaim(5)


def test_a_fork_and_a_join_inside_a_capture_are_followed(manager, streams, watched, found):
    one, two = streams
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        request(manager, main)
        one.wait_stream(main)
        request(manager, one)
        two.wait_stream(main)  # not behind `one`
        assert [str(each) for each in found] == []
        request(manager, two)
        main.wait_stream(one)
        main.wait_stream(two)
        request(manager, main)
    assert [(each.kind, each.earlier.stream, each.later.stream) for each in found] == [("unordered", one, two)]
    assert found[0].earlier.capture == found[0].later.capture is not None
    graph.reset()
    arena.reclaim(5)


def test_a_stale_view_that_a_capture_retains_is_reported(manager, watched, found):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = manager.get_simultaneous(SPEC)[0]
        arena.retain(first)  # in time: it may live as long as the graph
        second = manager.get_simultaneous(SPEC)[0]
        third = manager.get_simultaneous(SPEC)[0]
        assert [str(each) for each in found] == []
        arena.retain(second)
    assert [each.kind for each in found] == ["retained"]
    del first, second, third
    graph.reset()
    arena.reclaim(5)


def test_two_graphs_that_share_bytes_are_named_and_overwrite_each_other(manager, watched):
    """A target's output that is read after its draft model's replay: wrong in one lane, right in two."""
    for draft_lane in (0, 1):
        graphs, captures, outs = [], [], []
        for value, lane in ((1, 0), (2, draft_lane)):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph), use_workspace_lane(lane):
                out = manager.get_simultaneous(SPEC)[0]
                out.fill_(value)
                captures.append(arena.capture_id())
            graphs.append(graph)
            outs.append(out)
            del out
        target, draft = graphs
        target.replay()
        draft.replay()
        torch.cuda.synchronize()
        shared = watched.shared(*captures)
        if draft_lane == 0:
            assert (outs[0] == 2).all().item()
            assert [(each.kind, each.bytes) for each in shared] == [("captures", (0, SIZE * 4))]
        else:
            assert (outs[0] == 1).all().item()
            assert shared == []
        outs.clear()
        for graph in graphs:
            graph.reset()
        arena.reclaim(5)


SETUP = """
import threading, torch
from arena import ordering
from arena.overlaps import watch
from arena.workspace import WorkspaceManager, use_workspace_lane
spec = ((1 << 16,), torch.float32)
manager = WorkspaceManager(torch.device("cuda"), 1, 2)
manager.reserve_all(spec)
one, two = torch.cuda.Stream(), torch.cuda.Stream()
asked, idle = [], ordering.idle
def counted(stream):
    asked.append(idle(stream))
    return asked[-1]
ordering.idle = counted
def requests():
    with use_workspace_lane(1):
        for stream in (one, two, one):
            with torch.cuda.stream(stream):
                manager.get_simultaneous(spec)
def asks():
    one.query()
def run(body):
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
watching = watch(manager, report=lambda overlap: None, poison=0xFF)
run(requests)  # what is loaded at its first use is loaded now
torch.cuda.synchronize()
asked.clear()
y = torch.zeros(8, device="cuda")
y.add_(1)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph, capture_error_mode="global"):
        y.add_(1)
        run(BODY)
except RuntimeError as error:
    print("broken:", str(error).splitlines()[0])
else:
    graph.replay()
    torch.cuda.synchronize()
    print("captured", int(y[0]), "and asked", len(asked), manager.watch is watching)
"""


def test_requests_of_other_streams_break_nobodys_capture():
    ended = run_python(SETUP.replace("BODY", "requests"), timeout=100)
    assert ended.stdout == "captured 2 and asked 2 True\n", ended.stdout + ended.stderr


def test_asking_a_stream_as_everybody_does_breaks_it():
    """The control: the same capture, and a query that is not in relaxed mode."""
    ended = run_python(SETUP.replace("BODY", "asks"), timeout=100)
    assert ended.stdout.startswith("broken:"), ended.stdout + ended.stderr


def test_a_watched_view_alone_keeps_its_bytes(manager, watched):
    view = manager.get_simultaneous(SPEC)[0].fill_(5)
    before = torch.cuda.memory_allocated()
    block = weakref.ref(manager._current_workspaces.parts[0].current)
    manager.get_simultaneous(((SIZE * 4,), torch.float32))
    assert block() is None
    assert torch.cuda.memory_allocated() == before + SIZE * 16
    assert (view == 5).all().item()
    del view
    assert torch.cuda.memory_allocated() == before + SIZE * 12


def test_threads_on_their_own_streams_and_lanes_say_nothing(manager, watched, found):
    def work(lane):
        try:
            with torch.cuda.stream(torch.cuda.Stream()), use_workspace_lane(lane):
                for turn in range(100):
                    view = manager.get_simultaneous(SPEC)[0].fill_(turn)
                    assert (view == turn).all().item()
        except BaseException as error:
            failed.append(error)

    failed = []
    threads = [threading.Thread(target=work, args=(lane,)) for lane in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert [str(each) for each in found] == []
