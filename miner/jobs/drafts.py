"""The plan of an attempt and the GPUs to request for it, from facts read at one moment.

`draft` is a pure function, run in a thread: planning takes tens of milliseconds for each class of nodes. What
a run teaches later plans is decided here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from core.domain.choices import GpuStrategy, Refusal
from core.domain.decisions import IDLE_HOST, TrainingWorth
from core.domain.hardware import Hardware
from core.domain.job_states import EndReason, StepFailed
from core.domain.keys import NamedLane, ReservationKind, nodes_of
from core.planning.conditions import JobConditions, LearnedBounds, tightest
from core.planning.oom import OutOfMemory, bounds_after_oom
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.planning.search.gpu_count import lane_for, node_counts
from core.planning.time.calibration import shape_key
from core.profile.resolve import LoadedProfile, resolve_profile
from core.profile.schema import ResolvedProfile
from core.runs.remedies import workarounds_after
from miner.fleet.base import FleetSnapshot, GpuGrant, GpuOption, NodeClass
from miner.inputs.fetch import FetchedInputs, JobTask
from miner.jobs.history import AttemptHistory

#: Looks up what earlier runs of the same validator taught about a plan's shape; reads the store.
LearnedLookup = Callable[[TrainingPlan], LearnedBounds | None]

#: Refusals about time. The task is accepted: a short training is worth more than none.
_TIME_REFUSALS = frozenset({Refusal.NO_TIME, Refusal.TOO_SLOW})
_MAX_DOUBLINGS = 12
#: Bounds on the change of the planned speed by one run, and by all runs together.
_SLOWER_AT_ONCE, _SLOWNESS = (0.5, 2.0), (0.2, 20.0)


@dataclass(frozen=True, slots=True)
class JobPlanRequest:
    """The question to the planner, for one choice of hardware."""

    spec: TaskSpec
    inputs: FetchedInputs
    profile: LoadedProfile
    learned: LearnedLookup
    conditions: JobConditions
    #: Accept a plan however little of the dataset it trains on.
    any_length: bool = False


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """Everything an attempt's plan follows from, read at one moment."""

    spec: TaskSpec
    inputs: FetchedInputs
    history: AttemptHistory
    profile: LoadedProfile
    #: Without what the job itself holds.
    fleet: FleetSnapshot
    #: GPUs reserved for the job.
    reserved: tuple[str, ...]
    task: JobTask
    learned: LearnedLookup
    worth: TrainingWorth = IDLE_HOST
    #: Bounds of the draft that its GPUs were requested for: who shares them may have changed since.
    drafted: LearnedBounds | None = None

    def request(self, hardware: Hardware) -> JobPlanRequest:
        conditions = JobConditions(hardware, model_cached=True, worth=self.worth)
        if self.history.plan is not None:
            conditions = self._after_failure(self.history.plan, conditions)
        return JobPlanRequest(self.spec, self.inputs, self.profile, self.learned, conditions)

    def _after_failure(self, plan: TrainingPlan, conditions: JobConditions) -> JobConditions:
        """Add what the last attempt has taught; `StepFailed` at the end of the ladder. What memory allows is
        known of one kind of GPU."""
        failure, learned = self.history.failures[-1], LearnedBounds()
        if plan.gpus.kind.name == conditions.hardware.gpus.kind.name:
            learned = plan.conditions.learned
            if failure.reason is EndReason.OOM:
                learned = self.drafted or _bounds_after_oom(self, plan, conditions.hardware)
        return replace(conditions, learned=learned, workarounds=workarounds_after(plan, failure))


@dataclass(frozen=True, slots=True)
class Draft:
    """The plan for the option that is wanted most, and everything to request the fleet for."""

    plan: TrainingPlan
    #: The most wanted first.
    options: tuple[GpuOption, ...]
    lane: NamedLane | None
    #: Nodes that could be used when this was drafted.
    nodes: frozenset[str]


def draft(facts: DraftFacts) -> Draft:
    """Plan for each class of nodes whose backend can train it; `StepFailed` if there is no plan.

    GPUs reserved for the job come first, then those that train the most.
    """
    classes = usable_classes(facts.fleet, facts.history, facts.task)
    if not classes:
        raise StepFailed(EndReason.NO_GPU, "no GPU of this fleet can be used")
    # After an OOM the next plan is one step down the ladder, for as many GPUs of the same kind. If no machine
    # has them any more, the job is planned from scratch.
    before = facts.history.plan if facts.history.ended_by is EndReason.OOM else None
    alike = [nodes for nodes in classes if before is not None and _has_gpus_of(before, nodes)]
    drafts, refusals = _plan_for_each(facts, alike or classes)
    if not drafts:
        if facts.history.bad_nodes:  # rather there than nowhere
            return draft(replace(facts, history=replace(facts.history, bad_nodes=frozenset())))
        _require_no_other_node(facts, classes)
        raise refusals[0]
    reserved = set(nodes_of(facts.reserved))

    def rank(drafted: _ClassDraft) -> tuple[bool, float]:
        return drafted.nodes.names.isdisjoint(reserved), -drafted.plan.steps.epochs

    drafts.sort(key=rank)
    first = [drafted.nodes.option(drafted.counts[0]) for drafted in drafts]
    fewer = [drafted.nodes.option(count) for drafted in drafts for count in drafted.counts[1:]]
    lane = _gpu_lane(facts.request(drafts[0].nodes.hardware))
    return Draft(drafts[0].plan, (*first, *fewer), lane, names_of(classes))


