"""Audits of torch's graphs without a GPU: the Python of the installed torch over a stand-in for its C++ class, on the simulated
driver and planted memory. test_audit_gpu.py makes the same promises on a real one."""

import contextlib
import gc
import warnings
import weakref

import pytest
from planted import Allocator

torch = pytest.importorskip("torch")

import standin  # noqa: E402

import arena  # noqa: E402
import arena.torch  # noqa: E402
from arena import auditing, watching  # noqa: E402


@pytest.fixture
def cuda(simulated, monkeypatch):
    monkeypatch.setattr(standin, "driver", simulated)
    return simulated


@pytest.fixture
def graphs(monkeypatch):
    module = standin.graphs()
    monkeypatch.setattr(arena.torch, "current_stream", lambda device: (standin.current_stream().handle, False))
    monkeypatch.setattr(torch._C, "_CUDAGraph", module.CUDAGraph.__base__, raising=False)
    arena.torch.patch(module.CUDAGraph, None)
    yield module
    arena.torch.uninstall()


@pytest.fixture
def torch_memory(cuda, monkeypatch):
    planted = Allocator(cuda)
    for each in (auditing, watching):
        monkeypatch.setattr(each, "allocator", lambda: planted)

    def pool(self):
        if not self.template and not self.executable:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return 1, 1

    monkeypatch.setattr(standin._CUDAGraph, "pool", pool, raising=False)
    return planted


@pytest.fixture
def mode(monkeypatch):
    """As ARENA_AUDIT sets it."""
    there = watching.Mode("warn", every=2)
    monkeypatch.setattr(watching, "mode", there)
    return there


@contextlib.contextmanager
def capturing(graph, stream):
    with standin.current(stream):
        graph.capture_begin(capture_error_mode="relaxed")
        yield
        graph.capture_end()


@pytest.mark.parametrize("keep", [False, True], ids=["template not kept", "template kept"])
def test_a_dropped_scratch_is_found_at_the_end_of_the_capture(cuda, graphs, torch_memory, mode, keep):
    stream, scratch = cuda.Stream(), torch_memory.array(32 << 20)
    graph = graphs.CUDAGraph(keep_graph=keep)

    def capture():
        with capturing(graph, stream):
            stream.kernel("other", 7)
            stream.kernel("add", 7, scratch.address + 64)
            scratch.free()

    with pytest.warns(arena.AuditWarning, match=r"freed: .*\(32 MiB\).* kernel add \(node 1\), parameter 1"):
        capture()
    assert mode.collected == []  # that is for who asks for it
    assert graph._arena_audit.name.startswith("tests/test_audit_torch.py:")


@pytest.mark.parametrize("keep", [False, True], ids=["template not kept", "template kept"])
def test_retained_it_is_held(cuda, graphs, torch_memory, mode, keep):
    """The control."""
    stream, scratch, pooled = cuda.Stream(), torch_memory.array(512), torch_memory.array(512, (1, 1))
    graph = graphs.CUDAGraph(keep_graph=keep)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with capturing(graph, stream):
            stream.kernel("add", scratch.address, pooled.address)
            arena.retain(scratch)
        pooled.free()  # as temporaries of a capture are
        with standin.current(stream):
            for _ in range(8):
                graph.replay()
    assert sorted(each.address for each in graph._arena_audit.held) == sorted((scratch.address, pooled.address))


def test_a_workspace_that_goes_later_is_found_before_the_replay_that_would_read_it(cuda, graphs, torch_memory, mode):
    stream, workspace = cuda.Stream(), torch_memory.array(1 << 20)
    graph = graphs.CUDAGraph()
    with capturing(graph, stream):
        stream.kernel("add", workspace.address)
    with standin.current(stream):
        for _ in range(3):
            graph.replay()
        workspace.free()
        torch_memory.array(1 << 20)  # by somebody else
        launches = graph.executable
        graph.replay()  # from here on every second one is checked
        with pytest.warns(arena.AuditWarning, match=r"handed out again: .*kernel add"):
            graph.replay()
    assert graph.executable is launches


def test_of_two_graphs_that_share_a_scratch_of_the_firsts_pool_the_second_is_told(cuda, graphs, torch_memory, mode):
    stream, scratch = cuda.Stream(), torch_memory.array(1 << 20, (1, 9))
    second = graphs.CUDAGraph()
    with capturing(second, stream):
        stream.kernel("gemm", bytes(96) + scratch.address.to_bytes(8, "little") + bytes(40))
    assert [each.by for each in second._arena_audit.external] == ["pool 1.9"]
    scratch.free()
    torch_memory.empty_cache()  # the first graph died, and its pool with it
    [finding] = second._arena_audit.check()
    assert (finding.what, finding.uses[0].name, finding.uses[0].offset) == ("freed", "gemm", 96)


