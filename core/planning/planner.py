"""The two ways to a plan: a summary for an offer, all of it for a task that starts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from core.budget import Refusal
from core.data import DatasetFacts
from core.data_facts import assumed_facts
from core.hardware import Hardware
from core.models import ModelFacts
from core.plan import TrainingPlan
from core.plan_parts import TaskSpec
from core.planning.assemble import plan_of
from core.planning.batch import with_steps_enough
from core.planning.costs import Site
from core.planning.fit import Fit, as_wished, fit
from core.planning.learned import Learned, with_learned
from core.planning.refuse import refusal
from core.planning.wishes import Wish, wish_for
from core.profile.load import LoadedProfile
from core.profile.resolve import resolve
from core.profile.schema import ResolvedProfile
from core.tasks import ImageModelType, TaskType


class PlanSummary(NamedTuple):
    """What an offer is judged by; times in seconds."""

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


def plan(
    task: TaskSpec,
    model: ModelFacts,
    data: DatasetFacts,
    hardware: Hardware,
    profile: ResolvedProfile | LoadedProfile,
    *,
    site: Site | None = None,
    learned: Learned | None = None,
    stated_params: int | None = None,
    explained: bool = True,
) -> TrainingPlan:
    """Every number of the run. What cannot be done comes back as a plan whose verdict says why.

    `stated_params` is a count from outside, for the refusal of one that nobody can mean; what is believed of
    it is in the model's facts already.
    """
    if isinstance(profile, LoadedProfile):
        profile = resolve(profile, task.task_type, model)
    site = site or Site(hardware)
    if learned is not None:
        profile, site = (
            with_learned(profile, learned),
            replace(site, slowness=site.slowness * learned.slowness),
        )
    wish, found = _candidate(task, model, data, site, profile, stated_params)
    return plan_of(wish, found, hardware, explained)


def _candidate(
    task: TaskSpec,
    model: ModelFacts,
    data: DatasetFacts,
    site: Site,
    profile: ResolvedProfile,
    stated_params: int | None,
) -> tuple[Wish, Fit]:
    gpus = site.hardware.gpus
    wish = wish_for(task, model, data, profile, gpus.kind)
    refused = refusal(task, model, data, site.hardware, profile.limits, stated_params)
    if refused is not None:
        return wish, as_wished(wish, site, *refused)
    return with_steps_enough(wish, fit(wish, gpus.count, site), gpus.count, site)


def usable_hours(hours: float) -> float:
    """What is no number of hours is none at all, and refused as such."""
    return max(hours, 0.0) if math.isfinite(hours) else 0.0


def quick_plan(
    model: ModelFacts,
    hours: float,
    task_type: TaskType,
    hardware: Hardware,
    profile: ResolvedProfile,
    *,
    image_type: ImageModelType | None = None,
    rows: int | None = None,
    stated_params: int | None = None,
) -> PlanSummary:
    """The plan for what an offer says, in the numbers that decide: the same search, nothing written out."""
    hours = usable_hours(hours)
    task = TaskSpec(task_type=task_type, hours=hours, image_type=image_type)
    data = assumed_facts(task_type, None if rows is None else max(rows, 0), hours, image_type)
    _, found = _candidate(task, model, data, Site(hardware), profile, stated_params)
    best, schedule = found.best, found.best.schedule
    stretches = list(best.stretches)
    total_s, budget_s = sum([one.seconds for one in stretches]), best.deadline_s - best.reserve_s
    training = sum([one.seconds for one in stretches if one.name in ("train", "evaluate", "save")])
    wanted = schedule.wanted or schedule.total
    return PlanSummary(
        code=found.code,
        reason=found.reason,
        gpus=best.setup.world,
        gpu_kind=hardware.gpus.kind.name,
        epochs=schedule.epochs,
        share=min(schedule.total / wanted, 1.0) if wanted else 0.0,
        total_s=total_s,
        slack_s=budget_s - total_s,
        budget_s=budget_s,
        reference_s=sum([one.seconds for one in stretches if one.name == "reference"]),
        around_s=total_s - training,
        rows=data.rows,
    )
