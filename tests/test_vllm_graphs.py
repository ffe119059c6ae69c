"""vLLM's own graph holders on a real GPU, over managed graphs: what an op retained while one of them captured lives as long as
that graph, and replays equal eager bit for bit though Python dropped it and its memory was asked for by others.

They are driven from vLLM's source tree without its kernels (tests/vllm_on_gpu.sh); skipped where vLLM cannot be imported.
"""

import contextvars
import gc
import itertools
import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from conftest import stays, until

import arena

torch = pytest.importorskip("torch")

import arena.torch  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(60),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

DEVICE = "cuda"
SIZE = 1 << 20


@pytest.fixture(scope="module")
def vllm():
    """The names of vLLM that are driven here."""
    pytest.importorskip("vllm", reason="vLLM cannot be imported here: tests/vllm_on_gpu.sh says how", exc_type=ImportError)
    import vllm_plugin

    vllm_plugin.usable()
    import vllm.config
    import vllm.forward_context
    from vllm.compilation import breakable_cudagraph, cuda_graph
    from vllm.utils import torch_utils
    from vllm.v1.worker import gpu_ubatch_wrapper, ubatch_utils, ubatching

    return SimpleNamespace(
        Mode=vllm.config.CUDAGraphMode,
        platform=type(vllm.platforms.current_platform),
        context=vllm.forward_context,
        breakable_cudagraph=breakable_cudagraph,
        cuda_graph=cuda_graph,
        torch_utils=torch_utils,
        gpu_ubatch_wrapper=gpu_ubatch_wrapper,
        ubatch_utils=ubatch_utils,
        ubatching=ubatching,
    )


@pytest.fixture(autouse=True)
def installed(vllm):
    arena.torch.install()
    yield
    gc.collect()
    torch.cuda.synchronize()
    arena.torch.uninstall()


@pytest.fixture
def stream(vllm, monkeypatch):
    """vLLM captures on the current stream, which is the last one that was set, and into one pool, here a new one."""
    monkeypatch.setattr(vllm.platform, "_global_graph_pool", None)
    here = vllm.torch_utils._current_stream_tls
    before = getattr(here, "value", None)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cat([Op(retains=False)(torch.ones(SIZE, device=DEVICE)) * 2.0] * 2)  # no kernel is loaded in a capture
        yield stream
    torch.cuda.synchronize()
    here.value = before


class Op:
    """An op that works with memory of its own, outside of the graph's pool, until it drops that for something newer."""

    def __init__(self, retains=True):
        self.retains, self.answers, self.threads = retains, [], set()
        self.table = torch.randn(SIZE, device=DEVICE)  # read: lost, it makes the result wrong
        self.scratch = torch.empty(SIZE, device=DEVICE)  # written: lost, it makes somebody else's wrong
        self.alive = [weakref.ref(self.table), weakref.ref(self.scratch)]
        self.again = self.table.clone()

    def __call__(self, x):
        self.threads.add(threading.get_ident())
        if self.retains:
            self.answers += [arena.retain(self.table), arena.retain(self.scratch)]
        torch.mul(x, self.table, out=self.scratch)
        return self.scratch.add_(1.0)

    def eager(self, x):
        return x * self.again + 1.0

    def drop(self):
        del self.table, self.scratch

    def lives(self):
        return [each() is not None for each in self.alive]


class Bystanders:
    """Tensors of others, made of whatever memory is free. Not of NaN: what a replay makes of NaN is NaN again."""

    def __init__(self):
        self.tensors = [torch.full((SIZE,), -7.0, device=DEVICE) for _ in range(48)]

    def intact(self):
        return all(bool((each == -7.0).all()) for each in self.tensors)


class Holder:
    """One of vLLM's graph holders around two ops, with what it needs to be called: a forward context and little more."""

    def __init__(self, vllm, retains):
        self.vllm = vllm
        self.ops = [Op(retains) for _ in range(2)]
        self.mode = vllm.Mode.PIECEWISE
        compilation = SimpleNamespace(fast_moe_cold_start=False, static_all_moe_layers=[], static_forward_context={})
        parallel = SimpleNamespace(
            num_ubatches=2,
            data_parallel_size=2,
            data_parallel_rank=0,
            use_sequence_parallel_moe=False,
            is_moe_model=True,
        )
        self.config = SimpleNamespace(compilation_config=compilation, parallel_config=parallel, use_cumem_cudagraph_pool=False)

    def context(self, number=0, **more):
        contexts, batch = self.vllm.context, self.vllm.context.BatchDescriptor(number + 1)
        more = {"cudagraph_runtime_mode": self.mode, "batch_descriptor": batch, **more}
        return contexts.override_forward_context(contexts.create_forward_context(None, self.config, **more))

    def eager(self, x):
        return self.ops[1].eager(self.ops[0].eager(x) * 2.0)

    def size(self):
        return SIZE


