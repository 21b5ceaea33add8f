"""Progress as TensorBoard's scalars."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.utils.tensorboard  # noqa: F401 - what is tested is of use with it only

from core.progress import EvalEvent, NoteEvent, StageEvent, StepEvent, events_in
from core.run_files import Score
from trainer.callbacks.report import Report
from trainer.native.board import with_board


def test_what_is_said_is_written_twice(tmp_path: Path) -> None:
    report = with_board(Report(tmp_path / "progress.jsonl"), tmp_path / "board")
    report.say(StepEvent(t=1.0, step=3, loss=2.5, lr=1e-3))
    report.say(EvalEvent(t=2.0, score=Score(value=1.5, metric="dpo_loss", step=3)))
    report.say(StageEvent(t=3.0, stage="train"))
    report._writer.flush()  # type: ignore[attr-defined]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert sorted(board.Tags()["scalars"]) == ["dpo_loss", "loss", "lr"]
    assert [(one.step, one.value) for one in board.Scalars("loss")] == [(3, 2.5)]
    said = [line.event for line in events_in((tmp_path / "progress.jsonl").read_bytes())]
    assert [event.event for event in said if event] == ["step", "eval", "stage"]


def test_without_tensorboard_there_is_a_note_and_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    report = Report(tmp_path / "progress.jsonl")
    assert with_board(report, tmp_path / "board") is report
    (line,) = events_in((tmp_path / "progress.jsonl").read_bytes())
    assert isinstance(line.event, NoteEvent)
    assert "not installed" in line.event.text
