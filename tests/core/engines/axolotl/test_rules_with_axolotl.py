"""Rendered configurations before the real Axolotl, and its schema before our table."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.domain.choices import Attention, CompileMode, Engine, LrSchedule, Method, Optimizer, Parallelism
from core.domain.hardware import parse_gpus
from core.domain.tasks import TaskType
from core.engines.base import RecipeError
from core.engines.render import render
from core.engines.validate import validate
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
from tests.core.engines.axolotl.engine import complaints
from tests.core.engines.cases import TEXT_TASKS, inputs, text_plan

ROOT = Path(__file__).parents[4]


def shapes() -> Iterator[tuple[str, TrainingPlan]]:
    """Every task as full fine-tune, LoRA and QLoRA, on one GPU, and on several by DDP and by FSDP."""
    for task in TEXT_TASKS:
        for method in Method:
            yield f"{task}-{method}-1", text_plan(task, method, Parallelism.SINGLE, 1)
            for gpus in (2, 4, 8):
                yield f"{task}-{method}-ddp-{gpus}", text_plan(task, method, Parallelism.DDP, gpus)
                if not (task.has_pairs and method is Method.QLORA):  # refused, see below
                    yield f"{task}-{method}-fsdp-{gpus}", text_plan(task, method, Parallelism.FSDP, gpus)


def optimizers() -> Iterator[tuple[str, TrainingPlan]]:
    for name in Optimizer:
        for parallelism in (Parallelism.DDP, Parallelism.FSDP):
            if name is not Optimizer.PRODIGY:  # image engines only
                chosen = OptimizerPlan(name=name, learning_rate=1e-4, schedule=LrSchedule.LINEAR)
                plan = text_plan(TaskType.INSTRUCT, parallelism=parallelism, optimizer=chosen)
                yield f"{name}-{parallelism}", plan
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
        yield f"{schedule}", text_plan(TaskType.DPO, optimizer=chosen)


def corners() -> Iterator[tuple[str, TrainingPlan]]:
    sft = TaskType.INSTRUCT
    big = AdapterPlan(rank=512, alpha=1024, dropout=0.05, params=10**9, dora=True, rslora=True, fp32=False)
    fast = PrecisionPlan(
        attention=Attention.FLASH_2, liger=True, compile_mode=CompileMode.MAX_AUTOTUNE, neftune_alpha=5
    )
    hold = StepsPlan(
        epochs=8,
        per_epoch=100,
        total=800,
        eval_every=20,
        save_every=40,
        early_stopping_patience=8,
        eval_rows=99,
    )
    offload = FsdpPlan(offload_params=True, wrap_class="LlamaDecoderLayer", reshard_after_forward=False)
    loose = SequencePlan(length=4096, group_by_length=True, per_epoch=9, tokens_per_epoch=9)
    yield "large-adapter", text_plan(sft, adapter=big)
    yield "kernels", text_plan(sft, precision=fast)
    yield "early-stopping", text_plan(sft, steps=hold)
    yield "offload", text_plan(sft, parallelism=Parallelism.FSDP, fsdp=offload)
    yield "loose", text_plan(sft, sequence=loose)
    yield "fp8", text_plan(sft, Method.FULL, Parallelism.FSDP, 8, precision=PrecisionPlan(fp8=True))
    yield (
        "loraplus",
        text_plan(sft, adapter=AdapterPlan(rank=8, alpha=8, dropout=0, params=1, loraplus_lr_ratio=16)),
    )
    yield "loader", text_plan(sft, loader=LoaderPlan(workers=64, prefetch_factor=8, drop_last=True))
    yield "precomputed", text_plan(TaskType.DPO, dpo=DpoPlan(precompute_reference=True))
    yield "vllm", text_plan(TaskType.GRPO, grpo=GrpoPlan(vllm=True, generations=4))
    cpu = text_plan(
        sft, gpus=1, parallelism=Parallelism.SINGLE, precision=PrecisionPlan(attention=Attention.EAGER)
    )
    yield "cpu", cpu.model_copy(update={"gpus": parse_gpus("cpu"), "available": parse_gpus("cpu")})
    old = {"max_memory_MB": 75000, "flash_attention": True, "xformers_attention": True, "ema": True}
    yield "old-keys", text_plan(sft, engine_config=dict(old))


def rendered_configs() -> dict[str, tuple[dict[str, Any], dict[str, int]]]:
    """With the machine of each."""
    configs = {}
    for name, plan in (*shapes(), *optimizers(), *corners()):
        for suffix, eval_path in (("", "/run/data/eval.json"), ("-alone", None)):
            config = dict(render(plan, inputs(plan.task.task_type, eval_path=eval_path)).config)
            configs[name + suffix] = (config, {"n_gpu": plan.launch.processes})
    return configs


def test_a_quantized_base_is_not_sharded_in_preference_training() -> None:
    plan = text_plan(TaskType.DPO, Method.QLORA, Parallelism.FSDP)
    with pytest.raises(RecipeError, match="quantized"):
        render(plan, inputs(TaskType.DPO))


@pytest.mark.integration
def test_axolotl_itself_accepts_every_rendered_configuration(training_python: str) -> None:
    configs = rendered_configs()
    answers = complaints(training_python, list(configs.values()))
    refused = {name: answer for name, answer in zip(configs, answers, strict=True) if answer}
    assert refused == {}
    assert len(configs) > 200


def broken() -> dict[str, dict[str, Any]]:
    """Changes to a good configuration that the engine refuses or drops."""
    return {
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
    config = copy.deepcopy(dict(render(text_plan(TaskType.INSTRUCT), inputs()).config))
    config |= change
    return {key: value for key, value in config.items() if value is not None}


@pytest.mark.parametrize("name", broken())
def test_what_the_engine_refuses_our_table_and_rules_refuse_too(name: str) -> None:
    assert validate(Engine.AXOLOTL, with_change(broken()[name]), gpus=4) != []


@pytest.mark.integration
def test_the_engine_does_refuse_or_drop_each_of_these(training_python: str) -> None:
    answers = complaints(training_python, [(with_change(change), {}) for change in broken().values()])
    assert [name for name, answer in zip(broken(), answers, strict=True) if not answer] == []


@pytest.mark.integration
def test_the_checked_in_table_is_the_installed_engines(training_python: str) -> None:
    script = ROOT / "scripts" / "engine_tables" / "axolotl_table.py"
    made = subprocess.run(
        [training_python, str(script)], capture_output=True, text=True, timeout=300, check=True
    )
    checked_in = (ROOT / "core" / "engines" / "axolotl" / "table.json").read_text("utf-8")
    assert json.loads(made.stdout) == json.loads(checked_in), f"run {script.name} and look at the difference"