class Full(Holder):
    """`CUDAGraphWrapper` around everything."""

    def __init__(self, vllm, retains):
        super().__init__(vllm, retains)
        self.mode = vllm.Mode.FULL
        self.wrapper = vllm.cuda_graph.CUDAGraphWrapper(self.model, self.config, self.mode)

    def model(self, x):
        return self.ops[1](self.ops[0](x) * 2.0)

    def __call__(self, x, number=0):
        with self.context(number):
            return self.wrapper(x)

    def graphs(self):
        return [entry.cudagraph for entry in self.wrapper.concrete_cudagraph_entries.values()]

    def clear(self):
        self.wrapper.clear_graphs()


class Piecewise(Holder):
    """A `CUDAGraphWrapper` around each piece, and something eager in between."""

    def __init__(self, vllm, retains):
        super().__init__(vllm, retains)
        self.between = torch.zeros(SIZE, device=DEVICE)
        self.wrappers = [
            vllm.cuda_graph.CUDAGraphWrapper(
                op,
                self.config,
                self.mode,
                vllm.cuda_graph.CUDAGraphOptions(gc_disable=number > 0, weak_ref_output=number == 1),
            )
            for number, op in enumerate(self.ops)
        ]

    def __call__(self, x, number=0):
        with self.context(number):
            torch.mul(self.wrappers[0](x), 2.0, out=self.between)
            return self.wrappers[1](self.between)

    def graphs(self):
        return [entry.cudagraph for each in self.wrappers for entry in each.concrete_cudagraph_entries.values()]

    def clear(self):
        for wrapper in self.wrappers:
            wrapper.clear_graphs()


class Breakable(Holder):
    """`BreakableCUDAGraphWrapper`: what the first op returns, its scratch, crosses the break as an address only."""

    def __init__(self, vllm, retains):
        super().__init__(vllm, retains)
        self.between = torch.zeros(SIZE, device=DEVICE)
        self.a_break = vllm.breakable_cudagraph.eager_break_during_capture(self.eager_part)
        self.wrapper = vllm.breakable_cudagraph.BreakableCUDAGraphWrapper(self.model, self.config)
        self.captured_in_a_break = []

    def eager_part(self, source, out):
        self.captured_in_a_break.append(arena.capture_id())
        torch.mul(source, 2.0, out=out)

    def model(self, x):
        self.a_break(self.ops[0](x), self.between)
        return self.ops[1](self.between)

    def __call__(self, x, number=0):
        with self.context(number):
            return self.wrapper(x)

    def graphs(self):
        captures = [entry.capture for entry in self.wrapper.entries.values()]
        return [graph for capture in captures for graph in graphs_of(capture)]

    def clear(self):
        self.wrapper.clear_graphs()


class UBatch(Holder):
    """`UBatchWrapper`: a thread for each half of the batch, both started before the capture, taking turns during it."""

    def __init__(self, vllm, retains):
        super().__init__(vllm, retains)
        self.mode = vllm.Mode.FULL
        self.seen, self.here = [], contextvars.ContextVar("here", default=False)
        device = torch.device(DEVICE, torch.cuda.current_device())
        self.wrapper = vllm.gpu_ubatch_wrapper.UBatchWrapper(self.model, self.config, self.mode, device)

    def model(self, input_ids, positions, intermediate_tensors, inputs_embeds):
        ubatching = self.vllm.ubatching
        self.seen.append(self.here.get())
        op = self.ops[ubatching.dbo_current_ubatch_id()]
        ubatching.dbo_yield()
        ubatching.dbo_switch_to_comm_sync()
        result = op(input_ids)
        ubatching.dbo_switch_to_compute_sync()
        ubatching.dbo_yield()
        return result * 2.0

    def eager(self, x):
        return torch.cat([op.eager(half) * 2.0 for op, half in zip(self.ops, x.split(SIZE), strict=True)])

    def size(self):
        return 2 * SIZE

    def __call__(self, x, number=0):
        slices = [
            self.vllm.ubatch_utils.UBatchSlice(slice(half, half + 1), slice(half * SIZE, (half + 1) * SIZE))
            for half in range(2)
        ]
        parallel = self.config.parallel_config
        ranks = self.vllm.context.DPMetadata.make(parallel, 2 * SIZE, torch.tensor([2 * SIZE] * 2, dtype=torch.int32))
        self.here.set(True)
        with self.context(number, ubatch_slices=slices, dp_metadata=ranks):
            return self.wrapper(input_ids=x, positions=x, intermediate_tensors=None, inputs_embeds=None)

    def graphs(self):
        return [each.cudagraph for each in self.wrapper.cudagraphs.values()]

    def clear(self):
        self.wrapper.clear_graphs()


