"""Audits on a real GPU: what was dropped is found, with the kernel and the parameter; what is clean gives no finding."""

import gc
import subprocess
import sys
import threading
import warnings

import pytest
from conftest import run_python

import arena

torch = pytest.importorskip("torch")

import arena.torch  # noqa: E402
from arena import _audit, memory  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

SIZE = 1 << 20


@pytest.fixture(autouse=True)
def quiet():
    """A clean pool before and after, and no warning unless a test asks for it."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(enabled=None)  # or all later tests of this process are recorded, too


def captured(body, *, audit="warn", warm=True, **options):
    """An audited graph of `body()`. Warmed up first, as torch asks."""
    if warm:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            body()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
    graph = arena.torch.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", arena.AuditWarning)
        with arena.torch.graph(graph, audit=audit, **options):
            body()
    torch.cuda.synchronize()
    return graph


def uses_of(findings, tensor_address, nbytes):
    return [use for each in findings for use in each.uses if tensor_address <= use.address < tensor_address + nbytes]


def told(seen):
    """For a failure: all that was seen."""
    lines = [str(seen)]
    for name in ("held", "external", "host", "foreign", "possible"):
        lines += [f"{name}: {each}" for each in getattr(seen, name)][:12]
    return "\n".join(lines)


# ---- what the rest stands on ----


def test_torchs_allocator_tells_what_an_audit_asks():
    torch.zeros(1, device="cuda")
    source = memory.allocator()
    source.watch()
    before, frees = memory.now(), source.freed()
    x = torch.empty(SIZE, device="cuda")
    address = x.data_ptr()
    block = next(each for each in source.blocks() if each.address <= address < each.address + each.size)
    assert (block.used, block.pool, block.requested) == (True, (0, 0), 4 * SIZE)
    del x
    assert source.freed() == frees + 1
    block = next(each for each in source.blocks() if each.address <= address < each.address + each.size)
    assert not block.used
    y = torch.empty(SIZE, device="cuda")
    assert y.data_ptr() == address
    events, whole = source.events(before)
    here = [each.action for each in events if each.address == address]
    assert whole
    assert here[:2] == ["alloc", "free"], here
    assert here[-1] == "alloc", here


def test_the_driver_gives_each_allocation_an_id_of_its_own():
    driver = pytest.importorskip("cuda.bindings.driver")
    torch.zeros(1, device="cuda")
    seen = []
    for _ in range(3):
        error, pointer = driver.cuMemAlloc(8 << 20)
        assert int(error) == 0
        kind, start, size, number, device, _ = _audit.pointed(int(pointer) + 100)
        assert (kind, start, size, device) == (2, int(pointer), 8 << 20, 0)
        seen.append((int(pointer), number))
        driver.cuMemFree(pointer)
        told_now = _audit.pointed(int(pointer))
        assert told_now is None, told_now
    assert len({number for _, number in seen}) == 3, seen
    assert _audit.pointed(5) is None


# ---- what was dropped is found ----


def test_a_tensor_that_an_op_dropped_during_the_capture_is_found_with_its_parameter():
    """An op's own temporary, outside the pool."""
    x, out = torch.full((SIZE,), 3.0, device="cuda"), torch.zeros(SIZE, device="cuda")
    held = [torch.full((SIZE,), 2.0, device="cuda")]
    address = held[0].data_ptr()
    torch.mul(x, held[0], out=out)

    def op():
        torch.mul(x, held[0], out=out)
        held.clear()

    seen = captured(op, warm=False)._arena_audit
    assert [each.what for each in seen.findings] == ["freed"], told(seen)
    [use] = seen.findings[0].uses
    # vectorized_elementwise_kernel(int count, functor, array of pointers: out, x, scratch)
    assert "elementwise" in use.name, use
    assert "Mul" in use.name or "mul" in use.name, use
    assert (use.parameter, use.offset, use.address) == (2, 16, address), told(seen)


