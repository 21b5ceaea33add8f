"""What Axolotl ignores or refuses in preference and group training (`rl: dpo`, `rl: grpo`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from core.errors import Problem
from core.recipes.rules.common import Config
from core.recipes.schema import shown

#: Read by the builder of supervised trainings only.
_IGNORED_WITH_RL = (
    "auto_find_batch_size",
    "dataloader_drop_last",
    "ddp_find_unused_parameters",
    "early_stopping_patience",
    "group_by_length",
    "load_best_model_at_end",
    "loss_watchdog_patience",
    "loss_watchdog_threshold",
    "metric_for_best_model",
    "neftune_noise_alpha",
)


def rules(config: Config) -> Iterator[Problem]:
    kind = config["rl"]
    for key in _IGNORED_WITH_RL:
        if config.get(key):
            yield Problem(key, shown(config[key]), f"Axolotl ignores it with rl: {kind}")
    if config.get("sample_packing") or config.get("eval_sample_packing"):
        yield Problem("sample_packing", "true", f"does not work with rl: {kind}")
    quantized = config.get("load_in_4bit") or config.get("load_in_8bit")
    if kind == "dpo" and quantized and config.get("fsdp_config"):
        yield Problem("fsdp_config", "", "FSDP2 does not take a quantized base with rl: dpo")
    datasets, tests = config.get("datasets") or [], config.get("test_datasets") or []
    if kind == "dpo" and len(tests) > len(datasets):
        rule = f"there are {len(tests)}, but only {len(datasets)} datasets, whose field maps they use"
        yield Problem("test_datasets", "", rule)
    for place, (train, test) in enumerate(zip(datasets, tests, strict=False)):
        if kind == "dpo" and train.get("type") != test.get("type"):
            rule = f"is ignored: rl: dpo reads it with the field map of datasets[{place}]"
            yield Problem(f"test_datasets[{place}].type", shown(test.get("type")), rule)


def group_rules(config: Config, gpus: int) -> Iterator[Problem]:
    settings: dict[str, Any] = config.get("trl") or {}
    if not settings.get("max_completion_length"):
        yield Problem("trl.max_completion_length", "", "is missing: generation would stop at 20 tokens")
    if not settings.get("reward_funcs"):
        yield Problem("trl.reward_funcs", "", "is missing: there is nothing to learn from")
    for name in settings.get("reward_funcs") or []:
        if "." not in str(name):
            yield Problem(
                "trl.reward_funcs", shown(name), "must be module.function; else it is taken for a model"
            )
    weights = settings.get("reward_weights")
    if weights is not None and len(weights) != len(settings.get("reward_funcs") or []):
        yield Problem("trl.reward_weights", shown(weights), "must be one per reward function")
    group = settings.get("num_generations")
    batch = int(config.get("micro_batch_size") or 1) * int(config.get("gradient_accumulation_steps") or 1)
    batch = int(settings.get("generation_batch_size") or batch)
    if not isinstance(group, int) or group < 2:
        yield Problem("trl.num_generations", shown(group), "must be at least 2")
    elif batch % group or batch < group * gpus:
        rule = (
            f"micro_batch_size × gradient_accumulation_steps = {batch} must be a multiple of it, "
            f"and at least {group * gpus} on {gpus} GPUs"
        )
        yield Problem("trl.num_generations", shown(group), rule)
