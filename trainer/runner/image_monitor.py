"""Watch an image engine from outside: read its progress bars, and submit each whole file that it leaves.

sd-scripts:   steps:   3%|▎  | 48/1600 [01:02<33:20,  1.29s/it, avr_loss=0.123]
ai-toolkit:   last:   1%|  | 12/2000 [00:30<1:22:00,  2.48s/it, lr: 1.0e-04 loss: 3.456e-01]

Bars that count something else (files, latents, epochs) differ only in names and totals.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from core.domain.choices import Engine, LrSchedule
from core.domain.evaluation import Era
from core.domain.tasks import TaskType
from core.planning.plan import TrainingPlan
from core.planning.time.calibration import flops_utilisation
from core.runs.progress import StepEvent, SubmissionEvent
from core.runs.run_files import RunEnd, RunSpec
from core.submission.faults import BadSubmission
from core.submission.safetensors import BadHeader, read_header
from trainer.runner.supervise import Termination
from trainer.session.progress_log import ProgressLog
from trainer.session.submission import Submission, TrainedSteps

LAST_FILE = "last.safetensors"
_NUMBERED = re.compile(r"last[-_](\d+)\.safetensors")


def whole_files(output: Path) -> list[Path]:
    """Newest first. sd-scripts: `last-000010.safetensors` by epoch; ai-toolkit:
    `last/last_000000250.safetensors` by step; both finally `last.safetensors`. A file that is still being
    written is shorter than its header says."""
    newest_first = sorted(output.rglob("last*.safetensors"), key=_order, reverse=True)
    return [path for path in newest_first if is_whole_file(path)]


def _order(path: Path) -> tuple[bool, int]:
    numbered = _NUMBERED.fullmatch(path.name)
    return path.name == LAST_FILE, int(numbered[1]) if numbered else -1


def _identity(path: Path) -> str:
    return f"{path} {path.stat().st_mtime_ns}"


def is_whole_file(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return bool(read_header(file).tensors)
    except (OSError, BadHeader):
        return False


def link_into_submission(source: Path, name: str) -> Callable[[Path], None]:
    """A function that puts the file into a submission folder under this name. A link costs nothing: engines
    write new files and never change one."""

    def write(folder: Path) -> None:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)

    return write


#: Begins with what few lines have: a pattern that began with the name took minutes over a long odd line.
_BAR = re.compile(r"\d{1,3}%\|[^|]*\|\s*(?P<step>\d{1,9})/(?P<total>\d{1,9})\s*\[(?P<rest>[^\]]*)")
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"
_LOSS = re.compile(rf"(?:avr_loss|loss)\s*[=:]\s*({_NUMBER})", re.IGNORECASE)
_RATE = re.compile(rf"\blr\s*[=:]\s*({_NUMBER})", re.IGNORECASE)


class EngineStep(NamedTuple):
    step: int
    total: int
    loss: float | None = None
    lr: float | None = None


def parse_step(line: str, total: int) -> EngineStep | None:
    """The step that a line reports, of a training with `total` steps; None for every other line."""
    bar = _BAR.search(line)
    if bar is None or int(bar["total"]) != total:
        return None
    # A bar over the latents may have the same total: a bar of the training has a loss, or the engine's name
    # for it.
    loss, rate = _number(_LOSS, bar["rest"]), _number(_RATE, bar["rest"])
    name = line[: bar.start()].rpartition("|")[2].strip().removesuffix(":")
    if loss is None and name != "steps":
        return None
    return EngineStep(int(bar["step"]), total, loss, rate)


def _number(pattern: re.Pattern[str], text: str) -> float | None:
    match = pattern.search(text)
    return float(match[1]) if match else None


def is_broken(step: EngineStep) -> bool:
    return step.loss is not None and not math.isfinite(step.loss)


#: Seconds between two progress events, and between two checks for new files.
LOG_EVERY_S, CHECK_EVERY_S = 1.0, 2.0
#: Losses in a row that are no numbers: the running mean that engines show never recovers from one.
MAX_NAN = 5
#: Steps that the shown speed is the mean of, at least and at most; the very first load and compile.
SHOWN_STEPS, KEPT_STEPS, UNUSUAL_STEPS = 20, 200, 2
_OOM = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
_NO_DATA = re.compile(r"No data found|画像がありません|no images? (were )?found", re.IGNORECASE)


@dataclass
class ImageMonitor:
    run: RunSpec
    plan: TrainingPlan
    output: Path
    progress: ProgressLog
    now: Callable[[], float] = time.time
    step: EngineStep | None = None
    out_of_memory: bool = False
    no_data: bool = False
    placed: str | None = None
    #: What an earlier launch or attempt has submitted: files that are worth less are not.
    earlier: TrainedSteps | None = None
    #: When the engine last wrote a line.
    heard_at: float = 0.0
    #: Why the last file that was tried could not be submitted.
    problem: OSError | BadSubmission | None = None
    #: Files that are no submissions, by name and time.
    refused: set[str] = field(default_factory=set)
    _remarked: set[str] = field(default_factory=set)
    _nan: int = 0
    _timed: list[tuple[int, float]] = field(default_factory=list)
    _logged_at: float = -math.inf
    _checked_at: float = -math.inf

    def __post_init__(self) -> None:
        place = Path(self.run.submission_dir)
        base = Path(self.run.model_path)
        self.submission = Submission(
            place, self.run.model_id, base, TaskType.IMAGE, image_type=self.run.image_type
        )
        # Validators of tournaments put the whole folder under `checkpoints/` themselves.
        self._name = LAST_FILE if self.run.era is Era.TOURNAMENTS else f"checkpoint/{LAST_FILE}"

    def on_line(self, line: str) -> None:
        """Every line of the engine, in the reader's thread."""
        self.heard_at = self.now()
        self.out_of_memory = self.out_of_memory or _OOM.search(line) is not None
        self.no_data = self.no_data or _NO_DATA.search(line) is not None
        step = parse_step(line, self.plan.steps.total)
        if step is None:
            return
        self.step = step
        self._nan = self._nan + 1 if is_broken(step) else 0
        if not self._timed or step.step > self._timed[-1][0]:
            self._timed = [*self._timed[-KEPT_STEPS:], (step.step, self.now())]
        if self.now() - self._logged_at >= LOG_EVERY_S:
            self._logged_at = self.now()
            self._log_step(step)

    def _log_step(self, step: EngineStep) -> None:
        loss, rate = (
            value if value is not None and math.isfinite(value) else None for value in (step.loss, step.lr)
        )
        seconds = self.step_s
        ends = self.now() + (step.total - step.step) * seconds if seconds else None
        images = self.plan.batch.effective / seconds if seconds else None
        event = StepEvent(
            t=self.now(),
            step=step.step,
            total=step.total,
            loss=loss,
            lr=rate,
            samples_s=images,
            mfu=flops_utilisation(self.plan, None, images),
            ends_at=ends,
        )
        self.progress.write(event)

    @property
    def doing(self) -> str:
        """Current activity, for the message that says why it was ended."""
        return f"after step {self.step.step:,}" if self.step and self.step.step else "before the first step"

    @property
    def step_s(self) -> float | None:
        """Over the latest steps, without the very first ones: they load and compile."""
        timed = [stamp for stamp in self._timed if stamp[0] > UNUSUAL_STEPS]
        if len(timed) < 2 or timed[-1][0] - timed[0][0] < SHOWN_STEPS:
            return None
        return (timed[-1][1] - timed[0][1]) / (timed[-1][0] - timed[0][0])

    def check(self) -> Termination | None:
        """Called repeatedly while the engine runs."""
        if self.now() - self._checked_at >= CHECK_EVERY_S:
            self._checked_at = self.now()
            self.place()
        if self._nan >= MAX_NAN:
            return Termination(RunEnd.NAN, f"the loss has been NaN since step {self.step and self.step.step}")
        return None

    def place(self) -> None:
        """Submit the newest complete file. A failure is noted and retried at the next check: a full disk, or
        a file that the engine removes meanwhile, does not end the training. A file that is no submission
        (saved before anything was trained, numbers that are none) is passed over, then and later."""
        try:
            self._place()
        except OSError as error:
            if str(error) != str(self.problem):
                self.progress.note("submission", f"cannot be put in place: {error}")
            self.problem = error

    def _place(self) -> None:
        for path in whole_files(self.output):
            name = _identity(path)
            if name == self.placed:
                return
            if name in self.refused or self._is_behind(path):
                continue
            try:
                self.put(path)
            except BadSubmission as error:
                self.refused.add(name)
                self.problem = error
                self.progress.note("submission", f"{path.name} is passed over: {error}")
            else:
                self.placed, self.problem = name, None
                return

    def _is_behind(self, path: Path) -> bool:
        """Return True if the submission of an earlier launch or attempt is better."""
        return self.earlier is not None and self.trained(path).worth < self.earlier.worth

    def trained(self, path: Path) -> TrainedSteps:
        """Counted in pictures: another launch may have another batch."""
        step = self.step_of(path)
        return TrainedSteps(step, worth(self.plan, step) * self.plan.batch.effective)

    def step_of(self, path: Path) -> int:
        """The step at which a file was saved; sd-scripts counts epochs. The last one is saved at the end."""
        if (numbered := _NUMBERED.fullmatch(path.name)) is None:
            return self.plan.steps.total
        kohya = self.plan.engine is Engine.KOHYA
        return int(numbered[1]) * (self.plan.steps.per_epoch if kohya else 1)

    def put(self, path: Path) -> None:
        """Make a file the submission."""
        trained = self.trained(path)
        self.submission.put(link_into_submission(path, self._name), None, trained)
        self.progress.write(SubmissionEvent(t=self.now(), step=trained.step))
        for remark in self.submission.remarks:
            if str(remark) not in self._remarked:
                self._remarked.add(str(remark))
                self.progress.note("submission", str(remark))


