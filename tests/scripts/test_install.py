"""Which build of torch is installed, and what is shown meanwhile."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import install


@pytest.mark.parametrize(
    ("gpu", "offered", "build", "expected"),
    [
        (False, True, "cpu", "for the CPU: 0.3 GB"),
        (False, False, "cuda", "index of CPU builds> make demo"),
        (True, True, "cuda", "for CUDA: 2.9 GB"),
    ],
    ids=["a wheel for the CPU", "plain PyPI", "a GPU"],
)
def test_the_build_fits_the_machine_and_its_size_is_shown_first(
    gpu: bool,
    offered: bool,
    build: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands: list[list[str]] = []

    def record(_folder: Path, _what: str, arguments: list[str]) -> int:
        assert expected in capsys.readouterr().out
        commands.append(arguments)
        return 0

    monkeypatch.setattr(install.shutil, "which", lambda _: "/usr/bin/nvidia-smi" if gpu else None)
    monkeypatch.setattr(install, "is_available", lambda *_: offered)
    monkeypatch.setattr(install, "install", record)
    assert install.install_training(tmp_path, "demo") == 0
    [command] = commands
    assert {"--require-hashes", "requirements/demo.txt", f"requirements/torch-{build}.txt"} <= set(command)
    assert ("requirements/triton.txt" in command) == (build == "cuda")
    assert "requirements/training.txt" not in command


@pytest.mark.parametrize("mine", [True, False])
def test_an_environment_of_another_python_is_kept_and_named(
    mine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the installation and after it, which may scroll the first line away."""
    this = f"python3.{sys.version_info.minor}"
    (tmp_path / "lib" / (this if mine else "python3.9")).mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for tool in ("pip", "python"):
        (tmp_path / "bin" / tool).touch()
    monkeypatch.setattr(install, "install", lambda *_: print("installed") or 0)
    monkeypatch.setattr(sys, "argv", ["install.py", "daemon", str(tmp_path)])
    assert install.main() == 0
    before, *_, after = capsys.readouterr().out.split("installed\n")
    assert before == after
    assert (f"with python3.9; for {this} ({sys.executable}): rm -rf" in after) is not mine
    assert bool(after) is not mine


@pytest.mark.parametrize(
    ("version", "machine", "message"),
    [
        ("3.10.12", "Linux x86_64", "Python 3.11 to 3.13, .* is 3.10.12: set PYTHON="),
        ("3.14.1", "Linux x86_64", "Python 3.11 to 3.13, .* is 3.14.1: set PYTHON="),
        ("3.12.3", "Linux aarch64", "hashes for Linux x86_64, and this is Linux aarch64"),
    ],
)
def test_what_there_are_no_hashes_for_is_refused_and_not_taken_for_a_forgery(
    version: str, machine: str, message: str
) -> None:
    install.check_platform("3.13.0rc1", "Linux x86_64")
    with pytest.raises(SystemExit, match=message):
        install.check_platform(version, machine)


def test_one_line_shows_the_progress_of_an_installation(capsys: pytest.CaptureFixture[str]) -> None:
    progress = install.Progress("demo")
    for line in (
        "WARNING: Location 'file:///simple/torch/' is ignored: it is neither a file nor a directory.",
        "Collecting torch==2.13.0",
        "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (30 kB)",
        "Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (527.4 MB)",
        "Using cached numpy-2.3.5-cp311-cp311-manylinux_2_28_x86_64.whl (16.6 MB)",
    ):
        progress.add(line)
    assert re.fullmatch(r"demo: 2 files, 544 MB, \d+:\d\d, numpy \(17 MB\)", str(progress))
    shown = capsys.readouterr().out
    assert "torch (527 MB)" in shown
    assert "ignored" not in shown
    assert len(shown.splitlines()) == 1


def test_an_environment_without_its_python_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/pip").touch()
    (tmp_path / "bin/python").symlink_to(tmp_path / "removed")
    commands: list[list[object]] = []

    def failing(command: list[object], check: bool) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess([], 1)

    monkeypatch.setattr(install.subprocess, "run", failing)
    with pytest.raises(SystemExit, match="could not be created"):
        install.make_environment(tmp_path)
    assert commands == [[sys.executable, "-m", "venv", "--clear", tmp_path]]
