"""The plan of an attempt: from real facts at first, smaller after OOM; and what a run teaches later ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from core.domain.choices import GpuStrategy, Refusal
from core.domain.decisions import IDLE_HOST, TrainingWorth
from core.domain.hardware import Hardware
from core.domain.job_states import EndReason, StepFailed
from core.domain.keys import NamedLane
from core.planning.assemble import container_concessions, container_plan
from core.planning.oom import OutOfMemory
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.planning.search.gpu_count import lane_for, node_counts
from core.planning.time.calibration import LearnedBounds, bounds_from, shape_key
from core.planning.time.overheads import JobConditions
from core.profile.resolve import LoadedProfile, resolve_profile
from core.profile.schema import ResolvedProfile
from core.runs.remedies import AttemptFailure, smaller_plan, with_remedies
from miner.inputs.fetch import FetchedInputs

#: What earlier runs of the same validator have taught about a plan's shape; reads the store, so in a thread.
LearnedLookup = Callable[[TrainingPlan], LearnedBounds | None]

#: Refusals about time. The task is accepted: a short training is worth more than none.
_TIME_REFUSALS = frozenset({Refusal.NO_TIME, Refusal.TOO_SLOW})
_MAX_DOUBLINGS = 12
#: How far one run may change the speed that later ones are planned with, and all runs together.
_SLOWER_AT_ONCE, _SLOWNESS = (0.5, 2.0), (0.2, 20.0)


@dataclass(frozen=True, slots=True)
class PlanDraft:
    """A plan, and what to request the fleet for."""

    plan: TrainingPlan
    #: Numbers of GPUs that are possible, the plan's own first.
    counts: tuple[int, ...]
    lane: NamedLane | None = None


@dataclass(frozen=True, slots=True)
class JobPlanRequest:
    """What the planner is asked."""

    spec: TaskSpec
    inputs: FetchedInputs
    hardware: Hardware
    profile: LoadedProfile
    learned: LearnedLookup
    #: How earlier attempts have ended, since the job's last start.
    failures: tuple[AttemptFailure, ...] = ()
    worth: TrainingWorth = IDLE_HOST
    #: Accept a plan however little of the dataset it trains on.
    any_length: bool = False


def first_plan(request: JobPlanRequest) -> TrainingPlan:
    """Plan with what is known now; `StepFailed` when no training is possible at all."""
    plan = _in_time(request)
    if plan.verdict.code in _TIME_REFUSALS:
        plan = _plan_ended_by_clock(request, plan)
    if not plan.verdict.feasible:
        raise StepFailed(EndReason.INFEASIBLE, plan.verdict.reason)
    return with_remedies(plan, request.failures)


def plan_in_time(request: JobPlanRequest) -> TrainingPlan | None:
    """A plan that is over within the requested hours, or None."""
    plan = _in_time(request)
    return with_remedies(plan, request.failures) if plan.verdict.feasible else None


def _in_time(request: JobPlanRequest) -> TrainingPlan:
    """Plan within the hours, even if only for a small part of an epoch.

    No offer would be accepted for that, but now it is better than nothing. Its learning rate comes down in
    the time there is, unlike that of a longer plan that the clock ends.
    """
    plan = _learned_plan(request)
    if plan.verdict.code is not Refusal.TOO_SLOW:
        return plan
    shorter = _learned_plan(replace(request, any_length=True))
    if not shorter.verdict.feasible:
        return plan
    note = f"{plan.verdict.reason}: as much as fits is trained all the same"
    return shorter.model_copy(update={"notes": (*shorter.notes, note)})


def _learned_plan(request: JobPlanRequest) -> TrainingPlan:
    """Plan again if there is a lesson: which one counts depends on the plan."""
    plan = _run_planner(request, None)
    learned = request.learned(plan)
    return plan if learned is None else _run_planner(request, learned)


def _resolved(request: JobPlanRequest) -> ResolvedProfile:
    model, pictures = request.inputs.model, request.inputs.data.pictures
    return resolve_profile(request.profile, request.spec.task_type, model, pictures)


def _run_planner(request: JobPlanRequest, learned: LearnedBounds | None) -> TrainingPlan:
    inputs, resolved = request.inputs, _resolved(request)
    if request.any_length:
        limits = resolved.limits.model_copy(update={"min_epochs": 0.0})
        resolved = resolved.model_copy(update={"limits": limits})
    return plan_task(
        request.spec,
        inputs.model,
        inputs.data,
        request.hardware,
        resolved,
        conditions=JobConditions(request.hardware, model_cached=True, worth=request.worth),
        learned=learned,
    )


def _plan_ended_by_clock(request: JobPlanRequest, refused: TrainingPlan) -> TrainingPlan:
    """A plan for more time than there is; the trainer's own clock ends it, with the best model so far."""
    hours = max(request.spec.hours, 0.05)
    for _ in range(_MAX_DOUBLINGS):
        hours *= 2
        longer = request.spec.model_copy(update={"hours": hours})
        found = _learned_plan(replace(request, spec=longer))
        if found.verdict.code not in _TIME_REFUSALS:
            break
    if not found.verdict.feasible:
        return refused
    note = f"{refused.verdict.reason}: planned as if there were {hours:.2g} h, and the clock ends it"
    time = found.time.model_copy(update={"deadline_s": refused.time.deadline_s})
    return found.model_copy(update={"task": request.spec, "time": time, "notes": (*found.notes, note)})


