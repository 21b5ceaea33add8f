"""Time, after the first steps: what was measured replaces the prior, and the schedule follows.

Before the run the parts are in `flops.py` (operations per token), `speed.py` (seconds per step), `costs.py`
(everything beside training) and `schedule.py` (the largest training that ends in time).
"""

from __future__ import annotations

import math

from pydantic import Field

from core.budget import Phase, TimeBreakdown
from core.facts import Record
from core.plan import TrainingPlan
from core.plan_parts import Reason
from core.planning.schedule import Cadence, Rates, count_of, most_steps, save_interval
from core.units import show_seconds

#: Kept of the time that is left, against steps that grow slower yet.
MARGIN = 0.03
#: Evaluations and checkpoints may take this share, or what the plan had meant them to, if that is more.
SHARE = 0.1


class Measured(Record):
    """What a run has shown of itself so far."""

    steps_done: int = Field(ge=0)
    #: Since the plan was made.
    elapsed_s: float = Field(ge=0)
    #: Of one optimizer step: the 90th percentile of the last ones, the first few and compilation left out.
    step_s: float = Field(gt=0)
    eval_s: float | None = Field(default=None, ge=0)
    save_s: float | None = Field(default=None, ge=0)
    publish_s: float | None = Field(default=None, ge=0)


def recalibrate(plan: TrainingPlan, measured: Measured) -> TrainingPlan:
    """The same run with as many steps as its real speed allows: fewer, or more up to the wish."""
    tail, rate = _tail(plan, measured), _rates(plan, measured)
    left = plan.time.deadline_s - plan.time.reserve_s - measured.elapsed_s - tail.seconds
    wanted = max(plan.steps.wanted or plan.steps.total, measured.steps_done)
    cadence = _cadence(plan, rate)
    more = most_steps(wanted - measured.steps_done, rate, cadence, left * (1 - MARGIN))
    total = measured.steps_done + more
    eval_every = min(max(plan.steps.eval_every, cadence.eval_least), max(total, 1))
    save_every = save_interval(cadence, eval_every, total)
    per_epoch = max(plan.steps.per_epoch, 1)
    steps = plan.steps.model_copy(
        update={
            "total": total,
            "epochs": total / per_epoch,
            "eval_every": eval_every,
            "save_every": save_every,
        }
    )
    time = _time(plan, measured, rate, tail, more, eval_every, save_every)
    why = (
        f"{rate.step_s:.3g} s per step measured after {measured.steps_done:,} steps, "
        f"{plan.time.step_s:.3g} s planned; "
        f"{show_seconds(max(left, 0))} were left"
    )
    reasons = {**plan.reasons, "steps.total": Reason(text=why, source="measured")}
    return plan.model_copy(update={"steps": steps, "time": time, "reasons": reasons})


def _tail(plan: TrainingPlan, measured: Measured) -> Phase:
    last = plan.time.phases[-1] if plan.time.phases else Phase(name="publish", seconds=0)
    if measured.publish_s is None:
        return last
    return Phase(name=last.name, seconds=measured.publish_s, why="as measured")


def _rates(plan: TrainingPlan, measured: Measured) -> Rates:
    """What has not been seen yet stays as planned, corrected like the steps."""
    slower = measured.step_s / plan.time.step_s if plan.time.step_s else 1.0
    eval_s, save_s = measured.eval_s, measured.save_s
    if eval_s is None:
        eval_s = plan.time["evaluate"] / (count_of(plan.steps.total, plan.steps.eval_every) + 1) * slower
    if save_s is None:
        save_s = plan.time["save"] / max(count_of(plan.steps.total, plan.steps.save_every), 1)
    return Rates(step_s=measured.step_s, eval_s=eval_s, save_s=save_s)


def _cadence(plan: TrainingPlan, rate: Rates) -> Cadence:
    train = plan.time["train"]
    share = max(SHARE, plan.time["evaluate"] / train if train else 0.0)
    saving = max(SHARE, plan.time["save"] / train if train else 0.0)
    return Cadence(
        eval_asked=plan.steps.eval_every,
        save_asked=plan.steps.save_every,
        eval_least=max(math.ceil(rate.eval_s / (share * rate.step_s)), 1),
        save_least=max(math.ceil(rate.save_s / (saving * rate.step_s)), 1),
        eval_s=rate.eval_s,
    )


def _time(
    plan: TrainingPlan,
    measured: Measured,
    rate: Rates,
    tail: Phase,
    more: int,
    eval_every: int,
    save_every: int,
) -> TimeBreakdown:
    old = plan.time
    faster = old.step_s / rate.step_s if rate.step_s and old.step_s else 1.0
    phases = [
        Phase(name="so far", seconds=measured.elapsed_s, why=f"{measured.steps_done:,} steps done"),
        Phase(name="train", seconds=more * rate.step_s, why=f"{more:,} more steps of {rate.step_s:.3g} s"),
        Phase(
            name="evaluate", seconds=count_of(more, eval_every) * rate.eval_s, why=f"every {eval_every} steps"
        ),
        Phase(name="save", seconds=count_of(more, save_every) * rate.save_s, why=f"every {save_every} steps"),
        tail,
    ]
    return TimeBreakdown(
        phases=tuple(phases),
        deadline_s=old.deadline_s,
        reserve_s=old.reserve_s,
        step_s=rate.step_s,
        throughput=old.throughput * faster,
        utilisation=min(old.utilisation * faster, 1.0),
        measured=True,
    )
