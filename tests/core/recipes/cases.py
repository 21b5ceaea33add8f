"""Plans and inputs for the recipes' tests: one small feasible plan per kind of run."""

from __future__ import annotations

from typing import Any

from core.domain.choices import LrSchedule, Method, Optimizer, Parallelism
from core.domain.hardware import parse_gpus
from core.domain.tasks import DatasetType, GrpoDataset, ImageModelType, RewardFunction, TaskType
from core.models.image_families import IMAGE_FAMILIES
from core.planning.plan import (
    AdapterPlan,
    BatchPlan,
    DpoPlan,
    FsdpPlan,
    GrpoPlan,
    ImagePlan,
    LaunchPlan,
    OptimizerPlan,
    PrecisionPlan,
    SequencePlan,
    TaskSpec,
    TrainingPlan,
)
from core.recipes import dry_run
from core.recipes.base import ImageFiles, RenderedRun, RunInputs
from tests.core.builders import plan

DATASETS: dict[TaskType, DatasetType] = {
    **dry_run.DATASETS,
    TaskType.GRPO: GrpoDataset(
        field_prompt="prompt",
        reward_functions=[
            RewardFunction(reward_func="def a(completions, **kw): return [0.0]", reward_weight=0.75),
            RewardFunction(reward_func="def b(completions, **kw): return [0.0]", reward_weight=0.25),
        ],
    ),
}
TEXT_TASKS = tuple(DATASETS)
#: The version that Axolotl's checks are told.
TORCH = "2.13.0"


def inputs(task: TaskType | None = TaskType.INSTRUCT, **changes: Any) -> RunInputs:
    values: dict[str, Any] = {
        "model_path": "/cache/models/base",
        "train_path": "/run/data/train.json",
        "eval_path": "/run/data/eval.json",
        "output_dir": "/run/output",
        "work_dir": "/run/work",
        "config_dir": "/run/config",
        "dataset": DATASETS[task] if task is not None else None,
        "port": 29511,
    }
    return RunInputs(**{**values, **changes})


def text_plan(
    task: TaskType,
    method: Method = Method.LORA,
    parallelism: Parallelism = Parallelism.DDP,
    gpus: int = 4,
    **changes: Any,
) -> TrainingPlan:
    """A plan of this shape; FSDP and GRPO bring what they need along."""
    supervised = task.is_supervised
    accumulation = 8 if task.generates else 1
    values: dict[str, Any] = {
        "task": TaskSpec(task_type=task, hours=3),
        "gpus": parse_gpus(f"{gpus}xH100"),
        "available": parse_gpus(f"{gpus}xH100"),
        "method": method,
        "adapter": None
        if method is Method.FULL
        else AdapterPlan(rank=64, alpha=32, dropout=0.05, params=10**8),
        "parallelism": parallelism,
        "fsdp": FsdpPlan() if parallelism is Parallelism.FSDP else None,
        "batch": BatchPlan(micro=8, accumulation=accumulation, world_size=gpus),
        "sequence": SequencePlan(
            length=1024,
            packing=supervised,
            completion_limit=256 if task.generates else None,
            per_epoch=7000,
            tokens_per_epoch=7_168_000,
        ),
        "precision": PrecisionPlan(gradient_checkpointing=True),
        "launch": LaunchPlan(processes=gpus),
        "dpo": DpoPlan() if task.has_pairs else None,
        "grpo": GrpoPlan() if task.generates else None,
    }
    return plan(**{**values, **changes})


IMAGE_ENGINES = {kind: family.engines[0] for kind, family in IMAGE_FAMILIES.items()}


def image_plan(kind: ImageModelType, gpus: int = 1, **changes: Any) -> TrainingPlan:
    values: dict[str, Any] = {
        "task": TaskSpec(task_type=TaskType.IMAGE, hours=1, image_type=kind),
        "engine": IMAGE_ENGINES[kind],
        "gpus": parse_gpus(f"{gpus}xH100"),
        "available": parse_gpus(f"{gpus}xH100"),
        "adapter": AdapterPlan(rank=32, alpha=16, dropout=0, params=10**7),
        "parallelism": Parallelism.DDP if gpus > 1 else Parallelism.SINGLE,
        "batch": BatchPlan(micro=4, accumulation=1, world_size=gpus),
        "sequence": SequencePlan(length=4096, per_epoch=40, tokens_per_epoch=163_840),
        "optimizer": OptimizerPlan(
            name=Optimizer.ADAMW_BNB_8BIT, learning_rate=1e-4, schedule=LrSchedule.COSINE, warmup_steps=10
        ),
        "precision": PrecisionPlan(gradient_checkpointing=True),
        "launch": LaunchPlan(processes=gpus),
        "image": ImagePlan(),
    }
    return plan(**{**values, **changes})


def image_inputs(kind: ImageModelType, **changes: Any) -> RunInputs:
    files = ImageFiles(
        clip_l="/cache/flux/clip_l.safetensors",
        t5xxl="/cache/flux/t5xxl.safetensors",
        ae="/cache/flux/ae.safetensors",
        text_encoder="/cache/encoder",
        vae="/cache/vae",
    )
    values = {"train_path": "/run/images", "eval_path": None, "image": files, **changes}
    return inputs(None, **values)


def noted(rendered: RenderedRun, key: str) -> bool:
    return any(note.startswith(key) for note in rendered.notes)
