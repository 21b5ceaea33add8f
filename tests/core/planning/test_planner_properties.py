"""What must hold for every task, model, GPU and profile."""

from __future__ import annotations

from itertools import cycle
from typing import NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.data.facts import assumed_facts
from core.domain.choices import Refusal
from core.domain.hardware import GPU_KINDS, GpuKind, GpuSet, Hardware
from core.domain.tasks import ImageModelType, TaskType
from core.models.identify import facts_from_name
from core.planning.memory.peak import memory_of, peak_bytes
from core.planning.oom import OutOfMemory, next_after_oom
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.profile.resolve import load_profile, resolve_profile

PROFILES = {name: load_profile(name) for name in ("h100x4", "h100x4-strategy", "h100x8", "steady")}
#: More hours may cost a checkpoint another place in the run: a step of thousands.
TOLERANCE = 1e-3


class Case(NamedTuple):
    task: TaskType
    image: ImageModelType | None
    params: int
    rows: int

    def plan(self, profile: str, kind: GpuKind, count: int, hours: float) -> TrainingPlan:
        model = facts_from_name("a-llama", self.params, self.image)
        spec = TaskSpec(task_type=self.task, hours=hours, image_type=self.image)
        resolved = resolve_profile(PROFILES[profile], self.task, model)
        free = resolved.limits.model_copy(update={"gpu_memory": None})
        return plan_task(
            spec,
            model,
            assumed_facts(self.task, self.rows, image_type=self.image),
            Hardware(gpus=GpuSet(kind=kind, count=count)),
            resolved.model_copy(update={"limits": free}),
            explained=False,
        )


texts = st.builds(
    Case,
    st.sampled_from([task for task in TaskType if task.is_text]),
    st.none(),
    st.floats(min_value=8, max_value=10.95).map(lambda exponent: int(10**exponent)),
    st.sampled_from([30, 800, 8_000, 60_000, 170_000]),
)
images = st.builds(
    Case, st.just(TaskType.IMAGE), st.sampled_from(list(ImageModelType)), st.just(10**9), st.integers(5, 50)
)
cases = texts | images
profiles = st.sampled_from(list(PROFILES))
kinds = st.sampled_from(list(GPU_KINDS.values()))
counts = st.integers(1, 8)
moments = st.sampled_from(["train", "evaluation", "generation", "load"])
hours = st.floats(min_value=0.3, max_value=12)
quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(cases, profiles, kinds, counts, hours)
def test_a_feasible_plan_fits_memory_and_time_and_a_refusal_has_its_reason(
    case: Case, profile: str, kind: GpuKind, count: int, time: float
) -> None:
    plan = case.plan(profile, kind, count, time)
    if plan.verdict.feasible:
        assert plan.memory.fits
        assert plan.memory.budget_bytes <= kind.memory_bytes
        assert plan.time.slack_s >= 0
        assert plan.steps.total >= 1
    else:
        assert any(letter.isdigit() for letter in plan.verdict.reason)
    assert plan.batch.world_size <= count
    if case.image is None:
        assert memory_of(plan.candidate, plan.memory.budget_bytes) == plan.memory
    assert plan.steps.save_every % plan.steps.eval_every == 0


@quick
@given(cases, profiles, kinds, counts, hours, st.floats(min_value=1.0, max_value=4.0))
def test_more_hours_never_shrink_the_training(
    case: Case, profile: str, kind: GpuKind, count: int, time: float, longer: float
) -> None:
    short, long = case.plan(profile, kind, count, time), case.plan(profile, kind, count, time * longer)
    if short.verdict.feasible:
        assert long.verdict.feasible
        assert long.steps.epochs >= short.steps.epochs * (1 - TOLERANCE)


@quick
@given(cases, profiles, kinds, st.integers(1, 7), hours)
def test_one_more_gpu_never_makes_a_task_infeasible(
    case: Case, profile: str, kind: GpuKind, count: int, time: float
) -> None:
    if case.plan(profile, kind, count, time).verdict.feasible:
        assert case.plan(profile, kind, count + 1, time).verdict.feasible


@quick
@given(cases, profiles, kinds, counts, hours, st.lists(moments, min_size=1, max_size=4))
def test_each_plan_after_memory_ran_out_needs_no_more_than_the_last_and_the_ladder_ends(
    case: Case, profile: str, kind: GpuKind, count: int, time: float, failures: list[str]
) -> None:
    plan, steps = case.plan(profile, kind, count, time), 0
    feasible = plan.verdict.feasible
    for moment in cycle(failures):
        after = next_after_oom(plan, OutOfMemory(moment=moment, available=count))
        if after is None:
            break
        assert after.candidate != plan.candidate
        assert peak_bytes(after.candidate) <= peak_bytes(plan.candidate)
        assert not feasible or after.verdict.code is not Refusal.ROWS_TOO_LONG
        plan, steps = after, steps + 1
        assert steps < 40, plan.oom_steps


def _learning(plan: TrainingPlan) -> tuple[object, ...]:
    """What the training learns, however it is cut into passes."""
    rank, pixels = plan.adapter and plan.adapter.rank, plan.image and plan.image.resolutions
    return rank, pixels, plan.method, plan.optimizer.name, plan.gpus.count, plan.sequence.length


@quick
@given(cases, profiles, kinds, counts, hours, st.floats(min_value=1.0, max_value=3.0))
def test_more_memory_never_shrinks_the_batch(
    case: Case, profile: str, kind: GpuKind, count: int, time: float, larger: float
) -> None:
    roomy = kind.model_copy(update={"memory_bytes": int(kind.memory_bytes * larger)})
    tight, wide = case.plan(profile, kind, count, time), case.plan(profile, roomy, count, time)
    if not tight.verdict.feasible or not wide.verdict.feasible:
        return
    if tight.gpus.count == wide.gpus.count:
        assert wide.batch.effective >= tight.batch.effective
    if _learning(tight) == _learning(wide):
        assert wide.batch.micro >= tight.batch.micro
        assert tight.precision.gradient_checkpointing or not wide.precision.gradient_checkpointing
