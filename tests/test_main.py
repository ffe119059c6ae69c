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
