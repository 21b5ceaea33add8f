"""The plan of an attempt: from real facts at first, one rung down after an OOM; and what it has taught."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from core.budget import Refusal, Verdict
from core.choices import GpuStrategy
from core.hardware import Hardware
from core.plan import TrainingPlan
from core.plan_parts import TaskSpec
from core.planning.costs import Site
from core.planning.gpus import COUNTS, lane_for
from core.planning.learned import Learned, learned_from, shape_key
from core.planning.oom import OutOfMemory, next_after_oom
from core.planning.planner import plan as make
from core.planning.timing import Measured, recalibrate
from core.profile.load import LoadedProfile
from core.profile.resolve import resolve
from core.remedies import calmer
from miner.fleet.base import NamedLane
from miner.jobs.ports import Fetched, StepFailed
from miner.jobs.states import EndReason

#: Of a plan, by what earlier runs of the same validator have taught.
Lessons = Callable[[TrainingPlan], Learned | None]

#: Refusals about time. The task is ours already: a short training is worth more than none.
_LATE = frozenset({Refusal.NO_TIME, Refusal.TOO_SLOW})
_MOST_DOUBLINGS = 12
#: What one run may change of the speed that later ones are planned with, and what all together.
_SLOWER_AT_ONCE, _SLOWNESS = (0.5, 2.0), (0.2, 20.0)


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan, and what to ask the fleet for."""

    plan: TrainingPlan
    #: Numbers of GPUs that would do, the plan's own first.
    counts: tuple[int, ...]
    lane: NamedLane | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """What the planner is asked."""

    spec: TaskSpec
    inputs: Fetched
    hardware: Hardware
    #: How earlier attempts of this life have ended.
    history: tuple[EndReason, ...] = ()
    #: However little of the dataset is trained on.
    any_length: bool = False


def first_plan(ask: Ask, profile: LoadedProfile, lessons: Lessons) -> TrainingPlan:
    """With what is known now; `StepFailed` when no training can be had at all."""
    found = _in_time(ask, profile, lessons)
    if found.verdict.code in _LATE:
        found = _in_what_is_left(ask, profile, lessons, found)
    if not found.verdict.feasible:
        raise StepFailed(EndReason.INFEASIBLE, found.verdict.reason)
    return _wiser(found, ask.history)


def plan_in_time(ask: Ask, profile: LoadedProfile, lessons: Lessons) -> TrainingPlan | None:
    """One that is over within the hours asked for; None where there is none."""
    found = _in_time(ask, profile, lessons)
    return _wiser(found, ask.history) if found.verdict.feasible else None


def _in_time(ask: Ask, profile: LoadedProfile, lessons: Lessons) -> TrainingPlan:
    """What no offer would be accepted for, a small part of an epoch, is better than nothing now. Its learning
    rate comes down in the time there is, as that of a longer plan which the clock ends does not."""
    found = _learned_plan(ask, profile, lessons)
    if found.verdict.code is not Refusal.TOO_SLOW:
        return found
    shorter = _learned_plan(replace(ask, any_length=True), profile, lessons)
    if not shorter.verdict.feasible:
        return found
    note = f"{found.verdict.reason}: as much as fits is trained all the same"
    return shorter.model_copy(update={"notes": (*shorter.notes, note)})


def _learned_plan(ask: Ask, profile: LoadedProfile, lessons: Lessons) -> TrainingPlan:
    """Which lesson counts depends on the plan, so there are two rounds where there is one."""
    found = _made(ask, profile, None)
    learned = lessons(found)
    return found if learned is None else _made(ask, profile, learned)


def _made(ask: Ask, profile: LoadedProfile, learned: Learned | None) -> TrainingPlan:
    resolved = resolve(profile, ask.spec.task_type, ask.inputs.model)
    if ask.any_length:
        limits = resolved.limits.model_copy(update={"min_epochs": 0.0})
        resolved = resolved.model_copy(update={"limits": limits})
    return make(
        ask.spec,
        ask.inputs.model,
        ask.inputs.data,
        ask.hardware,
        resolved,
        site=Site(ask.hardware, model_here=True),
        learned=learned,
    )


def _in_what_is_left(
    ask: Ask, profile: LoadedProfile, lessons: Lessons, refused: TrainingPlan
) -> TrainingPlan:
    """A plan for more time than there is. The trainer's own clock ends it, with the best that it has."""
    hours = max(ask.spec.hours, 0.05)
    for _ in range(_MOST_DOUBLINGS):
        hours *= 2
        longer = ask.spec.model_copy(update={"hours": hours})
        found = _learned_plan(Ask(longer, ask.inputs, ask.hardware), profile, lessons)
        if found.verdict.code not in _LATE:
            break
    if not found.verdict.feasible:
        return refused
    note = f"{refused.verdict.reason}: planned as if there were {hours:.2g} h, and the clock ends it"
    time = found.time.model_copy(update={"deadline_s": refused.time.deadline_s})
    return found.model_copy(update={"task": ask.spec, "time": time, "notes": (*found.notes, note)})


