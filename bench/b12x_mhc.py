"""Real B12X on a GPU: 90 bindings of its MHC in each of 17 graphs, whose owners Python drops; and its hyperconnection ops.

Run by b12x_on_gpu.sh, which brings B12X there. Measures each promise beside its target, and the same scenario without arena in
a process of its own (it may fault). Ends with 1 if a target is missed, or if the control did not go wrong.
"""

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

HIDDEN, BF16 = 4096, torch.bfloat16
RECIPE = {"rms_eps": 1e-6, "hc_eps": 1e-6, "sinkhorn_iters": 20}
POISON = 255  # as floats: NaN
started = time.perf_counter()


def say(text):
    print(f"[{time.perf_counter() - started:6.1f} s] {text}", flush=True)


class Stack:
    """A stack of MHC layers as an engine runs it: weights, plans per token count, one session."""

    def __init__(self, tokens, layers):
        from b12x.norm import mhc
        from b12x.preparation import FrozenMapping, PreparationSession, PreparedCall

        self.mhc, self.tokens, self.layers = mhc, tokens, layers
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
        self.plans, requests = {}, []
        for count in tokens:
            for operation in ("pre", "post_pre"):
                caps = mhc.Caps(device=self.device, max_tokens=count, hidden_size=HIDDEN, split_k=64)
                invocation = {"operation": operation, "has_norm_weight": True, "norm_weight_dtype": "bfloat16"}
                invocation |= {"output_mode": "provided", "norm_eps": 1e-6, **RECIPE}
                plan = mhc.plan(caps, invocation=FrozenMapping(invocation))
                self.plans[count, operation] = plan
                name, nothing = f"{operation}-{count}", lambda state: PreparedCall(run=lambda: None)
                requests.append(plan.request(name=name, prepare_call=nothing))
        self.session.prepare(tuple(requests))

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


# ---- who else gets the memory ----


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
    return sum(bool((each != POISON).any()) for each in others)


class Writer:
    """A second stream that writes poison to all of the others, over and over, while replays run."""

    def __init__(self, others):
        self.stream, self.others, self.by_size = torch.cuda.Stream(), others, {}
        for each in others:
            pattern = torch.full((each.numel(),), POISON, dtype=torch.uint8, device="cuda")
            self.by_size.setdefault(each.numel(), ([], pattern))[0].append(each)
        torch.cuda.synchronize()

    def write(self):
        with torch.cuda.stream(self.stream):
            for targets, pattern in self.by_size.values():
                torch._foreach_copy_(targets, [pattern] * len(targets))


def replay_all(graphs, references, least, most, seconds, writer=None):
    """(replays, wrong, with NaN): round after round over all graphs, each result compared with eager bit by bit, on the GPU."""
    wrong, nans = torch.zeros((), device="cuda", dtype=torch.int64), torch.zeros((), device="cuda", dtype=torch.int64)
    count, begin = 0, time.perf_counter()
    while count < most and (count < least or time.perf_counter() - begin < seconds):
        for tokens, (graph, result) in graphs.items():
            if writer is not None:
                writer.write()
            graph.replay()
            differs = torch.stack([(a != b).any() for a, b in zip(result, references[tokens], strict=True)]).any()
            wrong += differs
            nans += result[3].isnan().any()
            count += 1
        if writer is not None or count % 340 < len(graphs):
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
    """What happens to the same graphs when nobody holds their owners: printed as JSON."""
    stack = Stack(tokens, layers)
    references = {count: stack.eager(count) for count in tokens}
    graphs, ranges = {}, []
    for count in tokens:
        scratches = stack.scratches(count)
        ranges += [(each.data_ptr(), each.numel()) for each in scratches]
        graphs[count] = stack.capture(count, scratches)
        del scratches
    gc.collect()
    others = others_of([size for _, size in ranges])
    seen = {"bindings": len(ranges), "given to others": overlapping(others, ranges)}
    print(json.dumps(seen), flush=True)
    _, seen["wrong serially"], _ = replay_all(graphs, references, 2 * len(tokens), 2 * len(tokens), 0)
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


