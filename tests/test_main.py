"""`python -m arena`: what it prints is true, and the exit code says so."""

import subprocess
import sys

import pytest

import arena
from arena.__main__ import main


def run(*arguments, cwd):
    """From another folder, as a user would: the package that is imported is the installed one or that on PYTHONPATH."""
    return subprocess.run(
        [sys.executable, "-m", "arena", *arguments], capture_output=True, text=True, timeout=100, cwd=cwd, check=False
    )


def test_doctor_without_a_driver_says_why_and_fails(monkeypatch, capsys):
    def absent():
        raise arena.DriverError("no CUDA driver: libcuda.so.1 is not there")

    monkeypatch.setattr("arena._registry.driver_version", absent)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "no CUDA driver: libcuda.so.1 is not there" in said
    assert "arena.testing" in said


def test_demo_on_the_simulator_says_that_it_is_one(monkeypatch, capsys):
    monkeypatch.setattr("arena.__main__.torch_with_gpu", lambda: "torch is not installed")
    assert main(["demo"]) == 0
    said = capsys.readouterr().out
    assert "simulated driver" in said
    assert "without arena         before the first replay the scratch is freed" in said
    assert "The owner lived exactly as long as the graph." in said


def test_demo_fails_if_what_it_shows_is_not_true(monkeypatch, capsys):
    """The control: an arena that retains nothing."""
    monkeypatch.setattr("arena.__main__.torch_with_gpu", lambda: "torch is not installed")
    monkeypatch.setattr(arena, "retain", lambda owner, stream=None: False)
    assert main(["demo"]) == 1
    assert "not what should have happened" in capsys.readouterr().out


def test_doctor_and_demo_run_as_commands(tmp_path):
    assert run("demo", cwd=tmp_path).returncode == 0
    assert "arena" in run("doctor", cwd=tmp_path).stdout
    assert run(cwd=tmp_path).returncode == 2


SCRIPT = """
import json, os, pickle, sys
import __main__, beside
class Own: pass
print(json.dumps([sys.argv, __name__, __file__, sys.path[0], os.getcwd() in sys.path, vars(__main__) is globals(), __spec__]))
assert type(pickle.loads(pickle.dumps(Own()))) is Own
def later(own: 1 = 2): assert __main__.Own is Own and later.__annotations__ == {"own": 1}
import atexit; atexit.register(later)
"""


@pytest.mark.parametrize("verb", ["audit", "report"])
def test_a_script_finds_what_it_would_find_without_arena(tmp_path, verb):
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "scripts" / "beside.py").write_text("")
    asked = [str(script.relative_to(tmp_path)), "--html", "a b"]
    plain = subprocess.run([sys.executable, *asked], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True)
    done = run(verb, *asked, cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, plain.stdout.strip()), done.stderr
    assert "Error" not in done.stderr


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no way')", 1, "no way\n"),
        ("raise ValueError('wrong')", 1, 'Traceback (most recent call last):\n  File "{}", line 1, in <module>\n'),
        ("def", 1, '  File "{}", line 1\n'),
    ],
    ids=["exits", "exits with words", "raises", "is no Python"],
)
def test_a_script_that_fails_fails_as_without_arena(tmp_path, script, code, said):
    there = tmp_path / "script.py"
    there.write_text(script)
    done = run("audit", "script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.startswith(said.format(there))
    assert "__main__.py" not in done.stderr
    assert "0 graphs audited, 0 findings" in done.stderr


@pytest.mark.parametrize("verb", ["audit", "report"])
def test_a_script_that_is_not_there_is_no_finding(tmp_path, verb):
    done = run(verb, "nowhere.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"python -m arena: [Errno 2] No such file or directory: '{tmp_path / 'nowhere.py'}'\n"


def test_a_page_that_cannot_be_written_is_told_after_the_report(tmp_path):
    (tmp_path / "script.py").write_text("")
    done = run("report", "--html", "nowhere/page.html", "script.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "0 graphs hold 0 owners" in done.stdout
    assert done.stderr == "python -m arena: [Errno 2] No such file or directory: 'nowhere/page.html'\n"


def test_a_child_that_a_script_forks_leaves_the_telling_to_its_parent(tmp_path):
    body = "import os, sys\nif os.fork():\n    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\nsys.exit(5)"
    (tmp_path / "script.py").write_text(body)
    done = run("audit", "script.py", cwd=tmp_path)
    assert done.returncode == 5
    assert done.stderr.count("0 graphs audited") == 1


@pytest.mark.gpu
def test_doctor_and_demo_on_a_gpu_show_the_real_thing(tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    doctor, demo = run("doctor", cwd=tmp_path), run("demo", cwd=tmp_path)
    assert doctor.returncode == 0, doctor.stdout
    assert "its owner lived as long as the graph" in doctor.stdout
    assert demo.returncode == 0, demo.stdout
    assert torch.cuda.get_device_name() in demo.stdout
    assert "simulated" not in demo.stdout
