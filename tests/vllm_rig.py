"""vLLM's source tree with its own tests, and what they import, from PyPI, in a folder that is kept between runs.

`prepare()` fills the folder once (ARENA_VLLM_RIG names it, else it lies with the system's temporary files) and returns it;
`Unreachable` says that PyPI could not be asked. Everything is asked of pip as it is configured here: no build, no torch, which
is the running interpreter's. `python tests/vllm_rig.py pack FOLDER` writes what a machine with a GPU and no network needs.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.33.0"
KEEP = ("vllm/", "tests/", "vllm.egg-info/")

REQUIREMENTS = Path(__file__).with_name("vllm_requirements.txt")

# vLLM's setup.py imports these before it can say its own name, which pip asks before it hands out the archive.
TO_SAY_ITS_NAME = ["setuptools-rust==1.13.0", "setuptools-scm==10.3.4", "vcs-versioning==2.6.0", "semantic-version==2.10.0"]

OUT_OF_REACH = re.compile(
    r"Name or service not known|name resolution|Network is unreachable|Connection refused|Connection reset|timed out"
    r"|Max retries|ProxyError|from versions: none",
    re.IGNORECASE,
)


class Unreachable(Exception):
    """PyPI cannot be asked from here."""


def pip(*arguments, python=sys.executable, **environment):
    command = [str(python), "-m", "pip", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if ended.returncode == 0:
        return
    said = ended.stdout + ended.stderr
    if reason := OUT_OF_REACH.search(said):
        raise Unreachable(f"PyPI is out of reach: {reason.group()}")
    raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}:\n{said}")


def install(wanted, folder):
    pip("install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:", "--target", folder, *wanted)


def archive(folder):
    """vLLM's sdist. pip downloads it but keeps it only if it can say its metadata; nothing is compiled for that."""
    install(TO_SAY_ITS_NAME, folder / "name")
    pip(
        *("download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", "vllm", f"vllm=={VERSION}"),
        *("--dest", folder),
        PYTHONPATH=str(folder / "name"),
        VLLM_TARGET_DEVICE="empty",
        VLLM_VERSION_OVERRIDE=VERSION,
        SETUPTOOLS_SCM_PRETEND_VERSION=VERSION,
    )
    return folder / f"vllm-{VERSION}.tar.gz"


def unpack(sdist, folder):
    with tarfile.open(sdist) as packed:
        for member in packed:
            member.name = member.name.partition("/")[2]
            if member.isfile() and member.name.startswith(KEEP):
                packed.extract(member, folder, filter="data")


def home():
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    named = os.environ.get("ARENA_VLLM_RIG")
    return Path(named) if named else Path(tempfile.gettempdir()) / f"arena-vllm-{VERSION}-python{python}-{os.getuid()}"


def prepare():
    """The folder with vLLM's tree in `vllm` and what it imports in `site`. Whole or not there: renamed when it is full."""
    folder = home()
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.", ignore_cleanup_errors=True) as scratch:
        new = Path(scratch) / "full"
        install(["-r", REQUIREMENTS], new / "site")
        unpack(archive(Path(scratch)), new / "vllm")
        try:
            new.rename(folder)
        except OSError:
            if not folder.exists():  # else somebody was faster
                raise
    return folder


def pack(folder):
    """Wheels for CPython 3.12, less what such a machine has with its torch, and the part of vLLM's tree that is imported."""
    packed, _, _ = REQUIREMENTS.read_text().partition("# there")
    tags = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
    pip(
        *("download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp"),
        *(*tags, "--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64", "--dest", folder / "wheels"),
        *(line for line in packed.splitlines() if not line.startswith("#")),
    )
    tree = prepare() / "vllm"
    wanted = ("vllm/", "vllm.egg-info/", "tests/v1/worker/", "tests/v1/cudagraph/", "tests/__init__.py", "tests/v1/__init__.py")
    with zipfile.ZipFile(folder / "vllm.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archived:
        for path in sorted(tree.rglob("*")):
            name = str(path.relative_to(tree))
            if path.is_file() and name.startswith(wanted) and (path.suffix == ".py" or "egg-info" in name):
                archived.write(path, name)


def unpack_packed(folder, into):
    """On the machine with the GPU: the folder that `prepare` would have made, from the one that `pack` made."""
    with zipfile.ZipFile(folder / "vllm.zip") as packed:
        packed.extractall(into / "vllm")
    install_command = ("install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target", into / "site")
    pip(*install_command, *sorted((folder / "wheels").glob("*.whl")))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["pack", where]:
            Path(where).mkdir(parents=True, exist_ok=True)
            pack(Path(where).resolve())
        case ["unpack", where, into]:
            unpack_packed(Path(where).resolve(), Path(into))
        case _:
            sys.exit(f"usage: {sys.argv[0]} pack FOLDER | unpack FOLDER INTO")
