"""What `arena.report()` and `arena.owner_of()` say, on the simulated driver and planted memory."""

import gc
import json
import re
import subprocess
import sys
import threading
import time
import types
import weakref
from xml.etree import ElementTree

import native
import pytest
from conftest import until
from planted import Allocator, Array

import arena
from arena import _registry, captures, memory, page, reporting
from arena.reporting import GraphReport, Life, Report, SlotReport


@pytest.fixture
def cuda(simulated):
    return simulated


@pytest.fixture
def torch_memory(cuda, monkeypatch):
    """In the place of torch's allocator."""
    planted = Allocator(cuda)
    monkeypatch.setattr(reporting, "allocator", lambda: planted)
    return planted


@pytest.fixture
def stream(cuda):
    return cuda.Stream()


class Graph:
    def __init__(self, pool=None):
        self._pool = pool

    def pool(self):
        return self._pool


def captured(stream, *owners, name=None, pool=None):
    with stream.capture() as capture:
        if name:
            captures.note(capture.id, Graph(pool), name)
        stream.kernel()
        for owner in owners:
            assert arena.retain(owner)
    return capture.graph


def by_name(told):
    return {each.name: each for each in told.graphs}


def test_bytes_inside_and_outside_the_pool_are_told_apart(stream, torch_memory):
    mine, theirs = torch_memory.array(1 << 20, (1, 5)), torch_memory.array(2 << 20, (1, 6))
    out = torch_memory.array(4 << 20)
    captured(stream, mine, theirs, out, name="decode", pool=(1, 5))
    told = by_name(arena.report())["decode"]
    assert (told.owners, told.inside, told.outside) == (3, 1 << 20, 6 << 20)


def test_where_the_pool_is_unknown_any_private_one_counts_as_the_graphs_own(stream, torch_memory):
    captured(stream, torch_memory.array(1 << 20, (1, 5)), torch_memory.array(4 << 20))
    [told] = arena.report().graphs
    assert (told.inside, told.outside) == (1 << 20, 4 << 20)


def test_a_shared_block_is_counted_once_in_the_total_and_with_each_holder(stream, torch_memory):
    common, own = torch_memory.array(100 << 20), [torch_memory.array(24 << 20) for _ in range(2)]
    for number in range(41):
        captured(stream, common, *own[number : number + 1], name=f"graph {number}")
    told = arena.report()
    assert told.bytes == (100 << 20) + 2 * (24 << 20)
    graphs = by_name(told)
    assert graphs["graph 0"].outside == 124 << 20
    assert graphs["graph 40"].outside == 100 << 20
    assert all(each.shared == 100 << 20 and len(each.shared_with) == 40 for each in told.graphs)
    assert "graph 0" not in graphs["graph 0"].shared_with
    assert told.graphs[0].outside >= told.graphs[-1].outside


def test_an_owner_retained_twice_is_counted_twice_and_its_bytes_once(stream, torch_memory):
    scratch = torch_memory.array(1 << 20)
    captured(stream, scratch, scratch)
    [told] = arena.report().graphs
    assert (told.owners, told.outside, arena.report().bytes) == (2, 1 << 20, 1 << 20)


def test_the_graph_that_holds_most_comes_first(stream, torch_memory):
    for mib in (2, 8, 4):
        captured(stream, torch_memory.array(mib << 20), name=f"{mib} MiB")
    assert [each.name for each in arena.report().graphs] == ["8 MiB", "4 MiB", "2 MiB"]


def test_of_owners_that_begin_at_one_place_the_largest_counts(stream, torch_memory):
    whole = torch_memory.array(1 << 20)
    captured(stream, whole, Array(None, whole.address, 512))
    assert (arena.report().graphs[0].outside, arena.report().bytes) == (1 << 20, 1 << 20)


def test_a_graph_without_a_name_is_called_by_where_it_first_retained(stream, torch_memory):
    captured(stream, torch_memory.array(512))
    [told] = arena.report().graphs
    assert re.fullmatch(r"tests/test_report\.py:\d+ \(captured\) #\d+", told.name)
    assert abs(told.born - time.time()) < 60