def draft_plan(request: JobPlanRequest) -> PlanDraft:
    """The first plan, and every smaller number of GPUs that is still possible."""
    plan = first_plan(request)
    counts = (plan.gpus.count, *_smaller_gpu_counts(plan, request))
    return PlanDraft(plan, counts, _gpu_lane(request))


def on_host(plan: TrainingPlan, request: JobPlanRequest) -> TrainingPlan:
    """Return a plan made for other GPUs of the host with the container's limits for these."""
    asked = _resolved(request).container
    world = plan.gpus.per_node
    conceded = [one for one in plan.concessions if not one.field.startswith("container.")]
    conceded += container_concessions(asked, request.hardware, world)
    container = container_plan(asked, request.hardware, world)
    return plan.model_copy(update={"container": container, "concessions": tuple(conceded)})


def most_nodes(profile: LoadedProfile, spec: TaskSpec, inputs: FetchedInputs) -> int:
    """How many nodes of a cluster the profile allows for such tasks."""
    return resolve_profile(profile, spec.task_type, inputs.model, inputs.data.pictures).targets.nodes


def _gpu_lane(request: JobPlanRequest) -> NamedLane | None:
    targets = _resolved(request).targets
    if targets.gpu_strategy is not GpuStrategy.LANES:
        return None
    return lane_for(targets, request.inputs.model, request.spec.task_type)


def _smaller_gpu_counts(plan: TrainingPlan, request: JobPlanRequest) -> Iterator[int]:
    gpus = request.hardware.gpus
    nodes = range(gpus.per_node, gpus.count, gpus.per_node)
    counts = {*nodes, *node_counts(gpus.per_node)}
    for count in sorted((count for count in counts if count < plan.gpus.count), reverse=True):
        fewer = request.hardware.model_copy(update={"gpus": gpus.take(count)})
        found = _learned_plan(replace(request, hardware=fewer))
        if found.verdict.feasible and found.gpus.count == count:
            yield count


def plan_after_oom(plan: TrainingPlan, failure: OutOfMemory) -> TrainingPlan:
    """One step down the ladder; `StepFailed` at its end."""
    smaller = smaller_plan(plan, failure)
    if smaller is None:
        steps = ", ".join(plan.oom_steps) or "the first plan"
        raise StepFailed(EndReason.OOM, f"the GPU's memory ran out and no smaller plan is left after {steps}")
    return smaller


def lesson_key(validator: str, plan: TrainingPlan) -> str:
    """Each validator's runs teach only its own later ones."""
    return f"{validator}/{shape_key(plan)}"


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


def lesson_of(
    plan: TrainingPlan, known: LearnedBounds | None, measured_step_s: float | None
) -> LearnedBounds | None:
    """What this plan's run has taught, merged with what was known; None if nothing is new."""
    found = bounds_from(plan)
    known = known or LearnedBounds()
    slowness = known.slowness
    if measured_step_s and plan.time.step_s and not plan.oom_steps:
        # The plan contains the known slowness already. Steps are timed by the run itself: a bad clock, or a
        # run that lies, must not decide about all later ones.
        ratio = _within(measured_step_s / plan.time.step_s, _SLOWER_AT_ONCE)
        slowness = _within(known.slowness * ratio, _SLOWNESS)
    merged = LearnedBounds(
        micro=_min_known(known.micro, found.micro),
        checkpointing=known.checkpointing or found.checkpointing,
        length=_min_known(known.length, found.length),
        gpus=max(known.gpus or 0, found.gpus or 0) or None,
        slowness=slowness,
    )
    return None if merged == known else merged


def with_micro_cap(known: LearnedBounds | None, micro: int) -> LearnedBounds:
    """What is known, with smaller passes: a rule wanted them, and the attempt before could not change."""
    known = known or LearnedBounds()
    return known.model_copy(update={"micro": _min_known(known.micro, micro)})


def _min_known(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)
