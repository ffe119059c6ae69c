"""What a user gets: an sdist with all its sources, a wheel with nothing but the package, an import that costs and loads
nothing, and types that are true. What is built is built from a copy of the sources, in virtual environments of its own; that
needs PyPI, for the build tools. Here too the linters and every Python that the metadata names are tried, where they are found.
"""

import glob
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import run_python

import arena

TESTS = Path(__file__).parent
ROOT = TESTS.parent
NAMES = ("arena", "pyx", "tests", "bench", "setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
OUT_OF_REACH = re.compile(
    r"Name or service not known|name resolution|Network is unreachable|Connection refused|Connection reset|timed out"
    r"|Max retries|ProxyError|No matching distribution found for (build|setuptools|cython|pytest)",
    re.IGNORECASE,
)


def environment(**more):
    """That of a user: no path to these sources."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | more


def run(*command, cwd, seconds=100, **more):
    return subprocess.run(
        [str(each) for each in command], cwd=cwd, capture_output=True, text=True, timeout=seconds, env=environment(**more)
    )


def done(*command, cwd, seconds=100, **more):
    """Runs a command that has to succeed, but for a PyPI that cannot be reached: that is no fault of ours."""
    ended = run(*command, cwd=cwd, seconds=seconds, **more)
    if ended.returncode and (reason := OUT_OF_REACH.search(ended.stdout + ended.stderr)):
        pytest.skip(f"PyPI is out of reach: {reason.group()}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def virtual_environment(folder, python=sys.executable):
    done(python, "-m", "venv", folder, cwd=folder.parent)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of what belongs to the project, and of nothing that was built or is somebody's own."""
    if not (ROOT / "setup.py").exists():
        pytest.skip("the tests lie beside no sources")
    folder = tmp_path_factory.mktemp("sources")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    if listed.returncode == 0 and listed.stdout:
        files = [Path(name) for name in listed.stdout.splitlines() if name.split("/")[0] in NAMES]
    else:  # from an sdist
        files = [path.relative_to(ROOT) for name in NAMES for path in [ROOT / name, *(ROOT / name).rglob("*")]]
    for file in files:
        if (ROOT / file).is_file() and file.suffix not in (".so", ".pyc"):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, folder / file)
    return folder


@pytest.fixture(scope="module")
def built(sources, tmp_path_factory):
    """The sdist, and the wheel that was built from that and not from the sources."""
    folder = tmp_path_factory.mktemp("built")
    python = virtual_environment(folder / "venv")
    done(python, "-m", "pip", "install", "--quiet", "build", cwd=folder)
    done(python, "-m", "build", "--outdir", folder / "dist", sources, cwd=folder)
    [sdist], [wheel] = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A Python in whose environment the wheel is alone."""
    folder = tmp_path_factory.mktemp("installed")
    python = virtual_environment(folder / "venv")
    done(python, "-m", "pip", "install", "--quiet", "--no-index", built[1], cwd=folder)
    return python


# ---- what is built ----


@pytest.mark.slow
def test_the_sdist_has_every_source(built, sources):
    with tarfile.open(built[0]) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    needed = {
        str(path.relative_to(sources))
        for folder in ("arena", "pyx", "tests")
        for path in (sources / folder).rglob("*")
        if path.is_file()
    }
    assert len(needed) > 25
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE"} <= packed
    assert sorted(needed - packed) == []


@pytest.mark.slow
def test_the_wheel_has_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as archive:
        packed = archive.namelist()
    assert {name.split("/")[0].partition("-")[0] for name in packed} == {"arena", "cuda_graph_arena"}
    libraries = [name.split(".")[0] for name in packed if name.endswith(".so")]
    assert sorted(libraries) == ["arena/_audit", "arena/_registry", "arena/_simulator", "arena/_workspace"]
    names = ("__init__.py", "_registry.pxd", "_registry.pyi", "_workspace.pyi", "testing.py", "testing.pyi", "py.typed")
    for name in (*names, "include/arena.h", "torch.py", "dynamo.py", "workspace.py", "vllm.py"):
        assert f"arena/{name}" in packed
    assert any(name.endswith("licenses/LICENSE") for name in packed)
    assert [name for name in packed if name.endswith((".pyx", ".pxi", ".c"))] == []


@pytest.mark.slow
def test_installing_needs_no_other_package(installed, tmp_path):
    names = done(installed, "-m", "pip", "list", "--format=freeze", cwd=tmp_path).split()
    assert {name.partition("==")[0] for name in names} <= {"cuda-graph-arena", "pip", "setuptools"}
    code = """
