"""Requests of the control file in a running training: read on rank 0, carried out on all ranks between the
same two steps, each once. `MicroChange` is the engine's part of the answer.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from core.runs.progress import ControlEvent
from core.runs.run_files import RunControl, read_control
from trainer.session.clock import RunClock
from trainer.session.progress_log import ProgressLog

#: In a pause between steps a request to stop is looked for this often.
PAUSE_CHECK_S = 0.5


class MicroChange(NamedTuple):
    """Result of a request for another micro-batch."""

    #: Sequences of a pass from now on.
    micro: int
    #: Why it is not what was asked; empty: it is.
    refusal: str = ""


class ControlFile:
    """The newest request, read when the file has changed, at most every `every_s`."""

    def __init__(self, path: Path | None, note: Callable[[str, str], None], every_s: float = 1.0) -> None:
        """Without a `path`, no request ever comes. `note` gets a kind and a text."""
        self._path, self._note, self._every = path, note, every_s
        self._next = 0.0
        self._seen: tuple[int, ...] | None = None
        self._answered = 0

    def take(self) -> RunControl | None:
        """A request that has not been taken yet; older numbers than the last one are none."""
        if self._path is None or time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + self._every
        identity = _identity(self._path)
        if identity is None or identity == self._seen:
            return None
        self._seen = identity
        control = read_control(self._path)
        if control is None:
            self._note("control", f"{self._path.name} cannot be read as a request: it is ignored")
        if control is None or control.number <= self._answered:
            return None
        self._answered = control.number
        return control


def release_memory() -> None:
    """Between passes of different sizes: what the new ones need shows only once the old ones' memory is given
    back and their peak forgotten."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def wait_for_gpu() -> None:
    """Until the step that was queued last is computed: before that a pause would be none."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass
class Controls:
    """The requests in force. `clock.duty` is part of them: forecasts need it as well."""

    #: Sets the most sequences in a pass of the engine, from the next step on; None restores the first number.
    regroup: Callable[[int | None], MicroChange]
    clock: RunClock
    progress: ProgressLog
    #: Sequences of a pass on one GPU.
    micro: int
    #: The last request; 0: none.
    number: int = 0

    def begin(self, planned: int) -> None:
        """Report the size of passes, where the engine found that a larger one than planned fits."""
        if self.micro != planned:
            self._report(True, 0, f"sequences in a pass {planned} → {self.micro}")

    def pause(self, seconds: float, sleep: Callable[[float], None], stop: Callable[[], bool]) -> None:
        """Leave the GPU idle after a step that took so long, as the duty says. A request to stop ends it."""
        left = seconds * (1 / self.clock.duty - 1)
        while left > 0 and not stop():
            sleep(min(left, PAUSE_CHECK_S))
            left -= PAUSE_CHECK_S

    def carry_out(self, control: RunControl, step: int) -> None:
        micro, duty = self.micro, self.clock.duty
        change = self.regroup(control.micro)
        self.number, self.clock.duty = control.number, control.duty
        self._set_micro(change.micro)
        said = [change.refusal] if change.refusal else []
        said += [f"sequences in a pass {micro} → {self.micro}"] if micro != self.micro else []
        said += [f"duty {duty:.3g} → {control.duty:.3g}"] if duty != control.duty else []
        self._report(not change.refusal, step, "; ".join(said) or "nothing to change")

    def undo_growth(self, micro: int, step: int, reason: str) -> None:
        """The engine has gone back to a smaller micro-batch in the middle of a step."""
        self._set_micro(micro)
        self._report(False, step, reason)

    def _set_micro(self, micro: int) -> None:
        if micro != self.micro:
            self.micro = micro
            self.clock.speed_changed()

    def _report(self, applied: bool, step: int, text: str) -> None:
        event = ControlEvent(
            t=self.clock.now(),
            number=self.number,
            applied=applied,
            micro=self.micro,
            duty=self.clock.duty,
            text=f"after step {step:,}: {text}",
        )
        self.progress.write(event)


def _identity(path: Path) -> tuple[int, ...] | None:
    """Identify a plain file, so that a new one is recognised. Return None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size) if stat.S_ISREG(status.st_mode) else None