def test_a_second_asking_follows_what_came_and_went(stream, torch_memory):
    first = captured(stream, torch_memory.array(1 << 20), name="first")
    assert arena.report().bytes == 1 << 20
    captured(stream, torch_memory.array(2 << 20), name="second")
    assert arena.report().bytes == 3 << 20
    first.destroy()
    told = arena.report()
    assert (told.bytes, list(by_name(told))) == (2 << 20, ["second"])


def test_what_is_kept_is_not_looked_up_again(stream, torch_memory, monkeypatch):
    captured(stream, torch_memory.array(1 << 20))
    before = arena.report().bytes
    monkeypatch.setattr(reporting, "memory_of", lambda owner: 1 / 0)
    assert arena.report().bytes == before
    captured(stream, torch_memory.array(1 << 20))
    with pytest.raises(ZeroDivisionError):  # the control: what is new is
        arena.report()


def test_threads_may_report_while_graphs_come_and_go(stream, torch_memory):
    failed, done, interval = [], threading.Event(), sys.getswitchinterval()
    weight = torch_memory.array(512)

    def look():
        try:
            while not done.is_set():
                assert arena.report().bytes in (0, 512)
                arena.owner_of(weight.address)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    sys.setswitchinterval(1e-5)
    try:
        for each in threads:
            each.start()
        for _ in range(100):
            for graph in [captured(stream, weight) for _ in range(5)]:
                graph.destroy()
    finally:
        done.set()
        for each in threads:
            each.join(60)
        sys.setswitchinterval(interval)
    assert failed == []


def test_another_capture_into_the_same_graph_is_looked_up_anew(cuda, stream, torch_memory):
    """It has the same number, and may have as many owners."""
    graph = cuda.Graph()
    for size in (1 << 20, 2 << 20):
        stream.begin_capture("relaxed", into=graph)
        managed = _registry.begin(stream)
        arena.retain(torch_memory.array(size), stream)
        managed.seal()
        stream.end_capture()
        managed.hold(graph.handle)
        told = arena.report()
        assert (told.bytes, told.graphs[0].outside) == (size, size)


def test_lives_are_told_until_they_end(cuda, stream, torch_memory):
    graph = captured(stream, torch_memory.array(512), torch_memory.array(512), name="short")
    captured(stream, torch_memory.array(512), name="long")
    executable = graph.instantiate()
    graph.destroy()
    [short, long] = [each for each in arena.report().lives if each.name in ("short", "long")]
    assert (short.owners, short.died, long.died) == (2, None, None)
    executable.destroy()

    def life():
        return next(each for each in arena.report().lives if each.name == "short")

    assert until(lambda: life().died is not None)
    assert life().born <= life().died <= time.time()
    assert "short" not in by_name(arena.report())


def test_a_report_searches_for_the_birth_of_no_capture(stream, torch_memory, monkeypatch):
    """Each search looks through all that died: a report of a process that captures for long would be the slower for it."""
    captured(stream, torch_memory.array(512)).destroy()
    captured(stream, torch_memory.array(512))
    monkeypatch.setattr(_registry, "born", lambda capture: 1 / 0)
    told = arena.report()
    assert {each.name.split(" #")[0] for each in told.lives[-2:]} == {told.graphs[0].name.split(" #")[0]}
    assert all(each.born for each in told.lives[-2:])


def test_owners_from_c_are_counted_and_their_memory_is_nobodys_to_see(stream, torch_memory):
    client = native.extension("cimport_client")
    with stream.capture():
        assert client.retain_block(64, stream.handle)
        arena.retain(torch_memory.array(512), stream)
    told = arena.report()
    [graph] = told.graphs
    assert (graph.owners, graph.opaque, graph.outside, told.rows()[1][1]) == (1, 1, 512, "2")
    with stream.capture():
        assert client.retain_block(64, stream.handle)
    assert sorted((each.owners, each.opaque) for each in arena.report().graphs) == [(0, 1), (1, 1)]


