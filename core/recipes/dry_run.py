"""Plan and render without a task: for `plan --write` and `profile check`."""

from __future__ import annotations

from collections.abc import Iterator

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
from core.recipes.base import ImageFiles, RunInputs
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


#: Long enough that only a mistake in the profile makes the plan impossible.
CHECK_HOURS = 24.0
#: For a profile that does not name its hardware.
CHECK_HARDWARE = "4xH100"
#: The size of the model that a CPU is checked with.
TOY_PARAMS = 20_000_000
#: Refusals that only the profile can cause.
PROFILE_REFUSALS = (Refusal.IMPOSSIBLE_LIMIT, Refusal.NO_GPU, Refusal.NO_ENGINE)


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
