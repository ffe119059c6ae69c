"""Real B12X on a GPU: 90 bindings of its MHC in each of 17 graphs, whose owners Python drops; and its hyperconnection ops.

Run by b12x_on_gpu.sh, which brings B12X there. Measures each promise beside its target, section by section, and the same
without arena in a process of its own (it may fault). A section that fails or takes too long is told with its traceback, and the
next one runs. Every line is in the report as soon as it is known. Ends with 1 if a target was missed, a section failed, or the
control did not go wrong.
"""

import argparse
import contextlib
import faulthandler
import gc
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

HIDDEN, BF16 = 4096, torch.bfloat16
RECIPE = {"rms_eps": 1e-6, "hc_eps": 1e-6, "sinkhorn_iters": 20}
POISON = 255  # as floats: NaN
started = time.perf_counter()


class Missing(Exception):
    """What a section needs was not made by those before it."""


class OutOfTime(BaseException):
    """No Exception: B12X, or whoever else runs at that moment, is not to handle it."""


class Report:
    """The lines, on the screen and in the file, and what went wrong."""

    def __init__(self, path, budget):
        self.file = Path(path).open("w")  # noqa: SIM115 - until the process ends
        self.budget, self.wrong = budget, []

    def line(self, text=""):
        print(text, flush=True)
        self.file.write(text + "\n")
        self.file.flush()

    def say(self, text):
        self.line(f"[{time.perf_counter() - started:6.1f} s] {text}")

    def row(self, what, target, measured, good):
        if not good:
            self.wrong.append(what)
        self.line(f"  {'ok    ' if good else 'MISSED'}  {what:<52}  {target:<14}  {measured}")

    def left(self):
        return self.budget - (time.perf_counter() - started)

    def section(self, name, seconds, work, *args):
        """Whether `work(self, *args)` went through within that time and what is left of the whole."""
        self.say(name)
        seconds = min(seconds, self.left())
        begin = time.perf_counter()
        try:
            if seconds < 1:
                raise OutOfTime("the time for all of it is over")
            signal.signal(signal.SIGALRM, lambda *_: expired(seconds))
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                work(self, *args)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            return True
        except (Exception, OutOfTime) as error:
            self.wrong.append(name)
            for line in traceback.format_exc().rstrip().splitlines():
                self.line("    " + line)
            self.line(f"  FAILED  {name}: {type(error).__name__}, after {time.perf_counter() - begin:.1f} s")
            return False


def expired(seconds):
    raise OutOfTime(f"not done in {seconds:.0f} s")


