"""Rendered configurations before the real Axolotl, and its schema before our table."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.domain.choices import Attention, CompileMode, Engine, LrSchedule, Method, Optimizer, Parallelism
from core.domain.hardware import parse_gpus
from core.domain.tasks import TaskType
from core.models.identify import facts_from_name
from core.planning.plan import (
    AdapterPlan,
    DpoPlan,
    FsdpPlan,
    GrpoPlan,
    LoaderPlan,
    OptimizerPlan,
    PrecisionPlan,
    SequencePlan,
    StepsPlan,
    TrainingPlan,
)
from core.profile.targets import Targets
from core.recipes.dry_run import example_inputs
from core.recipes.render import render
from tests.core.planning.test_planner_grid import EVERY, Entry, feasible, grid
from tests.core.recipes.axolotl.test_rules import BROKEN, with_change
from tests.core.recipes.cases import TEXT_TASKS, inputs, text_plan
from tests.trainer.axolotl_engine import answered, complaints
from tests.trainer.forks import ROOT, ForkServer

__all__ = ["feasible", "grid"]

SFT = TaskType.INSTRUCT
DDP, FSDP = Parallelism.DDP, Parallelism.FSDP
EXPERTS = facts_from_name("Qwen/Qwen3-30B-A3B")
CORNERS: tuple[dict[str, Any], ...] = (
    {
        "adapter": AdapterPlan(rank=512, alpha=1024, dropout=0.05, params=1),
        "targets": Targets(dora=True, rslora=True),
    },
    {"adapter": AdapterPlan(rank=8, alpha=8, dropout=0, params=1), "targets": Targets(loraplus_lr_ratio=16)},
    {"method": Method.QLORA, "model": EXPERTS, "gpus": 1, "parallelism": Parallelism.SINGLE},
    {"method": Method.QLORA, "model": EXPERTS, "parallelism": FSDP, "fsdp": FsdpPlan()},
    {"precision": PrecisionPlan(liger=True, attention=Attention.FLASH_2)},
    {"precision": PrecisionPlan(liger=True, attention=Attention.FLASH_3), "method": Method.FULL, "gpus": 8},
    {"precision": PrecisionPlan(liger=True), "parallelism": FSDP, "fsdp": FsdpPlan()},
    {"precision": PrecisionPlan(liger=True), "task": TaskType.DPO},
    {"precision": PrecisionPlan(liger=True, lora_kernels=False), "task": TaskType.GRPO},
    {"precision": PrecisionPlan(compile_mode=CompileMode.MAX_AUTOTUNE, attention=Attention.FLASH_2)},
    {
        "steps": StepsPlan(
            epochs=8, per_epoch=100, total=800, eval_every=20, save_every=40, early_stopping_patience=8
        )
    },
    {"parallelism": FSDP, "fsdp": FsdpPlan(), "targets": Targets(fsdp_reshard_after_forward=False)},
    {"sequence": SequencePlan(length=4096, group_by_length=True, per_epoch=9, tokens_per_epoch=9)},
    {"method": Method.FULL, "parallelism": FSDP, "gpus": 8, "precision": PrecisionPlan(fp8=True)},
    {"loader": LoaderPlan(workers=64, prefetch_factor=8, drop_last=True)},
    {"task": TaskType.DPO, "dpo": DpoPlan(precompute_reference=True)},
    {
        "task": TaskType.GRPO,
        "grpo": GrpoPlan(vllm=True, vllm_sleep=True),
        "targets": Targets(grpo_generations=4),
    },
    {"engine_config": {"max_memory_MB": 75000, "flash_attention": True, "xformers_attention": True}},
)


def plans() -> Iterator[TrainingPlan]:
    """Every task as full fine-tune, LoRA and QLoRA, on one GPU, and on several by DDP and by FSDP; every
    optimizer and schedule; and the corners."""
    for task, method in itertools.product(TEXT_TASKS, Method):
        yield text_plan(task, method, Parallelism.SINGLE, 1)
        for gpus in (2, 4, 8):
            yield text_plan(task, method, DDP, gpus)
            if not (task.has_pairs and method is Method.QLORA):  # refused, see below
                yield text_plan(task, method, FSDP, gpus)
    text_optimizers = [name for name in Optimizer if name is not Optimizer.PRODIGY]
    for name, parallelism in itertools.product(text_optimizers, (DDP, FSDP)):
        chosen = OptimizerPlan(name=name, learning_rate=1e-4, schedule=LrSchedule.LINEAR)
        yield text_plan(SFT, parallelism=parallelism, optimizer=chosen)
    for schedule in LrSchedule:
        chosen = OptimizerPlan(
            name=Optimizer.ADAMW_TORCH_FUSED,
            learning_rate=8e-4,
            schedule=schedule,
            cycles=5,
            min_lr_ratio=0.1,
            cooldown_share=0.2,
            warmup_steps=300,
        )
        yield text_plan(TaskType.DPO, optimizer=chosen)
    for corner in CORNERS:
        yield text_plan(**{"task": SFT, **corner})
    cpu = text_plan(
        SFT, gpus=1, parallelism=Parallelism.SINGLE, precision=PrecisionPlan(attention=Attention.EAGER)
    )
    yield cpu.model_copy(update={"gpus": parse_gpus("cpu"), "available": parse_gpus("cpu")})


def test_axolotl_itself_accepts_every_rendered_configuration(forks: ForkServer, tmp_path: Path) -> None:
    requests = [
        (render(plan, inputs(plan.task.task_type, eval_path=path)).config, {"n_gpu": plan.launch.processes})
        for plan in plans()
        for path in ("/run/data/eval.json", None)
    ]
    answers = complaints(forks, tmp_path, requests)
    refused = [(answer, config) for answer, (config, _) in zip(answers, requests, strict=True) if answer]
    assert refused == []
    assert len(requests) > 200


def test_the_engine_does_refuse_or_drop_each_of_these(forks: ForkServer, tmp_path: Path) -> None:
    answers = complaints(forks, tmp_path, [(with_change(change), {}) for change in BROKEN.values()])
    assert [name for name, answer in zip(BROKEN, answers, strict=True) if not answer] == []


def test_the_checked_in_table_is_the_installed_engines(forks: ForkServer, tmp_path: Path) -> None:
    checked_in = json.loads((ROOT / "core" / "recipes" / "axolotl" / "table.json").read_text("utf-8"))
    assert answered(forks, tmp_path, "table") == checked_in, "run make engine-tables"


def gpus_of(plan: TrainingPlan) -> dict[str, Any]:
    """The engine is told of the GPUs of the plan."""
    major, minor = plan.gpus.kind.compute_capability
    return {
        "n_gpu": plan.gpus.count,
        "compute_capability": f"sm_{major}{minor}",
        "bf16": plan.gpus.kind.has_bf16,
        "tf32": (major, minor) >= (8, 0),
        "fp8": plan.gpus.kind.has_fp8,
    }


def test_it_accepts_the_configurations_of_shipped_profiles(
    feasible: list[Entry], forks: ForkServer, tmp_path: Path
) -> None:
    chosen = [entry for entry in feasible if entry.plan.engine is Engine.AXOLOTL]
    asked = [(render(entry.plan, example_inputs(entry.task)).config, gpus_of(entry.plan)) for entry in chosen]
    answers = complaints(forks, tmp_path, asked)
    refused = [(str(entry), answer) for entry, answer in zip(chosen, answers, strict=True) if answer]
    assert len(chosen) * EVERY >= 150
    assert not refused, refused[:3]