@dataclass(frozen=True, slots=True)
class _ClassDraft:
    nodes: NodeClass
    plan: TrainingPlan
    #: Numbers of GPUs that are possible, the plan's own first.
    counts: tuple[int, ...]


def _plan_for_each(
    facts: DraftFacts, classes: Sequence[NodeClass]
) -> tuple[list[_ClassDraft], list[StepFailed]]:
    """Return the drafts of the classes that can train it, and the refusals of the others."""
    model, pictures = facts.inputs.model, facts.inputs.data.pictures
    most_nodes = resolve_profile(facts.profile, facts.spec.task_type, model, pictures).targets.nodes
    drafts, refusals = list[_ClassDraft](), list[StepFailed]()
    for nodes in classes:
        try:
            request = facts.request(nodes.of_nodes(most_nodes))
            plan = first_plan(request)
        except StepFailed as refused:
            refusals.append(refused)
        else:
            drafts.append(_ClassDraft(nodes, plan, gpu_counts(plan, request)))
    ability = facts.fleet.ability_of
    able = [entry for entry in drafts if entry.plan.engine not in ability(entry.nodes.backend).missing]
    return able or drafts, refusals


def usable_classes(fleet: FleetSnapshot, history: AttemptHistory, task: JobTask) -> Sequence[NodeClass]:
    """Nodes that can be used, without those where an attempt could not run; all, if no other is left."""
    able = []
    for nodes in fleet.inventory.classes:
        ability = fleet.ability_of(nodes.backend)
        if not (ability.problem or (task.is_hostile and ability.no_sandbox)):
            able.append(nodes)
    able = able or list(fleet.inventory.classes)
    others = [nodes._replace(names=nodes.names - history.bad_nodes) for nodes in able]
    return [nodes for nodes in others if nodes.names] or able


def names_of(classes: Sequence[NodeClass]) -> frozenset[str]:
    return frozenset[str]().union(*(nodes.names for nodes in classes))


def _has_gpus_of(plan: TrainingPlan, nodes: NodeClass) -> bool:
    gpus, wanted = nodes.hardware.gpus, plan.gpus
    if gpus.kind.name != wanted.kind.name or len(nodes.names) < wanted.nodes:
        return False
    return gpus.count == wanted.per_node if wanted.nodes > 1 else gpus.count >= wanted.count


def _require_no_other_node(facts: DraftFacts, tried: Sequence[NodeClass]) -> None:
    """Raise that a GPU is missing, which is waited for, if a node that cannot be used now could train it."""
    names = names_of(tried)
    others = {node.installed.gpus: node for node in facts.fleet.nodes if node.name not in names}
    for node in others.values():
        try:
            first_plan(facts.request(node.installed))
        except StepFailed:
            continue
        text = f"only nodes like {node.name} can train it, and none can be used now"
        raise StepFailed(EndReason.NO_GPU, text)


def _bounds_after_oom(facts: DraftFacts, plan: TrainingPlan, hardware: Hardware) -> LearnedBounds:
    ours = set(facts.history.gpus)
    failure = OutOfMemory(
        moment=facts.history.oom_moment,
        grown_micro=facts.history.grown_micro,
        shared_gpus=any(
            ours & set(reservation.gpus)
            for reservation in facts.fleet.reservations
            if reservation.kind is ReservationKind.JOB
        ),
        available=max(hardware.gpus.count, plan.gpus.count),
    )
    bounds = bounds_after_oom(plan, failure)
    if bounds is None:
        steps = ", ".join(plan.oom_steps) or "the first plan"
        raise StepFailed(EndReason.OOM, f"the GPU's memory ran out and no smaller plan is left after {steps}")
    return bounds


def with_draft(facts: DraftFacts, plan: TrainingPlan) -> DraftFacts:
    """Keep to the step after an OOM that the draft took."""
    last = facts.history.plan
    same_kind = last is not None and last.gpus.kind.name == plan.gpus.kind.name
    return replace(facts, drafted=plan.conditions.learned) if same_kind else facts


def draft_granted(facts: DraftFacts, grant: GpuGrant) -> TrainingPlan:
    """Plan for the GPUs that the job was given; `StepFailed` if their machine is gone."""
    return first_plan(facts.request(granted_hardware(facts.fleet, grant)))


def granted_hardware(fleet: FleetSnapshot, grant: GpuGrant) -> Hardware:
    """The host with the job's GPUs, and their places among the host's; `StepFailed` if it is gone."""
    node = fleet.inventory.node_with(grant.ids)
    if node is None:
        raise StepFailed(EndReason.GPU_LOST, f"the machine of {', '.join(grant.ids)} is not there any more")
    ids = [gpu.id for gpu in fleet.gpus if gpu.node == node.name]
    return node.installed.model_copy(
        update={
            "gpus": grant.gpus,
            "host_gpus": (node.hardware or node.installed).gpus.count,
            "gpu_places": tuple(place for place, gpu in enumerate(ids) if gpu in grant.ids),
        }
    )


