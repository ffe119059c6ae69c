"""Op libraries in C, Cython and C++, built against an installed wheel of arena in an environment of its own, and used there.
The wheel is built with the tools of this environment, so that no network is needed."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from test_package import done, run, sources  # noqa: F401 - `sources` is a fixture

TESTS = Path(__file__).parent
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
HEADERS = sysconfig.get_path("include")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def house(sources, tmp_path_factory):  # noqa: F811
    """A folder with `venv`, where the wheel is installed alone; what is built for it goes there too."""
    for tool in ("Cython", "setuptools", "pip"):
        if not importlib.util.find_spec(tool):
            pytest.skip(f"{tool} is not installed: no wheel can be built")
    folder = tmp_path_factory.mktemp("house")
    done(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-build-isolation", "--no-deps"),
        *("-w", folder, sources),
        cwd=folder,
    )
    [wheel] = folder.glob("*.whl")
    done(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    done(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"),
        *("--target", packages_of(folder), wheel),
        cwd=folder,
    )
    return folder


def packages_of(house):
    [packages] = (house / "venv" / "lib").glob("python*/site-packages")
    return packages


def python_of(house):
    return house / "venv" / "bin" / "python"


def include(house):
    """What an op library's build asks for; it must be the wheel's."""
    said = Path(done(python_of(house), "-I", "-c", "import arena; print(arena.get_include())", cwd=house).strip())
    assert said.is_relative_to(house / "venv")
    assert [each.name for each in said.iterdir()] == ["arena.h"]
    return said


def compile_c(house, compiler, source, *flags):
    target = house / f"{Path(source).stem}{SUFFIX}"
    command = [compiler, "-O2", "-shared", "-fPIC", f"-I{include(house)}", f"-I{HEADERS}", source, "-o", target, *flags]
    built = subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr[-4000:]
    return target


LIFE = """
import sys, weakref
sys.path.insert(0, {house!r})
import arena
import {name} as op
from arena.testing import simulated_driver
assert arena.__file__.startswith({house!r}) and op.__file__.startswith({house!r})
class Scratch: pass
with simulated_driver() as cuda:
    stream = cuda.Stream()
    alive = weakref.ref(scratch := Scratch())
    assert not op.scale(scratch, stream.handle) and not op.scale_with(64, stream.handle)
    assert op.state() == {{"arena": 1, "freed": 1}}
    with stream.capture() as capture:
        stream.kernel()
        assert op.scale(scratch, stream.handle) and op.scale_with(64, stream.handle)
    del scratch
    executable = capture.graph.instantiate()
    capture.graph.destroy()
    arena.reclaim(0.05)
    assert alive() is not None and op.state()["freed"] == 1
    executable.destroy()
    for _ in range(1000):  # the driver's thread may be late
        if alive() is None and op.state()["freed"] == 2: break
        arena.reclaim(0.01)
    assert alive() is None and op.state()["freed"] == 2