def graphs_of(capture):
    """The graphs of a breakable capture, which knows only their `replay`."""
    return [each.__self__ for each in capture.segments if isinstance(getattr(each, "__self__", None), torch.cuda.CUDAGraph)]


HOLDERS = {"CUDAGraphWrapper": Full, "piecewise": Piecewise, "breakable": Breakable, "UBatchWrapper": UBatch}


@pytest.fixture(params=HOLDERS)
def make(request, vllm, stream, monkeypatch):
    # How many multiprocessors communication gets is asked of platforms that vLLM has kernels for.
    monkeypatch.setattr(vllm.gpu_ubatch_wrapper, "create_sm_control_context", lambda config: nullcontext())
    return lambda retains=True: HOLDERS[request.param](vllm, retains)


def clean(graph):
    """As many launches can be queued behind a running one as without owners: more than 28."""
    torch.cuda.synchronize()
    torch.cuda._sleep(int(100 * 1.9e6))
    gate = torch.cuda.Event()
    gate.record()
    for _ in range(60):
        graph.replay()
    waited = gate.query()
    torch.cuda.synchronize()
    return not waited


def released(ops):
    gc.collect()
    arena.reclaim(5.0)
    return until(lambda: not any(alive for op in ops for alive in op.lives()))


def test_replays_equal_eager_though_python_dropped_what_the_ops_used(make):
    holder = make()
    x = torch.randn(holder.size(), device=DEVICE)
    holder(x)  # captures
    for op in holder.ops:
        assert op.answers == [True, True]
        op.drop()
        assert op.lives() == [True, True]
    bystanders = Bystanders()
    for _ in range(3):
        x.normal_()
        result = holder(x)
        torch.cuda.synchronize()
        assert torch.equal(result, holder.eager(x))
    assert bystanders.intact()
    assert all(clean(graph) for graph in holder.graphs())
    assert all(op.lives() == [True, True] for op in holder.ops)
    assert len(holder.ops[0].answers) == 2  # replays run no Python of the ops
    del result
    holder.clear()
    assert released(holder.ops)


def test_without_retention_they_do_not(make):
    """The control: the same memory, dropped, is handed to others, whom the replays then overwrite or read."""
    holder = make(retains=False)
    x = torch.randn(holder.size(), device=DEVICE)
    holder(x)
    for op in holder.ops:
        op.drop()
        assert op.lives() == [False, False]
    bystanders = Bystanders()
    x.normal_()
    result = holder(x)
    torch.cuda.synchronize()
    equal, intact = torch.equal(result, holder.eager(x)), bystanders.intact()
    assert not equal, "the ops' tables were not handed to others"
    assert not intact, "the ops' scratch was not handed to others"
    del result
    holder.clear()


def test_the_executable_that_holds_an_owner_is_not_clean(vllm, stream):
    """The control of `clean`: the same holder over torch's own graphs."""
    arena.torch.uninstall()
    holder = Full(vllm, True)
    holder(torch.randn(SIZE, device=DEVICE))
    [graph] = holder.graphs()
    assert not clean(graph)
    holder.clear()
    del graph
    for op in holder.ops:
        op.drop()
    assert released(holder.ops)
    arena.torch.install()