def run_control(tokens, layers):
    command = [sys.executable, __file__, "-", "--control", "--layers", str(layers), "--tokens", ",".join(map(str, tokens))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"the control ended with {run.returncode} before it saw anything:\n{run.stderr[-2000:]}")
    seen = json.loads(lines[-1])
    if run.returncode:
        seen["ended with"] = f"{run.returncode}: {run.stderr.strip().splitlines()[-1] if run.stderr.strip() else ''}"
    return seen


# ---- with arena ----


def pool_bytes(pool):
    segments = [each for each in torch.cuda.memory_snapshot() if tuple(each.get("segment_pool_id", ())) == tuple(pool)]
    return sum(each["total_size"] for each in segments)


def pool_of(stack, mode):
    """Bytes of the pool that all graphs share, when nothing, our owners or whole bindings are retained."""
    import arena.b12x

    gc.collect()
    torch.cuda.empty_cache()
    kept = [] if mode == "whole" else None
    if mode == "ours":
        arena.b12x.install()
    pool, graphs = torch.cuda.graph_pool_handle(), []
    try:
        largest = stack.scratch(max(stack.tokens))
        for count in sorted(stack.tokens, reverse=True):
            scratches = [largest[: stack.plans[count, "post_pre"].scratch_specs()[0].nbytes]] * stack.layers
            graph, result = stack.capture(count, scratches, pool, kept)
            graphs.append((graph, result[3]))
            del graph, result, scratches
        torch.cuda.synchronize()
        return pool_bytes(pool)
    finally:
        arena.b12x.uninstall()
        del graphs
        arena.reclaim(5)


def cost_of_retention(stack, count, pairs):
    """(share of the capture time that is spent retaining, median ratio with / without, its standard error)."""
    import arena.b12x

    scratches, spent = stack.scratches(count, shared=True), [0]
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

    for installed in (False, True):
        if installed:
            arena.b12x.install()
        capture()
    gc.disable()
    try:
        shares, ratios = [], []
        real, arena.b12x.retain = arena.b12x.retain, timed
        for _ in range(5):
            spent[0] = 0
            took = capture()
            shares.append(spent[0] / took)
        arena.b12x.retain = real
        for index in range(pairs):
            took = {}
            for installed in (True, False) if index % 2 else (False, True):
                (arena.b12x.install if installed else arena.b12x.uninstall)()
                took[installed] = capture()
            ratios.append(took[True] / took[False])
    finally:
        gc.enable()
        arena.b12x.uninstall()
    middle = statistics.median(ratios)
    spread = statistics.median(abs(each - middle) for each in ratios)
    return statistics.median(shares), middle, 1.2533 * 1.4826 * spread / len(ratios) ** 0.5


def capture_resources(stack, count):
    """Whether a capture of two bindings retains the bytes of pre's scratch, then those of post_pre's; and an eager run none."""
    import arena

    scratches = stack.scratches(count)[:2]
    layers, stack.weights = stack.weights, stack.weights[:2]
    try:
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
    del graph
    return in_order and all(each.dtype is torch.uint8 for each in scratches) and eager == 0


def hyperconnection(stack):
    """Two of its ops, one by plan and one by binding, captured and replayed: (replay equal to eager, plans that are owners)."""
    from b12x.norm import hyperconnection as ops
    from b12x.preparation import FrozenMapping, PreparedCall

    import arena

    tokens, lowrank = 16, 320
    caps = ops.Caps(device=stack.device, max_tokens=tokens, hidden_size=HIDDEN, streams=4, lowrank=lowrank)
    plans = {each: ops.plan(caps, invocation=FrozenMapping({"operation": each})) for each in ("add", "scaled_silu")}
    nothing = lambda state: PreparedCall(run=lambda: None)  # noqa: E731
    stack.session.prepare(tuple(plan.request(name=f"hc-{name}", prepare_call=nothing) for name, plan in plans.items()))
    made = lambda *shape: torch.randn(*shape, device="cuda").to(BF16)  # noqa: E731
    left, right, out, down = made(tokens, HIDDEN), made(tokens, HIDDEN), made(tokens, HIDDEN), made(tokens, lowrank)
    shapes = {"normalized": 4 * HIDDEN, "bottleneck": lowrank, "block_input": HIDDEN}
    binding = ops.bind(plans["scaled_silu"], tokens=tokens, **{name: made(tokens, width) for name, width in shapes.items()})

    def run():
        ops.run_add(left, right, out=out, plan=plans["add"])
        return ops.run_scaled_silu(down, binding=binding)

    result = run()
    expected = out.clone(), result.clone()
    graph = torch.cuda.CUDAGraph()
    with arena.collect() as owners, stack.session.capture(), torch.cuda.graph(graph):
        result = run()
    out.zero_()
    result.zero_()
    graph.replay()
    torch.cuda.synchronize()
    held = sum(any(each is plan for each in owners) for plan in plans.values())
    return bool(torch.equal(out, expected[0]) and torch.equal(result, expected[1])), held