def test_raise_stops_the_replay_and_leaves_the_capture_whole(cuda, graphs, torch_memory, mode):
    mode.action = "raise"
    stream, scratch = cuda.Stream(), torch_memory.array(512)
    graph = graphs.CUDAGraph()
    with capturing(graph, stream):
        stream.kernel("add", scratch.address)
        scratch.free()
    assert graph.executable is not None
    with standin.current(stream), pytest.raises(arena.AuditError, match="kernel add"):
        graph.replay()


def test_the_context_raises_once_torch_has_put_all_back(cuda, graphs, torch_memory, mode):
    """What arena.torch.graph and an installed torch.cuda.graph do in `__exit__`."""
    mode.action = "raise"
    stream, scratch = cuda.Stream(), torch_memory.array(512)
    graph = graphs.CUDAGraph()
    with capturing(graph, stream):
        stream.kernel("add", scratch.address)
        scratch.free()
    left = []
    context = type("Context", (), {"cuda_graph": graph})()
    with pytest.raises(arena.AuditError):
        arena.torch.leave(context, lambda self, *exc: left.append(exc), None, None, None)
    assert left == [(None, None, None)]


def test_a_warning_that_is_an_error_is_raised_by_the_context_or_by_the_first_replay(cuda, graphs, torch_memory, mode):
    stream, scratch = cuda.Stream(), torch_memory.array(512)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = graphs.CUDAGraph()
        with capturing(graph, stream):  # an error in here would be capture_end's
            stream.kernel("add", scratch.address)
            scratch.free()
        context = type("Context", (), {"cuda_graph": graph})()
        with pytest.raises(arena.AuditWarning, match="kernel add"):
            arena.torch.leave(context, lambda self, *exc: None, None, None, None)
        arena.torch.leave(context, lambda self, *exc: None, None, None, None)  # once
        with standin.current(stream):
            with pytest.raises(arena.AuditWarning, match="kernel add"):
                graph.replay()
            graph.replay()


def test_the_bodys_own_error_is_not_lost_behind_a_finding(cuda, graphs, torch_memory, mode):
    mode.action = "raise"
    stream, scratch = cuda.Stream(), torch_memory.array(512)
    graph = graphs.CUDAGraph()
    with capturing(graph, stream):
        stream.kernel("add", scratch.address)
        scratch.free()
    context, error = type("Context", (), {"cuda_graph": graph})(), ValueError("the body's")
    arena.torch.leave(context, lambda self, *exc: None, ValueError, error, None)
    with pytest.raises(arena.AuditError):  # the control
        arena.torch.leave(context, lambda self, *exc: None, None, None, None)


def test_a_graph_that_is_not_kept_says_how_it_can_be_audited(cuda, graphs, torch_memory):
    stream = cuda.Stream()
    graph = graphs.CUDAGraph()
    with capturing(graph, stream):
        stream.kernel()
    with pytest.raises(arena.AuditError, match="keep_graph=True"):
        arena.audit(graph)


def test_a_kept_graph_can_be_audited_by_hand(cuda, graphs, torch_memory):
    stream, scratch = cuda.Stream(), torch_memory.array(512)
    graph = graphs.CUDAGraph(keep_graph=True)
    with capturing(graph, stream):
        stream.kernel("add", scratch.address)
        arena.retain(scratch)
    seen = arena.audit(graph)
    assert (seen.findings, [each.address for each in seen.held]) == ([], [scratch.address])
    assert f"#{graph._arena_capture.id}" in seen.name


def test_the_pool_of_a_managed_graph_is_known_of_its_handle_too(cuda, graphs, torch_memory):
    pooled, other = torch_memory.array(512, (1, 1)), torch_memory.array(512, (1, 2))
    graph = graphs.CUDAGraph(keep_graph=True)
    with capturing(graph, stream := cuda.Stream()):
        stream.kernel("add", pooled.address, other.address)
        arena.retain(object())
    seen = arena.audit(graph.raw_cuda_graph())
    assert [[each.address for each in there] for there in (seen.held, seen.external)] == [[pooled.address], [other.address]]