@pytest.fixture
def workspace(torch_memory):
    """One slot, with a retired block that graphs still use."""
    old = torch_memory.array(48 << 20)

    def slots():
        yield SlotReport("ubatch 0, lane 0", 64 << 20, 61 << 20, "moe.py:412", ["decode"], [(old.address, old.size)])

    reporting.workspaces.append(slots)
    yield old
    reporting.workspaces.remove(slots)


def test_retired_blocks_are_told_with_the_graph_that_keeps_them_and_with_their_slot(stream, torch_memory, workspace):
    captured(stream, workspace, name="old")
    captured(stream, torch_memory.array(512), name="new")
    told = arena.report()
    assert {each.name: each.retired for each in told.graphs} == {"old": 48 << 20, "new": 0}
    assert told.slot_rows()[1] == ("ubatch 0, lane 0", "64 MiB", "61 MiB", "moe.py:412", "decode", "48 MiB")
    assert "a retired block of workspace slot ubatch 0, lane 0" in arena.owner_of(workspace.address + 7).by


def test_slots_of_the_workspace_are_told_with_who_asked_for_most_and_what_is_retired(cuda, stream, monkeypatch):
    torch = pytest.importorskip("torch")
    from arena.workspace import WorkspaceManager, use_workspace_lane

    manager = WorkspaceManager(torch.device("cpu"), 1, 2)
    with use_workspace_lane(1):
        view = manager.get_simultaneous(((1000,), torch.uint8))[0]
        with stream.capture():
            arena.retain(manager._current_workspaces.parts[1].current, stream)
        old = view.data_ptr()
        manager.get_simultaneous(((4, 512), torch.float32), ((3,), torch.bfloat16))
        manager.get_simultaneous(((8,), torch.uint8))
    [slot] = [each for each in arena.report().slots if each.name == "ubatch 0, lane 1"]
    assert (slot.bytes, slot.high_water, slot.retired, slot.holders) == (8448, 8448, [(old, 1024)], [])
    assert slot.set_by.startswith("test_report.py:")
    assert slot.set_by.endswith(": [4, 512] float32 + [3] bfloat16")
    assert "a retired block of workspace slot ubatch 0, lane 1" in arena.owner_of(old + 7).by
    with stream.capture():
        arena.retain(manager._current_workspaces.parts[1].current, stream)
    [slot] = [each for each in arena.report().slots if each.name == "ubatch 0, lane 1"]
    assert len(slot.holders) == 1
    assert sum(each.outside for each in arena.report().graphs) == 1024 + 8448
    del manager
    gc.collect()
    assert not [each for each in arena.report().slots if each.name == "ubatch 0, lane 1"]


def test_a_slot_that_grows_under_a_report_fails_none(monkeypatch):
    pytest.importorskip("torch")
    from arena import _workspace

    class Slot:
        blocks, high, retired = [types.SimpleNamespace(nbytes=512)], None, []

        @property
        def current(self):
            return self.blocks.pop() if self.blocks else None

    slots = types.SimpleNamespace(parts=[Slot()])
    monkeypatch.setattr(_workspace, "managers", [types.SimpleNamespace(_current_workspaces=slots, _num_lanes=1)])
    assert [each.bytes for each in arena.report().slots] == [512]


# ---- whose is it ----


def test_an_address_is_told_by_what_is_known_of_it(cuda, stream, torch_memory):
    scratch, free, pooled = torch_memory.array(4096), torch_memory.array(512), torch_memory.array(512, (1, 2))
    free.free()
    theirs, pinned = cuda.plant(4096), cuda.plant(4096, host=True)
    captured(stream, scratch, name="decode")
    captured(stream, scratch, name="prefill")
    seen = arena.owner_of(scratch.address + 100)
    assert (seen.start, seen.bytes) == (scratch.address, 4096)
    assert (sorted(seen.graphs), seen.objects) == (["decode", "prefill"], [scratch, scratch])
    assert str(seen).startswith(f"{scratch.address + 100:#x}: planted.Array (4 KiB), retained by ")
    said = {each: arena.owner_of(each).by for each in (free.address, pooled.address, theirs + 8, pinned, 5)}
    assert said[free.address].startswith("no graph's; a free block of torch's (512 B)")
    assert "a block in use of torch's" in said[pooled.address]
    assert "private pool 1.2" in said[pooled.address]
    assert said[theirs + 8] == "no graph's; not torch's: memory of device 0 (4 KiB)"
    assert said[pinned] == "no graph's; not torch's: host memory (4 KiB)"
    assert said[5] == "no graph's; no memory that the driver knows"
    assert arena.owner_of(5).bytes == 0