def test_each_graph_of_a_holder_keeps_its_owners_for_itself(vllm, stream):
    """Two sizes of batch, one pool, and what is retained for both."""
    holder = Full(vllm, True)
    x = torch.randn(SIZE, device=DEVICE)
    holder(x, 0)
    first = holder.ops
    holder.ops = [Op(), Op()]
    second = holder.ops
    holder(x, 1)
    for op in first + second:
        op.drop()
    bystanders = Bystanders()
    for number, ops in enumerate((first, second)):
        holder.ops = ops
        x.normal_()
        result = holder(x, number)
        torch.cuda.synchronize()
        assert torch.equal(result, holder.eager(x))
    assert bystanders.intact()
    del result
    entries = holder.wrapper.concrete_cudagraph_entries
    del entries[next(iter(entries))]
    assert released(first)
    assert stays(lambda: all(op.lives() == [True, True] for op in second))
    holder.clear()
    assert released(second)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_each_segment_holds_what_was_retained_in_it_whatever_dies_first(vllm, stream, order):
    ops, buffers = [Op() for _ in range(4)], [torch.zeros(SIZE, device=DEVICE) for _ in range(3)]
    shared = torch.zeros(SIZE, device=DEVICE)
    everywhere, in_breaks = weakref.ref(shared), []

    def a_break(source, out):
        in_breaks.append(arena.retain(source))
        torch.mul(source, 2.0, out=out)

    x = torch.randn(SIZE, device=DEVICE)
    value = x
    with vllm.breakable_cudagraph.BreakableCUDAGraphCapture(pool=torch.cuda.graph_pool_handle()) as capture:
        for op, buffer in itertools.zip_longest(ops, buffers):
            assert arena.retain(shared)
            result = op(value)
            if buffer is not None:
                source = vllm.torch_utils.weak_ref_tensor(result)
                capture.add_eager(lambda source=source, buffer=buffer: a_break(source, buffer))
                value = buffer
    assert in_breaks == [False] * 3
    out = vllm.torch_utils.weak_ref_tensor(result)
    del shared, result, value, source
    for op in ops:
        op.drop()
    bystanders = Bystanders()
    x.normal_()
    capture.replay()
    torch.cuda.synchronize()
    expected = ops[0].eager(x)
    for op in ops[1:]:
        expected = op.eager(expected * 2.0)
    assert torch.equal(out, expected)
    assert bystanders.intact()

    segments = dict(enumerate(graphs_of(capture)))
    assert len(segments) == 4
    assert all(clean(graph) for graph in segments.values())
    capture.segments.clear()
    for number in order:
        assert everywhere() is not None
        assert stays(lambda number=number: ops[number].lives() == [True, True], 0.01)
        del segments[number]
        assert released([ops[number]])
        assert all(ops[other].lives() == [True, True] for other in segments)
    assert until(lambda: everywhere() is None)


def test_a_value_that_crosses_a_break_is_lost_where_its_segment_did_not_retain_it(vllm, stream):
    """The control: a break keeps an address, not the tensor."""
    kept, lost = Breakable(vllm, True), Breakable(vllm, True)
    lost.ops[0].retains = False
    x = torch.randn(SIZE, device=DEVICE)
    for holder in (kept, lost):
        holder(x)
        for op in holder.ops:
            op.drop()
    bystanders = Bystanders()
    right, wrong = kept(x), lost(x)
    torch.cuda.synchronize()
    assert torch.equal(right, kept.eager(x))
    assert not torch.equal(wrong, lost.eager(x))
    assert not bystanders.intact()
    assert kept.captured_in_a_break == lost.captured_in_a_break == [None, None]
    del right, wrong
    kept.clear()
    lost.clear()
    assert released(kept.ops + lost.ops)


def test_the_threads_of_a_ubatch_see_no_context_and_retain_all_the_same(vllm, stream, monkeypatch):
    monkeypatch.setattr(vllm.gpu_ubatch_wrapper, "create_sm_control_context", lambda config: nullcontext())
    before = arena.stats().lists
    holder = UBatch(vllm, True)
    holder(torch.randn(2 * SIZE, device=DEVICE))
    assert holder.seen == [False, False]
    threads = holder.ops[0].threads | holder.ops[1].threads
    assert len(threads) == 2
    assert threading.get_ident() not in threads
    assert [op.answers for op in holder.ops] == [[True, True]] * 2
    assert arena.stats().lists == before + 1
    for op in holder.ops:
        op.drop()
    holder.clear()
    assert released(holder.ops)
