"""Builds the extensions. Switches, all read from the environment:

ARENA_DEBUG=1|2     invariants checked; every list walked at every call.
ARENA_SANITIZE=X    compile and link with -fsanitize=X (address, thread, undefined).
ARENA_LINETRACE=1   Cython line tracing, for coverage.
"""

import os
import re
from glob import glob
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.sdist import sdist

debug = int(os.environ.get("ARENA_DEBUG", "0"))
sanitize = os.environ.get("ARENA_SANITIZE", "")
trace = os.environ.get("ARENA_LINETRACE", "") == "1"

compile_args = ["-std=gnu11", "-O2", "-fvisibility=hidden", "-Wall", "-Wno-unused-function"]
link_args = []
if sanitize:
    compile_args += [f"-fsanitize={sanitize}", "-g", "-fno-omit-frame-pointer"]
    link_args += [f"-fsanitize={sanitize}"]
version = re.search(r'^__version__ = (".+")', Path("arena/__init__.py").read_text(), re.MULTILINE).group(1)
macros = [("ARENA_DEBUG", str(debug)), ("ARENA_VERSION", version)]
if trace:
    macros += [("CYTHON_TRACE", "1"), ("CYTHON_USE_SYS_MONITORING", "0")]


def extension(name, *sources):
    return Extension(
        f"arena.{name}",
        list(sources),
        include_dirs=["pyx", "arena/include"],
        depends=sorted(glob("pyx/*") + glob("arena/*.pxd") + glob("arena/include/*")),
        define_macros=macros,
        extra_compile_args=compile_args,
        extra_link_args=link_args,
        libraries=["dl", "pthread"],
    )


class SourceArchive(sdist):
    """With the tests and benchmarks, so that what was unpacked can be tested like a clone."""

    def make_distribution(self):
        folders = ("tests", "bench", "bench/results")
        self.filelist.extend(path for folder in folders for path in sorted(glob(f"{folder}/*")) if os.path.isfile(path))
        super().make_distribution()


setup(
    cmdclass={"sdist": SourceArchive},
    ext_modules=cythonize(
        [
            extension("_registry", "pyx/registry.pyx"),
            extension("_workspace", "pyx/workspace.pyx"),
            extension("_audit", "pyx/audit.pyx"),
            extension("_simulator", "pyx/simulator.pyx", *sorted(glob("pyx/simulator*.c"))),
        ],
        # Generated C stays out of the sources: pyx/simulator.pyx and the hand-written pyx/simulator.c share a stem.
        build_dir="build/cython",
        # With ["pyx"] alone the public arena/_registry.pxd would be lost without a word.
        include_path=[".", "pyx"],
        compiler_directives={"language_level": 3, "binding": False, "linetrace": trace},
    ),
)