def test_an_address_that_the_driver_cannot_tell_of_is_not_said_to_be_nobodys(cuda, torch_memory):
    theirs = cuda.plant(4096)
    cuda.fail("cuPointerGetAttributes", 1, 700)
    assert "more cannot be told: cuPointerGetAttributes failed" in arena.owner_of(theirs).by


@pytest.mark.parametrize("wrong", ["0x10", None, 1.0, True, -1, 1 << 64])
def test_what_is_no_address_is_told(wrong):
    with pytest.raises(TypeError, match="needs an address as an int, not"):
        arena.owner_of(wrong)


# ---- how it is told ----


def sample():
    """A report with everything in it, words that HTML would take for its own among them."""
    graphs = [
        GraphReport("decode B=64", 1, 30, 1, 900 << 20, 40 << 20, 700 << 20, ["a <b> & c"], 48 << 20, 1000.0),
        GraphReport("a <b> & c", 2, 1, 0, 700 << 20, 0, 700 << 20, ["decode B=64"], 0, 1010.0),
    ]
    lives = [Life("decode B=64", 1, 31, 1000.0, None), Life("gone", 3, 4, 1005.0, 1020.0)]
    lives.append(Life("a <b> & c", 2, 1, 1010.0, None))
    slots = [SlotReport("ubatch 0, lane 0", 64 << 20, 61 << 20, "moe.py:412 (apply)", ["decode B=64"], [(4096, 48 << 20)])]
    return Report(1100.0, graphs, slots, lives, 32, 940 << 20, 2 << 30)


def test_json_is_read_back_as_it_was_written(tmp_path):
    told = sample()
    assert Report.from_dict(json.loads(told.json(tmp_path / "report.json"))) == told
    assert json.loads((tmp_path / "report.json").read_text())["owners"] == 32


def test_the_page_is_whole_and_needs_nothing_else(tmp_path):
    text = sample().html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == text
    assert not re.search(r"(src|href)\s*=|url\(|@import|<script|https?://", text)
    body = text.split("<body>")[1].split("</body>")[0]
    tree = ElementTree.fromstring(f"<body>{body}</body>")  # well-formed: names were escaped
    words = " ".join("".join(tree.itertext()).split())
    for expected in ("a <b> & c", "decode B=64", "940 MiB, 31 owners", "ubatch 0, lane 0", "gone", "now"):
        assert expected in words, expected
    assert len(tree.findall(".//svg")) == 2
    assert "prefers-color-scheme: dark" in text


def test_nothing_in_the_pictures_leaves_them():
    tree = ElementTree.fromstring("<body>" + page.bars(sample()) + page.lifetimes(sample().lives, 1100.0) + "</body>")
    for svg in tree.iter("svg"):
        width, height = map(float, svg.get("viewBox").split()[2:])
        for each in svg.iter("rect"):
            x, y, w, h = (float(each.get(name)) for name in ("x", "y", "width", "height"))
            assert 0 <= x <= x + w <= width
            assert 0 <= y <= y + h <= height


LONG = {
    "a call site": "vllm/model_executor/layers/fused_moe/layer.py:1412 (capture_everything_in_it) #12345",
    "capitals": "W" * 60,
    "wide letters": "\u6f22" * 60,
}