def test_the_same_op_that_retains_its_temporary_is_clean():
    """The control."""
    x, out = torch.full((SIZE,), 3.0, device="cuda"), torch.zeros(SIZE, device="cuda")
    held = [torch.full((SIZE,), 2.0, device="cuda")]
    address = held[0].data_ptr()

    def op():
        arena.retain(held[0])
        torch.mul(x, held[0], out=out)
        held.clear()

    graph = captured(op, warm=False, audit="raise")
    graph.replay()
    torch.cuda.synchronize()
    seen = graph._arena_audit
    assert seen.findings == [], told(seen)
    assert [each.by.split(",")[0] for each in seen.held if each.address == address] == ["owner 0"], told(seen)
    assert out[0].item() == 6.0


class Workspace:
    """A slot that is grown by whoever needs more, as libraries do."""

    def __init__(self):
        self.buffer = torch.zeros(0, dtype=torch.uint8, device="cuda")

    def get(self, nbytes):
        if self.buffer.numel() < nbytes:
            self.buffer = None
            self.buffer = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        return self.buffer[:nbytes].view(torch.float32)


@pytest.mark.parametrize("empty", [True, False], ids=["given back to the driver", "kept in the cache"])
def test_a_workspace_that_grew_after_the_capture_is_found(empty):
    workspace, out = Workspace(), torch.zeros(8 << 20, device="cuda")
    views = [workspace.get(32 << 20)]
    address = views[0].data_ptr()

    def step():
        views[0].add_(1)
        out.copy_(views[0])

    graph = captured(step)
    seen = graph._arena_audit
    assert seen.check() == [], told(seen)
    views.clear()
    workspace.get(64 << 20)
    gc.collect()
    if empty:
        torch.cuda.empty_cache()
    poison = [torch.full((32 << 20 >> 2,), float("nan"), device="cuda") for _ in range(64)]
    findings = seen.check()
    assert len(findings) == 1, told(seen)
    assert findings[0].what in ("freed", "handed out again")
    kinds = {(use.kind, use.parameter, use.offset) for use in uses_of(findings, address, 32 << 20)}
    # add_: elementwise kernel, pointers out and in; copy_: a memcpy node, its source
    assert ("memcpy", 1, 0) in kinds, findings
    assert {("kernel", 2, 0), ("kernel", 2, 8)} <= kinds, findings
    del poison


def test_each_graph_of_an_ascending_capture_order_is_told_which_block_it_lost():
    workspace, out = Workspace(), torch.zeros(1, device="cuda")
    graphs, addresses = [], []
    for batch in (1, 2, 4, 8, 16, 32, 64):
        addresses.append(workspace.get(batch << 20).data_ptr())
        graphs.append(captured(lambda batch=batch: torch.sum(workspace.get(batch << 20), 0, keepdim=True, out=out)))
        torch.cuda.empty_cache()
    for number, graph in enumerate(graphs[:-1]):
        findings = graph._arena_audit.check()
        found = uses_of(findings, addresses[number], 1 << 20)
        assert found, (number, told(graph._arena_audit))
        assert "reduce" in found[0].name, found
        assert found[0].parameter == 0, found
    assert graphs[-1]._arena_audit.check() == [], told(graphs[-1]._arena_audit)


def test_a_scratch_of_the_first_graphs_pool_is_lost_to_the_others_when_it_goes():
    """What a library caches for a stream during the first capture, and later captures use."""
    shared, out = [], torch.zeros(8 << 20, device="cuda")

    def step():
        if not shared:
            shared.append(torch.zeros(8 << 20, device="cuda"))  # in the pool of whoever comes first
        shared[0].add_(1)
        torch.add(out, shared[0], out=out)

    step()  # loads the kernels
    shared.clear()
    first = captured(step, warm=False)
    others = [captured(step, warm=False) for _ in range(2)]
    address = shared[0].data_ptr()
    assert all(each._arena_audit.check() == [] for each in (first, *others))
    assert all(any("pool" in a.by for a in each._arena_audit.external) for each in others), told(others[0]._arena_audit)
    shared.clear()
    assert first._arena_audit.check() == []  # its own pool, which lives as long as it does
    first.reset()
    del first
    gc.collect()
    torch.cuda.empty_cache()
    for each in others:
        findings = each._arena_audit.check()
        found = uses_of(findings, address, 32 << 20)
        assert {(use.parameter, use.offset) for use in found if use.kind == "kernel"} >= {(2, 0)}, told(each._arena_audit)
        assert all("elementwise" in use.name for use in found if use.kind == "kernel"), found


