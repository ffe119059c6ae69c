"""The C side: the owner list under sanitizers, and the surface that other Cython modules cimport."""

import os
import re
import shutil
import signal
import subprocess
import sys
import weakref

import native
import pytest
from conftest import until

import arena


class Owner:
    """Something that owns memory."""


def stress(*flags):
    program = native.program("stress_owners.c", "stress" + re.sub(r"\W", "", "".join(flags)), *flags)
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}  # after the first race it only writes reports
    return subprocess.run([program], capture_output=True, text=True, timeout=100, env=environment)


@pytest.mark.parametrize("flags", [["-fsanitize=thread"], ["-fsanitize=address,undefined"], ["-DARENA_DEBUG=2"]], ids=str)
def test_the_owner_list_is_clean_under_sanitizers(flags):
    run = stress(*flags)
    assert run.returncode == 0, run.stderr
    assert "80000 lists" in run.stdout
    assert "300 captures" in run.stdout
    assert run.stderr == ""


def test_thread_sanitizer_objects_when_the_release_store_is_weakened():
    """The test of the test."""
    run = stress("-fsanitize=thread", "-DARENA_PUBLISH=memory_order_relaxed")
    assert run.returncode != 0
    assert "data race" in run.stderr


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        (
            "atomic_store_explicit(&owner_locked, false, memory_order_release)",
            "atomic_store_explicit(&owner_locked, false, memory_order_relaxed)",
            "data race",
        ),
        ("__atomic_store_n(&list->count, list->count + 1, __ATOMIC_RELAXED)", "list->count++", "data race"),
        ("size_t before = __atomic_load_n(&list->count, __ATOMIC_RELAXED)", "size_t before = 0", "out of order"),
    ],
    ids=["unlock", "count", "place"],
)
def test_without_any_one_part_of_the_lock_and_the_order_the_stress_fails(tmp_path, right, wrong, complaint):
    """The tests of the test, for what callers without the GIL rest on."""
    source = (native.HEADERS / "owners.h").read_text()
    assert source.count(right) == 1
    (tmp_path / "owners.h").write_text(source.replace(right, wrong))
    run = stress("-fsanitize=thread", f"-I{tmp_path}")
    assert run.returncode != 0
    assert complaint in run.stderr


FORKED = """
#include "owners.h"
#include <sys/wait.h>
#include <unistd.h>
static sem_t held;
static void *holder(void *nothing) { owner_lock(); sem_post(&held); pause(); return nothing; }
int main(void) {
    pthread_t thread;
    sem_init(&held, 0, 0);
    pthread_create(&thread, NULL, holder, NULL);
    sem_wait(&held);
    int status;
    pid_t child = fork();
    if (!child) {
        alarm(2);
        RESET
        owner_lock();
        _exit(0);
    }
    waitpid(child, &status, 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}
"""


@pytest.mark.parametrize("reset", ["owner_lock_reset();", ""])
def test_a_forked_child_has_to_make_the_lock_anew(tmp_path, reset):
    """The holder was a thread of the parent; without the reset (the control) the child waits for ever."""
    (tmp_path / "forked.c").write_text(FORKED.replace("RESET", reset))
    ended = subprocess.run([native.program(tmp_path / "forked.c", f"forked{bool(reset)}")], timeout=10)
    assert ended.returncode == (0 if reset else signal.SIGALRM)


CORE = ["test_retain.py", "test_scopes.py", "test_reclaim.py", "test_managed.py"]


@pytest.mark.slow
def test_a_debug_build_checks_every_invariant_and_finds_none_broken(tmp_path):
    root = native.TESTS.parent
    for name in ("arena", "pyx", "tests"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tmp_path)
    environment = {**os.environ, "ARENA_DEBUG": "2", "PYTHONPATH": str(tmp_path)}
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(build, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=100)
    code = f"import arena._registry as r; assert r.debug_level == 2 and r.__file__.startswith({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu", *(f"tests/{name}" for name in CORE)]
    run = subprocess.run(tests, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stdout[-3000:]


def test_a_debug_build_notices_a_broken_invariant():
    """The control: a list that holds more than it has room for."""
    run = subprocess.run(
        [native.program("broken_list.c", "broken", "-DARENA_DEBUG=1")], capture_output=True, text=True, timeout=10
    )
    assert run.returncode == -signal.SIGABRT
    assert "broken invariant list->count <= list->capacity" in run.stderr
    assert subprocess.run([native.program("broken_list.c", "unchecked")], timeout=10).returncode == 0


def test_every_atomic_of_the_library_is_in_one_file():
    for path in native.HEADERS.glob("*"):
        if path.name != "owners.h" and not path.name.startswith("simulator"):
            assert "atomic" not in path.read_text(), path.name


def test_a_cython_module_retains_by_cimport(cuda):
    client = native.extension("cimport_client")
    stream = cuda.Stream()
    alive = weakref.ref(owner := Owner())
    assert client.retain(owner, stream.handle) is False
    with stream.capture() as capture:
        stream.kernel()
        assert client.retain(owner, stream.handle)
    del owner
    assert alive() is not None
    capture.graph.destroy()
    assert until(lambda: alive() is None)


def test_opaque_owners_are_released_once_in_their_turn(cuda):
    client = native.extension("cimport_client")
    stream = cuda.Stream()
    freed = client.blocks_freed()
    order = []
    before, after = Owner(), Owner()
    weakref.finalize(before, lambda: order.append(client.blocks_freed() - freed))
    weakref.finalize(after, lambda: order.append(client.blocks_freed() - freed))
    assert client.retain_block(64, stream.handle) is False
    assert client.blocks_freed() == freed
    with stream.capture() as capture:
        stream.kernel()
        assert arena.retain(before, stream)
        assert client.retain_block(64, stream.handle)
        assert arena.retain(after, stream)
    del before, after
    capture.graph.destroy()
    assert until(lambda: len(order) == 2)
    assert order == [0, 1]


def test_opaque_owners_that_are_refused_stay_the_callers(simulated):
    client = native.extension("cimport_client")
    stream = simulated.Stream()
    freed = client.blocks_freed()
    with pytest.raises(ValueError, match="NULL"):
        client.retain_null(stream.handle)
    with stream.capture() as capture:
        simulated.fail("cuUserObjectCreate")
        with pytest.raises(arena.DriverError):
            client.retain_block(64, stream.handle)
    assert client.blocks_freed() == freed
    capture.graph.destroy()
