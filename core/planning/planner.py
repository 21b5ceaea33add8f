"""The entry points: `quick_plan` summarises a plan for an offer, `plan_task` plans a task that starts.

Before the search, tasks that no plan can do are refused; after it, the batch is made smaller where a run
would have too few steps to leave its warmup, and that of a GRPO run larger where it would leave GPUs idle.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from core.data.facts import DatasetFacts, assumed_facts
from core.domain.choices import Refusal
from core.domain.decisions import IDLE_HOST, TrainingWorth
from core.domain.hardware import Hardware
from core.domain.records import Confidence
from core.domain.tasks import ImageModelType, TaskType
from core.domain.units import show_params
from core.models.facts import ModelFacts
from core.models.image_families import is_older_sd
from core.planning.assemble import assemble_plan
from core.planning.conditions import JobConditions
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.search.batch import with_enough_steps, with_larger_steps
from core.planning.search.fit import SearchResult, best_fit, refused_as_required
from core.planning.search.gpu_count import usable_gpus
from core.planning.search.requirements import Requirements, requirements_for
from core.profile.limits import ProfileLimits
from core.profile.resolve import LoadedProfile, resolve_profile
from core.profile.schema import ResolvedProfile

#: The largest published model has a trillion or two; a count beyond this is a mistake or a joke.
MOST_PARAMS = 5 * 10**12
RefusedTask = tuple[Refusal, str]


def task_refusal(
    task: TaskSpec,
    model: ModelFacts,
    data: DatasetFacts,
    hardware: Hardware,
    limits: ProfileLimits,
    stated: int | None = None,
) -> RefusedTask | None:
    """The first reason to refuse the task, or None. `stated` is a parameter count from outside."""
    if refused := _model_refusal(model, stated):
        return refused
    if task.hours <= 0:
        return Refusal.NO_TIME, f"{task.hours:g} hours leave no time at all"
    if data.rows < 1:
        return Refusal.EMPTY_DATASET, "the dataset has no rows"
    if hardware.gpus.count < limits.min_gpus:
        return Refusal.NO_GPU, f"{hardware.gpus} is there; limits.min_gpus is {limits.min_gpus}"
    if limits.min_gpus > limits.max_gpus:
        why = f"limits.min_gpus {limits.min_gpus} is above limits.max_gpus {limits.max_gpus}"
        return Refusal.IMPOSSIBLE_LIMIT, why
    return None


def _model_refusal(model: ModelFacts, stated: int | None) -> RefusedTask | None:
    name = model.model_id or "the model"
    if model.image is not None and model.image.image_type is ImageModelType.SDXL and is_older_sd(name):
        trained = ", ".join(ImageModelType)
        return Refusal.NO_ENGINE, f"{name} is Stable Diffusion 1 or 2; the image models trained are {trained}"
    params = max(model.params_total, 0 if model.is_image else stated or 0)
    if params > MOST_PARAMS:
        return Refusal.ABSURD_SIZE, (
            f"{name} is said to have {show_params(params)} parameters; "
            f"no model has more than {show_params(MOST_PARAMS)}"
        )
    if model.params_total < 1 or model.sources.get("params_total") is Confidence.GUESS:
        return Refusal.UNKNOWN_SIZE, (
            f"the size of {name} is unknown: no config, no parameter count, no size in its name"
        )
    return None


class PlanSummary(NamedTuple):
    """The numbers that decide an offer; times in seconds."""

    #: None: feasible.
    code: Refusal | None
    reason: str
    gpus: int
    gpu_kind: str
    epochs: float
    #: The part of the training asked for that is done.
    share: float
    total_s: float
    slack_s: float
    #: Until the reserve begins.
    budget_s: float
    #: DPO's pass of the reference model over all rows; everything before and after the training.
    reference_s: float
    around_s: float
    #: Assumed of a text dataset.
    rows: int

    @property
    def feasible(self) -> bool:
        return self.code is None


def plan_task(
    task: TaskSpec,
    model: ModelFacts,
    data: DatasetFacts,
    hardware: Hardware,
    profile: ResolvedProfile | LoadedProfile,
    *,
    conditions: JobConditions | None = None,
    stated_params: int | None = None,
    explained: bool = True,
) -> TrainingPlan:
    """Plan every number of the run. A task that cannot be done returns a plan whose verdict says why.

    `stated_params` is a count from outside, used only to refuse an absurd one; what is believed of it is in
    the model's facts already.
    """
    if isinstance(profile, LoadedProfile):
        profile = resolve_profile(profile, task.task_type, model, data.pictures)
    conditions = conditions or JobConditions(hardware)
    needs, result = _search(task, model, data, conditions, profile, stated_params)
    return assemble_plan(needs, result, profile, explained)


def replan(plan: TrainingPlan, conditions: JobConditions, hours: float) -> TrainingPlan:
    """Plan the same task again, on a machine that has its files, for the hours that are left."""
    return plan_task(
        plan.task.model_copy(update={"hours": hours}),
        plan.model,
        plan.data,
        conditions.hardware,
        plan.profile,
        conditions=replace(conditions, model_cached=True, rows_made=True),
    )


def _search(
    task: TaskSpec,
    model: ModelFacts,
    data: DatasetFacts,
    conditions: JobConditions,
    profile: ResolvedProfile,
    stated_params: int | None,
) -> tuple[Requirements, SearchResult]:
    needs = requirements_for(task, model, data, profile, conditions)
    refused = task_refusal(task, model, data, conditions.hardware, needs.limits, stated_params)
    if refused is not None:
        return needs, refused_as_required(needs, *refused)
    available = usable_gpus(needs)
    result = best_fit(needs, available)
    sized = with_larger_steps if task.task_type.generates else with_enough_steps
    return sized(needs, result, available)


def usable_hours(hours: float) -> float:
    """The hours if they are a number that is not negative, else 0, which is refused as no time."""
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
    worth: TrainingWorth = IDLE_HOST,
) -> PlanSummary:
    """Plan for what an offer says, in the numbers that decide: the same search, nothing written out."""
    hours = usable_hours(hours)
    task = TaskSpec(task_type=task_type, hours=hours, image_type=image_type)
    data = assumed_facts(task_type, None if rows is None else max(rows, 0), hours, image_type)
    _, result = _search(task, model, data, JobConditions(hardware, worth=worth), profile, stated_params)
    best = result.best
    phases = list(best.phases)
    total_s, budget_s = best.total_s, best.deadline_s - best.reserve_s
    training = sum([phase.seconds for phase in phases if phase.name in ("train", "evaluate", "save")])
    return PlanSummary(
        code=result.code,
        reason=result.reason,
        gpus=best.candidate.world,
        gpu_kind=hardware.gpus.kind.name,
        epochs=best.schedule.epochs,
        share=best.share,
        total_s=total_s,
        slack_s=budget_s - total_s,
        budget_s=budget_s,
        reference_s=sum([phase.seconds for phase in phases if phase.name == "reference"]),
        around_s=total_s - training,
        rows=data.rows,
    )
