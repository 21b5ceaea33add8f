"""What our own container would plan for a task of the field, as the same figures.

Planned as the container plans: profile `steady`, the task's hours without a reserve for publishing, the model
in the cache, one H100 with 24 CPUs and 110 GB. Rows of a text task are not published: they are assumed by
the hours, and validators may give it more than one GPU.
"""

from __future__ import annotations

from functools import lru_cache

from core.data.facts import assumed_facts
from core.domain.errors import GodMinerError
from core.domain.hardware import Hardware, parse_gpus
from core.domain.tasks import ImageModelType, TaskType, task_type_named
from core.models.identify import facts_from_name
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task
from core.planning.time.overheads import JobConditions
from core.profile.resolve import LoadedProfile, load_profile, resolve_profile
from miner.tournament.field.recipes import FieldRecipe
from miner.tournament.rules import CPUS_PER_GPU, MEMORY_PER_GPU

PROFILE, GPUS = "steady", "1xH100"
#: The container ends so long before the validator does, but at most this share of its time.
RESERVE_S, RESERVE_SHARE = 180.0, 0.1
#: What ai-toolkit calls each loss.
_LOSSES = {"l2": "mse", "l1": "mae"}


def own_plan(
    task_type: str | None, family: str | None, model_id: str | None, hours: float | None, rows: int | None
) -> tuple[FieldRecipe | None, str]:
    """Return our figures, or None and why there are none."""
    if task_type is None:
        return None, "the task is not known: there is no task.json"
    kind = task_type_named(task_type)
    if kind is None:
        return None, f"{task_type} is not a kind that we plan"
    if hours is None:
        return None, "the task's hours are not known"
    image = None
    if not kind.is_text:
        if family not in list(ImageModelType):
            return None, f"{family or 'the family'} is not a family that we plan"
        if rows is None:
            return None, "the number of pictures is not known"
        image = ImageModelType(family)
    try:
        plan = container_plan(kind, image, model_id or family or "", hours, rows)
    except (GodMinerError, ValueError) as error:
        return None, str(error).splitlines()[0]
    if not plan.verdict.feasible:
        return None, plan.verdict.reason
    return recipe_of_plan(plan), ""


@lru_cache(maxsize=256)
def container_plan(
    kind: TaskType, image: ImageModelType | None, model_id: str, hours: float, rows: int | None
) -> TrainingPlan:
    model = facts_from_name(model_id, None, image)
    data = assumed_facts(kind, rows, hours, image)
    hardware = Hardware(gpus=parse_gpus(GPUS), cpu_cores=CPUS_PER_GPU, memory_bytes=MEMORY_PER_GPU)
    profile = resolve_profile(_profile(), kind, model, data.pictures)
    reserve = min(RESERVE_S, RESERVE_SHARE * hours * 3600)
    free = {"reserve": reserve, "reserve_share": 0.0, "min_epochs": 0.0}
    own = profile.model_copy(update={"limits": profile.limits.model_copy(update=free)})
    conditions = JobConditions(hardware, model_cached=True, publishes=False)
    task = TaskSpec(task_type=kind, hours=hours, image_type=image)
    return plan_task(task, model, data, hardware, own, conditions=conditions)


@lru_cache(maxsize=1)
def _profile() -> LoadedProfile:
    return load_profile(PROFILE)


def recipe_of_plan(plan: TrainingPlan) -> FieldRecipe:
    optimizer, steps, image = plan.optimizer, plan.steps, plan.image
    return FieldRecipe(
        trainer=str(plan.engine),
        steps=steps.total,
        shipped=steps.total,
        epochs=steps.epochs,
        batch=plan.batch.micro * plan.batch.world_size,
        accumulation=plan.batch.accumulation,
        optimizer=str(optimizer.name),
        lr=optimizer.learning_rate,
        schedule=str(optimizer.schedule),
        floor=optimizer.min_lr_ratio,
        warmup=optimizer.warmup_steps,
        cooldown=optimizer.cooldown_share,
        lora_rank=plan.adapter.rank if plan.adapter else None,
        lora_alpha=plan.adapter.alpha if plan.adapter else None,
        dropout=image.caption_dropout if image else plan.adapter.dropout if plan.adapter else None,
        loss=_LOSSES.get(str(plan.targets.image_loss), str(plan.targets.image_loss)) if image else None,
        ema=plan.ema.decay if plan.ema else 0.0,
        resolutions=image.resolutions if image else (),
    )
