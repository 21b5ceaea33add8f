"""What a container prints: in a tournament events without the plan, with a daemon everything."""

# Once: it needs nothing of the training stack.

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from core.domain.evaluation import Era
from core.runs.progress import NoteEvent, StageEvent, StepEvent, SubmissionEvent
from core.runs.run_files import RunEnd, RunSpec, TrainerExitCode
from tests.trainer.runner import test_main
from tests.trainer.runner.test_main import exit_of, run_in, submit
from trainer.runner.main import LOG_FILE, error_line
from trainer.session.progress_log import ProgressLog

this_process_is_left_alone = test_main.this_process_is_left_alone


def train(run: RunSpec) -> None:
    """As an engine does it: everything of the plan on both streams."""
    os.write(1, b'{\n  "learning_rate": 0.0002,\n  "lora_r": 64\n}\n')
    os.write(2, b"{'loss': 2.1, 'learning_rate': 2e-04}\n")
    progress = ProgressLog(Path(run.progress_path))
    now = time.time()
    progress.write(StageEvent(t=now, stage="data", text="rows are read and tokenised"))
    progress.write(StageEvent(t=now, stage="train", text="kohya, 1,200 steps"))
    progress.write(StepEvent(t=now, step=1, total=1200, lr=2e-4, loss=2.0))
    progress.write(StageEvent(t=now, stage="train"))
    progress.write(NoteEvent(t=now, kind="plan", text="rank 64"))
    progress.write(StageEvent(t=now, stage="search", text="learning rates are tried out"))
    submit(run)
    progress.write(SubmissionEvent(t=now, step=1))
    progress.write(SubmissionEvent(t=now, step=2))


def test_a_tournament_shows_one_line_per_event_and_keeps_the_rest(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(tmp_path)
    with open(1, "w", closefd=False) as output:  # as outside of tests: pytest's writes past descriptor 1
        monkeypatch.setattr("sys.stdout", output)
        assert exit_of(run, train) == 0
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "trainer: stage: data",
        "trainer: stage: train",
        "trainer: a submission is in its place",
        "trainer: a better submission is in its place",
        "trainer: ended: a submission is in its place",
    ]
    kept = (Path(run.work_dir) / LOG_FILE).read_text()
    assert '"lora_r": 64' in kept
    assert "plan: rank 64" in kept
    assert "'learning_rate': 2e-04" in kept


def test_a_failure_names_its_error_in_the_last_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def act(run: RunSpec) -> None:
        raise KeyError("down_blocks")

    assert exit_of(run_in(tmp_path), act) == TrainerExitCode.CRASHED
    (line,) = capfd.readouterr().err.splitlines()
    assert line == f"trainer: Error: {RunEnd.CRASHED}: KeyError: 'down_blocks'"


def test_with_a_daemon_everything_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = run_in(tmp_path, era=Era.OFFERS, plan_path=str(tmp_path / "plan.json"))
    assert exit_of(run, train) == 0
    assert '"lora_r": 64' in capfd.readouterr().out
    assert not (Path(run.work_dir) / LOG_FILE).exists()


@pytest.mark.parametrize(
    ("detail", "line"),
    [
        ("", "no details"),
        ("the disk is full", "the disk is full"),
        ("the engine ended with 1; its last words:\nValueError: no\nbye", "ValueError: no"),
    ],
)
def test_of_a_failure_the_line_that_says_most_is_shown(detail: str, line: str) -> None:
    assert error_line(detail) == line
