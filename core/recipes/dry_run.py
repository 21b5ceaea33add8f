"""Plan and render without a task, for `plan --write` and `profile check`; compare two plans, down to the keys
of the engine's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from core.data.facts import assumed_facts
from core.domain.choices import Refusal
from core.domain.errors import ConfigError
from core.domain.hardware import Hardware, parse_gpus
from core.domain.tasks import (
    ChatDataset,
    DatasetType,
    DpoDataset,
    EnvironmentDataset,
    GrpoDataset,
    InstructDataset,
    RewardFunction,
    TaskType,
)
from core.models.identify import facts_from_name
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.profile.explain import ProfileFinding, ProfileFindingLevel, Subject
from core.profile.schema import ResolvedProfile
from core.recipes.base import ImageFiles, RenderedRun, RunInputs
from core.recipes.render import render

#: Row formats as in the validators' files.
DATASETS: dict[TaskType, DatasetType] = {
    TaskType.INSTRUCT: InstructDataset(
        field_instruction="instruct", field_input="input", field_output="output", field_system="system"
    ),
    TaskType.CHAT: ChatDataset(),
    TaskType.DPO: DpoDataset(field_prompt="prompt", field_chosen="chosen", field_rejected="rejected"),
    TaskType.GRPO: GrpoDataset(
        field_prompt="prompt",
        reward_functions=[
            RewardFunction(reward_func="def reward(completions, **kwargs): ...", reward_weight=1.0)
        ],
    ),
    TaskType.ENVIRONMENT: EnvironmentDataset(environment_names=["leduc_poker"]),
}
#: Long enough that only a mistake in the profile makes the plan impossible.
CHECK_HOURS = 24.0
#: For a profile that does not name its hardware.
CHECK_HARDWARE = "4xH100"
#: The size of the model that a CPU is checked with.
TOY_PARAMS = 20_000_000
#: Refusals that only the profile can cause.
PROFILE_REFUSALS = (Refusal.IMPOSSIBLE_LIMIT, Refusal.NO_GPU, Refusal.NO_ENGINE)


def example_inputs(task: TaskType, model: str = "base-model") -> RunInputs:
    """Inputs with every file that any engine may need."""
    text = task.is_text
    cache = "/cache/models"
    return RunInputs(
        model_path=f"{cache}/{model.replace('/', '--')}",
        train_path="/run/data/train.json" if text else "/run/images",
        eval_path="/run/data/eval.json" if text else None,
        output_dir="/run/output",
        work_dir="/run/work",
        config_dir="/run/config",
        plan_path="/run/config/plan.json",
        dataset=DATASETS.get(task),
        image=ImageFiles(
            clip_l=f"{cache}/clip_l.safetensors",
            t5xxl=f"{cache}/t5xxl.safetensors",
            ae=f"{cache}/ae.safetensors",
            text_encoder=f"{cache}/text-encoder",
            vae=f"{cache}/{model.replace('/', '--')}",
        ),
        port=29500,
    )


def check_profile_plan(profile: ResolvedProfile, about: Subject) -> Iterator[ProfileFinding]:
    """Yield what is wrong with the plan of this subject, or with the configuration rendered from it."""
    hardware = Hardware(gpus=parse_gpus(profile.hardware or CHECK_HARDWARE))
    image = about.model.image.image_type if about.model.image else None
    model = about.model
    if hardware.gpus.is_cpu:
        # A demo trains toys: no published model fits a CPU's time.
        model = model if image else facts_from_name("a-toy", TOY_PARAMS)
    task = TaskSpec(task_type=about.task_type, hours=CHECK_HOURS, image_type=image)
    data = assumed_facts(about.task_type, about.pictures, 2, image)
    plan = plan_task(task, model, data, hardware, profile, explained=False)
    if plan.verdict.code in PROFILE_REFUSALS:
        yield ProfileFinding(ProfileFindingLevel.ERROR, about.label, plan.verdict.reason)
    elif not plan.verdict.feasible and not hardware.gpus.is_cpu:
        yield ProfileFinding(
            ProfileFindingLevel.WARNING, about.label, f"refused on {hardware.gpus}: {plan.verdict.reason}"
        )
    elif plan.verdict.feasible:
        yield from _rendering_problems(plan, about)


def _rendering_problems(plan: TrainingPlan, about: Subject) -> Iterator[ProfileFinding]:
    try:
        render(plan, example_inputs(about.task_type))
    except ConfigError as error:
        for problem in error.problems:
            yield ProfileFinding(ProfileFindingLevel.ERROR, about.label, str(problem))


# Differences


def render_example(plan: TrainingPlan) -> RenderedRun:
    """Render the plan with example paths and columns, as there is no task yet."""
    return render(plan, example_inputs(plan.task.task_type, plan.model.model_id))


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten to dotted paths; a list is one value."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            leaves |= flatten(value, f"{path}.")
        else:
            leaves[path] = value
    return leaves


class PlanDifference(NamedTuple):
    #: "configuration" (the engine's keys), "memory" (bytes of one GPU) or "time" (seconds).
    part: str
    what: str
    before: Any
    after: Any


def plan_differences(before: TrainingPlan, after: TrainingPlan) -> list[PlanDifference]:
    """Return what differs between two plans, from the engine's keys to the totals."""
    parts = (
        ("configuration", None, _engine_keys(before), _engine_keys(after)),
        ("memory", 0, _memory_bytes(before), _memory_bytes(after)),
        ("time", 0.0, _phase_seconds(before), _phase_seconds(after)),
    )
    return [
        PlanDifference(part, key, there.get(key, missing), here.get(key, missing))
        for part, missing, there, here in parts
        for key in sorted({**there, **here}, key="total".__eq__)  # last, after what only one plan has
        if there.get(key, missing) != here.get(key, missing)
    ]


def _engine_keys(plan: TrainingPlan) -> dict[str, Any]:
    if not plan.verdict.feasible:
        return {}
    made = render_example(plan)
    gpus = {"gpus": str(plan.gpus), "micro batch × accumulation × GPUs": _batch_words(plan)}
    return {**gpus, **flatten(made.config)}


def _batch_words(plan: TrainingPlan) -> str:
    return f"{plan.batch.micro} × {plan.batch.accumulation} × {plan.batch.world_size}"


def _memory_bytes(plan: TrainingPlan) -> dict[str, Any]:
    terms = {term.name: term.bytes for term in plan.memory.terms}
    return {**terms, "total": plan.memory.total_bytes}


def _phase_seconds(plan: TrainingPlan) -> dict[str, Any]:
    phases = {phase.name: phase.seconds for phase in plan.time.phases}
    return {**phases, "total": plan.time.total_s}