class Stack:
    """A stack of MHC layers as an engine runs it: weights, plans per token count, one session."""

    def __init__(self, tokens, layers):
        from b12x.norm import mhc
        from b12x.preparation import PreparationSession

        self.mhc, self.tokens, self.layers = mhc, [], layers
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.session = PreparationSession(device=self.device, autotune=False, compile_workers=0)
        generator = torch.Generator(device=self.device).manual_seed(7)

        def random(*shape, divisor=1.0, dtype=torch.float32):
            return (torch.randn(*shape, generator=generator, device=self.device) / divisor).to(dtype)

        self.first = random(24, HIDDEN, divisor=64), random(3, divisor=3), random(24, divisor=5)
        self.weights = [
            (random(24, 4 * HIDDEN, divisor=64), random(3, divisor=3), random(24, divisor=5), random(HIDDEN, dtype=BF16))
            for _ in range(layers)
        ]
        self.inputs = {count: random(count, HIDDEN, divisor=3, dtype=BF16) for count in tokens}
        self.plans = {}

    def prepare(self, count):
        """That token count's two plans. B12X compiles a kernel for the first count that takes it, and reuses it for the others:
        one set below 96 tokens, one from there on."""
        from b12x.preparation import FrozenMapping

        plans = {}
        for operation in ("pre", "post_pre"):
            caps = self.mhc.Caps(device=self.device, max_tokens=count, hidden_size=HIDDEN, split_k=64)
            invocation = {"operation": operation, "has_norm_weight": True, "norm_weight_dtype": "bfloat16"}
            invocation |= {"output_mode": "provided", "norm_eps": 1e-6, **RECIPE}
            plans[count, operation] = self.mhc.plan(caps, invocation=FrozenMapping(invocation))
        self.session.prepare(tuple(request(plan, f"{operation}-{count}") for (_, operation), plan in plans.items()))
        self.plans |= plans
        self.tokens.append(count)

    def outputs(self, count):
        return {
            "y": torch.empty(count, HIDDEN, dtype=BF16, device=self.device),
            "post": torch.empty(count, 4, device=self.device),
            "comb": torch.empty(count, 4, 4, device=self.device),
            "out": torch.empty(count, 4, HIDDEN, dtype=BF16, device=self.device),
        }

    def scratch(self, count, operation="post_pre"):
        (spec,) = self.plans[count, operation].scratch_specs()
        return torch.empty(spec.shape, dtype=spec.dtype, device=self.device)

    def run(self, count, scratches, kept=None):
        """All layers of `count` tokens, each bound here and now to the next scratch: (residual, post, comb, y) of the last."""
        state = None
        for index, (fn, scale, base, norm) in enumerate(self.weights):
            operation = "post_pre" if index else "pre"
            plan = self.plans[count, operation]
            binding = self.mhc.bind(plan, scratch=scratches[index], tokens=count, **self.outputs(count))
            if kept is not None:
                kept.append(binding)
            options = {**RECIPE, "norm_weight": norm, "norm_eps": 1e-6, "binding": binding}
            if index:
                residual, post, comb, y = state
                state = self.mhc.run_post_pre(y, residual, post, comb, fn, scale, base, **options)
            else:
                state = self.mhc.run_pre(self.inputs[count], *self.first, **options)
        return state

    def scratches(self, count, shared=False):
        if shared:
            return [self.scratch(count)] * self.layers
        return [self.scratch(count, "post_pre" if index else "pre") for index in range(self.layers)]

    def eager(self, count):
        result = [each.clone() for each in self.run(count, self.scratches(count, shared=True))]
        torch.cuda.synchronize()
        return result

    def capture(self, count, scratches, pool=None, kept=None):
        graph = torch.cuda.CUDAGraph()
        with self.session.capture(), torch.cuda.graph(graph, pool=pool):
            begin = time.perf_counter_ns()
            result = self.run(count, scratches, kept)
            self.took = time.perf_counter_ns() - begin  # binding and running, without torch's own begin and end
        return graph, result


def request(plan, name):
    from b12x.preparation import PreparedCall

    return plan.request(name=name, prepare_call=lambda state: PreparedCall(run=lambda: None))


# ---- who else gets the memory ----


def churn(sizes, rounds=3):
    """What an allocator goes through between steps: blocks of these sizes taken, poisoned, freed, given back to the driver."""
    for number in range(rounds):
        taken = [torch.empty(size + 512 * number, dtype=torch.uint8, device="cuda") for size in sizes]
        for each in taken:
            each.fill_(POISON)
        del taken[:: number + 2]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        del taken
        torch.cuda.empty_cache()


def others_of(sizes):
    """Tensors of everybody else: what the allocator gives now for requests as large as the scratch was. All poisoned."""
    others = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    others += [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sorted(set(sizes)) for _ in range(16)]
    for each in others:
        each.fill_(POISON)
    torch.cuda.synchronize()
    return others


def overlapping(others, ranges):
    spans = sorted((each.data_ptr(), each.data_ptr() + each.numel()) for each in others)
    return sum(any(low < start + size and start < high for low, high in spans) for start, size in ranges)


def overwritten(others):
    return int(torch.stack([(each != POISON).any() for each in others]).sum())


