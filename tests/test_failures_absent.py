"""What holds when something is not there: memory, a thread that cannot be started, a driver that is missing or lacks something.
It is named, nothing is freed too early, nothing is lost, and the next attempt works. It must happen before a driver or `malloc`
is first asked, so that each scenario runs in a subprocess. What holds when a driver refuses a call is in test_failures.py."""

import os
import shutil
import subprocess

import pytest
from conftest import run_python

# ---- memory ----

SHIM = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>

/* The `left`th allocation that code between `low` and `high` asks for fails. */
static volatile uintptr_t low, high;
static volatile long left;
static volatile int met;

void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);

void shim_arm(uintptr_t from, uintptr_t to, long nth) { low = from, high = to, met = 0, left = nth; }
int shim_disarm(void) { left = 0; return met; }

static int fails(void *caller) {
    if (!left || (uintptr_t)caller < low || (uintptr_t)caller >= high || --left) return 0;
    errno = ENOMEM;
    return met = 1;
}
void *malloc(size_t size) { return fails(__builtin_return_address(0)) ? NULL : __libc_malloc(size); }
void *calloc(size_t count, size_t size) { return fails(__builtin_return_address(0)) ? NULL : __libc_calloc(count, size); }
void *realloc(void *old, size_t size) { return fails(__builtin_return_address(0)) ? NULL : __libc_realloc(old, size); }
"""

WITHOUT_MEMORY = """
import ctypes, os, sys, weakref
import arena
import arena._registry as registry
from arena.testing import simulated_driver

class Owner:
    pass

with open("/proc/self/maps") as maps:
    spans = [line.split()[0].split("-") for line in maps if registry.__file__ in line]
LOW, HIGH = int(spans[0][0], 16), int(spans[-1][1], 16)
libc = ctypes.CDLL(None)
arm, disarm = libc.shim_arm, libc.shim_disarm
arm.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_long]

def attempt(nth, action):
    "Runs it with the nth allocation failing: (whether one did fail, what it returned or raised)."
    arm(LOW, HIGH, nth)
    try:
        answer = action()
    except Exception as error:
        answer = error
    return bool(disarm()), answer

def sums_up():
    now = arena.stats()
    return now.retained == now.owners + now.dead + now.released + now.leaked

driver = simulated_driver()
cuda = driver.__enter__()
stream = cuda.Stream()
"""


def compiled(folder, source, name):
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    file, target = folder / f"{name}.c", folder / name
    file.write_text(source)
    command = ["gcc", "-O1", "-Wall", "-fno-builtin", "-fno-optimize-sibling-calls", "-shared", "-fPIC", "-o", target, file]
    subprocess.run([*command, "-ldl"], check=True, capture_output=True, text=True)
    return target


@pytest.fixture(scope="module")
def without_memory(tmp_path_factory):
    """Runs code in a process whose allocations can be made to fail."""
    if "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the sanitizer has malloc for itself")
    shim = compiled(tmp_path_factory.mktemp("shim"), SHIM, "libshim.so")

    def run(code):
        done = run_python(WITHOUT_MEMORY + code, timeout=10, env={"LD_PRELOAD": str(shim)})
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        return done.stdout.split()

    return run


@pytest.mark.parametrize("owners", [1, 10])
def test_memory_that_fails_in_a_first_retain_is_a_memory_error_and_loses_nothing(without_memory, owners):
    met = without_memory(
        f"""
class Binding:
    def __init__(self):
        self.owners = [Owner() for _ in range({owners})]
    def __cuda_owners__(self):
        return self.owners

failures = 0
for nth in range(1, 20):
    binding = Binding()
    alive = [weakref.ref(each) for each in binding.owners]
    before = arena.stats()
    with stream.capture("relaxed") as capture:
        met, answer = attempt(nth, lambda: arena.retain(binding, stream))
        del binding
        assert sums_up()
        if not met:
            assert answer is True
            break
        failures += 1
        assert isinstance(answer, MemoryError), answer
        assert "capture" in str(answer)
        assert all(each() is None for each in alive)
        assert arena.stats().retained == before.retained
        assert capture.graph.owners == 0
        assert arena.retain(Owner(), stream) or nth < 3
    capture.graph.destroy()
    arena.reclaim(1)
else:
    raise AssertionError("it never succeeded")