import importlib.metadata, sys, arena
print(arena.__file__)
print(arena.retain(object()), arena.capture_id(), arena.reclaim(), arena.stats().retained)
print([each for each in importlib.metadata.requires("cuda-graph-arena") if "extra ==" not in each])
print(importlib.metadata.version("cuda-graph-arena") == arena.__version__)
"""
    where, answers, requires, same = done(installed, "-I", "-c", code, cwd=tmp_path).splitlines()
    assert Path(where).is_relative_to(installed.parent.parent)
    assert answers == "False None 0 0"
    assert requires == "[]"
    assert same == "True"


@pytest.mark.slow
def test_the_commands_work_from_the_wheel(installed, tmp_path):
    said = run(installed, "-m", "arena", "doctor", cwd=tmp_path)
    assert said.returncode in (0, 1), said.stderr  # 1: it cannot do its work here, and says why
    assert said.stdout.startswith(f"arena {arena.__version__}\n")
    assert said.stderr == ""
    assert run(installed, "-m", "arena", "demo", cwd=tmp_path).returncode == 0


@pytest.mark.slow
def test_the_core_tests_pass_on_the_installed_wheel(installed, tmp_path):
    for path in TESTS.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    done(installed, "-m", "pip", "install", "--quiet", "pytest", "pytest-timeout", cwd=tmp_path)
    files = ["test_retain.py", "test_scopes.py", "test_reclaim.py"]
    said = done(installed, "-m", "pytest", "-q", "-k", "not real", "-p", "no:cacheprovider", *files, cwd=tmp_path)
    passed = re.search(r"(\d+) passed", said)
    assert passed, said
    assert int(passed.group(1)) > 50
    assert "failed" not in said


def pythons():
    """The versions that the metadata names."""
    classifiers = (ROOT / "pyproject.toml").read_text() if (ROOT / "pyproject.toml").exists() else ""
    return re.findall(r"Python :: (3\.\d+)\"", classifiers)


def find_python(version):
    """A CPython of that version that can build extensions, wherever it is installed; or None."""
    name = f"python{version}"
    places = [shutil.which(name), *sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}*/bin/{name}")))]
    places += sorted(glob.glob(f"/opt/python/cp{version.replace('.', '')}-*/bin/python"))
    look = "import sys, sysconfig, os, ensurepip; print(sys.implementation.name, *sys.version_info[:2], os.path.exists(\
sysconfig.get_path('include') + '/Python.h'))"
    for place in filter(None, places):
        seen = subprocess.run([place, "-c", look], capture_output=True, text=True, timeout=20)  # a shim may lead nowhere
        if seen.returncode == 0 and seen.stdout.split() == ["cpython", *version.split("."), "True"]:
            return place
    return None


SMOKE = """
import sys, weakref, arena
from arena.testing import simulated_driver
class Owner: pass
with simulated_driver() as cuda:
    stream = cuda.Stream()
    alive = weakref.ref(owner := Owner())
    with stream.capture() as capture, arena.collect() as owners:
        assert arena.retain(owner, stream)
        assert arena.capture_id(stream) == capture.id
    assert owners == [owner]
    owners.clear()
    del owner
    executable = capture.graph.instantiate()
    capture.graph.destroy()
    assert alive() is not None
    executable.destroy()
    arena.reclaim(5)
    assert alive() is None
    assert arena.stats().released == 1
