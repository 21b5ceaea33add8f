"""The largest training that ends in time: steps, evaluations and checkpoints from the clock.

The wish is a number of epochs (the profile's, or its upper limit); the clock says how many steps fit between
the first step and the reserve. Evaluations get at most their share of the time: first they become rarer,
then smaller. Nothing here grows when the hours shrink, so more hours never make the training smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from core.planning.costs import checkpoint_bytes, save_seconds
from core.planning.sequences import Sequences
from core.planning.setup import Setup
from core.planning.speed import StepTime, evaluation_seconds, step_time
from core.profile.targets import Limits, Targets
from core.tasks import TaskType

#: Evaluations of a run whose profile does not say how often.
EVALUATIONS = 10
#: GRPO evaluates by generating; more prompts than this cost more than they tell.
GRPO_EVAL_ROWS = 64
#: Below this many rows none can be spared.
FEW_ROWS = 40


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of the things that repeat."""

    step_s: float
    eval_s: float
    save_s: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """What fits, and what it was cut down from."""

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
    #: Steps that were wished for before the clock had its say.
    wanted: int
    wanted_epochs: float
    wanted_eval_every: int
    wanted_keep: int

    @property
    def complete(self) -> bool:
        return self.total >= self.wanted


def held_out(task: TaskType, rows: int, targets: Targets) -> int:
    """Rows that evaluate instead of training; validators hold out their own pictures."""
    if task is TaskType.IMAGE or rows < FEW_ROWS:
        return 0
    most = min(targets.val_rows_max, GRPO_EVAL_ROWS) if task is TaskType.GRPO else targets.val_rows_max
    return min(round(rows * targets.val_set_size), most)


def wanted_steps(seq: Sequences, effective: int, targets: Targets, limits: Limits) -> tuple[int, float]:
    """Steps and epochs of the whole wish, the clock aside."""
    per_epoch = max(seq.per_epoch / effective, 1e-9)
    caps = [steps for steps in (targets.max_steps, limits.max_steps) if steps is not None]
    if targets.num_epochs is not None:
        steps = targets.num_epochs * per_epoch
    elif targets.max_steps is not None and seq.length and seq.trained == 1.0:
        steps = math.inf  # pictures are counted in steps; an epoch of them is a moment
    else:
        steps = limits.max_epochs * per_epoch
    whole = max(round(min([steps, *caps])), 1)
    return whole, whole / per_epoch


def rates(s: Setup, seq: Sequences, eval_rows: int) -> tuple[Rates, StepTime]:
    step = step_time(s, seq.work(s.micro))
    one_eval = evaluation_seconds(s, eval_rows, seq.work(s.micro), seq.row_tokens * seq.sides)
    return Rates(step.seconds, one_eval, save_seconds(s)), step


def fit_schedule(
    s: Setup,
    seq: Sequences,
    rate: Rates,
    eval_rows: int,
    seconds: float,
    targets: Targets,
    limits: Limits,
) -> Schedule:
    """The most steps, with their evaluations and checkpoints, that `seconds` hold."""
    effective = s.micro * s.accumulation * s.world
    wanted, epochs = wanted_steps(seq, effective, targets, limits)
    per_epoch = max(seq.per_epoch / effective, 1e-9)
    eval_s, rows = (rate.eval_s, eval_rows) if eval_rows else (0.0, 0)
    every_least = math.ceil(eval_s / (limits.eval_share * rate.step_s)) if eval_s else 1
    if every_least > max(wanted // 2, 1):  # not even two would fit their share: smaller ones
        rows = max(int(rows * max(wanted // 2, 1) / every_least), 1)
        eval_s = 2.0 + (eval_s - 2.0) * rows / eval_rows
        every_least = max(math.ceil(eval_s / (limits.eval_share * rate.step_s)), 1)
    total = _most(wanted, rate, eval_s, every_least, seconds, targets)
    asked = targets.eval_steps or max(math.ceil(total / EVALUATIONS), 1)
    eval_every = min(max(asked, every_least), max(total, 1))
    save_every = _save_every(targets, eval_every, total)
    keep = _keep(s, targets, limits)
    return Schedule(
        total=total,
        per_epoch=max(math.ceil(per_epoch - 1e-9), 1) if seq.per_epoch else 0,
        epochs=total / per_epoch if seq.per_epoch else 0.0,
        eval_every=eval_every,
        save_every=save_every,
        eval_rows=rows,
        keep=keep,
        train_s=total * rate.step_s,
        eval_s=_count(total, eval_every) * eval_s,
        save_s=_count(total, save_every) * rate.save_s,
        wanted=wanted,
        wanted_epochs=epochs,
        wanted_eval_every=targets.eval_steps or eval_every,
        wanted_keep=targets.save_total_limit,
    )


def _count(total: int, every: int) -> int:
    """On the way, and the last one at the end."""
    return math.ceil(total / every) if total > 0 else 0


def _most(
    wanted: int, rate: Rates, eval_s: float, every_least: int, seconds: float, targets: Targets
) -> int:
    """By bisection over the steps; the overhead is an upper bound that never falls with more of them."""
    low, high = 0, wanted
    while low < high:
        middle = (low + high + 1) // 2
        if middle * rate.step_s + _overhead(middle, rate, eval_s, every_least, targets) <= seconds:
            low = middle
        else:
            high = middle - 1
    return low


def _overhead(total: int, rate: Rates, eval_s: float, every_least: int, targets: Targets) -> float:
    if targets.eval_steps:
        evaluations = math.ceil(total / max(targets.eval_steps, every_least))
    else:
        evaluations = min(EVALUATIONS, math.ceil(total / every_least))
    saves = math.ceil(total / targets.save_steps) if targets.save_steps else evaluations
    return evaluations * eval_s + max(min(saves, evaluations), 1) * rate.save_s


def _save_every(targets: Targets, eval_every: int, total: int) -> int:
    """A multiple of the evaluations: the best checkpoint is chosen among those that were evaluated."""
    if targets.save_steps is None:
        return eval_every
    return min(max(math.ceil(targets.save_steps / eval_every), 1) * eval_every, max(total, 1))


def _keep(s: Setup, targets: Targets, limits: Limits) -> int:
    if limits.checkpoint_disk is None:
        return targets.save_total_limit
    room = limits.checkpoint_disk // max(checkpoint_bytes(s), 1)
    return max(min(targets.save_total_limit, room), 1)