def test_memory_that_others_allocated_is_found_too():
    driver = pytest.importorskip("cuda.bindings.driver")
    out = torch.zeros(1024, device="cuda")
    error, pointer = driver.cuMemAlloc(8 << 20)
    assert int(error) == 0

    class Theirs:
        __cuda_array_interface__ = {"data": (int(pointer), False), "shape": (1024,), "typestr": "<f4", "version": 3}

    view = torch.as_tensor(Theirs(), device="cuda")
    assert view.data_ptr() == int(pointer)
    graph = captured(lambda: out.add_(view))
    seen = graph._arena_audit
    assert [each.address for each in seen.foreign] == [int(pointer)], told(seen)
    assert seen.check() == []
    driver.cuMemFree(pointer)
    [finding] = seen.check()
    assert (finding.what, finding.address) == ("freed", int(pointer))
    error, again = driver.cuMemAlloc(8 << 20)
    if int(again) == int(pointer):
        assert [each.what for each in seen.check()] == ["handed out again"]
    driver.cuMemFree(again)


def test_copies_and_fills_are_told_by_their_end():
    a, b = torch.ones(SIZE, device="cuda"), torch.ones(SIZE, device="cuda")
    pinned = torch.ones(SIZE).pin_memory()
    driver = pytest.importorskip("cuda.bindings.driver")

    def step():
        b.copy_(a)
        driver.cuMemsetD8Async(a.data_ptr(), 0, 4 * SIZE, torch.cuda.current_stream().cuda_stream)
        b.copy_(pinned, non_blocking=True)

    seen = captured(step)._arena_audit
    found = {(use.kind, use.parameter): use.address for each in seen.external for use in each.uses}
    assert found.get(("memcpy", 0)) == b.data_ptr(), told(seen)
    assert found.get(("memcpy", 1)) == a.data_ptr(), told(seen)
    assert found.get(("memset", 0)) == a.data_ptr(), told(seen)
    assert [use.address for each in seen.host for use in each.uses] == [pinned.data_ptr()], told(seen)


