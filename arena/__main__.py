"""`python -m arena doctor` says what of this machine arena can use and why not the rest; `demo` shows the problem and the cure;
`audit` runs a script and says what its graphs use that was freed; `report` what they hold. The first three end with 0 only if
all is as it should be. For people: nothing imports this."""

from __future__ import annotations

import argparse
import builtins
import gc
import importlib.metadata
import os
import platform
import sys
import time
import traceback
import types
import weakref
from pathlib import Path
from typing import Any

import arena
from arena import _registry

Reference = weakref.ref[Any]


def line(label: str, text: str) -> None:
    print(f"  {label:<22}{text}")


def until_gone(reference: Reference) -> bool:
    deadline = time.monotonic() + 5
    while reference() is not None and time.monotonic() < deadline:
        arena.reclaim(0.05)
    return reference() is None


def version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# ---- doctor ----


def doctor() -> int:
    """Prints what is here and what works. 0: arena can do its work on this machine."""
    print(f"arena {arena.__version__}")
    line("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    line("torch", version_of("torch"))
    line("cuda-bindings", version_of("cuda-bindings"))
    line("cuda-core", version_of("cuda-core"))
    line("b12x", version_of("b12x"))
    try:
        version = _registry.driver_version()
    except arena.DriverError as error:
        line("driver", "not usable")
        print(f"\nretain(): always False here: {error}.")
        print("The simulated driver (arena.testing) works without one; `python -m arena demo` shows it.")
        return 1
    line("driver", f"CUDA {version // 1000}.{version % 1000 // 10}")
    print("\nWhat is supported")
    line("retain, any library", "yes, on a stream given by hand")
    torch = torch_with_gpu()
    if isinstance(torch, str):
        line("retain without stream", f"no: {torch}")
        print("\nThe driver is here, but no GPU was captured on.")
        return 1
    line("retain without stream", f"yes: torch's current stream, {torch.cuda.get_device_name()}")
    from arena.torch import installed

    done = "are managed in this process" if installed() else "not managed in this process: arena.torch.install() would"
    line("torch graphs", f"{done} (clean executables, fences behind replays)")
    ok, text = one_capture(torch)
    line("a capture just now", text)
    return 0 if ok else 1


def torch_with_gpu() -> Any:
    """torch, or a sentence that says why it cannot capture here."""
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return torch


def one_capture(torch: Any) -> tuple[bool, str]:
    class Owner:
        pass

    owner = Owner()
    alive = weakref.ref(owner)
    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        retained = arena.retain(owner)
    del owner
    kept = alive() is not None
    del graph
    ok = retained and kept and until_gone(alive)
    return ok, "its owner lived as long as the graph" if ok else f"FAILED: retained {retained}, kept {kept}"


# ---- demo ----


def demo() -> int:
    """Shows the problem and the cure. 0: the one went wrong and the other right, as printed."""
    torch = torch_with_gpu()
    if isinstance(torch, str):
        print(f"No GPU to show it on ({torch}): the same lifetimes on the simulated driver.\n")
        return demo_simulated()
    print(f"On {torch.cuda.get_device_name()}, torch {torch.__version__}.\n")
    return demo_torch(torch)


STORY = """\
An op keeps a table in scratch memory, captures a kernel that reads it, and drops the scratch, as ops do:
the graph recorded the pointer, not the Python object that owns the memory."""


def demo_torch(torch: Any) -> int:
    size = 1 << 20
    x = torch.full((size,), 3.0, device="cuda")

    class Op:
        """A binding of an op library: its scratch lies outside the graph's memory pool."""

        def __init__(self) -> None:
            self.scratch = torch.full((size,), 2.0, device="cuda")

        def run(self, out: Any, retain: bool) -> None:
            if retain:
                arena.retain(self.scratch)
            torch.mul(x, self.scratch, out=out)

    def capture_and_replay(retain: bool) -> tuple[float, Any, Reference]:
        out = torch.zeros_like(x)
        op = Op()
        op.run(out, False)  # warm up
        scratch = weakref.ref(op.scratch)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            op.run(out, retain)
        del op  # the caller drops it; the graph is still there
        gc.collect()
        others = [torch.full((size,), float("nan"), device="cuda") for _ in range(8)]  # somebody else's data
        graph.replay()
        torch.cuda.synchronize()
        del others
        return out[0].item(), graph, scratch

    print(STORY + "\n")
    wrong, graph, scratch = capture_and_replay(retain=False)
    line("without arena", f"replay gives {wrong} (6.0 is right); scratch {'alive' if scratch() is not None else 'freed'}")
    del graph
    right, graph, scratch = capture_and_replay(retain=True)
    alive = scratch() is not None
    line("with arena.retain()", f"replay gives {right}; scratch {'alive' if alive else 'freed'}")
    del graph
    freed = until_gone(scratch)
    line("graph dropped", f"scratch {'freed' if freed else 'still alive'}")
    return verdict(wrong != 6.0 and right == 6.0 and alive and freed)


def demo_simulated() -> int:
    from arena.testing import Driver, Exec, Stream, simulated_driver

    class Scratch:
        """Stands for device memory that a captured kernel points to."""

    def capture(cuda: Driver, retain: bool) -> tuple[Reference, Exec, Stream]:
        scratch = Scratch()
        alive = weakref.ref(scratch)
        stream = cuda.Stream()
        with stream.capture() as capture:
            stream.kernel()  # records the pointer
            if retain:
                arena.retain(scratch)
        executable = capture.graph.instantiate()
        capture.graph.destroy()
        return alive, executable, stream  # and the op drops its scratch

    def says(reference: Reference) -> str:
        return "alive" if reference() is not None else "freed"

    print(STORY + "\n")
    with simulated_driver() as cuda:
        scratch, executable, stream = capture(cuda, retain=False)
        wrong = scratch() is None
        line(
            "without arena",
            f"before the first replay the scratch is {says(scratch)}: the kernel would read freed memory",
        )
        executable.destroy()
        scratch, executable, stream = capture(cuda, retain=True)
        gate = cuda.Event()
        executable.launch(stream, until=gate)
        kept = scratch() is not None
        line("with arena.retain()", f"during the replay the scratch is {says(scratch)}")
        executable.destroy()
        arena.reclaim(0.05)
        still = scratch() is not None
        line("graph dropped", f"the replay still runs: the scratch is {says(scratch)}")
        gate.set()
        stream.synchronize()
        freed = until_gone(scratch)
        line("replay finished", f"the scratch is {says(scratch)}")
    return verdict(wrong and kept and still and freed)


def verdict(true: bool) -> int:
    print("\n" + ("The owner lived exactly as long as the graph." if true else "This is not what should have happened."))
    return 0 if true else 1


# ---- audit and report ----


def run_script(script: str, arguments: list[str]) -> tuple[types.ModuleType | None, int]:
    """Runs it as `python script arguments` would: its `__main__` is there to stay, and with it the graphs in it.

    Returns:
        That module, None if the script failed, and its exit code. A child that it forked ends here: its parent tells.

    Raises:
        OSError: The script cannot be read.
    """
    path, process = Path(script).absolute(), os.getpid()
    source = path.read_bytes()
    module = types.ModuleType("__main__")
    module.__file__, vars(module)["__builtins__"] = str(path), builtins
    sys.modules["__main__"], sys.argv = module, [script, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(path.resolve().parent)  # in the place of the folder that `python -m` puts there
    code, ended = 0, True
    try:
        exec(compile(source, path, "exec", dont_inherit=True), vars(module))
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)  # not this frame
        code, ended = 1, False
    if os.getpid() != process:
        sys.exit(code)
    return module if ended else None, code


def manage_torch() -> None:
    """torch's graphs say when they are captured, where there is a torch."""
    try:
        import arena.torch
    except ImportError:
        return
    arena.torch.install()


def audit(script: str, arguments: list[str]) -> int:
    """Runs a script, audits each graph as its capture ends, and checks each at replays and at the end. What it found goes to
    stderr: stdout is the script's."""
    from arena import watching

    watching.mode = watching.Mode("collect")
    manage_torch()
    kept, code = run_script(script, arguments)
    audits = watching.mode.collected
    found = 0
    for graph, each in audits:
        # What a graph used may go with it, or with this capture of it; a failed script's are being torn down.
        if kept is not None and getattr(graph(), "_arena_audit", None) is each:
            each.check()
        found += len(each.findings)
        print(each, file=sys.stderr)
    print(f"{len(audits)} graph{'s' * (len(audits) != 1)} audited, {found} finding{'s' * (found != 1)}", file=sys.stderr)
    if not audits:
        print("No capture was seen: torch.cuda.graph or CUDAGraph.capture_begin() begins one.", file=sys.stderr)
    return 1 if found else code


def report(source: str, arguments: list[str], html: str | None, as_json: str | None) -> int:
    """Runs a script and reports what its graphs hold at its end; or shows a report that was saved as JSON."""
    import json

    from arena import reporting

    code = 0
    if source.endswith(".json"):
        try:
            told = reporting.Report.from_dict(json.loads(Path(source).read_text(encoding="utf-8")))
        except ValueError as error:
            return refused(f"{source!r} is not a report that was saved with --json: {error}")
    else:
        manage_torch()
        kept, code = run_script(source, arguments)
        told = reporting.report()
        del kept
    told.print()
    if html:
        told.html(html)
    if as_json:
        told.json(as_json)
    return code


def refused(why: str) -> int:
    print(f"python -m arena: {why}", file=sys.stderr)
    return 2


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m arena", description=(arena.__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("doctor", help="what of this machine arena can use, and why not the rest")
    verbs.add_parser("demo", help="a captured op drops its scratch: wrong without arena, right with it")
    audits = verbs.add_parser("audit", help="runs a script and says what its graphs use that was freed; 1 if there is any")
    reports = verbs.add_parser("report", help="runs a script, or reads a saved report, and says what its graphs hold")
    reports.add_argument("--html", metavar="FILE", help="also as a page with a picture")
    reports.add_argument("--json", metavar="FILE", help="also as JSON")
    for verb, what in ((audits, "script.py"), (reports, "script.py, or a report saved with --json")):
        verb.add_argument("script", help=what)
        verb.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    given = parser.parse_args(arguments)
    try:
        if given.verb == "audit":
            return audit(given.script, given.arguments)
        if given.verb == "report":
            return report(given.script, given.arguments, given.html, given.json)
    except OSError as error:  # not the script's own: that is told where it was run
        return refused(str(error))
    return {"doctor": doctor, "demo": demo}[given.verb]()


if __name__ == "__main__":
    sys.exit(main())
