"""vLLM's own tests of its workspace and its breakable graphs: with its own module, with ours in its place, and with the plugin.

They come from vLLM's source archive, and run in a process of their own: on the CPU, and on a GPU where there is one
(tests/vllm_on_gpu.sh on a machine without a network). Skipped where PyPI is out of reach.
"""

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree
from collections import Counter
from pathlib import Path

import pytest
import vllm_rig

import arena

torch = pytest.importorskip("torch")

TESTS = Path(__file__).parent
CORE = ["tests/v1/worker/test_workspace.py", "tests/v1/cudagraph/test_breakable_cudagraph.py"]
WIDE = [  # what else touches the workspace
    "tests/v1/attention/test_mla_prefill_registry.py::test_prefill_backend_does_not_pin_grown_workspace",
    "tests/model_executor/model_loader/test_reload.py::test_marlin_workspace_uses_persistent_workspace_manager",
    "tests/model_executor/model_loader/test_reload.py::test_marlin_workspace_without_manager",
    "tests/kernels/attention/test_segmented_attention.py::test_segmented_scratch_is_stable_and_isolated_across_runtime_lanes",
    "tests/kernels/moe/test_moe.py::test_humming_permute_scratch_is_shared_by_config",
]
NEEDS = {"stock": None, "swapped": "arena.workspace", "plugin": "arena.vllm"}

pytestmark = [
    pytest.mark.timeout(400),  # the first of them downloads
    pytest.mark.skipif(sys.version_info < (3, 11), reason="what vLLM imports is pinned for CPython 3.11 and later"),
]


@pytest.fixture(scope="module")
def rig():
    try:
        return vllm_rig.prepare()
    except vllm_rig.Unreachable as reason:
        pytest.skip(str(reason))


def needed(mode):
    module = NEEDS[mode]
    if module and not importlib.util.find_spec(module):
        pytest.skip(f"there is no {module}")


def outcome(rig, folder, mode, selected, **more):
    """How many of vLLM's tests ended how, and what pytest said."""
    report = folder / "report.xml"
    roots = [TESTS, folder, rig / "vllm", rig / "site", Path(arena.__file__).parent.parent, os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(each) for each in roots if each),
        "PYTHONDONTWRITEBYTECODE": "",  # the folder that is kept keeps what was compiled, too
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "ARENA_VLLM_MODE": mode,
        **more,
    }
    command = [sys.executable, "-m", "pytest", "-p", "vllm_plugin", "-p", "no:cacheprovider", "--noconftest", "-q", "-ra"]
    command += ["--tb=short", "-W", "ignore", f"--junitxml={report}", *selected]
    ended = subprocess.run(command, cwd=rig / "vllm", env=environment, capture_output=True, text=True, timeout=300)
    said = ended.stdout + ended.stderr
    assert report.exists(), said
    cases = xml.etree.ElementTree.parse(report).iter("testcase")
    return Counter(case[0].tag if len(case) else "passed" for case in cases), said


@pytest.mark.slow
@pytest.mark.parametrize("mode", NEEDS)
def test_on_the_cpu(rig, tmp_path, mode):
    needed(mode)
    counts, said = outcome(rig, tmp_path, mode, CORE + WIDE, CUDA_VISIBLE_DEVICES="")
    assert counts == {"passed": 29, "skipped": 14}, said


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("mode", NEEDS)
def test_on_a_gpu(rig, tmp_path, mode):
    needed(mode)
    counts, said = outcome(rig, tmp_path, mode, CORE)
    assert counts == {"passed": 37}, said


@pytest.mark.slow
def test_they_fail_on_a_module_that_is_wrong(rig, tmp_path):
    """The control: what is put in the place of vLLM's module is what its tests meet. This one forgets to lock."""
    right = (rig / "vllm/vllm/v1/worker/workspace.py").read_text()
    assert right.count("self._locked = True") == 1
    (tmp_path / "forgetful.py").write_text(right.replace("self._locked = True", "pass"))
    counts, said = outcome(rig, tmp_path, "swapped", CORE[:1], CUDA_VISIBLE_DEVICES="", ARENA_VLLM_MODULE="forgetful")
    assert "test_workspace_lock_blocks_growth_and_unlock_restores" in said
    assert counts["failure"] > 0, said
    assert counts["passed"] > counts["failure"], said
