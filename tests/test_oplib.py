"""What an op library calls: arena.h from C, with the GIL and without, the gate, and what becomes of it when arena is missing,
old or newer, when the driver is exchanged, the process forks or the interpreter goes."""

import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import weakref
from pathlib import Path

import native
import pytest
from conftest import run_python, stays, until

import arena
from arena import _registry

HEADER = Path(arena.get_include()) / "arena.h"
INVALIDATED, SEALED, ENDED, NO_MEMORY, NULL, REFUSED = -3, -4, -5, -6, -2, -1000


class Owner:
    """Something that owns memory."""


class Numbered:
    """A Python owner that goes into the same log as the opaque ones."""

    def __init__(self, number):
        self.number = number

    def __del__(self):
        client().log(self.number)


def client():
    """The op library of these tests, its log empty or as the test left it."""
    module = native.load(native.c_extension("op_client"))
    module.import_arena()
    return module


@pytest.fixture
def ops():
    module = client()
    module.take_log()
    return module


# ---- the header ----


@pytest.mark.parametrize("language", ["c11", "c++17"])
def test_the_header_compiles_without_a_warning_and_is_imported_once_for_a_whole_library(tmp_path, language):
    """Two files of one library: one imports, the other has it."""
    compiler, suffix = ("gcc", "c") if language == "c11" else ("g++", "cpp")
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler}")
    outside = 'extern "C" ' if suffix == "cpp" else ""
    uses = "".join(
        f"(void){call};"
        for call in (
            "arena_there()",
            "arena_retain(Py_None, 0)",
            "arena_retain_opaque(0, 0, 0)",
            "arena_capturing(0)",
            "arena_set_error(-2, 0)",
            "arena_maybe_capturing()",
            "arena_only_torch()",
        )
    )
    one = f"#include <Python.h>\n#include <arena.h>\n{outside}int first(void);\nint first(void) {{ return arena_import(); }}\n"
    two = f"#include <Python.h>\n#include <arena.h>\n{outside}int second(void);\n"
    two += f"int second(void) {{ if (0) {{ {uses} }} return arena_there() && arena_maybe_capturing(); }}\n"
    (tmp_path / f"one.{suffix}").write_text(one)
    (tmp_path / f"two.{suffix}").write_text(two)
    command = [compiler, f"-std={language}", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-shared", "-fPIC"]
    command += [f"-I{arena.get_include()}", f"-isystem{sysconfig.get_path('include')}"]
    command += [str(tmp_path / f"{name}.{suffix}") for name in ("one", "two")] + ["-o", str(tmp_path / "both.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = run_python(
        f"import ctypes; both = ctypes.PyDLL({str(tmp_path / 'both.so')!r}); print(both.second(), both.first(), both.second())",
        timeout=20,
    )
    assert run.stdout.split() == ["0", "0", "1"], run.stderr


# Numbered for good: a slot may be added below, with its number, and nothing else may change.
SLOTS = ["slots", "version", "gate", "retain", "retain_opaque", "capturing", "set_error"]
CODES = {
    "ARENA_RETAINED": 1,
    "ARENA_NOT_CAPTURING": 0,
    "ARENA_RAISED": -1,
    "ARENA_NULL": NULL,
    "ARENA_INVALIDATED": INVALIDATED,
    "ARENA_SEALED": SEALED,
    "ARENA_ENDED": ENDED,
    "ARENA_NO_MEMORY": NO_MEMORY,
    "ARENA_NO_DRIVER": -7,
    "ARENA_REFUSED": REFUSED,
}


def test_slots_and_codes_are_what_they_were(tmp_path):
    claims = [f"offsetof(arena_api, {name}) == {number} * sizeof(void *)" for number, name in enumerate(SLOTS)]
    claims += [f"{name} == {value}" for name, value in CODES.items()]
    claims += [f"ARENA_SLOTS == {len(SLOTS)}", "sizeof(arena_api) == ARENA_SLOTS * sizeof(void *)"]
    source = "#include <Python.h>\n#include <arena.h>\n#include <stddef.h>\n"
    (tmp_path / "claims.c").write_text(source + "".join(f'_Static_assert({each}, "");\n' for each in claims))
    command = ["gcc", "-std=c11", "-fsyntax-only", f"-I{arena.get_include()}", f"-I{sysconfig.get_path('include')}"]
    done = subprocess.run([*command, str(tmp_path / "claims.c")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(CODES) == sorted(re.findall(r"^    (ARENA_\w+) = ", HEADER.read_text(), re.MULTILINE))


def built_against(folder, header):
    """The client, built with another header."""
    (folder / "arena.h").write_text(header)
    target = folder / f"op_client{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = ["gcc", "-std=gnu11", "-shared", "-fPIC", f"-I{folder}", f"-I{sysconfig.get_path('include')}"]
    subprocess.run([*command, str(native.TESTS / "op_client.c"), "-o", str(target)], check=True, capture_output=True)
    return target


def test_a_library_built_for_a_newer_arena_is_told_and_goes_on_without(tmp_path):
    header = HEADER.read_text()
    newer = header.replace(f"#define ARENA_SLOTS {len(SLOTS)} ", f"#define ARENA_SLOTS {len(SLOTS) + 2} ")
    assert newer != header
    ops = native.load(built_against(tmp_path, newer))
    with pytest.raises(ImportError, match=rf"{len(SLOTS) + 2} slots; the installed cuda-graph-arena {arena.__version__} has 7"):
        ops.import_arena()
    assert (ops.there(), ops.retain(Owner(), 0), ops.retain_opaque(1, 0), ops.maybe_capturing()) == (0, 0, 0, False)


def test_a_library_built_for_an_older_arena_works_on(tmp_path, simulated):
    """What only ever grows: a library that knows less is served."""
    older = HEADER.read_text().replace(f"#define ARENA_SLOTS {len(SLOTS)} ", "#define ARENA_SLOTS 5 ")
    ops = native.load(built_against(tmp_path, older))
    ops.import_arena()
    stream = simulated.Stream()
    with stream.capture() as capture:
        assert ops.retain(Owner(), stream.handle) == 1
    capture.graph.destroy()


WITHOUT = """
import importlib.util, sys
def load(path):
    spec = importlib.util.spec_from_file_location("op_client", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
ops = load({path!r})
try:
    ops.import_arena()
except ImportError as error:
    print(error)
print(ops.there(), ops.retain(object(), 0), ops.retain_opaque(1, 0), ops.capturing(0), ops.maybe_capturing())
try:
    ops.set_error(-4, 0)
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("what", ["missing", "older than the C API", "broken"])
def test_without_arena_the_import_says_so_and_every_call_answers_nothing(tmp_path, what):
    if what != "missing":
        (tmp_path / "arena").mkdir()
        (tmp_path / "arena" / "__init__.py").write_text("1 / 0" if what == "broken" else "")
        (tmp_path / "arena" / "_registry.py").write_text("")
    code = WITHOUT.format(path=str(native.c_extension("op_client")))
    run = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        timeout=20,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert run.returncode == 0, run.stderr
    said, answers, error = run.stdout.splitlines()
    assert {"missing": "No module named 'arena'", "broken": "cannot be imported"}.get(what, "too old, upgrade it") in said
    assert answers == "0 0 0 0 False"
    assert "was not imported" in error


# ---- the calls ----


@pytest.mark.parametrize("python", [True, False], ids=["both kinds", "opaque alone"])
def test_a_body_that_joins_the_capture_around_it_hands_over_owners_of_both_kinds(simulated, ops, python):
    stream, inside, graph = simulated.Stream(), simulated.Stream(), simulated.Graph()
    stream.begin_capture("relaxed", into=graph)
    capture = _registry.begin(stream)
    assert ops.retain_opaque(1, stream.handle) == 1
    assert arena.retain(Numbered(2), stream)
    inside.begin_capture("relaxed", into=graph.add_conditional())
    body = _registry.begin(inside)
    assert ops.retain_opaque(3, inside.handle) == 1
    if python:
        assert arena.retain(Numbered(4), inside)
    assert ops.join(ops.start(5, 2, inside.handle)) == 2
    body.join(capture)
    body.drop()
    inside.end_capture()
    assert ops.retain_opaque(7, stream.handle) == 1
    capture.seal()
    stream.end_capture()
    executable = graph.instantiate()
    capture.hold()
    graph.destroy()
    arena.reclaim()
    assert (executable.owners, ops.take_log()) == (0, [])
    executable.destroy()
    capture.drop()
    expected = [1, 2, 3, 4, 5, 6, 7] if python else [1, 2, 3, 5, 6, 7]
    log = []
    assert until(lambda: log.extend(ops.take_log()) or len(log) == len(expected))
    assert log == expected


def test_owners_of_both_kinds_live_as_long_as_the_graph_and_go_in_order(cuda, ops):
    stream = cuda.Stream()
    assert (ops.retain(Owner(), stream.handle), ops.retain_opaque(1, stream.handle), ops.capturing(stream.handle)) == (0, 0, 0)
    with stream.capture() as capture:
        stream.kernel()
        assert ops.capturing(stream.handle) == 1
        assert ops.retain(Numbered(0), stream.handle) == 1
        assert ops.retain_opaque(1, stream.handle, 2) == 1
        assert arena.retain(Numbered(3), stream)
        assert ops.retain_with_gil(4, stream.handle) == 1
        assert ops.join(ops.start(5, 1, stream.handle)) == 1
        assert ops.retain(Numbered(6), stream.handle) == 1
    assert arena.stats().owners == 7
    executable = capture.graph.instantiate()
    capture.graph.destroy()
    assert stays(lambda: ops.take_log() == [])
    executable.destroy()
    log = []
    assert until(lambda: len(log.extend(ops.take_log()) or log) == 7)
    assert log == list(range(7))
    assert arena.stats().owners == 0


def test_the_first_owner_may_come_without_the_gil_and_the_executable_holds_it(cuda, ops):
    """Nobody with the GIL passes by between that and the instantiation."""
    stream = cuda.Stream()
    with stream.capture() as capture:
        stream.kernel()
        assert ops.join(ops.start(7, 1, stream.handle)) == 1
    executable = capture.graph.instantiate()
    capture.graph.destroy()
    arena.reclaim()
    assert stays(lambda: ops.take_log() == [])
    executable.destroy()
    arena.reclaim(5)
    assert until(lambda: ops.take_log() == [7])


def test_in_a_managed_capture_opaque_owners_are_held_by_the_graphs_owner(cuda, ops):
    stream = cuda.Stream()
    stream.begin_capture("relaxed")
    held = _registry.begin(stream)
    stream.kernel()
    assert ops.join(ops.start(1, 3, stream.handle)) == 3
    assert arena.retain(Numbered(4), stream)
    held.seal()
    assert ops.retain_opaque(9, stream.handle) == SEALED
    with pytest.raises(arena.CaptureError, match="sealed"):
        ops.set_error(SEALED, stream.handle)
    graph = stream.end_capture()
    held.hold()
    graph.destroy()
    arena.reclaim()
    assert stays(lambda: ops.take_log() == [])
    held.drop()
    arena.reclaim(5)
    assert until(lambda: ops.take_log() == [1, 2, 3, 4])


def test_after_a_seal_of_nothing_a_late_owner_is_held_as_in_any_other_capture(simulated, ops):
    stream = simulated.Stream()
    stream.begin_capture("relaxed")
    held = _registry.begin(stream)
    held.seal()
    assert not held.holds
    assert ops.retain_opaque(1, stream.handle) == 1
    graph = stream.end_capture()
    graph.destroy()
    held.drop()
    arena.reclaim(5)
    assert ops.take_log() == [1]


def test_a_second_capture_into_the_same_graph_has_a_list_of_its_own(simulated, ops):
    first, second = simulated.Stream(), simulated.Stream()
    first.begin_capture("relaxed")
    held = _registry.begin(first)
    assert ops.retain_opaque(1, first.handle) == 1
    held.seal()
    graph = first.end_capture()
    held.hold(graph.handle)
    with second.capture("relaxed", into=graph):
        assert ops.retain_opaque(2, second.handle) == 1
        assert arena.retain(Numbered(3), second)
    held.drop()
    graph.destroy()
    arena.reclaim(5)
    assert until(lambda: sorted(ops.take_log()) == [1, 2, 3])


def test_bad_arguments_and_invalidated_captures_have_codes_of_their_own(cuda, ops):
    stream = cuda.Stream()
    assert ops.retain_null(stream.handle) == (NULL, NULL)
    with pytest.raises(TypeError, match="needs an owner"):
        ops.retain(None, stream.handle)
    with pytest.raises(TypeError, match="needs an owner"):
        ops.retain(..., stream.handle)  # NULL
    for code, error in [(NULL, ValueError), (NO_MEMORY, MemoryError), (ENDED, arena.CaptureError), (5, ValueError)]:
        with pytest.raises(error):
            ops.set_error(code, stream.handle)


def test_an_invalidated_capture_takes_none(simulated, ops):
    stream = simulated.Stream()
    stream.begin_capture("global")
    assert ops.retain_opaque(1, stream.handle) == 1
    with pytest.raises(RuntimeError):
        stream.synchronize()
    assert ops.retain_opaque(2, stream.handle) == ops.capturing(stream.handle) == INVALIDATED
    with pytest.raises(arena.CaptureError, match="invalidated"):
        ops.set_error(INVALIDATED, stream.handle)
    with pytest.raises(RuntimeError):
        stream.end_capture()
    arena.reclaim(5)
    assert until(lambda: ops.take_log() == [1])


@pytest.mark.parametrize("kind", ["plain", "managed"])
@pytest.mark.parametrize("symbol", ["cuStreamGetCaptureInfo", "cuUserObjectCreate", "cuGraphRetainUserObject", "the last"])
def test_a_refused_owner_stays_the_callers_and_the_next_is_taken(simulated, ops, symbol, kind):
    stream = simulated.Stream()
    stream.begin_capture("relaxed")
    held = _registry.begin(stream) if kind == "managed" else None
    before = arena.stats()
    if symbol == "the last":  # the question that is asked once the graph holds the object
        simulated.fail("cuStreamGetCaptureInfo", 2)
    else:
        simulated.fail(symbol)
    assert ops.retain_opaque(1, stream.handle) == (ENDED if symbol == "the last" else REFUSED - 2)
    with pytest.raises(arena.DriverError, match=r"retaining an owner failed on stream .*: 2 \(CUDA_ERROR_OUT_OF_MEMORY\)"):
        ops.set_error(REFUSED - 2, stream.handle)
    assert arena.stats().retained == before.retained
    assert ops.retain_opaque(2, stream.handle) == 1
    if held is not None:
        held.seal()
    graph = stream.end_capture()
    graph.destroy()
    if held is not None:
        held.drop()
    arena.reclaim(5)
    assert until(lambda: ops.take_log() == [2])


@pytest.mark.parametrize("kind", ["plain", "managed"])
def test_threads_with_the_gil_and_without_retain_into_one_capture(simulated, ops, kind):
    """Each thread's owners, of whichever kind, go in its order, and each once; whatever came after the seal was refused.

    The reclaimer releases them alone: a second thread in `reclaim()` would begin in order, too, but either may lose the GIL
    inside a `__del__` before that has written its number.
    """
    rounds, each, without, within = 6, 400, 3, 2
    for number in range(rounds):
        stream = simulated.Stream()
        stream.begin_capture("relaxed")
        held = _registry.begin(stream) if kind == "managed" else None
        took = []

        def work(first, stream=stream, took=took):
            for i in range(first, first + each):
                try:
                    if arena.retain(Numbered(i), stream) if i % 3 else ops.retain_opaque(i, stream.handle) == 1:
                        took.append(i)
                except arena.CaptureError:  # sealed: it goes at once, and its number is in the log
                    return

        jobs = [ops.start((t + 1) * 100_000, each, stream.handle) for t in range(without)]
        threads = [threading.Thread(target=work, args=((t + 11) * 100_000,)) for t in range(within)]
        for thread in threads:
            thread.start()
        if held is not None and number % 2:
            held.seal()
        else:
            for thread in threads:
                thread.join()
        for thread in threads:
            thread.join()
        sum_without = sum(ops.join(job) for job in jobs)
        if held is not None:
            held.seal()
        refused = ops.take_log()
        graph = stream.end_capture()
        graph.destroy()
        if held is not None:
            held.drop()
        log = []
        assert until(lambda: arena.stats().owners == 0)
        expected = sum_without + len(took)
        assert until(lambda log=log, expected=expected: (log.extend(ops.take_log()), len(log) >= expected)[1])
        assert len(log) == len(set(log)) == expected
        assert not set(log) & set(refused)
        for thread in {i // 100_000 for i in log}:
            mine = [i for i in log if i // 100_000 == thread]
            assert mine == sorted(mine)
        if held is None or not number % 2:
            assert len(log) >= within * each


def test_captures_end_while_threads_retain_into_them(simulated, ops):
    """The window between the driver's answer and the append, as far as chance finds it: nothing is lost or freed twice."""
    stream = simulated.Stream()
    took = []
    for number in range(40):
        stream.begin_capture("relaxed")
        jobs = [ops.start(number * 10_000 + t * 1_000, 500, stream.handle) for t in range(3)]
        if number % 2:
            arena.retain(Owner(), stream)
        stream.end_capture().destroy()
        took.append(sum(ops.join(job) for job in jobs))
    log = []
    assert until(lambda: (arena.reclaim(1), log.extend(ops.take_log()), len(log) >= sum(took))[2])
    assert len(log) == len(set(log)) == sum(took)
    assert arena.stats().owners == 0


SUBPROCESS = """
import native, arena, os, sys, time
from conftest import until
from arena.testing import simulated_driver
ops = native.load(native.c_extension("op_client"))
ops.import_arena()
"""


def test_the_reclaimer_starts_where_nobody_comes_with_the_gil():
    run = run_python(
        SUBPROCESS
        + """
with simulated_driver() as cuda:
    stream = cuda.Stream()
    stream.begin_capture("relaxed")
    assert ops.retain_opaque(3, stream.handle, 2) == 1
    stream.end_capture().destroy()
    assert until(lambda: ops.take_log() == [3, 4], 10)  # neither reclaim() nor stats() was called
print("released")
""",
        timeout=30,
    )
    assert run.stdout.split() == ["released"], run.stderr


def test_a_thread_without_the_gil_outlives_the_interpreter():
    """It asks and retains through finalization, into a capture that nobody ends."""
    run = run_python(
        SUBPROCESS
        + """
driver = simulated_driver()
cuda = driver.__enter__()
stream = cuda.Stream()
stream.begin_capture("relaxed")
for _ in range(2):
    ops.hammer(stream.handle)
assert until(lambda: arena.stats().retained > 1000)
print("ended", flush=True)
""",
        timeout=30,
    )
    assert (run.returncode, run.stdout.split()) == (0, ["ended"]), run.stderr


def test_a_child_forked_while_the_lock_is_busy_has_a_free_one():
    run = run_python(
        SUBPROCESS
        + """
with simulated_driver() as cuda:
    stream, other = cuda.Stream(), cuda.Stream()
    stream.begin_capture("relaxed")
    jobs = [ops.start(1, 3_000_000, stream.handle) for _ in range(2)]
    assert until(lambda: arena.stats().retained > 1000)
    for _ in range(25):
        child = os.fork()
        if child == 0:
            now = arena.stats()
            assert now.owners == 0 and now.leaked == now.retained
            assert arena.retain([1], stream) is False and ops.retain_opaque(1, stream.handle) == 0
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    busy = sum(ops.join(job) for job in jobs)
    assert arena.stats().owners == busy == 6_000_000, busy
    stream.end_capture().destroy()
print("done")
""",
        timeout=100,
    )
    assert (run.returncode, run.stdout.split()) == (0, ["done"]), run.stderr


def test_the_driver_may_be_exchanged_under_a_thread_that_asks():
    run = run_python(
        SUBPROCESS
        + """
ops.hammer(0)
for i in range(1, 31):
    with simulated_driver() as cuda:
        stream = cuda.Stream()
        stream.begin_capture("relaxed")
        assert ops.retain_opaque(i, stream.handle) == 1
        stream.end_capture().destroy()
        arena.reclaim(1)
log = ops.take_log()
assert log == list(range(1, 31)), log
print("done", flush=True)
os._exit(0)
""",
        timeout=60,
    )
    assert run.stdout.split() == ["done"], run.stderr


# ---- the gate ----


@pytest.fixture
def gate(ops):
    """The gate of a library that made the promise, in a process where torch's captures are watched."""
    ops.only_torch()
    _registry.watched(True)
    yield ops.maybe_capturing
    _registry.watched(False)
    ops_again = client()
    assert ops_again.maybe_capturing()  # the promise was withdrawn


def managed(stream):
    stream.begin_capture("relaxed")
    return _registry.begin(stream)


def test_the_gate_is_exact_where_every_capture_is_managed(simulated, gate):
    one, two = simulated.Stream(), simulated.Stream()
    assert not gate()
    first = managed(one)
    assert gate()
    second = managed(two)
    first.seal()
    assert gate()
    second.seal()
    assert not gate()
    one.end_capture().destroy()
    two.end_capture().destroy()
    dropped = managed(one)
    assert gate()
    one.end_capture().destroy()
    dropped.drop()  # never sealed
    assert not gate()


def test_the_gate_says_maybe_to_who_promised_nothing(tmp_path, simulated):
    ops = native.load(built_against(tmp_path, HEADER.read_text()))
    assert not ops.maybe_capturing()  # there is no arena
    ops.import_arena()
    _registry.watched(True)
    try:
        assert ops.maybe_capturing()
        ops.only_torch()
        assert not ops.maybe_capturing()
    finally:
        _registry.watched(False)
    assert ops.maybe_capturing()


def test_a_promise_that_is_not_kept_loses_the_owner_and_without_it_nothing_is_lost(simulated, gate, ops):
    """The control: what the gate may not be used for."""
    stream = simulated.Stream()
    with stream.capture() as capture:
        alive = weakref.ref(owner := Owner())
        if gate():
            arena.retain(owner, stream)
        del owner
    assert alive() is None  # the graph points to it
    _registry.watched(False)
    with stream.capture() as second:
        alive = weakref.ref(owner := Owner())
        if gate():
            arena.retain(owner, stream)
        del owner
    assert alive() is not None
    capture.graph.destroy()
    second.graph.destroy()


def test_a_capture_that_was_met_unseen_opens_the_gate_for_good():
    run = run_python(
        SUBPROCESS
        + """
from arena import _registry
ops.only_torch()
_registry.watched(True)
with simulated_driver() as cuda:
    stream, other = cuda.Stream(), cuda.Stream()
    stream.begin_capture("relaxed")
    held = _registry.begin(stream)
    with other.capture("relaxed") as body:  # beside a managed capture it may be a part of that
        assert ops.retain_opaque(1, other.handle) == 1
    held.seal()
    stream.end_capture().destroy()
    body.graph.destroy()
    print(ops.maybe_capturing())
    with stream.capture() as capture:
        assert arena.retain([1], stream)
    capture.graph.destroy()
    print(ops.maybe_capturing())
    _registry.watched(True)
    print(ops.maybe_capturing())
""",
        timeout=30,
    )
    assert run.stdout.split() == ["False", "True", "True"], run.stderr


def test_a_forked_child_has_no_capture_open_in_its_gate():
    run = run_python(
        SUBPROCESS
        + """
from arena import _registry
ops.only_torch()
_registry.watched(True)
with simulated_driver() as cuda:
    stream = cuda.Stream()
    stream.begin_capture("relaxed")
    held = _registry.begin(stream)
    child = os.fork()
    if child == 0:
        os._exit(5 if ops.maybe_capturing() else 6)
    print(ops.maybe_capturing(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    held.seal()
""",
        timeout=30,
    )
    assert run.stdout.split() == ["True", "6"], run.stderr