def _wiser(plan: TrainingPlan, history: Sequence[EndReason]) -> TrainingPlan:
    """What ends that the planner knows nothing of ask for."""
    changes: dict[str, object] = {}
    notes = list(plan.notes)
    if nans := history.count(EndReason.NAN):
        optimizer = calmer(plan, nans).optimizer
        changes["optimizer"] = optimizer
        rates = f"{plan.optimizer.learning_rate:g} → {optimizer.learning_rate:g}"
        notes.append(f"learning_rate {rates}: the loss became NaN")
    if EndReason.HOST_MEMORY in history and plan.loader.workers:
        update = {"workers": 0, "prefetch_factor": None, "persistent_workers": False}
        changes["loader"] = plan.loader.model_copy(update=update)
        notes.append(f"loader workers {plan.loader.workers} → 0: the host's memory ran out")
    return plan.model_copy(update={**changes, "notes": tuple(notes)}) if changes else plan


def draft(ask: Ask, profile: LoadedProfile, lessons: Lessons) -> Draft:
    """The first plan, and every smaller number of GPUs that would still do."""
    plan = first_plan(ask, profile, lessons)
    counts = (plan.gpus.count, *_smaller(plan, ask, profile, lessons))
    return Draft(plan, counts, _lane(ask, profile))


def _lane(ask: Ask, profile: LoadedProfile) -> NamedLane | None:
    task = ask.spec.task_type
    targets = resolve(profile, task, ask.inputs.model).targets
    if targets.gpu_strategy is not GpuStrategy.LANES:
        return None
    return lane_for(targets, ask.inputs.model, task)


def _smaller(plan: TrainingPlan, ask: Ask, profile: LoadedProfile, lessons: Lessons) -> Iterator[int]:
    for count in sorted((one for one in COUNTS if one < plan.gpus.count), reverse=True):
        fewer = ask.hardware.model_copy(update={"gpus": ask.hardware.gpus.take(count)})
        found = _learned_plan(Ask(ask.spec, ask.inputs, fewer), profile, lessons)
        if found.verdict.feasible and found.gpus.count == count:
            yield count


def plan_after_oom(plan: TrainingPlan, failure: OutOfMemory) -> TrainingPlan:
    """One rung down. Out of time is no end here either: a smaller plan ends when the clock says so."""
    found = next_after_oom(plan, failure)
    if found is None:
        steps = ", ".join(plan.oom_steps) or "the first plan"
        raise StepFailed(EndReason.OOM, f"the GPU's memory ran out and no smaller plan is left after {steps}")
    if found.verdict.code in _LATE:
        longer = found.steps.model_copy(update={"total": max(found.steps.total, plan.steps.total, 1)})
        return found.model_copy(update={"verdict": Verdict(feasible=True), "steps": longer})
    return found


def lesson_key(validator: str, plan: TrainingPlan) -> str:
    """Each validator's runs teach its own later ones only."""
    return f"{validator}/{shape_key(plan)}"


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


def lesson_of(plan: TrainingPlan, known: Learned | None, measured_step_s: float | None) -> Learned | None:
    """What this plan's run has taught, added to what was known; None for nothing new."""
    found = learned_from(plan)
    known = known or Learned()
    slowness = known.slowness
    if measured_step_s and plan.time.step_s and not plan.oom_steps:
        # The plan had the known slowness in it already. Steps are timed by the run itself: a bad clock, or a
        # run that lies, must not decide over all that come after it.
        ratio = _within(measured_step_s / plan.time.step_s, _SLOWER_AT_ONCE)
        slowness = _within(known.slowness * ratio, _SLOWNESS)
    merged = Learned(
        micro=_least(known.micro, found.micro),
        checkpointing=known.checkpointing or found.checkpointing,
        length=_least(known.length, found.length),
        gpus=max(known.gpus or 0, found.gpus or 0) or None,
        slowness=slowness,
    )
    return None if merged == known else merged


def _least(one: int | None, other: int | None) -> int | None:
    return min((value for value in (one, other) if value is not None), default=None)


def measured_plan(
    plan: TrainingPlan, steps: int, elapsed_s: float, step_s: float, eval_s: float | None
) -> TrainingPlan:
    """The same run at the speed that it has shown."""
    return recalibrate(
        plan, Measured(steps_done=steps, elapsed_s=max(elapsed_s, 0.0), step_s=step_s, eval_s=eval_s)
    )