def first_plan(request: JobPlanRequest) -> TrainingPlan:
    """Plan with what is known now; `StepFailed` when no training is possible at all."""
    plan = _in_time(request)
    if plan.verdict.code in _TIME_REFUSALS:
        plan = _plan_ended_by_clock(request, plan)
    if not plan.verdict.feasible:
        raise StepFailed(EndReason.INFEASIBLE, plan.verdict.reason)
    return plan


def plan_in_time(request: JobPlanRequest, hours: float) -> TrainingPlan | None:
    """Return a plan that is over within these hours, or None if there is none."""
    request = replace(request, spec=request.spec.model_copy(update={"hours": hours}))
    plan = _in_time(request)
    return plan if plan.verdict.feasible else None


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
    plan = _run_planner(request)
    lesson = request.learned(plan)
    if lesson is None:
        return plan
    learned = tightest(request.conditions.learned, lesson)
    return _run_planner(replace(request, conditions=replace(request.conditions, learned=learned)))


def _resolved(request: JobPlanRequest) -> ResolvedProfile:
    model, pictures = request.inputs.model, request.inputs.data.pictures
    return resolve_profile(request.profile, request.spec.task_type, model, pictures)


def _run_planner(request: JobPlanRequest) -> TrainingPlan:
    inputs, resolved = request.inputs, _resolved(request)
    if request.any_length:
        limits = resolved.limits.model_copy(update={"min_epochs": 0.0})
        resolved = resolved.model_copy(update={"limits": limits})
    return plan_task(
        request.spec,
        inputs.model,
        inputs.data,
        request.conditions.hardware,
        resolved,
        conditions=request.conditions,
    )


def _plan_ended_by_clock(request: JobPlanRequest, refused: TrainingPlan) -> TrainingPlan:
    """Plan for more time than there is; the trainer's own clock ends it, with the best model so far."""
    hours = max(request.spec.hours, 0.05)
    for _ in range(_MAX_DOUBLINGS):
        hours *= 2
        longer = request.spec.model_copy(update={"hours": hours})
        plan = _learned_plan(replace(request, spec=longer))
        if plan.verdict.code not in _TIME_REFUSALS:
            break
    if not plan.verdict.feasible:
        return refused
    note = f"{refused.verdict.reason}: planned for {hours:.2g} h; the deadline will cut it off"
    time = plan.time.model_copy(update={"deadline_s": refused.time.deadline_s})
    return plan.model_copy(update={"task": request.spec, "time": time, "notes": (*plan.notes, note)})


def _gpu_lane(request: JobPlanRequest) -> NamedLane | None:
    targets = _resolved(request).targets
    if targets.gpu_strategy is not GpuStrategy.LANES:
        return None
    return lane_for(targets, request.inputs.model, request.spec.task_type)


def gpu_counts(plan: TrainingPlan, request: JobPlanRequest) -> tuple[int, ...]:
    """The plan's number of GPUs, and every smaller one that is still possible."""
    gpus = request.conditions.hardware.gpus
    counts = {*range(gpus.per_node, gpus.count, gpus.per_node), *node_counts(gpus.per_node)}
    fewer = sorted((count for count in counts if count < plan.gpus.count), reverse=True)
    return plan.gpus.count, *(count for count in fewer if _is_possible(request, count))


def _is_possible(request: JobPlanRequest, count: int) -> bool:
    hardware = request.conditions.hardware
    fewer = hardware.model_copy(update={"gpus": hardware.gpus.take(count)})
    plan = _learned_plan(replace(request, conditions=replace(request.conditions, hardware=fewer)))
    return plan.verdict.feasible and plan.gpus.count == count


def lesson_key(validator: str, plan: TrainingPlan) -> str:
    """Each validator's runs teach only its own later ones."""
    return f"{validator}/{shape_key(plan)}"


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


def lesson_of(
    plan: TrainingPlan, known: LearnedBounds | None, measured_step_s: float | None
) -> LearnedBounds | None:
    """Merge what this plan's run taught with what was known; return None if nothing is new."""
    known = known or LearnedBounds()
    merged = tightest(plan.conditions.learned.for_later_jobs(), known) if plan.oom_steps else known
    if measured_step_s and plan.time.step_s:
        # The plan contains the known slowness already. Steps are timed by the run itself: a bad clock, or a
        # run that lies, must not decide about all later ones.
        ratio = _within(measured_step_s / plan.time.step_s, _SLOWER_AT_ONCE)
        merged = merged.model_copy(update={"slowness": _within(known.slowness * ratio, _SLOWNESS)})
    return None if merged == known else merged


def with_micro_cap(known: LearnedBounds | None, micro: int) -> LearnedBounds:
    """Add smaller passes to what is known: a rule wanted them, and the last attempt could not change."""
    return tightest(LearnedBounds(micro=micro), known or LearnedBounds())
