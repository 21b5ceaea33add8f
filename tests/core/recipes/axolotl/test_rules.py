"""What Axolotl refuses or drops, refused by our table and rules. `test_axolotl_installed` asks Axolotl."""

from __future__ import annotations

from typing import Any

import pytest

from core.domain.choices import Engine, Method, Parallelism
from core.domain.tasks import TaskType
from core.recipes.base import RecipeError
from core.recipes.render import render, validate
from tests.core.recipes.cases import inputs, text_plan
from tests.doubles.each import each

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
    config = {**render(text_plan(TaskType.INSTRUCT), inputs()).config, **change}
    return {key: value for key, value in config.items() if value is not None}


@each("name", BROKEN)
def test_what_the_engine_refuses_our_table_and_rules_refuse_too(name: str) -> None:
    assert validate(Engine.AXOLOTL, with_change(BROKEN[name]), gpus=4) != []


def test_a_quantized_base_is_not_sharded_in_preference_training() -> None:
    plan = text_plan(TaskType.DPO, Method.QLORA, Parallelism.FSDP)
    with pytest.raises(RecipeError, match="quantized"):
        render(plan, inputs(TaskType.DPO))
