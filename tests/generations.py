"""torch's `graphs.py` of other generations than the installed one: that one member, read out of the wheel on the package index
that pip is configured for, by HTTP range requests. A few hundred kilobytes in all, kept in pytest's cache."""

import functools
import io
import json
import os
import re
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

MEMBER = "torch/cuda/graphs.py"
GENERATIONS = ("2.8", "2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
SECONDS = 10


class Remote(io.RawIOBase):
    """A file on a web server that gives parts of it."""

    def __init__(self, url, size):
        self.url, self.size, self.position = url, size, 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def tell(self):
        return self.position

    def seek(self, offset, whence=io.SEEK_SET):
        self.position = offset + (0, self.position, self.size)[whence]
        return self.position

    def readinto(self, buffer):
        count = min(len(buffer), self.size - self.position)
        if count <= 0:
            return 0
        wanted = f"bytes={self.position}-{self.position + count - 1}"
        with urllib.request.urlopen(urllib.request.Request(self.url, headers={"Range": wanted}), timeout=SECONDS) as answer:
            if answer.status != 206:
                raise OSError(f"the index does not give parts of files (status {answer.status})")
            read = answer.read(count)
        buffer[: len(read)] = read
        self.position += len(read)
        return len(read)


def index_url():
    """Where pip looks for packages: its environment, its configuration, its default."""
    if url := os.environ.get("PIP_INDEX_URL"):
        return url
    asked = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True)
    if asked.returncode == 0 and asked.stdout.strip():
        return asked.stdout.strip()
    from pip._internal.models.index import PyPI

    return PyPI.simple_url


@functools.cache
def files():
    """[(version, url, size)] of torch's wheels on the index; or why it cannot be said, as a str. Asked once."""
    try:
        request = urllib.request.Request(
            f"{index_url().rstrip('/')}/torch/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            listed = json.load(answer)["files"]
    except Exception as error:
        return f"the package index cannot be asked for torch's files: {error!r}"
    names = ((re.match(r"torch-(\d+)\.(\d+)\.(\d+)-.*x86_64\.whl$", each["filename"]), each) for each in listed)
    return [
        (tuple(map(int, match.groups())), each["url"], each["size"])
        for match, each in names
        if match and each.get("size") and not each.get("yanked")
    ]


def fetched(generation, folder):
    """The file of the newest release of that generation ("2.14"), and its version. Skips where it cannot be had."""
    kept = sorted(Path(folder).glob(f"torch-{generation}.*.py"))
    if kept:
        return kept[-1], kept[-1].stem.removeprefix("torch-")
    known = files()
    if isinstance(known, str):
        pytest.skip(known)
    of_it = sorted(each for each in known if each[0][:2] == tuple(map(int, generation.split("."))))
    if not of_it:
        pytest.skip(f"the package index has no torch {generation}")
    numbers, url, size = of_it[-1]
    version = ".".join(map(str, numbers))
    try:
        with zipfile.ZipFile(io.BufferedReader(Remote(url, size), 1 << 16)) as wheel:
            source = wheel.read(MEMBER)
    except Exception as error:
        pytest.skip(f"{MEMBER} of torch {version} cannot be read from the package index: {error!r}")
    path = Path(folder) / f"torch-{version}.py"
    path.write_bytes(source)
    return path, version