class Rows(list):
    """The table, which is printed and written as it grows: what was measured stays when a later part fails."""

    def __init__(self, path, quick):
        self.path, self.quick = path, quick

    def row(self, what, target, measured, good):
        self.append((what, target, measured, good))
        say(f"{what}: {measured}   [{target}] {'ok' if good else 'MISSED'}")
        self.path.write_text(report(self, self.quick))

    @contextlib.contextmanager
    def part(self, name):
        """A part that fails is a row that says so, and the next part begins."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.row(name, "runs", f"{type(error).__name__}: {error}".splitlines()[0][:200], False)


def measure(rows, tokens, layers, least, most, seconds, pairs):
    """All that is measured with arena, into `rows`; a part that fails leaves the others theirs."""
    from b12x._lib.program_cache import evict_unretained

    import arena.b12x
    import arena.torch

    row, part = rows.row, rows.part

    arena.torch.install()
    say("preparing (B12X compiles its kernels)")
    stack = Stack(tokens, layers)
    say(f"{len(stack.plans)} plans prepared")
    references = {count: stack.eager(count) for count in tokens}
    say("eager results are there")

    middle = sorted(tokens)[len(tokens) // 2]
    with part("cost of retention"):
        share, ratio, error = cost_of_retention(stack, middle, pairs)
        text = f"{share:.3%}; captures with / without {ratio:.4f} ± {error:.4f} ({pairs} pairs, {middle} tokens)"
        row("retaining, of the capture's time", "≤ 0.5 %", text, share <= 0.005 and ratio - 2 * error <= 1.005)

    with part("graph pool"):
        size = {mode: pool_of(stack, mode) for mode in ("nothing", "ours", "whole")}
        more, ours, whole = size["ours"] / size["nothing"] - 1, size["ours"] / 1e6, size["whole"] / 1e6
        text = f"{more:+.2%} ({ours:.1f} MB; whole bindings {whole:.1f} MB)"
        row("graph pool, against retaining nothing", "within 2 %", text, size["ours"] <= 1.02 * size["nothing"])

    arena.b12x.install()
    before = arena.stats()
    graphs, ranges = {}, []
    for count in tokens:
        scratches = stack.scratches(count)
        ranges += [(each.data_ptr(), each.numel()) for each in scratches]
        graphs[count] = stack.capture(count, scratches)
        del scratches
    gc.collect()
    owners = arena.stats().owners - before.owners
    say(f"{len(graphs)} graphs captured, {len(ranges)} bindings dropped, {owners} owners held")
    others = others_of([size for _, size in ranges])
    given = overlapping(others, ranges)
    row("scratch of dropped bindings given to others", "0", f"0 of {len(ranges)}" if not given else f"{given}", given == 0)
    replays, wrong, nans = replay_all(graphs, references, least, most, seconds)
    row("replays that differ from eager", f"0 of ≥ {least}", f"{wrong} of {replays}, {nans} with NaN", wrong == nans == 0)
    replays, wrong, nans = replay_all(graphs, references, least, most, seconds, Writer(others))
    row("the same beside a stream that writes", f"0 of ≥ {least}", f"{wrong} of {replays}, {nans} with NaN", wrong == nans == 0)
    changed = overwritten(others)
    row("tensors of others overwritten", "0", f"{changed} of {len(others)}", changed == 0)

    with part("capture resources"):
        good = capture_resources(stack, middle)
        row("scratch in the order pre, post_pre; eager none", "yes", "yes" if good else "no", good)
    with part("hyperconnection"):
        equal, held = hyperconnection(stack)
        row("hyperconnection, replay equal to eager", "yes", "yes" if equal else "no", equal)
        row("its plans retained, by plan and by binding", "2", str(held), held == 2)

    unloads = Unloads()
    try:
        plans = tuple(stack.plans.values())
        stack.plans.clear()
        stack.session.release_many(plans)
        del plans
        gone = unloads.so_far()
        row("kernel libraries unloaded by session.release", "0", str(gone), gone == 0)
        replays, wrong, _ = replay_all(graphs, references, len(graphs), len(graphs), 0)
        row("replays after it that differ", "0", f"{wrong} of {replays}", wrong == 0)
        graphs.clear()
        torch.cuda.synchronize()
        deadline = time.perf_counter() + 5
        while arena.stats().owners + arena.stats().dead > before.owners and time.perf_counter() < deadline:
            gc.collect()
            arena.reclaim(0.1)
        left = arena.stats().owners + arena.stats().dead
        row("owners left after all graphs died and reclaim()", "0", f"{left} of {owners}", left == 0)
        evict_unretained(frozenset())  # B12X looks for programs that nobody needs only when a plan is released
        gone = unloads.so_far()
        row("kernel libraries unloaded then", "≥ 1", str(gone), gone > 0)
    finally:
        unloads.stop()


def control_rows(rows, seen):
    def row(what, key, of, wrong):
        rows.row(f"without arena: {what}", "goes wrong", f"{seen.get(key, '-')}{of}", wrong or "ended with" in seen)

    row("scratch given to others", "given to others", f" of {seen.get('bindings', '-')}", seen.get("given to others", 0) > 0)
    row("tensors of others overwritten", "others overwritten", "", seen.get("others overwritten", 0) > 0)
    row("wrong replays beside a writer", "wrong", f" of {seen.get('replays beside a writer', '-')}", seen.get("wrong", 0) > 0)
    row("of these with NaN", "NaN", "", seen.get("NaN", 0) > 0)
    key = "libraries unloaded while the graphs live"
    row("kernel libraries unloaded by session.release", key, "", seen.get(key, 0) > 0)
    if "ended with" in seen:
        rows.row("without arena: the process ended with", "-", seen["ended with"], True)


def report(rows, quick):
    versions = " ".join(f"{each} {importlib.metadata.version(each)}" for each in ("b12x", "torch", "cuda-graph-arena"))
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.strip()
    wide = [max(len(each[column]) for each in rows) for column in range(3)]
    lines = [
        f"machine: {driver or torch.cuda.get_device_name()}, {os.cpu_count()} cores",
        f"versions: python {platform.python_version()} {versions}, CUDA {torch.version.cuda}",
        f"date: {time.strftime('%Y-%m-%d')}{' (quick: fewer bindings, graphs and replays)' if quick else ''}",
        f"took: {time.perf_counter() - started:.0f} s",
        "",
        *("  ".join(text.ljust(width) for text, width in zip(each, wide, strict=False)) + ("  ok" if each[3] else "  MISSED")
          for each in rows),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", help="the file to write the table to")
    parser.add_argument("--quick", action="store_true", help="10 bindings, 2 graphs, 40 replays: does it run at all?")
    parser.add_argument("--control", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", default="8,12," + ",".join(str(each) for each in range(16, 129, 8)))
    parser.add_argument("--layers", type=int, default=90)
    chosen = parser.parse_args()
    tokens, layers = [int(each) for each in chosen.tokens.split(",")], chosen.layers
    if chosen.control:
        return control(tokens, layers)
    if chosen.quick:
        tokens, layers = [8, 64], 10
    rows = Rows(Path(chosen.report), chosen.quick)
    with rows.part("with arena"):
        measure(rows, tokens, layers, *((40, 40, 15, 3) if chosen.quick else (1000, 17000, 15, 15)))
    with rows.part("without arena"):
        say("the same without arena, in a process of its own")
        control_rows(rows, run_control([8, 64], layers))
    print("\n" + Path(chosen.report).read_text())
    return 0 if all(each[3] for each in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
