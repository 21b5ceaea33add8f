"""How a run of the tests ends: its exit code, and its last line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import run_tests
from tests.doubles.each import each

pytestmark = pytest.mark.process


CASE = '<testcase time="1"><properties><property name="tier" value="fast"/></properties>{}</testcase>'
PASSED, FAILED = CASE.format(""), CASE.format('<failure message="no"/>')
SKIPPED = CASE.format('<skipped message="no pm2"/>')
DIES = "import os; os.kill(os.getpid(), 9)"


def writes(cases: str, code: int, more: str = "") -> str:
    """A program in pytest's place, which finds the path of its report in its arguments."""
    return f"import sys; open(sys.argv[1], 'w').write({f'<a>{cases}</a>'!r}); {more} sys.exit({code})"


@each(
    ("daemon", "training", "code", "expected"),
    [
        (writes(PASSED + SKIPPED, 0), writes(PASSED, 0), 0, "2 passed, 0 failed, 1 skipped"),
        (writes(PASSED + FAILED, 1), writes(PASSED, 0), 1, "2 passed, 1 failed, 0 skipped"),
        (writes(PASSED, 0), writes(FAILED, 1), 1, "1 passed, 1 failed, 0 skipped"),
        (writes("", 5), writes("", 5), 1, "0 passed, 0 failed, 0 skipped"),
        (writes(PASSED, 3), writes(PASSED, 0), 1, "2 passed, 0 failed, 0 skipped"),
        (writes(PASSED, 0), "raise SystemExit(1)", 1, "1 passed, 0 failed, 0 skipped"),
        (DIES, writes(PASSED, 0), 1, "1 passed, 0 failed, 0 skipped"),
        (writes(PASSED, 0), writes("<cut", 0, DIES), 1, "1 passed, 0 failed, 0 skipped"),
    ],
)
def test_the_last_line_has_the_totals_and_only_success_exits_with_0(
    daemon: str,
    training: str,
    code: int,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for report in tmp_path.iterdir():
        report.unlink()

    def program(text: str) -> object:
        return lambda _which, _training, report, _seed: [sys.executable, "-c", text, str(report)]

    monkeypatch.setattr(run_tests, "daemon_command", program(daemon))
    monkeypatch.setattr(run_tests, "training_command", program(training))
    monkeypatch.setattr(run_tests, "has_axolotl", lambda _: True)
    assert run_tests.run("test", sys.executable, tmp_path) == code
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == expected
    failed_itself = code == 1 and "1 failed" not in expected and "0 passed" not in expected
    assert ("ended with" in shown) == failed_itself


def test_continuous_integration_needs_a_training_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = [sys.executable, "-c", writes(PASSED, 0), str(tmp_path / "daemon.xml")]
    monkeypatch.setattr(run_tests, "daemon_command", lambda *_: report)
    for setting, code in (("true", 1), ("", 0)):
        monkeypatch.setitem(os.environ, "CI", setting)
        assert run_tests.run("test", "", tmp_path) == code
        shown = capsys.readouterr().out
        assert "left out: no training environment" in shown
        assert shown.splitlines()[-1] == "1 passed, 0 failed, 0 skipped"


def test_bytecode_is_cached_outside_the_tree_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = "import os; print([os.environ.get('PYTHON' + n) for n in ('DONTWRITEBYTECODE', 'PYCACHEPREFIX')],"
    command = [sys.executable, "-c", f"{shown} file=open({str(tmp_path / 'shown')!r}, 'w'))"]
    monkeypatch.setattr(run_tests, "daemon_command", lambda *_: command)
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    for setting, prefix in (("1", f"{sys.prefix}/pycache"), ("", None)):
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", setting)
        run_tests.run("fast", "", tmp_path)
        assert (tmp_path / "shown").read_text() == f"{[None, prefix]}\n"


def test_a_child_has_time_to_end_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input(); raise SystemExit(2)"], stdin=subprocess.PIPE
    ) as child:
        wait, polls = child.wait, []

        def interrupted() -> int:
            polls.append(child.poll())
            if len(polls) == 1:
                raise KeyboardInterrupt
            child.stdin.write(b"\n")
            child.stdin.close()
            return wait()

        monkeypatch.setattr(child, "wait", interrupted)
        assert run_tests.wait_for(child) == 2
        monkeypatch.undo()
    assert polls == [None, None]


def test_changed_code_is_tested_by_its_mirror_and_else_by_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def git(*words: str) -> None:
        person = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *person, *words], cwd=tmp_path, check=True, capture_output=True)

    mirror = ["tests/core/a/test_fit.py", "tests/core/a/test_fit_twice.py", "tests/core/a/test_other.py"]
    for name in ("core/a/fit.py", "core/b/alone.py", "core/c/same.py", "tests/core/b/test_b.py", *mirror):
        put(name, "1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    changed = ("core/a/fit.py", "core/b/alone.py", "tests/core/a/test_new.py", "page.md")
    for name in (*changed, "tests/trainer/test_text.py", "tests/miner/test_trainer_image.py"):
        put(name, "2")
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    monkeypatch.delenv("BASE", raising=False)
    run_tests.changed_tests.cache_clear()
    try:
        core = [*mirror[:2], "tests/core/a/test_new.py", "tests/core/b"]
        more = ["tests/miner/test_trainer_image.py", "tests/trainer/test_text.py"]
        assert run_tests.changed_tests() == sorted([*core, *more])
        assert run_tests.trainers("changed") == more[1:]
    finally:
        run_tests.changed_tests.cache_clear()
