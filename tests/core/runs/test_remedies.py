"""The daemon's next attempt and the retry inside a tournament's container follow one table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.data.facts import assumed_facts
from core.domain.choices import Attention, Refusal
from core.domain.evaluation import Era
from core.domain.hardware import Hardware, parse_gpus
from core.domain.job_states import EndReason
from core.domain.tasks import ImageModelType, TaskType
from core.models.identify import facts_from_name
from core.planning.conditions import JobConditions
from core.planning.oom import OutOfMemory, bounds_after_oom
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task, replan
from core.profile.resolve import LoadedProfile, load_profile
from core.runs.remedies import (
    REASON_OF_RUN_END,
    AttemptFailure,
    can_resume,
    forced_feasible,
    workarounds_after,
)
from core.runs.run_files import RunEnd
from miner.inputs.fetch import FetchedInputs
from miner.jobs import drafts
from miner.jobs.timeline import JobTimings
from miner.jobs.verdict import NextAction, RetrySituation, next_action
from tests.core.planning.candidates import on_all_gpus, resolved
from tests.doubles.each import each
from tests.miner.jobs.harness import MODEL, ROWS
from trainer.runner.planning import FailedLaunch, Remedy, remedy_for

OOM, NAN, CRASHED = RunEnd.OOM, RunEnd.NAN, RunEnd.CRASHED
HUNG, KILLED = RunEnd.HUNG, RunEnd.KILLED
NO_KERNEL = "RuntimeError: FlashAttention only supports Ampere GPUs or newer."
HARDWARE = Hardware(gpus=parse_gpus("4xH100"), cpu_cores=16, memory_bytes=64 * 10**9)


@pytest.fixture(scope="module")
def profile() -> LoadedProfile:
    return on_all_gpus()


def request(profile: LoadedProfile, conditions: JobConditions) -> drafts.JobPlanRequest:
    spec = TaskSpec(task_type=TaskType.INSTRUCT, hours=4.0)
    inputs = FetchedInputs(model_path=None, data_path=None, model=MODEL, data=ROWS)  # type: ignore[arg-type]
    return drafts.JobPlanRequest(spec, inputs, profile, lambda _plan: None, conditions)


def first_plan(profile: LoadedProfile) -> TrainingPlan:
    return drafts.first_plan(request(profile, JobConditions(HARDWARE)))


def in_daemon(profile: LoadedProfile, ends: list[tuple[RunEnd, str]]) -> list[tuple[TrainingPlan, bool]]:
    """The plans of the attempts, and whether each goes on from the checkpoint of the one before."""
    plan, failures = first_plan(profile), list[AttemptFailure]()
    attempts = [(plan, False)]
    for end, detail in ends:
        failures.append(AttemptFailure(REASON_OF_RUN_END[end], detail))
        reason = failures[-1].reason
        situation = RetrySituation(reason, tuple(failures), has_model=False, left_s=3600.0, needs_s=60.0)
        if next_action(situation, JobTimings()) is not NextAction.AGAIN:
            break
        before, learned = plan, plan.conditions.learned
        if reason is EndReason.OOM:
            bounds = bounds_after_oom(plan, OutOfMemory())
            if bounds is None:
                break
            learned = bounds
        without = workarounds_after(plan, failures[-1])
        conditions = replace(plan.conditions, learned=learned, workarounds=without)
        plan = drafts.first_plan(request(profile, conditions))
        attempts.append((plan, can_resume(before, plan, reason)))
    return attempts


def in_tournament(profile: LoadedProfile, ends: list[tuple[RunEnd, str]]) -> list[tuple[TrainingPlan, bool]]:
    remedies: list[Remedy] = []
    attempts = [(first_plan(profile), False)]
    for end, detail in ends:
        failed = FailedLaunch(end, "train", start_s=60.0, left_s=3600.0, detail=detail)
        remedy = remedy_for(attempts[-1][0], failed, remedies)
        if remedy is None:
            break
        remedies.append(remedy)
        attempts.append((remedy.plan, remedy.resumes))
    return attempts


@each(
    "ends",
    [
        [(NAN, ""), (NAN, "")],
        [(NAN, ""), (CRASHED, ""), (HUNG, ""), (CRASHED, "")],
        [(KILLED, "")] * 7,
        [(KILLED, ""), (CRASHED, ""), (NAN, ""), (HUNG, ""), (KILLED, "")],
        [(CRASHED, NO_KERNEL), (NAN, ""), (OOM, ""), (KILLED, "")],
        [(CRASHED, NO_KERNEL), (CRASHED, ""), (CRASHED, "")],
        [(CRASHED, ""), (CRASHED, NO_KERNEL), (CRASHED, NO_KERNEL)],
        [(OOM, ""), (KILLED, ""), (OOM, ""), (NAN, "")],
        [(OOM, "")] * 12,
        *([(end, "")] for end in (RunEnd.BAD_DATA, RunEnd.BAD_MODEL, RunEnd.BAD_REWARD)),
        *([(end, "")] for end in (RunEnd.INFEASIBLE, RunEnd.STOPPED)),
    ],
)
def test_daemon_and_tournament_retry_alike(profile: LoadedProfile, ends: list[tuple[RunEnd, str]]) -> None:
    def shown(attempts: list[tuple[TrainingPlan, bool]]) -> list[object]:
        return [
            (resumes, plan.optimizer.learning_rate, plan.precision, plan.batch, plan.sequence)
            for plan, resumes in attempts
        ]

    assert shown(in_daemon(profile, ends)) == shown(in_tournament(profile, ends))


def test_a_crash_in_a_flash_kernel_and_any_other_crash_get_a_retry_each(profile: LoadedProfile) -> None:
    for ends in ([(CRASHED, NO_KERNEL), (CRASHED, "")], [(CRASHED, ""), (CRASHED, NO_KERNEL)]):
        assert len(in_tournament(profile, [*ends, (CRASHED, NO_KERNEL)])) == 3
        assert in_tournament(profile, ends)[-1][0].precision.attention is Attention.SDPA


@each(
    ("kind", "hours", "gpus", "every"),
    [
        (ImageModelType.KREA2, 0.05, "1xH100", 250),
        (ImageModelType.FLUX, 0.05, "1xH100", 250),
        (ImageModelType.KREA2, 1.0, "1xRTX-4090", 250),
    ],
)
def test_an_infeasible_plan_of_pictures_that_is_tried_saves_four_times(
    kind: ImageModelType, hours: float, gpus: str, every: int
) -> None:
    hardware = Hardware(gpus=parse_gpus(gpus))
    spec = TaskSpec(task_type=TaskType.IMAGE, hours=hours, image_type=kind)
    data = assumed_facts(TaskType.IMAGE, 18, image_type=kind)
    plan = plan_task(spec, facts_from_name("a/model", None, kind), data, hardware, load_profile("steady"))
    assert not plan.verdict.feasible
    tried = forced_feasible(plan)
    assert tried.verdict.feasible
    assert tried.steps.total == plan.steps.wanted
    assert (tried.steps.save_every, tried.steps.eval_every) == (every, every)
    assert tried.image is not None
    epochs = tried.steps.total / tried.steps.per_epoch
    assert 3 <= epochs / tried.image.save_every_epochs <= 4


def test_a_picture_training_that_fits_nowhere_is_tried_with_the_least_memory() -> None:
    kind, hardware = ImageModelType.QWEN_IMAGE, Hardware(gpus=parse_gpus("1xRTX-4090"))
    conditions = JobConditions(hardware, era=Era.TOURNAMENTS, pictures=True)
    spec = TaskSpec(task_type=TaskType.IMAGE, hours=1.0, image_type=kind)
    data, model = assumed_facts(TaskType.IMAGE, 18, image_type=kind), facts_from_name("a/model", None, kind)
    plan = plan_task(spec, model, data, hardware, load_profile("steady"), conditions=conditions)
    assert plan.verdict.code is Refusal.NO_MEMORY
    tried = forced_feasible(plan)
    assert tried.image is not None
    assert tried.image.recipe is not None
    assert (tried.image.recipe.checkpointing, tried.image.twin) == (True, False)


def test_the_remedies_reach_the_next_plan(profile: LoadedProfile) -> None:
    ends = [(CRASHED, NO_KERNEL), (NAN, "")]
    (first, _), (second, resumed), (third, resumed_after_nan) = in_daemon(profile, ends)
    assert first.precision.attention not in (Attention.SDPA, Attention.EAGER)
    assert (second.precision.attention, resumed) == (Attention.SDPA, True)
    assert third.precision.attention is Attention.SDPA
    assert third.optimizer.learning_rate == pytest.approx(0.3 * first.optimizer.learning_rate)
    assert not resumed_after_nan


def test_a_failing_flash_attention_3_is_followed_by_2_and_then_by_torchs_own(profile: LoadedProfile) -> None:
    flash_3 = request(profile, JobConditions(HARDWARE, flash_3=True))
    targets = {"attention": None}
    plan = plan_task(flash_3.spec, MODEL, ROWS, HARDWARE, resolved(**targets), conditions=flash_3.conditions)
    assert plan.precision.attention is Attention.FLASH_3
    crash = AttemptFailure(EndReason.CRASHED, "flash_fwd: no kernel image is available for execution")
    for expected in (Attention.FLASH_2, Attention.SDPA):
        without = workarounds_after(plan, crash)
        plan = replan(plan, replace(plan.conditions, workarounds=without), 4.0)
        assert plan.precision.attention is expected


@pytest.mark.parametrize(
    "said",
    [
        "File \"/lib/mamba_ssm/ops/triton/ssd_combined.py\"\nTypeError: 'NoneType' object is not callable",
        "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered",
    ],
)
def test_failing_kernels_of_a_state_space_are_left_out_after_their_first_crash(said: str) -> None:
    model = facts_from_name("tiiuae/Falcon-H1-1.5B-Base")
    targets = {"liger": False, "lora_kernels": False}
    plan = plan_task(
        TaskSpec(task_type=TaskType.INSTRUCT, hours=4), model, ROWS, HARDWARE, resolved(**targets)
    )
    crash = AttemptFailure(EndReason.CRASHED, said)
    without = workarounds_after(plan, crash)
    assert without.no_state_kernels
    assert "state_kernels → off" in without.notes[-1]
    plan = replan(plan, replace(plan.conditions, workarounds=without), 4.0)
    assert workarounds_after(plan, crash) == without