def test_parameters_of_a_triton_kernel_are_told_by_number():
    pytest.importorskip("triton")
    from triton_kernels import double_it

    x, y = torch.ones(8192, device="cuda"), torch.zeros(8192, device="cuda")
    seen = captured(lambda: double_it[(8,)](x, y, 8192, BLOCK=1024))._arena_audit
    found = {(use.name, use.parameter): use.address for each in seen.external for use in each.uses}
    assert found == {("double_it", 0): x.data_ptr(), ("double_it", 1): y.data_ptr()}, told(seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("which", ["x", "w", "out"])
def test_each_operand_of_a_gemm_is_found_when_it_goes(dtype, which):
    """By a plain pointer or inside a tensor map, whichever the library's kernel takes."""
    there = {name: torch.randn(1024, 1024, device="cuda").to(dtype) for name in ("x", "w", "out")}
    address, nbytes = there[which].data_ptr(), there[which].nbytes
    graph = captured(lambda: torch.mm(there["x"], there["w"], out=there["out"]))
    assert graph._arena_audit.check() == [], told(graph._arena_audit)
    there.pop(which)
    gc.collect()
    found = uses_of(graph._arena_audit.check(), address, nbytes)
    assert found, told(graph._arena_audit)
    assert all(use.kind == "kernel" and use.name not in ("", "?") for use in found), found


def test_a_block_handed_out_again_with_the_same_size_is_found():
    x, scratch = torch.ones(SIZE, device="cuda"), [torch.ones(SIZE, device="cuda")]
    address = scratch[0].data_ptr()
    graph = captured(lambda: x.add_(scratch[0]))
    seen = graph._arena_audit
    assert seen.exact, told(seen)
    scratch.clear()
    again = torch.zeros(SIZE, device="cuda")
    assert again.data_ptr() == address, "torch did not hand the block out again: the test shows nothing"
    assert [each.what for each in seen.check()] == ["handed out again"], told(seen)
    assert seen.exact


# ---- what is clean ----


def tensors(*shapes, dtype=torch.float32):
    return [torch.randn(*shape, device="cuda").to(dtype) for shape in shapes]


def clean_ops():
    """name: (operands, what is captured). Each uses its operands, temporaries of the pool, and whatever its library keeps."""
    functional = torch.nn.functional
    bf16 = torch.bfloat16
    (a, b, c), (x, w, v) = tensors((1024, 1024), (1024, 1024), (1024, 1024)), tensors((4, 64, 256), (256, 512), (512,))
    q, k, u = tensors((2, 8, 256, 64), (2, 8, 256, 64), (2, 8, 256, 64), dtype=bf16)
    image, kernel = tensors((8, 16, 64, 64), (32, 16, 3, 3))
    index = torch.randint(0, 1024, (512,), device="cuda")
    half = [each.to(bf16) for each in (a, b)]
    norm = torch.nn.LayerNorm(1024, device="cuda")
    lstm = torch.nn.LSTM(64, 64, device="cuda")
    steps, embedding = torch.randn(8, 4, 64, device="cuda"), torch.nn.Embedding(1024, 64, device="cuda")
    return {
        "elementwise": ([a, b], lambda: (a * b + c).relu_()),
        "broadcast": ([a, v], lambda: a[:512, :512] * v - v[:, None]),
        "strided": ([a, b], lambda: a.t() + b[::2].repeat(2, 1)),
        "reduce": ([a], lambda: (a.sum(0), a.mean(1), a.amax(), a.std())),
        "softmax": ([a], lambda: torch.softmax(a, -1) @ b),
        "layer norm": ([a], lambda: norm(a)),
        "mm fp32": ([a, b], lambda: torch.mm(a, b)),
        "mm bf16": (half, lambda: torch.mm(*half)),
        "addmm": ([a, b, c], lambda: torch.addmm(c, a, b)),
        "batched": ([x], lambda: torch.bmm(x, x.transpose(1, 2))),
        "linear": ([x, w, v], lambda: functional.linear(x, w.t(), v)),
        "attention": ([q, k, u], lambda: functional.scaled_dot_product_attention(q, k, u)),
        "causal attention": ([q, k, u], lambda: functional.scaled_dot_product_attention(q, k, u, is_causal=True)),
        "convolution": ([image, kernel], lambda: functional.conv2d(image, kernel, padding=1)),
        "gather": ([a, index], lambda: (a[index], a.index_select(1, index), a.gather(0, index[None].expand(1, 512)))),
        "scatter": ([a, index], lambda: torch.zeros_like(a).index_add_(0, index, a[:512])),
        "cat": ([a, b, c], lambda: (torch.cat([a, b, c]), torch.stack([a, b]), torch.cat([a, b], 1))),
        "sort": ([a], lambda: (a.sort(-1).values, a.topk(8).indices, a.cumsum(1))),
        "random": ([a], lambda: functional.dropout(a, 0.5) + torch.rand_like(a)),
        "embedding": ([index], lambda: embedding(index).sum(0)),
        "where and copies": ([a, b], lambda: torch.where(a > 0, a, b).clone().to(bf16).float().zero_()),
        "foreach": ([a, b, c], lambda: torch._foreach_add([a, b, c], 1.0)),
        "lstm": ([steps], lambda: lstm(steps)[0]),
        "fft": ([a], lambda: torch.fft.rfft(a).abs()),
        "cross entropy": ([a, index], lambda: functional.cross_entropy(a[:512], index)),
    }


OPS = [
    "elementwise", "broadcast", "strided", "reduce", "softmax", "layer norm", "mm fp32", "mm bf16", "addmm", "batched",
    "linear", "attention", "causal attention", "convolution", "gather", "scatter", "cat", "sort", "random", "embedding",
    "where and copies", "foreach", "lstm", "fft", "cross entropy",
]  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_a_clean_capture_gives_no_finding_whatever_happens_around_it(name):
    ops = clean_ops()
    assert list(ops) == OPS
    _, op = ops[name]
    kept = []

    def body():
        with torch.no_grad():
            kept.append(op())

    body()
    kept.clear()  # what the warm-up made is gone, and stale words in a struct could point there
    graph = captured(body, audit="raise", warm=False)
    for _ in range(4):
        graph.replay()
    churn = [torch.randn(n, n, device="cuda") @ torch.randn(n, n, device="cuda") for n in (8, 64, 512, 1024)]
    del churn
    torch.cuda.synchronize()
    gc.collect()
    seen = graph._arena_audit
    assert seen.check() == [], told(seen)
    kept.clear()  # outputs in the pool
    torch.cuda.empty_cache()
    assert seen.check() == [], told(seen)
    assert seen.nodes > 0
    assert seen.unread == []


@pytest.mark.parametrize("name", OPS)
def test_the_same_capture_is_not_clean_once_an_operand_is_gone(name):
    """The control: each operand's storage is given back behind the graph's back."""
    operands, op = clean_ops()[name]
    ranges = [(each.untyped_storage().data_ptr(), each.untyped_storage().nbytes()) for each in operands]

    def body():
        with torch.no_grad():
            op()

    body()
    graph = captured(body)
    seen = graph._arena_audit
    assert seen.check() == [], told(seen)
    for each in operands:
        each.untyped_storage().resize_(0)
    findings = seen.check()
    missing = [each for each in ranges if not uses_of(findings, *each)]
    assert not missing, (missing, findings, told(seen))


def test_a_thread_and_a_side_stream_in_a_capture_are_clean():
    x = torch.ones(SIZE, device="cuda")
    side = torch.cuda.Stream()

    def body():
        main = torch.cuda.current_stream()
        side.wait_stream(main)

        def work():
            with torch.cuda.stream(side):
                x.add_(1)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        main.wait_stream(side)
        x.mul_(2)

    body()
    torch.cuda.synchronize()
    graph = captured(body, audit="raise", warm=False, capture_error_mode="thread_local")
    graph.replay()
    assert graph._arena_audit.nodes == 2
    assert graph._arena_audit.check() == []


# ---- ways in ----


def test_a_kept_template_and_graphs_of_other_libraries_can_be_audited():
    x, y = torch.ones(SIZE, device="cuda"), torch.ones(SIZE, device="cuda")
    x.add_(y)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        x.add_(y)
    expected = {x.data_ptr(), y.data_ptr()}
    for seen in (arena.audit(graph), arena.audit(graph.raw_cuda_graph(), pool=graph.pool())):
        assert {use.address for each in seen.external for use in each.uses} == expected, told(seen)
        assert not seen.exact  # no history was kept
    with pytest.raises(arena.AuditError, match="keep_graph=True"):
        arena.audit(torch.cuda.CUDAGraph())
    driver = pytest.importorskip("cuda.bindings.driver")
    stream = torch.cuda.Stream()
    driver.cuStreamBeginCapture(stream.cuda_stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    with torch.cuda.stream(stream):
        x.add_(y)
    _, raw = driver.cuStreamEndCapture(stream.cuda_stream)
    assert {use.address for each in arena.audit(raw).external for use in each.uses} == expected
    driver.cuGraphDestroy(raw)


def test_child_graphs_are_read():
    driver = pytest.importorskip("cuda.bindings.driver")
    x = torch.ones(SIZE, device="cuda")
    x.add_(1)
    inner = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(inner):
        x.add_(1)
    _, outer = driver.cuGraphCreate(0)
    error, _ = driver.cuGraphAddChildGraphNode(outer, None, 0, driver.CUgraph(inner.raw_cuda_graph()))
    assert int(error) == 0
    seen = arena.audit(outer)
    assert {use.node for each in seen.external for use in each.uses} == {(0, 0)}, told(seen)
    driver.cuGraphDestroy(outer)


def test_audits_break_nobodys_capture():
    x, y = torch.ones(SIZE, device="cuda"), torch.ones(SIZE, device="cuda")
    audited = captured(lambda: x.add_(1))
    kept = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(kept):
        x.add_(1)

    def look():
        audited._arena_audit.check()
        arena.audit(kept)
        arena.report()
        arena.owner_of(x.data_ptr())

    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other, capture_error_mode="global"):
        y.add_(1)
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        look()
        y.add_(1)
    other.replay()
    torch.cuda.synchronize()
    assert y[0].item() == 3.0


SCRIPT = """
import sys, torch, gc
x, out = torch.full((1 << 20,), 3.0, device="cuda"), torch.zeros(1 << 20, device="cuda")
scratch = torch.full((1 << 20,), 2.0, device="cuda")
torch.mul(x, scratch, out=out)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    torch.mul(x, scratch, out=out)
    if sys.argv[1] == "retain":
        import arena
        arena.retain(scratch)
if sys.argv[1] != "keep": del scratch
graph.replay()
torch.cuda.synchronize()
"""


@pytest.mark.parametrize(("case", "code"), [("drop", 1), ("keep", 0), ("retain", 0)])
def test_the_command_finds_what_a_script_dropped(tmp_path, case, code):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "arena", "audit", str(tmp_path / "script.py"), case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert f"1 graph audited, {code} finding" in done.stderr
    assert ("parameter 2 at byte 16" in done.stderr) == (case == "drop"), done.stderr


@pytest.mark.parametrize("action", ["warn", "raise"])
def test_the_environment_audits_code_that_nobody_changed(tmp_path, action):
    script = "import sys, arena.torch\narena.torch.install()\nsys.argv = ['script', 'drop']\n" + SCRIPT
    run = run_python(script, timeout=100, env={"ARENA_AUDIT": action})
    assert "AuditWarning" in run.stderr or "AuditError" in run.stderr, run.stderr
    assert "parameter 2 at byte 16" in run.stderr
    assert run.returncode == (1 if action == "raise" else 0)
    clean = run_python(script.replace("'drop'", "'retain'"), timeout=100, env={"ARENA_AUDIT": action})
    assert (clean.returncode, clean.stderr) == (0, "")


@pytest.mark.parametrize(("case", "found"), [("drop", True), ("retain", False)])
def test_expandable_segments_are_audited_too(case, found):
    script = f"import sys, arena.torch\narena.torch.install()\nsys.argv = ['script', {case!r}]\n" + SCRIPT
    env = {"ARENA_AUDIT": "warn", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    env["PYTORCH_ALLOC_CONF"] = env["PYTORCH_CUDA_ALLOC_CONF"]
    run = run_python(script, timeout=100, env=env)
    assert run.returncode == 0, run.stderr
    assert ("parameter 2 at byte 16" in run.stderr) == found, run.stderr


# ---- reports ----


def test_a_report_tells_bytes_inside_and_outside_the_pool():
    outside = torch.zeros(8 << 20, device="cuda")
    graph = arena.torch.CUDAGraph()
    with arena.torch.graph(graph, name="decode B=8"):
        inside = torch.zeros(4 << 20, device="cuda")
        inside.add_(outside[: 4 << 20])
        arena.retain(inside)
        arena.retain(outside)
    [seen] = [each for each in arena.report().graphs if each.name == "decode B=8"]
    assert (seen.owners, seen.inside, seen.outside) == (2, 16 << 20, 32 << 20)
    owner = arena.owner_of(outside.data_ptr() + 100)
    assert owner.graphs == ["decode B=8"]
    assert owner.objects[0] is outside
    assert "Tensor float32[8388608] (32 MiB), retained by decode B=8" in owner.by
    page = arena.report().html()
    assert "decode B=8" in page
    graph.reset()