assert all(each() is not None for each in alive)
capture.graph.destroy()
arena.reclaim(5)
assert all(each() is None for each in alive)
now = arena.stats()
assert (now.owners, now.lists, now.dead) == (0, 0, 0), now
driver.__exit__(None, None, None)
print(failures)
"""
    )
    assert int(met[0]) >= 2  # the list, its entries; the index only while there is none


def test_memory_that_fails_for_the_index_is_a_memory_error_while_there_is_none(without_memory):
    met = without_memory(
        """
failures = 0
with stream.capture("relaxed") as capture:
    for nth in range(1, 20):
        alive = weakref.ref(owner := Owner())
        met, answer = attempt(nth, lambda: arena.retain(owner, stream))
        del owner
        if not met:
            break
        failures += 1
        assert isinstance(answer, MemoryError) and alive() is None
    assert answer is True and alive() is not None
capture.graph.destroy()
driver.__exit__(None, None, None)
print(failures)
"""
    )
    assert int(met[0]) == 3


def test_memory_that_fails_when_a_list_grows_loses_nothing(without_memory):
    met = without_memory(
        """
failures = 0
alive = []
with stream.capture("relaxed") as capture:
    for number in range(200):
        alive.append(weakref.ref(owner := Owner()))
        met, answer = attempt(1, lambda: arena.retain(owner, stream))
        if met and number:
            assert isinstance(answer, MemoryError) and f"owner {number + 1} of" in str(answer), answer
        if met:
            failures += 1
            assert arena.stats().owners == number
            assert arena.retain(owner, stream)
        else:
            assert answer is True
        assert arena.stats().owners == number + 1
del owner
assert all(each() is not None for each in alive)
capture.graph.destroy()
arena.reclaim(5)
assert all(each() is None for each in alive)
driver.__exit__(None, None, None)
print(failures)
"""
    )
    assert int(met[0]) >= 5


def test_an_index_that_cannot_grow_serves_on(without_memory):
    met = without_memory(
        """
failures = 0
graphs, alive = [], []
for number in range(300):
    alive.append(weakref.ref(owner := Owner()))
    with stream.capture("relaxed") as capture:
        # the list, its entries, then the index where it is full
        met, answer = attempt(3, lambda: arena.retain(owner, stream))
        if number == 0:
            assert isinstance(answer, MemoryError)
            assert arena.retain(owner, stream)
        else:
            failures += met
            assert answer is True
    graphs.append(capture.graph)
del owner
assert arena.stats().lists == 300
for number, graph in enumerate(graphs):
    assert alive[number]() is not None
    graph.destroy()
arena.reclaim(5)
assert all(each() is None for each in alive)
driver.__exit__(None, None, None)
print(failures)
"""
    )
    assert int(met[0]) > 200  # it is asked for again with each list


def test_memory_that_fails_in_begin_is_a_memory_error_and_the_capture_goes_on(without_memory):
    met = without_memory(
        """
failures = 0
for nth in range(1, 20):
    stream.begin_capture("relaxed")
    met, answer = attempt(nth, lambda: registry.begin(stream))
    stream.kernel()
    alive = weakref.ref(owner := Owner())
    assert arena.retain(owner, stream)
    del owner
    if met:
        failures += 1
        assert isinstance(answer, MemoryError), answer
    else:
        answer.seal()
    graph = stream.end_capture()
    assert alive() is not None
    if not met:
        answer.drop()
    graph.destroy()
    arena.reclaim(5)
    assert alive() is None
    if not met:
        break
assert not met
driver.__exit__(None, None, None)
print(failures)
"""
    )
    assert int(met[0]) >= 1


def test_a_seal_that_cannot_trim_its_list_seals_it_all_the_same(without_memory):
    met = without_memory(
        """
stream.begin_capture("relaxed")
capture = registry.begin(stream)
stream.kernel()
alive = weakref.ref(owner := Owner())
assert arena.retain(owner, stream)
del owner
met, answer = attempt(1, capture.seal)
assert answer is None, answer
try:
    arena.retain(Owner(), stream)
except arena.CaptureError:
    pass
else:
    raise AssertionError("it was not sealed")
graph = stream.end_capture()
graph.destroy()
assert alive() is not None
capture.drop()
arena.reclaim(5)
assert alive() is None
driver.__exit__(None, None, None)
print(int(met))
"""
    )
    assert met == ["1"]


def test_a_replay_that_there_is_no_memory_to_note_says_so_and_letting_go_needs_none(without_memory):
    went = without_memory(
        """
