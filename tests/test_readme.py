"""The README's code runs as it stands, and its commands are the ones that are tested."""

import re
import weakref
from pathlib import Path

import pytest

import arena

README = (Path(__file__).parent.parent / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.gpu
def test_the_example_keeps_its_owner_as_long_as_its_graph():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    example, seen = PYTHON[0], {}
    watched = example.replace("graph = torch", "watch(table)\ngraph = torch").replace(
        "graph.replay()", "graph.replay(); during()"
    )
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
    exec(PYTHON[2], {"my_op": lambda stream: retained.append(arena.retain(object(), stream))})
    assert retained == [True]


def test_the_install_example_runs():
    pytest.importorskip("torch")
    exec(PYTHON[1], {})
    import arena.torch

    assert arena.torch.installed()
    arena.torch.uninstall()


def test_every_python_example_is_run_here():
    assert len(PYTHON) == 3


def test_files_that_the_readme_names_exist():
    names = set(re.findall(r"`(test_\w+\.py|\w+\.c)`", README))
    assert names
    assert all((Path(__file__).parent / name).exists() for name in names)