#: A decay may be cut off where its rate has come down to this share of the peak.
LOW_RATE = 0.1
#: A step of a training that is cut off at a high rate is worth this part of one whose decay ends.
CUT_OFF_WORTH = 0.5
_CONSTANT = (LrSchedule.CONSTANT, LrSchedule.CONSTANT_WITH_WARMUP)


def worth(plan: TrainingPlan, step: int) -> float:
    """The steps of a file for a comparison with one of another training."""
    return step * CUT_OFF_WORTH if is_cut_off(plan, step) else step


def is_cut_off(plan: TrainingPlan, step: int) -> bool:
    """Return True if a file of this step comes from the part of a decay where the rate is still high."""
    total = plan.steps.total
    return step < total and not is_constant(plan) and rate_at(plan, step / total) > LOW_RATE


def is_constant(plan: TrainingPlan) -> bool:
    return plan.optimizer.schedule in _CONSTANT


def rate_at(plan: TrainingPlan, part: float) -> float:
    """The rate after this part of the steps as a share of the peak. Other schedules are taken for a cosine,
    which is what ai-toolkit makes of them."""
    if is_constant(plan):
        return 1.0
    part = min(max(part, 0.0), 1.0)
    falls = 1 - part if plan.optimizer.schedule is LrSchedule.LINEAR else (1 + math.cos(math.pi * part)) / 2
    least = plan.optimizer.min_lr_ratio
    return least + (1 - least) * falls
