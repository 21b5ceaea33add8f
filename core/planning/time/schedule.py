"""The largest training that ends in time: steps, evaluations and checkpoints from the clock.

The profile wants a number of epochs, or its upper limit of them; the clock says how many steps fit between
the first step and the reserve. Evaluations get at most their share of the time: first they become rarer,
then smaller. Nothing here grows when the hours shrink, so more hours never make the training smaller.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

from core.domain.choices import Engine
from core.domain.tasks import TaskType
from core.models.image_families import PictureRecipe
from core.planning.candidate import RunCandidate
from core.planning.time.overheads import checkpoint_bytes, save_seconds
from core.planning.time.sequences import Sequences
from core.planning.time.speed import StepTime, evaluation_seconds, step_time
from core.profile.limits import ProfileLimits
from core.profile.targets import Targets

#: Evaluations of a run whose profile does not say how often.
EVALUATIONS = 10
#: Images to train on where the profile gives neither epochs nor steps.
IMAGES = 2000
#: With fewer rows of text than this, `few_rows_power` allows more passes.
MANY_ROWS = 10_000
#: GRPO evaluates by generating; more prompts than this cost more than they show.
GRPO_EVAL_ROWS = 64
#: Checkpoints during a run without evaluations, at least.
LEAST_SAVES = 4
#: Part of the training time that writing checkpoints may take.
SAVE_SHARE = 0.1
#: With fewer rows than this none are held out.
FEW_ROWS = 40
#: Rows of an evaluation, at least, in a short run: with fewer, chance chooses the checkpoint. For their sake
#: three evaluations may take so many seconds, or twice their share of the steps' time.
LEAST_EVAL_ROWS, LEAST_EVAL_S = 16, 60.0


class RepeatTimes(NamedTuple):
    """Seconds of each step, evaluation and save."""

    step_s: float
    eval_s: float
    save_s: float


class StepSchedule(NamedTuple):
    """The schedule that fits, and what it was cut down from."""

    total: int
    per_epoch: int
    epochs: float
    eval_every: int
    save_every: int
    eval_rows: int
    keep: int
    train_s: float
    eval_s: float
    save_s: float
    #: What was asked for, before the clock and the disk.
    wanted: int
    wanted_epochs: float
    wanted_keep: int

    @property
    def complete(self) -> bool:
        return self.total >= self.wanted


def held_out(task: TaskType, rows: int, targets: Targets) -> int:
    """Rows that evaluate instead of training; validators hold out their own images."""
    if not task.is_text or rows < FEW_ROWS:
        return 0
    most = min(targets.val_rows_max, GRPO_EVAL_ROWS) if task.generates else targets.val_rows_max
    wanted = max(round(rows * targets.val_set_size), min(targets.val_rows_min, rows // 5))
    return min(wanted, most)


def wanted_steps(
    seq: Sequences, effective: int, targets: Targets, limits: ProfileLimits
) -> tuple[int, float]:
    """Steps and epochs that the profile asks for, whatever the clock."""
    per_epoch = steps_per_epoch(seq, effective)
    caps = [steps for steps in (targets.max_steps, limits.max_steps) if steps is not None]
    if targets.num_epochs is not None:
        steps = targets.num_epochs * per_epoch
    elif seq.images:
        # An epoch of images takes moments, so they are counted in steps.
        steps = math.inf if caps else max(limits.max_epochs * per_epoch, IMAGES / effective)
    else:
        steps = limits.max_epochs * (MANY_ROWS / min(max(seq.rows, 1), MANY_ROWS)) ** limits.few_rows_power
        steps *= per_epoch
    wanted = max(round(min([steps, *caps])), 1)
    return wanted, wanted / per_epoch


def steps_per_epoch(seq: Sequences, effective: int) -> int:
    """The last batch of an epoch may be smaller, but it counts as a step."""
    return max(math.ceil(seq.per_epoch / effective), 1)


def repeat_times(
    s: RunCandidate, seq: Sequences, eval_rows: int, slowness: float = 1.0
) -> tuple[RepeatTimes, StepTime]:
    """`slowness`: how long earlier runs of this shape took, relative to the prior."""
    step = step_time(s, seq.work(s.micro))
    evaluation = evaluation_seconds(s, eval_rows, seq.work(s.micro), seq.row_tokens * seq.sides)
    return RepeatTimes(step.seconds * slowness, evaluation * slowness, save_seconds(s)), step


def fit_schedule(
    s: RunCandidate,
    seq: Sequences,
    rate: RepeatTimes,
    eval_rows: int,
    seconds: float,
    targets: Targets,
    limits: ProfileLimits,
    disk: float = math.inf,
) -> StepSchedule:
    """The most steps, with their evaluations and checkpoints, that `seconds` and `disk` hold."""
    effective = s.effective
    wanted, epochs = wanted_steps(seq, effective, targets, limits)
    per_epoch = steps_per_epoch(seq, effective)
    eval_s, rows = (rate.eval_s, eval_rows) if eval_rows else (0.0, 0)
    eval_least = _least(eval_s, limits.eval_share, rate)
    save_least = _least(rate.save_s, SAVE_SHARE, rate)
    if eval_least > max(wanted // 2, 1):  # not even two would fit their share: evaluate fewer rows
        least = _least_rows(rate, rows, limits.eval_share, wanted)
        rows = max(int(rows * max(wanted // 2, 1) / eval_least), least, 1)
        eval_s = 2.0 + (eval_s - 2.0) * rows / eval_rows
        eval_least = _least(eval_s, limits.eval_share, rate)
    save_asked = _save_interval_asked(s, targets, per_epoch)
    eval_asked = targets.eval_steps if rows else save_asked
    cadence = Cadence(eval_asked, save_asked, eval_least, save_least, eval_s)
    total = most_steps(wanted, rate, cadence, seconds)
    if not rows:
        cadence = _early_saves(cadence, total)
    asked = cadence.eval_asked or math.ceil(total / EVALUATIONS)
    if rows and cadence.eval_asked and targets.early_stopping_patience and total:
        patient = cadence._replace(evals=2 * targets.early_stopping_patience)
        if total * rate.step_s + _overhead(total, rate, patient) <= seconds:
            asked = min(asked, math.ceil(total / patient.evals))
    eval_every = min(max(asked, eval_least, 1), max(total, 1))
    save_every = save_interval(cadence, eval_every, total)
    keep = _keep(s, targets, min(disk, limits.checkpoint_disk if limits.checkpoint_disk else math.inf))
    return StepSchedule(
        total=total,
        per_epoch=per_epoch if seq.per_epoch else 0,
        epochs=total / per_epoch if seq.per_epoch else 0.0,
        eval_every=eval_every,
        save_every=save_every,
        eval_rows=rows,
        keep=keep,
        train_s=total * rate.step_s,
        # Axolotl evaluates once before the first step too.
        eval_s=(repeat_count(total, eval_every) + 1) * eval_s if total else 0.0,
        save_s=repeat_count(total, save_every) * rate.save_s,
        wanted=wanted,
        wanted_epochs=epochs,
        wanted_keep=targets.save_total_limit,
    )


def picture_schedule(
    s: RunCandidate, seq: Sequences, rate: RepeatTimes, seconds: float, recipe: PictureRecipe
) -> StepSchedule:
    """Fill `seconds` with steps beside the scores of held-out pictures: the trainer ends them by its curve,
    mostly before."""
    seconds = max(seconds - rate.save_s, 0.0)
    training = seconds * (1 - recipe.evaluation_share)
    total = min(int(training / rate.step_s), recipe.max_steps or sys.maxsize)
    per_epoch = steps_per_epoch(seq, s.effective)
    return StepSchedule(
        total=total,
        per_epoch=per_epoch,
        epochs=total / per_epoch,
        eval_every=max(total, 1),
        save_every=max(total, 1),
        eval_rows=0,
        keep=1,
        train_s=total * rate.step_s,
        eval_s=seconds - training,
        save_s=rate.save_s,
        wanted=total,
        wanted_epochs=total / per_epoch,
        wanted_keep=1,
    )


def _save_interval_asked(s: RunCandidate, targets: Targets, per_epoch: int) -> int | None:
    """Steps between saves. sd-scripts saves by epochs: validators do not recognise its step files."""
    if s.engine is not Engine.KOHYA:
        return targets.save_steps
    return targets.save_every_epochs * per_epoch if targets.save_every_epochs else None


def _early_saves(cadence: Cadence, total: int) -> Cadence:
    """Without evaluations, only these checkpoints can be submitted if the run is cut off."""
    most = max(math.ceil(total / LEAST_SAVES), 1)
    asked = max(min(cadence.save_asked or most, most), cadence.save_least)
    return cadence._replace(eval_asked=asked, save_asked=asked)


def _least(seconds: float, share: float, rate: RepeatTimes) -> int:
    """The least interval in steps for something that may take this share of the time."""
    return max(math.ceil(seconds / (share * rate.step_s)), 1)


def _least_rows(rate: RepeatTimes, rows: int, share: float, wanted: int) -> int:
    """Depends on the steps asked for and not on the clock, so that more hours never mean fewer steps."""
    per_row = max((rate.eval_s - 2.0) / rows, 1e-9)
    seconds = max(2 * share * wanted * rate.step_s, LEAST_EVAL_S) / 3
    return min(rows, LEAST_EVAL_ROWS, int(max(seconds - 2.0, 0.0) / per_row))


def repeat_count(total: int, every: int) -> int:
    """Count occurrences: at every interval, and at the end."""
    return math.ceil(total / every) if total > 0 else 0


class Cadence(NamedTuple):
    """The intervals asked for evaluations and checkpoints, and their least values."""

    eval_asked: int | None
    save_asked: int | None
    eval_least: int
    save_least: int
    eval_s: float
    #: Evaluations, at least, where their share of the time allows: patience means nothing with fewer. They
    #: take no time from the steps.
    evals: int = 0


def most_steps(wanted: int, rate: RepeatTimes, cadence: Cadence, seconds: float) -> int:
    """The most steps in `seconds`, by bisection: the overhead is a bound that never falls with more steps."""
    most = _overhead(wanted, rate, cadence)
    if wanted * rate.step_s + most <= seconds:
        return wanted
    # Without any overhead, and with all of it; one step more and less for rounding.
    high = min(max(int(seconds / rate.step_s) + 1, 0), wanted)
    low = min(max(int((seconds - most) / rate.step_s) - 1, 0), high)
    while low < high:
        middle = (low + high + 1) // 2
        if middle * rate.step_s + _overhead(middle, rate, cadence) <= seconds:
            low = middle
        else:
            high = middle - 1
    return low


def _overhead(total: int, rate: RepeatTimes, cadence: Cadence) -> float:
    evaluations = _at_most(total, cadence.eval_asked, cadence.eval_least)
    evaluations = max(evaluations, min(cadence.evals, math.ceil(total / cadence.eval_least)))
    if cadence.save_asked:
        saves = math.ceil(total / max(cadence.save_asked, cadence.save_least))
    else:
        saves = min(evaluations, math.ceil(total / cadence.save_least))
    # An interval longer than the run is cut to the last evaluation: that checkpoint and the end.
    least = 2 if cadence.eval_s else LEAST_SAVES + 1
    return (evaluations + 1) * cadence.eval_s + max(saves, least) * rate.save_s


def _at_most(total: int, asked: int | None, least: int) -> int:
    """An upper bound on how often something happens in so many steps."""
    if asked:
        return math.ceil(total / max(asked, least))
    return min(EVALUATIONS, math.ceil(total / least))


def save_interval(cadence: Cadence, eval_every: int, total: int) -> int:
    """A multiple of the evaluations: the best checkpoint is chosen among those that were evaluated."""
    asked = max(cadence.save_asked or eval_every, cadence.save_least)
    return max(min(math.ceil(asked / eval_every), total // eval_every), 1) * eval_every


def _keep(s: RunCandidate, targets: Targets, disk: float) -> int:
    """Checkpoints to keep; always one, because without it there is nothing to submit."""
    fitting = disk // max(checkpoint_bytes(s), 1)
    return int(max(min(targets.save_total_limit, fitting), 1))
