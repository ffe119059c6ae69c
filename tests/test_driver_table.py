"""pyx/driver.h, and nodes.h for audits, held against real cuda.h files, and its filling against drivers that lack something.

Every prototype, constant and ABI version that the header declares for itself is compiled against the headers of an old
and a new CUDA 12 and 13; what it does with an installed driver is tried on libraries built here.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

DRIVER_H = Path(__file__).parent.parent / "pyx" / "driver.h"
NODES_H = DRIVER_H.parent / "nodes.h"
READY, ABSENT, UNUSABLE = 0, -1, -2  # what driver_fill() returns
WHEELS = {
    "12.1": "nvidia-cuda-runtime-cu12==12.1.105",
    "12.9": "nvidia-cuda-runtime-cu12==12.9.79",
    "13.0": "nvidia-cuda-runtime==13.0.96",
    "13.5": "nvidia-cuda-runtime==13.5.37",
}

# __CUDA_API_VERSION_INTERNAL: cuda.h then renames nothing, and declares each ABI version under its own name.
AGAINST_CUDA_H = r"""
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <cudaTypedefs.h>
#include "driver.h"

#define X(name, value) _Static_assert((int)name == value, #name " is not " #value);
DRIVER_CONSTANTS(X)
#undef X

#define X(name, abi_name, version, parameters) \
    _Static_assert(__builtin_types_compatible_p(CUresult(*) parameters, __typeof__(&abi_name)), #abi_name); \
    _Static_assert(__builtin_types_compatible_p(CUresult(*) parameters, PFN_##name##_v##version), #name " " #version);
DRIVER_SYMBOLS(X)
#undef X

/* Where there is no cuda.h, these are int and uint64_t, and handles are pointers to structures of the same names. */
#define SAME_INTEGER(type, ours) \
    _Static_assert(sizeof(type) == sizeof(ours) && _Alignof(type) == _Alignof(ours), #type);
SAME_INTEGER(CUresult, int)
SAME_INTEGER(CUdevice, int)
SAME_INTEGER(CUstreamCaptureStatus, int)
SAME_INTEGER(CUstreamCaptureMode, int)
SAME_INTEGER(cuuint64_t, uint64_t)
#define SAME_TYPE(type, ours) _Static_assert(__builtin_types_compatible_p(type, ours), #type);
SAME_TYPE(CUcontext, struct CUctx_st *)
SAME_TYPE(CUstream, struct CUstream_st *)
SAME_TYPE(CUevent, struct CUevent_st *)
SAME_TYPE(CUgraph, struct CUgraph_st *)
SAME_TYPE(CUgraphNode, struct CUgraphNode_st *)
SAME_TYPE(CUgraphExec, struct CUgraphExec_st *)
SAME_TYPE(CUuserObject, struct CUuserObject_st *)
SAME_TYPE(CUhostFn, void (*)(void *))

int (*used)(driver_table *, char *, size_t) = driver_fill;
"""

NODES_AGAINST_CUDA_H = r"""
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <cudaTypedefs.h>
#include "nodes.h"

#define X(name, value) _Static_assert((int)name == value, #name " is not " #value);
NODE_CONSTANTS(X)
#undef X
_Static_assert((long)CU_LAUNCH_PARAM_END == NODE_EXTRA_END, "end");
_Static_assert((long)CU_LAUNCH_PARAM_BUFFER_POINTER == NODE_EXTRA_BUFFER, "buffer");
_Static_assert((long)CU_LAUNCH_PARAM_BUFFER_SIZE == NODE_EXTRA_SIZE, "size");

#define X(name, abi_name, version, parameters) \
    _Static_assert(__builtin_types_compatible_p(CUresult(*) parameters, __typeof__(&abi_name)), #abi_name); \
    _Static_assert(__builtin_types_compatible_p(CUresult(*) parameters, PFN_##name##_v##version), #name " " #version);
NODE_SYMBOLS(X)
#if CUDA_VERSION >= 13020
NODE_SYMBOLS_OPTIONAL(X)
#endif
#undef X

int (*used)(node_table *, char *, size_t) = node_fill;
"""

# What nodes.h declares for itself lies where cuda.h has it.
LAYOUT = r"""
#include "nodes.h"
#include <stddef.h>
#include <stdio.h>
#define AT(type, member) printf("%s.%s %zu %zu\n", #type, #member, offsetof(type, member), sizeof(((type *)0)->member));
int main(void) {
    AT(kernel_node, func) AT(kernel_node, blockDimZ) AT(kernel_node, sharedMemBytes) AT(kernel_node, kernelParams)
    AT(kernel_node, extra) AT(kernel_node, kern) AT(kernel_node, ctx)
    AT(memset_node, dst) AT(memset_node, elementSize) AT(memset_node, width) AT(memset_node, height)
    AT(memcpy_node, srcMemoryType) AT(memcpy_node, srcHost) AT(memcpy_node, srcDevice) AT(memcpy_node, srcHeight)
    AT(memcpy_node, dstMemoryType) AT(memcpy_node, dstHost) AT(memcpy_node, dstDevice) AT(memcpy_node, Depth)
    AT(any_node, type) AT(any_node, conditional.size) AT(any_node, conditional.phGraph_out) AT(any_node, reserved2)
    printf("%zu %zu %zu %zu %zu\n", sizeof(kernel_node), sizeof(memset_node), sizeof(memcpy_node), sizeof(any_node),
           sizeof(CUpointer_attribute));
    return 0;
}
"""

FAKE_DRIVER = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
static int nothing(void) { return 0; }
#ifdef GET
int GET(const char *symbol, void **function, int version, uint64_t flags, int *found) {
    (void)flags, (void)found;
    fprintf(stderr, "%s %d\n", symbol, version);
    *function = NULL;
    if (MISSING && !strcmp(symbol, MISSING)) return STATUS;
    *function = (void *)nothing;
    return 0;
}
#endif
"""

FILL = r"""
#include "driver.h"
#include <stdlib.h>
int main(void) {
    char why[256] = "";
    driver_table table;
    memset(&table, 0xA5, sizeof table);
    int filled = driver_fill(&table, why, sizeof why);
    size_t set = 0, untouched = 0;
    for (size_t at = 0; at < sizeof table; at++) untouched += ((unsigned char *)&table)[at] == 0xA5;
    if (!filled) {
#define X(name, abi_name, version, parameters) set += table.name && table.name == (void *)table.cuGetErrorName;
        DRIVER_SYMBOLS(X)
#undef X
    }
    printf("%d\n%zu\n%d\n%s\n", filled, set, untouched == sizeof table, why);
    return 0;
}
"""

SIZE = r"""
#include "driver.h"
#include <stddef.h>
#include <stdio.h>
int main(void) {
    printf("%zu", sizeof(driver_table));
#define X(name, abi_name, version, parameters) printf(" %zu", offsetof(driver_table, name));
    DRIVER_SYMBOLS(X)
#undef X
    printf(" %zu %zu\n", offsetof(driver_table, current_device), offsetof(driver_table, current_stream));
    return 0;
}
"""


def compiled(folder, source, *arguments, driver_h=DRIVER_H):
    """Runs the C compiler over `source`; the process, and what it made."""
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    file, output = folder / "source.c", folder / "output"
    file.write_text(source)
    command = ["gcc", "-std=gnu11", "-Wall", "-Wextra", "-Wno-unused-function"]
    command += ["-I", str(driver_h.parent), *map(str, arguments), "-o", str(output), str(file), "-ldl"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60), output


def run(program, libraries):
    """Runs it so that the libcuda.so.1 it finds is the one in that folder."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    return subprocess.run([program], capture_output=True, text=True, env=environment, timeout=20, check=True)


def symbols():
    """(name, ABI version) of every symbol of the table, in order."""
    listed = DRIVER_H.read_text().split("#define DRIVER_SYMBOLS(X)")[1].split("\n\n")[0]
    return [(name, int(version)) for name, version in re.findall(r"X\((\w+), \w+, (\d+),", listed)]


@pytest.fixture(params=WHEELS)
def cuda_include(request):
    """The include folder of one published CUDA, fetched once and kept in pytest's cache."""
    cache, wheel = Path(request.config.cache.mkdir("cuda_headers")), WHEELS[request.param]
    folder, part = cache / request.param, cache / f"{request.param}.part"
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        try:
            fetched = subprocess.run([*command, "--dest", part, wheel], capture_output=True, text=True, timeout=100)
        except subprocess.TimeoutExpired:
            pytest.skip(f"{wheel} did not arrive within 100 s")
        if fetched.returncode:
            pytest.skip(f"no {wheel}: {fetched.stderr.strip().splitlines()[-1]}")
        [file] = part.glob("*.whl")
        with zipfile.ZipFile(file) as archive:
            archive.extractall(part, [name for name in archive.namelist() if name.endswith(".h")])
        file.unlink()
        part.rename(folder)
    [header] = folder.rglob("cuda.h")
    return header.parent


# Against cuda.h


def test_prototypes_constants_and_versions_are_those_of_cuda_h(cuda_include, tmp_path):
    done, _ = compiled(tmp_path, AGAINST_CUDA_H, "-c", "-I", cuda_include)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("ours", "altered", "told"),
    [
        ("(CUevent, CUstream)", "(CUevent, CUevent)", "cuEventRecord"),
        ("CUgraph *, const CUgraphNode **,", "CUgraph *, CUgraphNode **,", "cuStreamGetCaptureInfo"),
        ("(CUuserObject, unsigned int)", "(CUuserObject, unsigned long)", "cuUserObjectRelease"),
        ("cuStreamGetCaptureInfo_v2, 11030", "cuStreamGetCaptureInfo_v2, 10010", "cuStreamGetCaptureInfo 10010"),
        ("X(CUDA_ERROR_NOT_READY, 600)", "X(CUDA_ERROR_NOT_READY, 34)", "CUDA_ERROR_NOT_READY is not 34"),
    ],
)
def test_altered_declaration_does_not_compile_against_cuda_h(cuda_include, tmp_path, ours, altered, told):
    """The control of the test above."""
    text = DRIVER_H.read_text()
    assert text.count(ours) == 1
    copy = tmp_path / "copy" / "driver.h"
    copy.parent.mkdir()
    copy.write_text(text.replace(ours, altered))
    done, _ = compiled(tmp_path, AGAINST_CUDA_H, "-c", "-I", cuda_include, driver_h=copy)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    assert errors
    assert all(told in line for line in errors)


def test_table_has_the_same_layout_with_and_without_cuda_h(cuda_include, tmp_path):
    layouts = []
    for before in ("", "#define __CUDA_API_VERSION_INTERNAL\n#include <cuda.h>\n"):
        done, program = compiled(tmp_path, before + SIZE, "-I", cuda_include)
        assert done.returncode == 0, done.stderr
        layouts.append(subprocess.run([program], capture_output=True, text=True, check=True).stdout.split())
    assert layouts[0] == layouts[1]
    pointers = len(symbols()) + 2  # and torch's two
    assert layouts[0][0] == str(pointers * 8)
    assert len(layouts[0]) == pointers + 1


@pytest.fixture
def audit_include(cuda_include, request):
    """Those of a CUDA whose driver an audit can ask."""
    if "[12.1" in request.node.name:
        pytest.skip("an audit needs CUDA 12.4: the headers of 12.1 have nothing to hold it against")
    return cuda_include


def test_nodes_are_declared_as_in_cuda_h(audit_include, tmp_path):
    done, _ = compiled(tmp_path, NODES_AGAINST_CUDA_H, "-c", "-I", audit_include)
    assert done.returncode == 0, done.stderr
    layouts = []
    for before in ("", "#define __CUDA_API_VERSION_INTERNAL\n#include <cuda.h>\n"):
        done, program = compiled(tmp_path, before + LAYOUT, "-I", audit_include)
        assert done.returncode == 0, done.stderr
        layouts.append(subprocess.run([program], capture_output=True, text=True, check=True).stdout)
    assert layouts[0] == layouts[1]


@pytest.mark.parametrize(
    ("ours", "altered"),
    [
        ("(CUgraphNode, memcpy_node *)", "(CUgraphNode, memset_node *)"),
        ("X(CU_POINTER_ATTRIBUTE_BUFFER_ID, 7)", "X(CU_POINTER_ATTRIBUTE_BUFFER_ID, 8)"),
        ("NODE_EXTRA_SIZE = 2", "NODE_EXTRA_SIZE = 3"),
    ],
)
def test_an_altered_node_does_not_compile_against_cuda_h(audit_include, tmp_path, ours, altered):
    """The control of the test above."""
    folder = tmp_path / "copy"
    folder.mkdir()
    assert NODES_H.read_text().count(ours) == 1
    (folder / "nodes.h").write_text(NODES_H.read_text().replace(ours, altered))
    (folder / "driver.h").write_text(DRIVER_H.read_text())
    done, _ = compiled(tmp_path, NODES_AGAINST_CUDA_H, "-c", "-I", audit_include, driver_h=folder / "driver.h")
    assert done.returncode != 0


# Filling the table


def fill(folder, *, get="cuGetProcAddress_v2", missing=None, status=500):
    """What driver_fill() makes of a driver: its result, how many pointers, whether the table is untouched, its words;
    and what it asked for. `get=""`: the driver's one function is not there; `get=None`: its file is no library."""
    library = folder / "libcuda.so.1"
    if get is None:
        library.write_text("not a library")
    else:
        defines = [f"-DGET={get}"] if get else []
        quoted = f'"{missing}"' if missing else "NULL"
        defines += [f"-DMISSING={quoted}", f"-DSTATUS={status}"]
        done, made = compiled(folder, FAKE_DRIVER, "-shared", "-fPIC", *defines)
        assert done.returncode == 0, done.stderr
        made.rename(library)
    done, program = compiled(folder, FILL)
    assert done.returncode == 0, done.stderr
    done = run(program, folder)
    filled, pointers, untouched, why = done.stdout.split("\n", 3)
    asked = [(name, int(version)) for name, version in re.findall(r"(\w+) (\d+)\n", done.stderr)]
    return (int(filled), int(pointers), untouched == "1", why.strip()), asked


def test_whole_driver_fills_every_pointer_at_its_pinned_version(tmp_path):
    filled, asked = fill(tmp_path)
    assert filled == (READY, len(symbols()), False, "")
    assert asked == symbols()
    assert len(symbols()) > 10


def test_no_library_is_told_and_leaves_the_table_alone(tmp_path):
    (result, _, untouched, why), _ = fill(tmp_path, get=None)
    assert (result, untouched) == (ABSENT, True)
    assert why.startswith("no CUDA driver: ")
    assert "libcuda.so.1" in why


@pytest.mark.parametrize("get", ["", "cuGetProcAddress"])
def test_driver_without_get_proc_address_v2_is_too_old(tmp_path, get):
    (result, _, untouched, why), asked = fill(tmp_path, get=get)
    assert (result, untouched, asked) == (UNUSABLE, True, [])
    assert "too old" in why
    assert "cuGetProcAddress_v2" in why
    assert "CUDA 12.0" in why


@pytest.mark.parametrize("status", [0, 500], ids=["null pointer", "not found"])
@pytest.mark.parametrize(("name", "version"), symbols())
def test_missing_symbol_is_named_and_leaves_the_table_alone(tmp_path, name, version, status):
    (result, _, untouched, why), asked = fill(tmp_path, missing=name, status=status)
    assert (result, untouched) == (UNUSABLE, True)
    assert f" {name} at ABI version {version} " in why
    assert asked[-1] == (name, version)


def test_short_buffer_for_the_reason_is_not_overrun(tmp_path):
    source = """
#include "driver.h"
int main(void) {
    driver_table table;
    char why[16] = "###############";
    int filled = driver_fill(&table, why, 8);
    printf("%d %zu %s", filled, strlen(why), why + 8);
    return 0;
}
"""
    done, program = compiled(tmp_path, source)
    assert done.returncode == 0, done.stderr
    (tmp_path / "libcuda.so.1").write_text("not a library")
    assert run(program, tmp_path).stdout.split() == [str(ABSENT), "7", "#######"]
