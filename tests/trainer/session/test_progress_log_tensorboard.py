"""Progress as TensorBoard's scalars."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.utils.tensorboard  # noqa: F401 - what is tested is of use with it only

from core.runs.progress import EvalEvent, NoteEvent, StageEvent, StepEvent, parse_events
from core.runs.run_files import HeldOutScore
from trainer.session.progress_log import ProgressLog, with_tensorboard


def test_events_are_written_twice(tmp_path: Path) -> None:
    progress = with_tensorboard(ProgressLog(tmp_path / "progress.jsonl"), tmp_path / "board")
    progress.write(StepEvent(t=1.0, step=3, loss=2.5, lr=1e-3))
    progress.write(EvalEvent(t=2.0, score=HeldOutScore(value=1.5, metric="dpo_loss", step=3)))
    progress.write(StageEvent(t=3.0, stage="train"))
    progress._writer.flush()  # type: ignore[attr-defined]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert sorted(board.Tags()["scalars"]) == ["dpo_loss", "loss", "lr"]
    assert [(one.step, one.value) for one in board.Scalars("loss")] == [(3, 2.5)]
    said = [line.event for line in parse_events((tmp_path / "progress.jsonl").read_bytes())]
    assert [event.event for event in said if event] == ["step", "eval", "stage"]


def test_without_tensorboard_there_is_a_note_and_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    progress = ProgressLog(tmp_path / "progress.jsonl")
    assert with_tensorboard(progress, tmp_path / "board") is progress
    (line,) = parse_events((tmp_path / "progress.jsonl").read_bytes())
    assert isinstance(line.event, NoteEvent)
    assert "not installed" in line.event.text
