"""The README's code runs as it stands, and its commands are the ones that are tested."""

import importlib
import re
import types
import weakref
from pathlib import Path

import pytest

import arena
from arena.testing import simulated_driver

README = (Path(__file__).parent.parent / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def example(text):
    """The one example that has that text in it."""
    (found,) = [each for each in PYTHON if text in each]
    return found


@pytest.mark.gpu
def test_the_example_keeps_its_owner_as_long_as_its_graph():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    code, seen = example("table = torch"), {}
    watched = code.replace("graph = torch", "watch(table)\ngraph = torch").replace("graph.replay()", "graph.replay(); during()")
    owner = []
    names = {
        "watch": lambda table: owner.append(weakref.ref(table)),
        "during": lambda: seen.update(alive=owner[0]() is not None, value=names["out"][0].item()),
    }
    exec(watched, names)
    assert seen == {"alive": True, "value": 2.0}
    arena.reclaim(5)
    assert owner[0]() is None


def test_the_testing_example_runs():
    retained = []
    exec(example("simulated_driver"), {"my_op": lambda stream: retained.append(arena.retain(object(), stream))})
    assert retained == [True]


@pytest.mark.gpu
def test_the_audit_example_warns_of_its_scratch(capsys):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    with pytest.warns(arena.AuditWarning, match=r"freed: .*MulFunctor.*parameter 2 at byte 16"):
        exec(example("AuditWarning"), {})
    torch.cuda.memory._record_memory_history(enabled=None)  # the audit had torch begin
    said = capsys.readouterr().out
    assert re.search(r"^\d+ graphs? holds? \d+ owners?, ", said, re.MULTILINE)
    assert "no graph's; a block in use of torch's" in said


def test_the_install_example_runs():
    pytest.importorskip("torch")
    exec(example("uninstall() undoes it"), {})
    import arena.torch

    assert arena.torch.installed()
    arena.torch.uninstall()


def test_the_workspace_example_runs():
    torch = pytest.importorskip("torch")
    names = {}
    exec(example("init_workspace_manager("), names)
    assert names["hidden"].shape == (128, 512)
    assert names["gate"].dtype == torch.float32
    importlib.import_module("arena.workspace").reset_workspace_manager()


class Scratch:
    """Something that owns memory."""


def lives_as_long_as_the_graph(call, scratch):
    """Whether what `call(stream)` retained in a capture outlives its last other reference, which is in `scratch`."""
    with simulated_driver() as cuda:
        stream = cuda.Stream()
        with stream, stream.capture() as capture:
            call()
        alive = weakref.ref(scratch.pop())
        kept = alive() is not None
        capture.graph.destroy()
        arena.reclaim(5)
        assert alive() is None
    return kept


def test_an_op_library_with_a_hook_needs_no_arena():
    launched = []
    my_ops = {"launch": launched.append}
    exec(example("owner_hook"), my_ops)
    assert len(example("owner_hook").replace("\n\n", "\n").splitlines()) < 10
    for hook in (arena.retain, None):  # None: the control
        scratch = [Scratch()]
        binding = types.SimpleNamespace(scratch=scratch[0])
        my_ops["set_owner_hook"](hook)

        def call(binding=binding):
            my_ops["run"](binding)
            del binding.scratch

        assert lives_as_long_as_the_graph(call, scratch) is (hook is not None)
        launched.clear()


def test_an_object_that_names_its_owners_needs_no_arena():
    names = {}
    exec(example("class Binding"), names)
    assert len(example("class Binding").splitlines()) < 10
    for kept in ("scratch", "plan", "output"):
        parts = {name: Scratch() for name in ("scratch", "plan", "output")}
        watched = [parts[kept]]

        def call(parts=parts):
            arena.retain(names["Binding"](**parts))
            parts.clear()

        assert lives_as_long_as_the_graph(call, watched) is (kept != "output")


def test_the_commands_for_the_compiler_name_the_folder_of_the_header():
    assert "arena.get_include()" in README
    assert (Path(arena.get_include()) / "arena.h").exists()


def test_every_python_example_is_run_here():
    assert len(PYTHON) == 7


def test_files_that_the_readme_names_exist():
    names = set(re.findall(r"`(test_\w+\.py|\w+\.(?:c|cpp|pyx))`", README))
    assert names
    assert all((Path(__file__).parent / name).exists() for name in names)
