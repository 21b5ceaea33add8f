"""What a decision needs to know of a plan, remembered: the same tasks are offered again and again.

A quick plan takes a millisecond, a look into memory a hundredth of that. Only a few numbers of each plan are
kept, so that thousands of them are no more than a megabyte.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from core.budget import Refusal
from core.hardware import Hardware
from core.plan import TrainingPlan
from core.planning.planner import quick_plan, usable_hours
from core.profile.schema import ResolvedProfile
from core.tasks import ImageModelType, TaskType

MOST_KEPT = 4096
#: Free disk changes all the time and matters in tens of gigabytes.
_DISK_STEP = 10 * 10**9


class Question(NamedTuple):
    """What is planned for. The profile stands for itself by its text and the sections that apply."""

    model_id: str
    params: int | None
    hours: float
    task_type: TaskType
    image_type: ImageModelType | None
    rows: int | None
    gpus: int
    hardware: Hardware


class Outline(NamedTuple):
    """A plan in a few numbers; times in seconds."""

    #: None: feasible.
    code: Refusal | None
    reason: str
    gpus: int
    gpu_kind: str
    epochs: float
    #: What part of the wished training is done.
    share: float
    total_s: float
    slack_s: float
    #: Until the reserve begins.
    budget_s: float
    #: DPO's pass of the reference model over all rows, and all else that comes before or after the training.
    reference_s: float
    around_s: float
    #: Assumed of a text dataset.
    rows: int

    @property
    def feasible(self) -> bool:
        return self.code is None


_Key = tuple[str, tuple[str, ...], Question]
_kept: dict[_Key, Outline] = {}


def outline(asked: Question, profile: ResolvedProfile) -> Outline:
    """Of the quick plan."""
    key = (profile.digest, profile.sections, asked)
    known = _kept.get(key)
    if known is None:
        if len(_kept) >= MOST_KEPT:
            del _kept[next(iter(_kept))]
        known = _kept[key] = outline_of(_plan(asked, profile))
    return known


def _plan(asked: Question, profile: ResolvedProfile) -> TrainingPlan:
    return quick_plan(
        asked.model_id,
        asked.params,
        usable_hours(asked.hours),
        asked.task_type,
        asked.hardware.model_copy(update={"gpus": asked.hardware.gpus.take(asked.gpus)}),
        profile,
        image_type=asked.image_type,
        rows=asked.rows,
    )


def outline_of(plan: TrainingPlan) -> Outline:
    time, wanted = plan.time, plan.steps.wanted or plan.steps.total
    training = time["train"] + time["evaluate"] + time["save"]
    return Outline(
        code=plan.verdict.code,
        reason=plan.verdict.reason,
        gpus=plan.gpus.count,
        gpu_kind=plan.gpus.kind.name,
        epochs=plan.steps.epochs,
        share=min(plan.steps.total / wanted, 1.0) if wanted else 0.0,
        total_s=time.total_s,
        slack_s=time.slack_s,
        budget_s=time.deadline_s - time.reserve_s,
        reference_s=time["reference"],
        around_s=time.total_s - training,
        rows=plan.data.rows,
    )


@lru_cache(maxsize=16)
def roughly(hardware: Hardware) -> Hardware:
    """The host with its free disk rounded down."""
    free = hardware.disk_free_bytes
    if free is None:
        return hardware
    return hardware.model_copy(update={"disk_free_bytes": free // _DISK_STEP * _DISK_STEP})
