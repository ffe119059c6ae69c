"""Compiles what tests and benchmarks need in C: a program, or an extension that uses the arena that is imported as an op
library does. Everything lands in a temporary folder of the process."""

import functools
import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import arena

TESTS = Path(__file__).parent
HEADERS = TESTS.parent / "pyx"


@functools.cache
def _folder():
    return tempfile.TemporaryDirectory(prefix="arena-tests-")


def folder():
    return Path(_folder().name)


def program(source, name, *flags):
    """Compiles one C file (of tests/, or a path) against the private headers; returns the path of the program."""
    target = folder() / name
    command = [
        "gcc",
        "-std=gnu11",
        "-g",
        "-O1",
        "-Wall",
        "-Wno-unused-function",
        *flags,
        f"-I{HEADERS}",
        str(TESTS / source),
    ]
    subprocess.run([*command, "-o", str(target), "-lpthread", "-ldl"], check=True, capture_output=True, text=True)
    return target


@functools.cache
def extension(name):
    """Builds tests/<name>.pyx against the arena that is imported (its public .pxd, not the sources) and imports it."""
    generated = folder() / f"{name}.c"
    include = Path(arena.__file__).parent.parent
    subprocess.run(
        [sys.executable, "-m", "cython", "-3", f"-I{include}", str(TESTS / f"{name}.pyx"), "-o", str(generated)],
        check=True,
        capture_output=True,
        text=True,
    )
    target = folder() / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    headers = sysconfig.get_path("include")
    command = ["gcc", "-O2", "-shared", "-fPIC", f"-I{headers}", str(generated), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return load(target)


@functools.cache
def c_extension(name):
    """Builds tests/<name>.c with the arena.h of the arena that is imported; returns its path."""
    target = folder() / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = [f"-I{sysconfig.get_path('include')}", f"-I{arena.get_include()}"]
    command = ["gcc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *include]
    command += [str(TESTS / f"{name}.c"), "-o", str(target), "-lpthread"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


def load(path):
    """A new module from that file: each load of a C extension that keeps state outside its module shares that state."""
    name = path.name.split(".")[0]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def above(whole, floor, target=5):
    """How benchmarks tell one cost above another, both in nanoseconds."""
    return f"{whole:.1f} ns, the driver's own question {floor:.1f}: {whole - floor:.1f} ns above it (target ≤ {target})"
