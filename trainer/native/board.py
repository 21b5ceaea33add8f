"""The progress events once more as TensorBoard's scalars, for those who look there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core.progress import EvalEvent, Event, StepEvent
from trainer.callbacks.report import Report

_OF_A_STEP = ("loss", "lr", "grad_norm", "tokens_s", "mfu", "memory_bytes", "wait")


class Board(Report):
    """Says everything twice."""

    def __init__(self, report: Report, writer: Any) -> None:
        super().__init__(report.path)
        self._writer = writer

    def say(self, event: Event) -> None:
        super().say(event)
        if isinstance(event, StepEvent):
            values = {name: getattr(event, name) for name in _OF_A_STEP}
            self._write({name: value for name, value in values.items() if value is not None}, event.step)
        elif isinstance(event, EvalEvent):
            self._write({event.score.metric: event.score.value}, event.score.step)

    def _write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


def with_board(report: Report, folder: Path) -> Report:
    """The report itself, with a note, where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        report.note("tensorboard", "asked for and not installed: pip install tensorboard beside torch")
        return report
    # Written out with every evaluation at the latest; a run that is killed loses half a minute of scalars.
    return Board(report, SummaryWriter(str(folder), flush_secs=30))