def test_a_graph_without_owners_is_not_given_those_of_another_with_its_handle(cuda, graphs, torch_memory, monkeypatch):
    """The other's template is gone, and its handle was given out again; its executable, and so its owners, live."""
    stream, scratch = cuda.Stream(), torch_memory.array(512)
    other, graph = graphs.CUDAGraph(), graphs.CUDAGraph(keep_graph=True)
    with capturing(other, stream):
        arena.retain(scratch)
    with capturing(graph, stream):
        stream.kernel("add", scratch.address)
    lists = [(each[0], graph.raw_cuda_graph(), *each[2:]) for each in arena._registry.lists()]
    monkeypatch.setattr(arena._registry, "lists", lambda: lists)
    seen = arena.audit(graph)
    assert (seen.held, [each.address for each in seen.external]) == ([], [scratch.address])
    assert arena.audit(graph.raw_cuda_graph()).held  # the control: of a raw handle nothing more is known


def test_an_audited_graph_dies_when_it_is_dropped(cuda, graphs, torch_memory, mode):
    stream = cuda.Stream()
    graph = graphs.CUDAGraph()
    with capturing(graph, stream):
        stream.kernel()
    alive = weakref.ref(graph)
    gc.disable()
    try:
        del graph
        assert alive() is None
    finally:
        gc.enable()


def test_a_capture_that_breaks_breaks_as_without_an_audit(cuda, graphs, torch_memory, mode):
    stream = cuda.Stream()
    graph = graphs.CUDAGraph()
    with pytest.raises(cuda.Error), capturing(graph, stream):
        stream.kernel()
        stream.invalidate()
    assert not hasattr(graph, "_arena_audit")


def test_without_a_mode_a_capture_is_not_looked_at(cuda, graphs, torch_memory, monkeypatch):
    monkeypatch.setattr(watching, "mode", watching.Mode())
    before = cuda.calls("cuGraphGetNodes")
    graph = graphs.CUDAGraph()
    with capturing(graph, cuda.Stream()):
        pass
    assert cuda.calls("cuGraphGetNodes") == before
    assert "replay" not in vars(graph)


def test_the_context_takes_a_name_and_a_mode_and_no_other():
    with pytest.raises(ValueError, match="audit is 'loud', not 'warn', 'raise' or None"):
        arena.torch.graph(object(), audit="loud")


def test_the_context_does_not_pretend_to_audit_what_it_cannot():
    with pytest.raises(TypeError, match=r"audit and name need an arena\.torch\.CUDAGraph, or install\(\); got object"):
        arena.torch.graph(object(), audit="warn")


def test_a_graph_that_was_reset_is_not_checked_any_more(cuda, graphs, torch_memory, mode):
    stream, scratch = cuda.Stream(), torch_memory.array(512)
    graph = graphs.CUDAGraph()
    with capturing(graph, stream):
        stream.kernel("add", scratch.address)
    graph.reset()
    scratch.free()
    assert not hasattr(graph, "_arena_audit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with standin.current(stream), pytest.raises(AttributeError):  # as the stand-in fails for it, and no finding
            graph.replay()


def test_a_begin_that_torch_refuses_leaves_the_graph_its_audit(cuda, graphs, torch_memory, mode):
    stream, scratch = cuda.Stream(), torch_memory.array(512)
    graph = graphs.CUDAGraph()
    with capturing(graph, stream):
        stream.kernel("add", scratch.address)
    with standin.current(stream):
        with pytest.raises(RuntimeError, match="already owns a captured graph"):
            graph.capture_begin()
        scratch.free()
        with pytest.warns(arena.AuditWarning, match="freed"):
            graph.replay()


def test_a_graph_that_is_captured_again_without_an_audit_is_not_checked_any_more(cuda, graphs, torch_memory, mode):
    stream, scratch = cuda.Stream(), torch_memory.array(512)
    graph = graphs.CUDAGraph()
    with capturing(graph, stream):
        stream.kernel("add", scratch.address)
    graph.reset()
    mode.action = None
    with capturing(graph, stream):
        stream.kernel()
    assert "replay" not in vars(graph)


def test_reports_know_the_name_that_was_given(cuda, graphs, torch_memory, monkeypatch):
    from arena import reporting

    monkeypatch.setattr(reporting, "allocator", lambda: torch_memory)
    graph = graphs.CUDAGraph()
    graph._arena_name = "decode B=8"
    with capturing(graph, cuda.Stream()):
        arena.retain(torch_memory.array(512, (1, 1)))
    [told] = [each for each in arena.report().graphs if each.name == "decode B=8"]
    assert (told.inside, told.outside) == (512, 0)


def test_the_audit_of_a_capture_without_owners_knows_where_it_began(cuda, graphs, torch_memory):
    """Its list is gone before the audit is made."""
    graph = graphs.CUDAGraph()
    graph._arena_audit_mode = "collect"
    with capturing(graph, cuda.Stream()):
        cuda_id = arena.capture_id()
    assert "/test_" in graph._arena_audit.name
    assert graph._arena_audit.name.endswith(f" #{cuda_id}")
