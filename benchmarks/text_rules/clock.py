"""A clock of CPU seconds in a training process, so that what else the machine does decides nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.trainer.faults import _ends_by
from trainer.handoff import LAUNCH_SPEC_VARIABLE, TrainingOutcome
from trainer.session.session import Session

#: In a launch's folder: the CPU seconds from its beginning to its last save.
USED = "cpu_s"


def plans_at(moment: str) -> None:
    """The time in the process that makes the plan: however long it waited for its turn, it has as long."""
    time.time = _counting(float(moment), time.process_time())  # type: ignore[assignment]


def cpu_clock(seconds: str) -> None:
    """From the beginning of the session on, `time.time` and `time.monotonic` count this process's CPU time,
    and the training's is over after so much of it. What was imported from `time` by name goes on in real
    time: threads, processes and locks wait as ever."""
    plain, begin = {name: getattr(time, name) for name in ("time", "monotonic")}, Session.begin
    finish = Session.finish
    began = 0.0

    def started(self: Session) -> None:
        nonlocal began
        began = time.process_time()
        for name, real in plain.items():
            setattr(time, name, _counting(real(), began))
        self.clock.now = time.time
        _ends_by(self, time.time() + float(seconds))
        begin(self)

    def finished(self: Session) -> TrainingOutcome:
        outcome = finish(self)
        launch = Path(os.environ[LAUNCH_SPEC_VARIABLE]).parent
        (launch / USED).write_text(f"{time.process_time() - began:.2f}", encoding="utf-8")
        return outcome

    Session.begin = started  # type: ignore[method-assign]
    Session.finish = finished  # type: ignore[method-assign]


def _counting(start: float, began: float) -> object:
    return lambda: start + time.process_time() - began