print(*sys.version_info[:2])
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("version", pythons())
def test_each_python_builds_it_and_works(built, version, tmp_path):
    found = find_python(version)
    if not found:
        pytest.skip(f"no Python {version} with headers on this machine")
    python = virtual_environment(tmp_path / "venv", found)
    done(python, "-m", "pip", "install", "--quiet", built[0], cwd=tmp_path)
    assert done(python, "-W", "error", "-c", SMOKE, cwd=tmp_path).split() == version.split(".")


# ---- the import ----


def test_the_import_loads_neither_torch_nor_cuda(tmp_path):
    """Both are planted where they would be found, and go off when they are."""
    for name in ("torch", "cuda", "cupy", "numpy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise AssertionError('{name} was imported')")
    code = """
import sys, arena
print(sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "cuda", "cupy", "numpy", "ctypes")))
import arena.testing
print(sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "cuda", "cupy", "numpy", "ctypes")))
"""
    ended = run_python(code, timeout=20, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(arena.__file__).parent.parent}"})
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[]\n[]\n", "")


def test_what_shows_is_loaded_when_it_is_first_asked_for(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('torch was imported')")
    code = """
import sys, arena
late = lambda: sorted(set(sys.modules) & {"arena.auditing", "arena.reporting", "arena._audit", "torch", "rich"})
print(late())
arena.report, arena.audit
print(late(), callable(arena.report), callable(arena.audit))
print(arena.report().graphs)
"""
    ended = run_python(code, timeout=20, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(arena.__file__).parent.parent}"})
    expected = "[]\n['arena._audit', 'arena.auditing', 'arena.reporting'] True True\n[]\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, expected, "")


def test_the_planted_torch_would_have_gone_off(tmp_path):
    """The control."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('torch was imported')")
    ended = run_python("import torch", timeout=20, env={"PYTHONPATH": str(tmp_path)})
    assert "AssertionError: torch was imported" in ended.stderr


def test_the_import_does_not_open_the_driver_and_the_first_question_does(tmp_path):
    """A driver is planted: a library without any symbol will do to be opened, and the question is the control."""
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    (tmp_path / "empty.c").write_text("int nothing_here;\n")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "empty.c"], check=True)
    code = """
def mapped():
    with open("/proc/self/maps") as maps:
        return "libcuda.so" in maps.read()
import arena
with arena.collect(), arena.suspend():
    arena.stats(), arena.reclaim()
print(mapped())
try:
    arena.retain(object(), 5)
except arena.DriverError as error:
    print("too old" in str(error))
print(mapped())
"""
    ended = run_python(code, timeout=20, env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (0, ["False", "True", "True"], "")


def test_the_import_takes_less_than_five_milliseconds():
    """The interpreter's own figure, of this package and all that it imports; the best of ten."""

    def microseconds():
        code = "import subprocess, sys\nprint(subprocess.run([sys.executable, '-X', 'importtime', '-c', 'import arena'], "
        ended = run_python(code + "capture_output=True, text=True).stderr)", timeout=20)
        lines = [line.split("|") for line in ended.stdout.splitlines() if line.startswith("import time:")]
        [cumulative] = [int(line[1]) for line in lines if line[2].strip() == "arena"]
        return cumulative

    best = min(microseconds() for _ in range(10))
    assert 0 < best < 5000


# ---- types and style ----


def tool(name):
    """The path of a tool beside this Python or on the path; skips where there is none."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if not found:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.fixture
def mypy():
    pytest.importorskip("mypy", reason="mypy is not installed")
    return [sys.executable, "-m", "mypy"]


# What a stub need not say: what the compiler adds, how to make objects that refuse to be made, and that a cached function still
# has its own parameters.
UNSAID = r"""
arena\._(audit|registry|simulator|workspace)\.__(pyx_capi|test)__
arena\.(testing|_audit)\.\w+\.__init__
arena\.testing\.Capture\.__(enter|exit)__
arena\.__main__\.\w+@\d+
arena\.b12x\.provider
"""


@pytest.mark.slow
def test_the_stubs_say_what_is_there(mypy, tmp_path):
    root = str(Path(arena.__file__).parent.parent)
    (tmp_path / "unsaid").write_text(UNSAID)
    command = [sys.executable, "-m", "mypy.stubtest", "--allowlist", "unsaid", "--ignore-unused-allowlist", "arena"]
    ended = run(*command, cwd=tmp_path, PYTHONPATH=root, MYPYPATH=root)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
def test_the_package_itself_is_strictly_typed(mypy, sources):
    ended = run(*mypy, "--no-incremental", cwd=sources)
    assert ended.returncode == 0, ended.stdout + ended.stderr


CONSUMER = """
from typing import Any

import arena
from arena.testing import Driver, simulated_driver


class Scratch:
    def __cuda_owners__(self) -> list[object]:
        return [bytearray(8)]


class Stream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 7


def use(owner: Any) -> int:
    kept: bool = arena.retain(owner)
    kept = arena.retain(Scratch(), 7)
    kept = arena.retain(Scratch(), stream=Stream())
    number: int | None = arena.capture_id(Stream())
    with arena.collect() as owners, arena.suspend():
        owners.append(kept)
    now: arena.Stats = arena.stats()
    total: int = now.owners + now.dead + now.released + now.leaked
    try:
        return arena.reclaim() + arena.reclaim(0.5) + total + (number or 0)
    except arena.CaptureError as error:
        raise SystemExit(str(error)) from error
    except arena.DriverError:
        return 0


def test() -> None:
    cuda: Driver
    with simulated_driver() as cuda:
        stream = cuda.Stream()
        with stream.capture("relaxed") as capture:
            use(Scratch())
        capture.graph.instantiate().launch(stream, until=cuda.Event())
"""


def check_consumer(mypy, tmp_path, source):
    root = str(Path(arena.__file__).parent.parent)
    (tmp_path / "consumer.py").write_text(source)
    return run(*mypy, "--strict", "--no-incremental", "consumer.py", cwd=tmp_path, MYPYPATH=root)


@pytest.mark.slow
def test_a_strictly_typed_consumer_is_accepted(mypy, tmp_path):
    ended = check_consumer(mypy, tmp_path, CONSUMER)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("arena.retain(Scratch(), 7)", "arena.retain(Scratch(), '7')"),
        ("reclaim(0.5)", "reclaim('soon')"),
        ('"relaxed"', '"lax"'),
    ],
    ids=["stream", "timeout", "mode"],
)
def test_a_consumer_that_is_wrong_is_told(mypy, tmp_path, right, wrong):
    """The control."""
    assert CONSUMER.count(right) == 1
    ended = check_consumer(mypy, tmp_path, CONSUMER.replace(right, wrong))
    assert ended.returncode == 1
    assert "error:" in ended.stdout


def test_the_public_names_are_there_documented_and_in_the_stub():
    folder = Path(arena.__file__).parent
    places = [folder / name for name in ("_registry.pyi", "auditing.py", "reporting.py")]
    defined = {name for place in places for name in re.findall(r"^(?:class|def) (\w+)", place.read_text(), re.MULTILINE)}
    assert sorted(arena.__all__) == arena.__all__
    own = {"get_include"}  # of the package itself
    for name in arena.__all__:
        assert name in defined | own
        assert getattr(arena, name).__doc__, name
    imported = re.findall(r"from arena\.\w+ import (.+)", Path(arena.__file__).read_text())
    assert sorted(",".join(imported).replace(" ", "").split(",")) == sorted(set(arena.__all__) - own)
    with pytest.raises(AttributeError, match="no attribute 'ghost'"):
        arena.ghost  # noqa: B018


def test_ruff_is_content(sources):
    ended = run(tool("ruff"), "check", "--no-cache", ".", cwd=sources)
    assert ended.returncode == 0, ended.stdout


def test_cython_lint_is_content(sources):
    files = sorted((sources / "pyx").glob("*.p*")) + sorted((sources / "arena").glob("*.pxd"))
    assert len(files) > 5
    beside = os.pathsep.join([str(Path(tool("cython-lint")).parent), os.environ.get("PATH", "")])  # it calls pycodestyle
    ended = run(tool("cython-lint"), *files, cwd=sources, PATH=beside)
    assert ended.returncode == 0, ended.stdout + ended.stderr
