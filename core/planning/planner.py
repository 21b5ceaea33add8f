"""The two doors to a plan: quick for an offer, whole for a task that starts."""

from __future__ import annotations

import math
from dataclasses import replace

from core.data import DatasetFacts
from core.data_facts import assumed_facts
from core.hardware import Hardware
from core.model_facts import facts_from_name
from core.models import ModelFacts
from core.plan import TrainingPlan
from core.plan_parts import TaskSpec
from core.planning.assemble import plan_of
from core.planning.batch import with_steps_enough
from core.planning.costs import Site
from core.planning.fit import as_wished, fit
from core.planning.learned import Learned, with_learned
from core.planning.refuse import refusal
from core.planning.wishes import wish_for
from core.profile.load import LoadedProfile
from core.profile.resolve import resolve
from core.profile.schema import ResolvedProfile
from core.tasks import ImageModelType, TaskType


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
    wish = wish_for(task, model, data, profile, hardware.gpus.kind)
    refused = refusal(task, model, data, hardware, profile.limits, stated_params)
    if refused is not None:
        return plan_of(wish, as_wished(wish, hardware, site, *refused), hardware, explained)
    found = fit(wish, hardware.gpus.count, site)
    wish, found = with_steps_enough(wish, found, hardware.gpus.count, site)
    return plan_of(wish, found, hardware, explained)


def usable_hours(hours: float) -> float:
    """What is no number of hours is none at all, and refused as such."""
    return max(hours, 0.0) if math.isfinite(hours) else 0.0


def quick_plan(
    model_id: str,
    params_count: int | None,
    hours: float,
    task_type: TaskType,
    hardware: Hardware,
    profile: ResolvedProfile | LoadedProfile,
    *,
    image_type: ImageModelType | None = None,
    rows: int | None = None,
    site: Site | None = None,
    learned: Learned | None = None,
) -> TrainingPlan:
    """From what an offer says; nothing is looked up. Notes and reasons are left out."""
    model = facts_from_name(model_id, params_count, image_type)
    hours = usable_hours(hours)
    task = TaskSpec(task_type=task_type, hours=hours, image_type=image_type)
    data = assumed_facts(task_type, None if rows is None else max(rows, 0), hours, image_type)
    return plan(
        task,
        model,
        data,
        hardware,
        profile,
        site=site,
        learned=learned,
        stated_params=params_count,
        explained=False,
    )