stream.begin_capture("relaxed")
capture = registry.begin(stream)
stream.kernel()
alive = weakref.ref(owner := Owner())
assert arena.retain(owner, stream)
del owner
capture.seal()
graph = stream.end_capture()
graph.destroy()
met, answer = attempt(1, lambda: capture.note(stream.handle))
assert met and isinstance(answer, MemoryError), answer
capture.note(stream.handle)
met, answer = attempt(1, capture.drop)
assert not met and answer is None
arena.reclaim(1)
print(alive() is None, sums_up())
driver.__exit__(None, None, None)
"""
    )
    assert went == ["True", "True"]


# ---- the thread ----


def test_without_a_thread_retain_works_and_reclaim_releases():
    done = run_python(
        """
import _thread, weakref, arena
from arena.testing import simulated_driver

class Owner:
    pass

def refused(*arguments):
    raise RuntimeError("can't start new thread")

_thread.start_new_thread = refused
with simulated_driver() as cuda:
    stream = cuda.Stream()
    for _ in range(3):
        alive = weakref.ref(owner := Owner())
        with stream.capture() as capture:
            assert arena.retain(owner, stream)
        del owner
        capture.graph.destroy()
        assert alive() is not None
        assert arena.stats().dead == 1
        assert arena.reclaim() == 1
        assert alive() is None
    alive = weakref.ref(owner := Owner())
    with stream.capture() as capture:
        arena.retain(owner, stream)
    del owner
    capture.graph.destroy()
    assert alive() is not None
assert alive() is None
print(arena.stats().released)
""",
        timeout=10,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")


# ---- no driver, or not enough of one ----

INSTALLED = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
static int nothing(void) { return 0; }
#ifdef GET
int GET(const char *symbol, void **function, int version, uint64_t flags, int *found) {
    (void)version, (void)flags, (void)found;
    const char *missing = getenv("MISSING_SYMBOL");
    *function = missing && !strcmp(symbol, missing) ? NULL : (void *)nothing;
    return 0;
}
#else
int cuInit(unsigned flags) { return nothing() + (int)flags; }
#endif
"""

ASK = """
import arena
from arena._registry import driver_version
def told(call):
    try:
        return repr(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
print(told(lambda: arena.retain(object())))
print(told(lambda: arena.retain(object(), 5)))
print(told(lambda: arena.capture_id(5)))
print(told(driver_version))
print(told(arena.reclaim), arena.stats().retained)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Runs `ASK` where libcuda.so.1 is what `kind` says; what it printed."""

    def run(kind, **environment):
        folder = tmp_path_factory.mktemp("driver")
        if kind == "none":
            (folder / "libcuda.so.1").write_text("not a library")  # found before any that is one
        else:
            source = INSTALLED if kind == "old" else "#define GET cuGetProcAddress_v2\n" + INSTALLED
            compiled(folder, source, "libcuda.so.1")
        done = run_python(ASK, timeout=10, env={"LD_LIBRARY_PATH": str(folder), **environment})
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    return run


@pytest.mark.parametrize("missing", ["cuStreamGetCaptureInfo", "cuEventQuery", "cuGetErrorName"])
def test_a_driver_that_lacks_a_symbol_is_an_error_that_names_it(installed, missing):
    answers = installed("new", MISSING_SYMBOL=missing)
    for each in answers[:4]:
        assert each.startswith(f"DriverError: the CUDA driver has no {missing} at ABI version ")
    assert answers[4] == "0 0"


def test_a_driver_that_lacks_nothing_answers(installed):
    """The control: the same library without a gap."""
    assert installed("new") == ["False", "False", "None", "0", "0 0"]


def test_a_driver_that_is_too_old_is_an_error_that_says_so(installed):
    answers = installed("old")
    for each in answers[:4]:
        assert each.startswith("DriverError: the CUDA driver is too old: libcuda.so.1 has no cuGetProcAddress_v2")
    assert answers[4] == "0 0"


def test_without_a_driver_nothing_is_capturing_and_only_the_version_is_an_error(installed):
    answers = installed("none")
    assert answers[:3] == ["False", "False", "None"]
    assert answers[3].startswith("DriverError: no CUDA driver: ")
    assert "libcuda.so.1" in answers[3]
    assert answers[4] == "0 0"