class Writer:
    """A second stream that writes poison to all of the others, longer than a replay takes: one graph of fills. Captured without
    `torch.cuda.graph`, which would give the allocator's free memory back to the driver."""

    def __init__(self, others):
        self.stream, self.others, self.graph = torch.cuda.Stream(), others, torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            self.graph.capture_begin()
            for _ in range(-(-2000 // len(others))):  # 2,000 kernels: the graphs beside it have 180
                for each in others:
                    each.fill_(POISON)
            self.graph.capture_end()
        torch.cuda.synchronize()

    def write(self):
        with torch.cuda.stream(self.stream):
            self.graph.replay()


def replay_all(graphs, references, least, most, seconds, writer=None):
    """(replays, wrong, with NaN): round after round over all graphs, each result compared with eager bit by bit, on the GPU.
    A result is overwritten before its replay: it is that replay's own."""
    wrong, nans = torch.zeros((), device="cuda", dtype=torch.int64), torch.zeros((), device="cuda", dtype=torch.int64)
    count, begin = 0, time.perf_counter()
    while count < most and (count < least or time.perf_counter() - begin < seconds):
        for tokens, (graph, result) in graphs.items():
            for each in result:
                each.fill_(float("nan"))
            if writer is not None:
                writer.write()
            graph.replay()
            differs = torch.stack([(a != b).any() for a, b in zip(result, references[tokens], strict=True)]).any()
            wrong += differs
            nans += result[3].isnan().any()
            count += 1
            if writer is not None:
                torch.cuda.synchronize()  # or the writer falls ever farther behind
        if count % 340 < len(graphs):
            torch.cuda.synchronize()  # else the host runs minutes ahead
    torch.cuda.synchronize()
    return count, int(wrong), int(nans)


class Unloads:
    """Counts the kernel libraries that B12X unloads, instead of unloading them: a fault would end the measurement."""

    def __init__(self):
        from cutlass.cutlass_dsl import cuda_jit_executor as executor

        self.executor, self.real, self.count = executor, executor.cuda_runtime, 0
        executor.cuda_runtime = self

    def __getattr__(self, name):
        return getattr(self.real, name)

    def cudaLibraryUnload(self, library):
        self.count += 1

    def so_far(self):
        gc.collect()
        return self.count

    def stop(self):
        self.executor.cuda_runtime = self.real


# ---- without arena ----


def control(tokens, layers):
    """What happens to the same graphs when nobody holds their owners: printed as JSON, one line more with each step."""
    faulthandler.enable()
    stack = Stack(tokens, layers)
    for count in tokens:
        stack.prepare(count)
    references = {count: stack.eager(count) for count in tokens}
    # Dropped together, once all is captured: each capture gives the allocator's free memory back to the driver, and a replay
    # that writes to memory which is gone ends the process before it shows anything.
    scratches = {count: stack.scratches(count) for count in tokens}
    ranges = [(each.data_ptr(), each.numel()) for some in scratches.values() for each in some]
    graphs = {count: stack.capture(count, scratches[count]) for count in tokens}
    del scratches
    gc.collect()
    others = others_of([size for _, size in ranges])
    seen = {"bindings": len(ranges), "given to others": overlapping(others, ranges)}
    print(json.dumps(seen), flush=True)
    seen["replays"], seen["wrong serially"], _ = replay_all(graphs, references, 2 * len(tokens), 2 * len(tokens), 0)
    seen["others"], seen["others overwritten"] = len(others), overwritten(others)
    print(json.dumps(seen), flush=True)
    replays, wrong, nans = replay_all(graphs, references, 20 * len(tokens), 20 * len(tokens), 0, Writer(others))
    seen |= {"replays beside a writer": replays, "wrong": wrong, "NaN": nans}
    print(json.dumps(seen), flush=True)
    unloads = Unloads()
    plans = tuple(stack.plans.values())
    stack.plans.clear()
    stack.session.release_many(plans)
    seen["libraries unloaded while the graphs live"] = unloads.so_far()
    print(json.dumps(seen), flush=True)
    os._exit(0)  # what was torn above is not to be torn down


def run_control(report, tokens, layers):
    command = [sys.executable, __file__, "-", "--control", "--layers", str(layers), "--tokens", ",".join(map(str, tokens))]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            code = subprocess.run(command, stdout=out, stderr=err, timeout=max(report.left() - 30, 10)).returncode
        except subprocess.TimeoutExpired:
            code = "a timeout"
        out.seek(0)
        err.seek(0)
        said = [line for line in out.read().splitlines() if line.startswith("{")]
        errors = err.read().strip().splitlines()
    if code:
        for line in errors[-20:]:
            report.line("    " + line)
    if not said:
        raise RuntimeError(f"the control ended with {code} before it saw anything")
    seen = json.loads(said[-1])
    if code:
        report.line(f"          without arena: the process ended with {code}: {errors[-1] if errors else 'silently'}")

    def row(what, key, of=""):
        report.row(f"without arena: {what}", "goes wrong", f"{seen.get(key, '-')}{of}", seen.get(key, 0) > 0)

    row("scratch of dropped bindings given to others", "given to others", f" of {seen.get('bindings', '-')}")
    row("tensors of others overwritten", "others overwritten", f" of {seen.get('others', '-')}")
    row("wrong replays beside a writer", "wrong", f" of {seen.get('replays beside a writer', '-')}")
    row("of these with NaN", "NaN")
    row("kernel libraries unloaded by session.release", "libraries unloaded while the graphs live")
    report.line(f"          without arena: wrong serially {seen.get('wrong serially', '-')} of {seen.get('replays', '-')}")


# ---- with arena ----


class Measured:
    """What the sections hand to each other."""

    def __init__(self, tokens, layers):
        self.tokens, self.layers = tokens, layers
        self.references, self.graphs, self.ranges, self.others, self.stack = {}, {}, [], [], None
        self.owners = 0

    def middle(self):
        counts = sorted(self.needed().tokens)
        return counts[len(counts) // 2]

    def needed(self):
        if not self.references:
            raise Missing("no eager results: nothing was prepared")
        return self.stack


@contextlib.contextmanager
def registered():
    import arena.b12x

    arena.b12x.install()
    try:
        yield
    finally:
        arena.b12x.uninstall()


def prepare(report, all_of_it):
    """Plans and eager results of every token count. One that cannot be made is told, and left out."""
    all_of_it.stack = stack = Stack(all_of_it.tokens, all_of_it.layers)
    failed = []
    for count in all_of_it.tokens:
        begin = time.perf_counter()
        try:
            try:
                stack.prepare(count)
            except Exception:
                report.line(f"    {count} tokens: {traceback.format_exc().rstrip()}\n    again, by the kernels for few tokens")
                os.environ["B12X_MHC_PREFILL_MIN_TOKENS"] = "1024"
                failed.append(count)
                stack.prepare(count)
            planned = time.perf_counter()
            all_of_it.references[count] = stack.eager(count)
        except Exception:
            report.line(f"    {count} tokens: {traceback.format_exc().rstrip()}")
            failed.append(count)
            if count in stack.tokens:
                stack.tokens.remove(count)
            torch.cuda.synchronize()  # raises, if the context is gone
            continue
        now = time.perf_counter()
        report.say(f"{count} tokens: prepared in {planned - begin:.2f} s, eager in {now - planned:.2f} s")
    finite = all(bool(each.isfinite().all()) for result in all_of_it.references.values() for each in result)
    done = f"{len(all_of_it.references)} of {len(all_of_it.tokens)}"
    report.row("token counts that B12X prepares and runs", "all", done, not failed)
    report.row("eager results finite", "yes", "yes" if finite else "no", finite)


def replays(report, all_of_it, least, most, seconds):
    import arena

    stack, graphs, ranges = all_of_it.needed(), all_of_it.graphs, all_of_it.ranges
    before = arena.stats().owners
    with registered():
        for count in stack.tokens:
            scratches = stack.scratches(count)
            ranges += [(each.data_ptr(), each.numel()) for each in scratches]
            graphs[count] = stack.capture(count, scratches)
            del scratches
    gc.collect()
    sizes = [size for _, size in ranges]
    all_of_it.owners = owners = arena.stats().owners - before
    report.say(f"{len(graphs)} graphs captured, {len(ranges)} bindings dropped, {owners} owners held")
    churn(sizes)
    all_of_it.others = others = others_of(sizes)
    given = overlapping(others, ranges)
    report.row("scratch of dropped bindings given to others", "0", f"{given} of {len(ranges)}", given == 0)
    compare(report, all_of_it, "replays that differ from eager", least, most, seconds)


def beside(report, all_of_it, least, most, seconds):
    if not all_of_it.others:
        raise Missing("nobody else has memory: the section before failed")
    compare(report, all_of_it, "the same beside a stream that writes", least, most, seconds, Writer(all_of_it.others))


def compare(report, all_of_it, what, *limits):
    begin, least, others = time.perf_counter(), limits[0], all_of_it.others
    count, wrong, nans = replay_all(all_of_it.graphs, all_of_it.references, *limits)
    text = f"{wrong} of {count}, {nans} with NaN, {time.perf_counter() - begin:.1f} s"
    report.row(what, f"0 of ≥ {least}", text, wrong == nans == 0 and count >= least)
    changed = overwritten(others)
    report.row("tensors of others overwritten", "0", f"{changed} of {len(others)}", changed == 0)


def pool_bytes(pool):
    segments = [each for each in torch.cuda.memory_snapshot() if tuple(each.get("segment_pool_id", ())) == tuple(pool)]
    return sum(each["total_size"] for each in segments)


def pool_of(stack, mode):
    """Bytes of the pool that all graphs share, when nothing, our owners or whole bindings are retained."""
    import arena

    gc.collect()
    torch.cuda.empty_cache()
    kept = [] if mode == "whole" else None
    pool, graphs = torch.cuda.graph_pool_handle(), []
    try:
        with registered() if mode == "ours" else contextlib.nullcontext():
            largest = stack.scratch(max(stack.tokens))
            for count in sorted(stack.tokens, reverse=True):
                scratches = [largest[: stack.plans[count, "post_pre"].scratch_specs()[0].nbytes]] * stack.layers
                graph, result = stack.capture(count, scratches, pool, kept)
                graphs.append((graph, result[3]))
                del graph, result, scratches
            torch.cuda.synchronize()
            return pool_bytes(pool)
    finally:
        graphs.clear()
        arena.reclaim(5)


def pools(report, all_of_it):
    stack = all_of_it.needed()
    size = {mode: pool_of(stack, mode) for mode in ("nothing", "ours", "whole")}
    nothing, ours, whole = (size[mode] for mode in ("nothing", "ours", "whole"))
    text = f"{ours / max(nothing, 1) - 1:+.2%}: {ours / 1e6:.1f} MB, of nothing {nothing / 1e6:.1f} MB"
    text += f", of whole bindings {whole / 1e6:.1f} MB"
    report.row("graph pool, against retaining nothing", "within 2 %", text, 0 < nothing <= whole and ours <= 1.02 * nothing)


def cost(report, all_of_it, pairs):
    """The share of the capture time that is spent retaining; and captures with our calls beside captures without."""
    import arena
    import arena.b12x

    stack, count, spent = all_of_it.needed(), all_of_it.middle(), [0, 0]
    scratches = stack.scratches(count, shared=True)
    clock = time.perf_counter_ns

    def capture():
        graph, _ = stack.capture(count, scratches)
        del graph
        arena.reclaim(5)
        return stack.took

    def timed(owner):
        begin = clock()
        arena.retain(owner)
        spent[0] += clock() - begin
        spent[1] += 1

    capture()
    with registered():
        capture()
        gc.disable()
        real, arena.b12x.retain = arena.b12x.retain, timed
        shares, each = [], []
        try:
            for _ in range(5):
                spent[:] = 0, 0
                took = capture()
                shares.append(spent[0] / took)
                each.append(spent[0] / max(spent[1], 1))
        finally:
            arena.b12x.retain = real
            gc.enable()
    gc.disable()
    try:
        ratios = []
        for index in range(pairs):
            took = {}
            for ours in (True, False) if index % 2 else (False, True):
                with registered() if ours else contextlib.nullcontext():
                    took[ours] = capture()
            ratios.append(took[True] / took[False])
    finally:
        gc.enable()
    middle, share = statistics.median(ratios), statistics.median(shares)
    error = 1.2533 * 1.4826 * statistics.median(abs(each - middle) for each in ratios) / len(ratios) ** 0.5
    good = share <= 0.005 and (pairs < 10 or middle - 2 * error <= 1.005)
    text = f"{share:.3%}, {statistics.median(each) / 1e3:.2f} µs each; with / without {middle:.4f} ± {error:.4f}"
    text += f" ({pairs} pairs, {count} tokens)"
    report.row("retaining, of the capture's time", "≤ 0.5 %", text, good and all(each))


def resources(report, all_of_it):
    """Whether a capture of two bindings retains the bytes of pre's scratch, then those of post_pre's; and an eager run none."""
    import arena

    stack, count = all_of_it.needed(), all_of_it.middle()
    scratches = stack.scratches(count)[:2]
    layers, stack.weights = stack.weights, stack.weights[:2]
    try:
        with registered():
            before = arena.stats().retained
            stack.run(count, scratches)
            eager = arena.stats().retained - before
            with arena.collect() as owners:
                graph, _ = stack.capture(count, scratches)
    finally:
        stack.weights = layers
    storages = [each for each in owners if isinstance(each, torch.UntypedStorage)]
    expected = [each.untyped_storage() for each in scratches]
    in_order = len(storages) == 2 and all(a is b for a, b in zip(storages, expected, strict=True))
    good = in_order and all(each.dtype is torch.uint8 for each in scratches) and eager == 0
    text = f"{'yes' if good else 'no'} ({', '.join(type(each).__name__ for each in owners)}; eager {eager})"
    report.row("scratch in the order pre, post_pre; eager none", "yes", text, good)
    del graph, owners


def hyperconnection(report, all_of_it):
    """Two of its ops, one by plan and one by binding, captured and replayed."""
    from b12x.norm import hyperconnection as ops
    from b12x.preparation import FrozenMapping

    import arena

    stack, tokens, lowrank = all_of_it.stack, 16, 320
    if stack is None:
        raise Missing("no session")
    caps = ops.Caps(device=stack.device, max_tokens=tokens, hidden_size=HIDDEN, streams=4, lowrank=lowrank)
    plans = {each: ops.plan(caps, invocation=FrozenMapping({"operation": each})) for each in ("add", "scaled_silu")}
    stack.session.prepare(tuple(request(plan, f"hc-{name}") for name, plan in plans.items()))
    made = lambda *shape: torch.randn(*shape, device="cuda").to(BF16)  # noqa: E731
    left, right, out, down = made(tokens, HIDDEN), made(tokens, HIDDEN), made(tokens, HIDDEN), made(tokens, lowrank)
    shapes = {"normalized": 4 * HIDDEN, "bottleneck": lowrank, "block_input": HIDDEN}
    binding = ops.bind(plans["scaled_silu"], tokens=tokens, **{name: made(tokens, width) for name, width in shapes.items()})

    def run():
        ops.run_add(left, right, out=out, plan=plans["add"])
        return ops.run_scaled_silu(down, binding=binding)

    result = run()
    torch.cuda.synchronize()
    expected = out.clone(), result.clone()
    graph = torch.cuda.CUDAGraph()
    with registered(), arena.collect() as owners, stack.session.capture(), torch.cuda.graph(graph):
        result = run()
    out.zero_()
    result.zero_()
    graph.replay()
    torch.cuda.synchronize()
    held = sum(any(each is plan for each in owners) for plan in plans.values())
    equal = bool(torch.equal(out, expected[0]) and torch.equal(result, expected[1]))
    report.row("hyperconnection, replay equal to eager", "yes", "yes" if equal else "no", equal)
    report.row("its plans retained, by plan and by binding", "2", str(held), held == 2)


def release(report, all_of_it):
    """The session lets go of everything, then the graphs die. Last, for nothing can be run afterwards."""
    from b12x._lib.program_cache import evict_unretained

    import arena

    stack, graphs, references, others = all_of_it.needed(), all_of_it.graphs, all_of_it.references, all_of_it.others
    if not graphs:
        raise Missing("no graphs: their capture failed")
    unloads = Unloads()
    try:
        plans = tuple(stack.plans.values())
        stack.plans.clear()
        stack.session.release_many(plans)
        prepared = sum(plan.prepared is not None for plan in plans)
        del plans
        gone = unloads.so_far()
        report.row("plans still prepared after session.release", "0", str(prepared), prepared == 0)
        report.row("kernel libraries unloaded by session.release", "0", str(gone), gone == 0)
        count, wrong, _ = replay_all(graphs, references, len(graphs), len(graphs), 0)
        report.row("replays after it that differ", "0", f"{wrong} of {count}", wrong == 0)
        changed = overwritten(others) if others else -1
        report.row("tensors of others overwritten", "0", f"{changed} of {len(others)}", changed == 0)
        graphs.clear()
        torch.cuda.synchronize()
        deadline = time.perf_counter() + 5
        while arena.stats().owners + arena.stats().dead and time.perf_counter() < deadline:
            gc.collect()
            arena.reclaim(0.1)
        stats = arena.stats()
        text = f"{stats.owners + stats.dead} of {all_of_it.owners} (released in all {stats.released}, leaked {stats.leaked})"
        report.row("owners left after all graphs died and reclaim()", "0", text, stats.owners + stats.dead + stats.leaked == 0)
        evict_unretained(frozenset())  # B12X looks for programs that nobody needs only when a plan is released
        gone = unloads.so_far()
        report.row("kernel libraries unloaded then", "≥ 1", str(gone), gone > 0)
    finally:
        unloads.stop()


def head(report, quick):
    versions = " ".join(f"{each} {importlib.metadata.version(each)}" for each in ("b12x", "torch", "cuda-graph-arena"))
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    driver = ""
    with contextlib.suppress(OSError):
        driver = subprocess.run(asked, capture_output=True, text=True).stdout.strip().replace("\n", "; ")
    report.line(f"machine: {driver or torch.cuda.get_device_name()}, {os.cpu_count()} cores")
    report.line(f"versions: python {platform.python_version()} {versions}, CUDA {torch.version.cuda}")
    report.line(f"date: {time.strftime('%Y-%m-%d')}{' (quick: fewer bindings, graphs and replays)' if quick else ''}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", help="the file to write to")
    parser.add_argument("--quick", action="store_true", help="10 bindings, 3 graphs, 40 replays: does it run at all?")
    parser.add_argument("--control", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", help="the graphs' token counts (default: 8, 12, 16, 24 … 128)")
    parser.add_argument("--layers", type=int, help="bindings per graph (default: 90)")
    parser.add_argument("--budget", type=float, default=440, help="seconds for all of it (default: 440)")
    chosen = parser.parse_args()
    tokens = chosen.tokens or ("8,64,128" if chosen.quick else "8,12," + ",".join(map(str, range(16, 129, 8))))
    tokens, layers = [int(each) for each in tokens.split(",")], chosen.layers or (10 if chosen.quick else 90)
    if chosen.control:
        return control(tokens, layers)

    import arena.torch

    report, all_of_it = Report(chosen.report, chosen.budget), Measured(tokens, layers)
    faulthandler.dump_traceback_later(chosen.budget + 15, exit=True)  # for what no signal interrupts
    report.section("who and where", 20, head, chosen.quick)
    arena.torch.install()
    least, most, seconds, pairs = (40, 40, 5, 3) if chosen.quick else (1000, 17000, 15, 15)
    report.section("preparing (B12X compiles its kernels) and running eagerly", 200, prepare, all_of_it)
    report.section("replays, with the owners dropped by Python", 120, replays, all_of_it, least, most, seconds)
    report.section("the same beside a second stream", 120, beside, all_of_it, least, most, seconds)
    report.section("the same without arena, in a process of its own", 150, run_control, [8, 64], layers)
    report.section("the graphs' pool", 60, pools, all_of_it)
    report.section("the cost of retaining", 60, cost, all_of_it, pairs)
    report.section("what is retained", 20, resources, all_of_it)
    report.section("hyperconnection", 60, hyperconnection, all_of_it)
    report.section("the session's release, and the graphs' death", 40, release, all_of_it)
    report.say(f"done: {'all as promised' if not report.wrong else f'{len(report.wrong)} wrong: ' + '; '.join(report.wrong)}")
    faulthandler.cancel_dump_traceback_later()
    return 1 if report.wrong else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a context that is gone is not to hang the end
