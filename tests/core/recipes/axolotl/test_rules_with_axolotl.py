"""Rendered configurations before the real Axolotl, and its schema before our table."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
from core.recipes.base import RecipeError
from core.recipes.render import render, validate
from tests.core.recipes.axolotl.engine import complaints
from tests.core.recipes.cases import TEXT_TASKS, inputs, text_plan
from tests.doubles.each import each

pytestmark = pytest.mark.process


ROOT = Path(__file__).parents[4]


SFT = TaskType.INSTRUCT
DDP, FSDP = Parallelism.DDP, Parallelism.FSDP
EXPERTS = facts_from_name("Qwen/Qwen3-30B-A3B")
CORNERS: tuple[dict[str, Any], ...] = (
    {
        "adapter": AdapterPlan(rank=512, alpha=1024, dropout=0.05, params=1),
        "targets": Targets(dora=True, rslora=True),
    },
    {
        "adapter": AdapterPlan(rank=8, alpha=8, dropout=0, params=1),
        "targets": Targets(loraplus_lr_ratio=16),
    },
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


def test_a_quantized_base_is_not_sharded_in_preference_training() -> None:
    plan = text_plan(TaskType.DPO, Method.QLORA, Parallelism.FSDP)
    with pytest.raises(RecipeError, match="quantized"):
        render(plan, inputs(TaskType.DPO))


def test_axolotl_itself_accepts_every_rendered_configuration(training_python: str) -> None:
    requests = [
        (render(plan, inputs(plan.task.task_type, eval_path=path)).config, {"n_gpu": plan.launch.processes})
        for plan in plans()
        for path in ("/run/data/eval.json", None)
    ]
    answers = complaints(training_python, requests)
    refused = [(answer, config) for answer, (config, _) in zip(answers, requests, strict=True) if answer]
    assert refused == []
    assert len(requests) > 200


#: Changes to a good configuration that the engine refuses or drops.
BROKEN: dict[str, dict[str, Any]] = {
    "unknown key": {"lora_rank": 8},
    "unknown nested key": {"trl": {"max_prompt_length": 512}},
    "unknown dataset key": {"datasets": [{"path": "x", "type": "chat_template", "messages": "m"}]},
    "text for a number": {"micro_batch_size": "many"},
    "fraction for a whole number": {"lora_r": 8.5},
    "text for a switch": {"sample_packing": "perhaps"},
    "unknown choice": {"rl": "ppo"},
    "list expected": {"datasets": "rows.json"},
    "mapping expected": {"trl": "grpo"},
    "required": {"learning_rate": None},
    "packing preferences": {"rl": "dpo", "sample_packing": True},
    "two warmups": {"warmup_steps": 10, "warmup_ratio": 0.1},
    "evaluation without rows": {"test_datasets": None, "val_set_size": 0},
    "two batch sizes": {"batch_size": 64},
    "stop between saves": {"early_stopping_patience": 3, "eval_steps": 30},
    "sharded 8-bit states": {
        "fsdp_version": 2,
        "fsdp_config": {"offload_params": False},
        "optimizer": "adamw_bnb_8bit",
    },
    "group does not divide": {
        "rl": "grpo",
        "sample_packing": False,
        "trl": {
            "num_generations": 3,
            "max_completion_length": 9,
            "reward_funcs": ["a.b"],
            "reward_weights": [1.0],
        },
    },
    "two losses": {
        "plugins": ["axolotl.integrations.liger.LigerPlugin"],
        "liger_fused_linear_cross_entropy": True,
    },
    "keys of a plugin not listed": {"liger_rope": True},
    "8-bit base and kernels": {"load_in_8bit": True},
    "an old flag beside its successor": {"flash_attention": True},
}


def with_change(change: dict[str, Any]) -> dict[str, Any]:
    config = {**render(text_plan(SFT), inputs()).config, **change}
    return {key: value for key, value in config.items() if value is not None}


@each("name", BROKEN)
def test_what_the_engine_refuses_our_table_and_rules_refuse_too(name: str) -> None:
    assert validate(Engine.AXOLOTL, with_change(BROKEN[name]), gpus=4) != []


def test_the_engine_does_refuse_or_drop_each_of_these(training_python: str) -> None:
    answers = complaints(training_python, [(with_change(change), {}) for change in BROKEN.values()])
    assert [name for name, answer in zip(BROKEN, answers, strict=True) if not answer] == []


def test_the_checked_in_table_is_the_installed_engines(training_python: str) -> None:
    script = ROOT / "scripts" / "engine_tables" / "axolotl_table.py"
    done = subprocess.run(
        [training_python, str(script)], capture_output=True, text=True, timeout=600, check=True
    )
    checked_in = (ROOT / "core" / "recipes" / "axolotl" / "table.json").read_text("utf-8")
    assert json.loads(done.stdout) == json.loads(checked_in), f"run {script.name} and look at the difference"