print("lived")
"""


def test_an_op_library_in_c(house):
    compile_c(house, "gcc", TESTS / "sample_op.c", "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror")
    assert done(python_of(house), "-c", LIFE.format(house=str(house), name="sample_op"), cwd=house).split() == ["lived"]


def test_the_same_library_without_arena(house):
    """Without site-packages: it loads, works and retains nothing."""
    compile_c(house, "gcc", TESTS / "sample_op.c")
    code = f"import sys; sys.path.insert(0, {str(house)!r}); import sample_op as op\n"
    code += "print(op.state()['arena'], op.scale([], 5), op.scale_with(64, 5), op.state()['freed'])"
    assert done(python_of(house), "-S", "-c", code, cwd=house).split() == ["0", "False", "False", "1"]


def test_an_op_library_in_cython(house):
    packages = include(house).parent.parent
    generated = house / "sample_cython_op.c"
    command = ["-m", "cython", "-3", f"-I{packages}", TESTS / "sample_cython_op.pyx", "-o", generated]
    done(sys.executable, *command, cwd=house)
    compile_c(house, "gcc", generated)
    assert done(python_of(house), "-c", LIFE.format(house=str(house), name="sample_cython_op"), cwd=house).split() == ["lived"]


# ---- torch ----


def cuda_headers(torch):
    """The folder of cuda_runtime_api.h, or None."""
    places = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", str(Path(shutil.which("nvcc") or "/nvcc").parent.parent)]
    folders = [Path(each) / "include" for each in places if each]
    folders += Path(torch.__file__).parent.parent.glob("nvidia/*/include")
    return next((each for each in folders if (each / "cuda_runtime_api.h").exists()), None)


@pytest.fixture(scope="module")
def torch_house(house):
    """With the torch of this environment behind what is installed there, and the op built for it."""
    torch = pytest.importorskip("torch")
    if not shutil.which("g++"):
        pytest.skip("no g++")
    here = Path(torch.__file__).parent
    (packages_of(house) / "torch-from-outside.pth").write_text(f"{here.parent}\n")
    flags = ["-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += [f"-isystem{here / each}" for each in ("include", "include/torch/csrc/api/include")]
    flags += [f"-L{here / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
    headers = cuda_headers(torch) if torch.cuda.is_available() else None
    if headers:
        flags += ["-DSAMPLE_CUDA", f"-isystem{headers}", "-lc10_cuda", "-ltorch_cuda"]
    compile_c(house, "g++", TESTS / "sample_torch_op.cpp", "-Wall", *flags)
    return house


HEAD = """
import sys
sys.path.insert(0, {house!r})
import torch, arena, sample_torch_op
assert arena.__file__.startswith({house!r})
op = torch.ops.arena_sample
"""

SIMULATED = """
from arena.testing import simulated_driver
x, out = torch.full((4,), 3.0), torch.zeros(4)
with simulated_driver() as cuda:
    stream = cuda.Stream()
    op.prepare(x)
    op.scale(x, out, stream.handle)
    assert list(op.state()) == [1, 0, 0, 0], op.state()  # nothing captures
    with stream.capture() as capture:
        stream.kernel()
        for retain in (True, False):
            op.prepare(x)
            op.scale(x, out, stream.handle, retain)
    assert out[0].item() == 6.0
    executable = capture.graph.instantiate()
    capture.graph.destroy()
    arena.reclaim(0.05)
    assert list(op.state()) == [1, 1, 0, 0], op.state()
    executable.destroy()
    for _ in range(1000):  # the driver's thread may be late
        if op.state()[2]: break
        arena.reclaim(0.01)
    assert list(op.state()) == [1, 1, 1, 0], op.state()  # never with the GIL
print("lived")
"""


def test_a_torch_op_in_cpp_holds_its_scratch_without_the_gil(torch_house):
    code = HEAD.format(house=str(torch_house)) + SIMULATED
    assert done(python_of(torch_house), "-W", "ignore", "-c", code, cwd=torch_house).split() == ["lived"]


REAL = """
import arena.torch
if {install}: arena.torch.install()
N = 1 << 20
def handle():  # 0: the op finds the current stream itself
    return 0 if {finds} else torch.cuda.current_stream().cuda_stream
def replayed(retain):
    x, out = torch.full((N,), 3.0, device="cuda"), torch.zeros(N, device="cuda")
    op.prepare(x)
    op.scale(x, out, handle(), retain)  # eager: nothing is kept
    assert out[0].item() == 6.0
    op.prepare(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.scale(x, out, handle(), retain)
    poison = [torch.full((N,), float("nan"), device="cuda") for _ in range(16)]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return out[0].item(), graph
value, graph = replayed(True)
there, held, dropped, with_gil = op.state()
assert (value, there, held, dropped, with_gil) == (6.0, 1, 1, 0, 0), (value, op.state())
del graph
for _ in range(1000):  # the driver's thread may be late
    if op.state()[2]: break
    arena.reclaim(0.01)
assert list(op.state()) == [1, 1, 1, 0], op.state()
value, graph = replayed(False)
assert value != 6.0, value  # the control: somebody else's memory
print("lived")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("install", [False, True], ids=["held by the executable", "managed"])
def test_on_a_gpu_the_graph_keeps_the_scratch_of_a_cpp_op(torch_house, install):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    code = HEAD.format(house=str(torch_house)) + REAL.format(install=install, finds=cuda_headers(torch) is not None)
    ended = run(python_of(torch_house), "-W", "ignore", "-c", code, cwd=torch_house)
    assert ended.stdout.split() == ["lived"], ended.stdout + ended.stderr
