"""What is installed, and whether the constraint files allow it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from scripts import lock

ROOT = Path(__file__).parents[2]


def pins(name: str) -> dict[str, str]:
    lines = re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / name).read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in lines}


def test_every_install_line_of_the_dockerfiles_is_found() -> None:
    by_file = {path.name: list(lock.of_dockerfile(path)) for path in (ROOT / "dockerfiles").iterdir()}
    assert [name for name, installs in by_file.items() if not installs] == []
    [daemon] = by_file["miner.dockerfile"]
    assert daemon.requirements == tuple(lock.project()[0])
    assert daemon.constraints == lock.DAEMON
    for name in ("standalone-image-trainer.dockerfile", "standalone-image-toolkit-trainer.dockerfile"):
        [wrapper] = by_file[name]
        assert {"pydantic", "pyyaml"} <= set(wrapper.requirements)
        assert wrapper.constraints == lock.DAEMON
    games, *rewards = by_file["standalone-text-trainer.dockerfile"]
    assert (games.requirements, games.optional) == (("open-spiel==2.0.2", "numba>=0.61"), False)
    assert {"textstat", "langcheck", "detoxify"} == {install.requirements[0] for install in rewards}
    assert all(install.optional for install in rewards)


def test_a_version_asked_for_by_name_is_the_pinned_one() -> None:
    for install in lock.installs():
        for requirement in install.requirements:
            name, _, version = requirement.partition("==")
            if version and install.constraints:
                assert pins(install.constraints)[name] == version, f"{install.name}: {requirement}"


def test_torch_on_cpu_or_cuda_finds_its_compiler_pinned_as_it_wants() -> None:
    training = pins(lock.TRAINING)
    assert {"torch", "triton", "nvidia-nccl-cu13"} <= training.keys()
    assert "+" not in training["torch"]


def answers(stdout: str = "", stderr: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], int(bool(stderr)), stdout, stderr)


@pytest.mark.parametrize(
    ("answer", "code", "expected"),
    [
        (answers("pydantic==1\n"), 0, "18 of 18 installs"),
        (answers("sesame==1\n"), 1, "not in constraints.txt, run make lock: sesame"),
        (answers(stderr="Because a==1 depends on b==2"), 1, "CONFLICT: dev on Python 3.12"),
        (answers(stderr="error: Failed to fetch: https://index.invalid/"), 2, "cannot be reached"),
    ],
    ids=["fits", "unpinned", "conflict", "no network"],
)
def test_a_check_says_what_cannot_be_installed(
    answer: subprocess.CompletedProcess[str],
    code: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wanted = [install for install in lock.installs() if install.constraints == lock.DAEMON]
    monkeypatch.setattr(lock, "installs", lambda: wanted)
    monkeypatch.setattr(lock, "resolve", lambda *_: answer)
    assert lock.check("uv") == code
    assert expected in "".join(capsys.readouterr())


def test_a_failed_optional_install_is_only_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lock, "installs", lambda: [lock.Install("text", ("langcheck",), None, optional=True)])
    monkeypatch.setattr(lock, "resolve", lambda *_: answers(stderr="no solution"))
    assert lock.check("uv") == 0
    assert "its build goes on without it" in capsys.readouterr().err
