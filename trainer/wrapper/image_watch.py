"""An image engine at work, seen from outside: it neither keeps time nor says when a file is good to take."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from core.choices import Schedule
from core.evaluation import Era
from core.plan import TrainingPlan
from core.progress import StepEvent, SubmissionEvent
from core.run_files import RunEnd, RunSpec
from core.submission.faults import BadSubmission
from core.tasks import TaskType
from core.units import show_seconds
from trainer.callbacks.report import Report
from trainer.callbacks.submission import Submission
from trainer.wrapper.files import LAST, newest_whole, placing
from trainer.wrapper.steps import Step, is_broken, step_of
from trainer.wrapper.supervise import Verdict

#: Lines of progress at most this often, and looks for new files.
SAY_S, LOOK_S = 1.0, 2.0
#: Losses in a row that are no numbers: the running mean that engines show never recovers from one.
MOST_NAN = 5
#: A forecast is made after so many steps, and is believed when it is off by more than this part of what is
#: left.
TIMED_STEPS, SLACK = 20, 0.05
#: A training is begun anew with fewer steps only while little of it is done.
EARLY = 0.25
_OOM = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
_NO_DATA = re.compile(r"No data found|画像がありません|no images? (were )?found", re.IGNORECASE)


@dataclass
class ImageWatch:
    run: RunSpec
    plan: TrainingPlan
    output: Path
    #: When the engine is ended, whatever it is at.
    hard_end: float
    report: Report
    now: Callable[[], float] = time.time
    #: The plan's steps do not fit, and so many do.
    refit: int | None = None
    may_refit: bool = True
    step: Step | None = None
    out_of_memory: bool = False
    no_data: bool = False
    placed: str | None = None
    #: Why the newest file is not the submission.
    problem: OSError | BadSubmission | None = None
    _nan: int = 0
    _timed: list[tuple[int, float]] = field(default_factory=list)
    _said: float = -math.inf
    _looked: float = -math.inf

    def __post_init__(self) -> None:
        place = Path(self.run.submission_dir)
        base = Path(self.run.model_path)
        self.submission = Submission(place, self.run.model_id, base, TaskType.IMAGE)
        # Validators of tournaments put the whole folder under `checkpoints/` themselves.
        self._name = LAST if self.run.era is Era.TOURNAMENTS else f"checkpoint/{LAST}"

    def heard(self, line: str) -> None:
        """Every line of the engine, in the reader's thread."""
        self.out_of_memory = self.out_of_memory or _OOM.search(line) is not None
        self.no_data = self.no_data or _NO_DATA.search(line) is not None
        step = step_of(line, self.plan.steps.total)
        if step is None:
            return
        self.step = step
        self._nan = self._nan + 1 if is_broken(step) else 0
        if not self._timed or step.step > self._timed[-1][0]:
            self._timed = [*self._timed[-4 * TIMED_STEPS :], (step.step, self.now())]
        if self.now() - self._said >= SAY_S:
            self._said = self.now()
            self._say(step)

    def _say(self, step: Step) -> None:
        loss, rate = (one if one is not None and math.isfinite(one) else None for one in (step.loss, step.lr))
        seconds = self.step_s
        ends = self.now() + (step.total - step.step) * seconds if seconds else None
        event = StepEvent(t=self.now(), step=step.step, total=step.total, loss=loss, lr=rate, ends_at=ends)
        self.report.say(event)

    @property
    def step_s(self) -> float | None:
        """Of the steps seen lately, the first ones of all left out: they load and compile."""
        timed = [one for one in self._timed if one[0] > 2]
        if len(timed) < 2 or timed[-1][0] - timed[0][0] < TIMED_STEPS:
            return None
        return (timed[-1][1] - timed[0][1]) / (timed[-1][0] - timed[0][0])

    def look(self) -> Verdict | None:
        """Called all the time while the engine runs."""
        if self.now() - self._looked >= LOOK_S:
            self._looked = self.now()
            self.place()
        if self._nan >= MOST_NAN:
            return Verdict(RunEnd.NAN, f"the loss is no number since step {self.step and self.step.step}")
        return self._too_slow()

    def place(self) -> None:
        """The newest whole file becomes the submission. What is in the way of that is told and tried again
        at the next look: a full disk, or a file that the engine removes meanwhile, ends no training."""
        try:
            self._place()
        except (OSError, BadSubmission) as error:
            if str(error) != str(self.problem):
                self.report.note("submission", f"cannot be put in place: {error}")
            self.problem = error
        else:
            self.problem = None

    def _place(self) -> None:
        newest = newest_whole(self.output)
        if newest is None or (name := f"{newest} {newest.stat().st_mtime_ns}") == self.placed:
            return
        self.submission.put(placing(newest, self._name), None)
        self.placed = name
        self.report.say(SubmissionEvent(t=self.now(), step=self.step.step if self.step else 0))

    def _too_slow(self) -> Verdict | None:
        """A schedule that decays must end with the training: then fewer steps from the start are better
        than a cut. One that stays constant loses nothing by it."""
        seconds, step = self.step_s, self.step
        if not self.may_refit or seconds is None or step is None:
            return None
        left = self.hard_end - self.now()
        needed = (step.total - step.step) * seconds
        constant = self.plan.optimizer.schedule in (Schedule.CONSTANT, Schedule.CONSTANT_WITH_WARMUP)
        if constant or needed <= left * (1 + SLACK) or step.step > EARLY * step.total:
            return None
        # What it took to get here it takes again: loading, encoding, compiling.
        began = self._timed[0][1] - self._timed[0][0] * seconds
        start_s = max(began - self.started, 0.0)
        fits = int((left - start_s) / seconds * (1 - SLACK))
        if fits < 2 * step.step:
            return None
        self.refit = fits
        return Verdict(RunEnd.CLOCK, f"{seconds:.3g} s a step: {fits:,} steps fit into {show_seconds(left)}")

    started: float = field(default_factory=time.time)
