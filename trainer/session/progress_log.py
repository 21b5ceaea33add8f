"""Report what happens: events in progress.jsonl and as lines of the log, speed between two of them, and
TensorBoard scalars if asked for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from core.planning.plan import TrainingPlan
from core.planning.time.calibration import peak_speed
from core.runs.progress import (
    EvalEvent,
    EventPrinter,
    NoteEvent,
    ProgressEvent,
    StageEvent,
    StepEvent,
    encode_event,
)

log = logging.getLogger(__name__)


def _print(text: str) -> None:
    # A closed log must not end a training.
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)  # noqa: T201 - the log of a run is the output of its processes


class ProgressLog:
    """Appends events to progress.jsonl and prints them for people. Each line is one write, so those of
    several processes never mix."""

    def __init__(self, path: Path | None) -> None:
        """Without a `path`, report nothing: such ranks are not the first."""
        self.path = path
        self._printed = EventPrinter(_print)

    def write(self, event: ProgressEvent) -> None:
        """A full disk must not end a training that could still finish: the loss of the event is logged."""
        if self.path is None:
            return
        self._printed(event)
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, encode_event(event))
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning("%s: event %s is lost: %s", self.path, event.event, error)

    def stage(self, stage: str, text: str = "") -> None:
        self.write(StageEvent(t=time.time(), stage=stage, text=text[:1000]))

    def note(self, kind: str, text: str) -> None:
        self.write(NoteEvent(t=time.time(), kind=kind, text=text[:2000]))


class SpeedReading(NamedTuple):
    tokens_s: float | None = None
    samples_s: float | None = None
    mfu: float | None = None
    wait: float | None = None


@dataclass
class SpeedMeter:
    """Measures speed on one rank; the others are as fast, since every step waits for the slowest."""

    plan: TrainingPlan
    now: Callable[[], float] = time.monotonic
    tokens: int = 0
    #: As `BatchPlan` counts them.
    samples: int = 0
    waited: float = 0.0
    #: Evaluations and saves between two logs are no slowness of the steps.
    paused: float = 0.0
    _since: float | None = field(default=None)

    def read(self) -> SpeedReading:
        """Since the last reading; empty the first time."""
        now = self.now()
        since, self._since = self._since, now
        tokens, samples, waited, paused = self.tokens, self.samples, self.waited, self.paused
        self.tokens, self.samples, self.waited, self.paused = 0, 0, 0.0, 0.0
        seconds = (now - since if since is not None else 0.0) - paused
        if seconds <= 0:
            return SpeedReading()
        world = self.plan.batch.world_size
        # Nothing counted is unknown, not zero: training on rewards has batches without tokens.
        tokens_s = tokens * world / seconds if tokens else None
        samples_s = samples * world / seconds if samples else None
        rate = tokens_s if self.plan.task.task_type.is_text else samples_s
        mfu = min(rate / self._peak, 1.0) if rate is not None and self._peak else None
        return SpeedReading(tokens_s, samples_s, mfu, min(waited / seconds, 1.0))

    @cached_property
    def _peak(self) -> float | None:
        """Peak speed; computing it takes milliseconds with many layers that have ranks of their own."""
        return peak_speed(self.plan)


_STEP_SCALARS = ("loss", "lr", "grad_norm", "tokens_s", "samples_s", "mfu", "memory_bytes", "wait")


class TensorBoardLog(ProgressLog):
    """Writes everything twice: to the file and as scalars."""

    def __init__(self, log: ProgressLog, writer: Any) -> None:
        super().__init__(log.path)
        self._writer = writer

    def write(self, event: ProgressEvent) -> None:
        super().write(event)
        if isinstance(event, StepEvent):
            values = {name: getattr(event, name) for name in _STEP_SCALARS}
            self._add_scalars(
                {name: value for name, value in values.items() if value is not None}, event.step
            )
        elif isinstance(event, EvalEvent):
            self._add_scalars({event.score.metric: event.score.value}, event.score.step)

    def _add_scalars(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


def with_tensorboard(progress: ProgressLog, folder: Path) -> ProgressLog:
    """The log itself, with a note, where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        progress.note("tensorboard", "asked for and not installed: pip install tensorboard beside torch")
        return progress
    # Written out with every evaluation at the latest; a run that is killed loses half a minute of scalars.
    return TensorBoardLog(progress, SummaryWriter(str(folder), flush_secs=30))