@pytest.mark.parametrize("name", LONG.values(), ids=LONG)
def test_a_long_label_is_cut_to_its_room_and_keeps_both_ends(name):
    """In units of the picture, as a wide font has it: 8 of a small letter, 12.9 of a W, 13 of a wide one."""
    label = page.short(name)
    units = sum(12.9 if each == "W" else 13 if each > "\u2fff" else 8 for each in label)
    assert units <= page.LABEL - 12
    head, tail = label.split("\u2026")
    assert name.startswith(head)
    assert name.endswith(tail)
    assert min(len(head), len(tail)) >= 8
    assert page.short("decode B=64") == "decode B=64"


def test_a_clock_that_was_set_back_draws_nothing_outside():
    lives = [Life("later", 1, 1, 1150.0, None), Life("ok", 2, 1, 1000.0, 1200.0), Life("died before", 3, 1, 1100.0, 1050.0)]
    for each in ElementTree.fromstring(page.lifetimes(lives, 1100.0)).iter("rect"):
        assert page.LABEL <= float(each.get("x")) <= float(each.get("x")) + float(each.get("width")) <= page.WIDTH


def test_lives_that_a_picture_has_no_room_for_are_counted():
    lives = [Life(f"g{n}", n, 1, 1.0 + n, None) for n in range(page.MOST + 3)]
    assert "<p>3 that began earlier are not shown.</p>" in page.lifetimes(lives, 100.0)
    assert "not shown" not in page.lifetimes(lives[3:], 100.0)


def test_a_name_that_is_no_unicode_can_be_written(tmp_path):
    told = sample()
    told.graphs[0].name = "\udc80.py:1"
    told.html(tmp_path / "report.html")
    assert "?.py:1" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_report_of_nothing_is_told_in_every_form(cuda, monkeypatch):
    monkeypatch.setattr(reporting._registry, "died", list)  # what other tests left in this process
    told = arena.report()
    assert str(told).startswith("0 graphs hold 0 owners, 0 B")
    assert told.html().count("<p>None.</p>") == 3
    assert json.loads(told.json())["graphs"] == []


def test_the_table_lines_up_without_rich(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    sample().print()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "2 graphs hold 32 owners, 940 MiB"
    assert said[2].split() == ["graph", "owners", "outside", "inside", "shared", "retired", "shared", "with"]
    assert said[4].index("31") == said[5].index("1  ") == said[2].index("owners")


def test_the_table_fits_a_terminal_with_rich(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "80")
    sample().print()
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    for whole in ("900 MiB", "decode B=64", "48 MiB", "2 graphs hold 32 owners, 940 MiB"):
        assert whole in said


@pytest.mark.parametrize("name", ["decode [b=64]", "attention [/b]", "[red]", "moe\\[x]"])
def test_names_are_no_marks_for_rich(monkeypatch, capsys, name):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "120")
    told = sample()
    told.graphs[0].name = told.slots[0].name = name
    told.print()
    assert capsys.readouterr().out.count(name) == 2


def test_more_graphs_than_a_picture_has_room_for_are_in_the_table():
    graphs = [GraphReport(f"g{n}", n, 1, 0, n << 20, 0, 0, [], 0, 1.0) for n in range(100)]
    text = Report(2.0, graphs, [], [], 100, 0, 0).html()
    assert "60 smaller ones are in the table." in text
    assert "<td>g99</td>" in text


def test_lengths_of_time_are_told_short():
    told = [page.ago(each) for each in (0.02, 5, 61, 900, 7200, 86400 * 3)]
    assert told == ["20 ms", "5.0 s", "61 s", "15 min", "2.0 h", "3.0 d"]


# ---- the command ----


def test_the_command_shows_a_saved_report_and_makes_its_page(tmp_path):
    sample().json(tmp_path / "report.json")
    command = [sys.executable, "-m", "arena", "report", "--html", "page.html", "report.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "decode B=64" in done.stdout
    assert (tmp_path / "page.html").read_text() == sample().html()


def test_the_command_runs_a_script_and_says_what_its_graphs_hold(tmp_path):
    (tmp_path / "script.py").write_text("""
import sys
import arena
from arena.testing import simulated_driver
opened = simulated_driver()
stream = opened.__enter__().Stream()
with stream.capture() as capture:
    arena.retain(object())
    arena.retain(object())
assert sys.argv[1:] == ["--html", "mine"], sys.argv
""")
    command = [sys.executable, "-m", "arena", "report", "--json", "told.json", "script.py", "--html", "mine"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 graph holds 2 owners" in done.stdout
    assert json.loads((tmp_path / "told.json").read_text())["graphs"][0]["owners"] == 2


@pytest.mark.parametrize("text", ["no JSON", "[1]", '{"graphs": []}', '{"graphs": [{"name": "a"}], "slots": [], "lives": []}'])
def test_the_command_refuses_what_is_not_a_report(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    command = [sys.executable, "-m", "arena", "report", "other.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("python -m arena: 'other.json' is not a report that was saved with --json: ")
    assert len(done.stderr.splitlines()) == 1


def test_graphs_of_a_script_that_exits_are_there_to_be_reported(tmp_path):
    (tmp_path / "script.py").write_text("""
import sys, weakref
import arena
from arena.testing import simulated_driver
opened = simulated_driver()
stream = opened.__enter__().Stream()
with stream.capture() as capture:
    arena.retain(object())
graph = type("Graph", (), {})()
weakref.finalize(graph, capture.graph.destroy)
if sys.argv[1:]:
    del graph
sys.exit(3)
""")
    command = [sys.executable, "-m", "arena", "report", "script.py"]
    for more, told in ((), "1 graph holds 1 owner"), (("gone",), "0 graphs hold 0 owners"):  # the second is the control
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=100, cwd=tmp_path, check=False)
        assert done.returncode == 3, done.stderr
        assert told in done.stdout


def test_memory_is_asked_of_torch_only_where_torch_uses_a_gpu():
    assert memory.allocator().blocks() == [] or sys.modules["torch"].cuda.is_initialized()


def test_a_managed_capture_is_born_at_its_begin_and_another_at_its_first_owner(stream):
    managed = begin_here(stream)
    where = begin_here.__code__
    assert _registry.born(managed.id)[1:] == (where.co_filename, where.co_firstlineno + 2, "begin_here")
    arena.retain(owner := memory.Block, stream)
    [(capture, *_, birth)] = [each for each in _registry.lists() if each[0] == managed.id]
    assert birth == _registry.born(capture)
    assert birth[3] == "begin_here"
    managed.seal()
    stream.end_capture().destroy()
    managed.hold()
    with stream.capture() as other:
        assert _registry.born(other.id) is None
        arena.retain(owner, stream)
        assert _registry.born(other.id)[3] == "test_a_managed_capture_is_born_at_its_begin_and_another_at_its_first_owner"
    managed.drop()
    arena.reclaim(5)
    assert _registry.born(capture) == birth  # of the dead that are listed, too
    assert captures.of(capture).name == f"tests/test_report.py:{birth[2]} (begin_here) #{capture}"
    other.graph.destroy()


def begin_here(stream):
    stream.begin_capture("relaxed")
    return _registry.begin(stream)


def test_the_code_of_a_birth_is_let_go_with_the_last_that_is_known_of_its_capture(stream):
    """The control: one death before, it is still there, and the birth is told."""
    names = {"arena": arena}
    body = "    with stream.capture() as capture:\n        arena.retain(arena, stream)\n    return capture"
    exec(f"def first(stream):\n{body}", names)
    code = weakref.ref(names["first"].__code__)
    capture = names.pop("first")(stream)
    number = capture.id
    capture.graph.destroy()
    died = len(_registry.died())
    for _ in range(1023):
        captured(stream, arena).destroy()
    arena.reclaim(5)
    assert died >= 1
    assert len(_registry.died()) == 1024
    gc.collect()
    assert code() is not None
    assert _registry.born(number)[3] == "first"
    captured(stream, arena).destroy()
    arena.reclaim(5)
    assert _registry.born(number) is None
    gc.collect()
    assert code() is None
