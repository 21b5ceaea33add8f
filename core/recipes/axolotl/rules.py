"""Settings that Axolotl accepts and then ignores, or refuses only after loading the model.

The engine's own cross-field checks are repeated where a rendered configuration could run into them, so that
a machine without Axolotl finds them too; tests compare with the engine itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from core.domain.choices import Engine
from core.domain.errors import Problem
from core.recipes.keys import DROPPED_AXOLOTL
from core.recipes.schema import (
    ConfigMapping,
    EngineTable,
    TypeAlternative,
    check_choice,
    check_range,
    engine_table,
    invalid,
    missing_keys,
    shown_value,
)

#: Only supervised training reads them.
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


def _preference_rules(config: ConfigMapping) -> Iterator[Problem]:
    kind = config["rl"]
    for key in _IGNORED_WITH_RL:
        if config.get(key):
            yield invalid(config, key, f"Axolotl ignores it with rl: {kind}")
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
            yield Problem(f"test_datasets[{place}].type", shown_value(test.get("type")), rule)


def _group_rules(config: ConfigMapping, gpus: int) -> Iterator[Problem]:
    settings: dict[str, Any] = config.get("trl") or {}
    if not settings.get("max_completion_length"):
        yield Problem("trl.max_completion_length", "", "is missing: generation would stop at 20 tokens")
    if not settings.get("reward_funcs"):
        yield Problem("trl.reward_funcs", "", "is missing: there is nothing to learn from")
    for name in settings.get("reward_funcs") or []:
        if "." not in str(name):
            yield Problem(
                "trl.reward_funcs", shown_value(name), "must be module.function; else it is taken for a model"
            )
    weights = settings.get("reward_weights")
    if weights is not None and len(weights) != len(settings.get("reward_funcs") or []):
        yield Problem("trl.reward_weights", shown_value(weights), "must be one per reward function")
    if settings.get("use_vllm") and settings.get("vllm_mode") != "colocate":
        rule = "must be colocate: without it Axolotl waits for a server"
        yield Problem("trl.vllm_mode", shown_value(settings.get("vllm_mode")), rule)
    elif settings.get("use_vllm") and not (config.get("vllm") or {}).get("tensor_parallel_size"):
        yield Problem("vllm.tensor_parallel_size", "", "is missing: it has no default beside the training")
    group = settings.get("num_generations")
    batch = int(config.get("micro_batch_size") or 1) * int(config.get("gradient_accumulation_steps") or 1)
    batch = int(settings.get("generation_batch_size") or batch)
    if not isinstance(group, int) or group < 2:
        yield Problem("trl.num_generations", shown_value(group), "must be at least 2")
    elif batch % group or batch < group * gpus:
        rule = (
            f"micro_batch_size × gradient_accumulation_steps = {batch} must be a multiple of it, "
            f"and at least {group * gpus} on {gpus} GPUs"
        )
        yield Problem("trl.num_generations", shown_value(group), rule)


#: Well-known keys that Axolotl does not have, and what to do instead. `engine_config` is rid of most of them
#: (`core.recipes.keys`); a template of `configs/base` may still have them.
AXOLOTL_HINTS = {
    **DROPPED_AXOLOTL,
    "label_smoothing_factor": "there is none in supervised training; DPO has dpo_label_smoothing",
    "ds_type": "preference data are read by the file's ending",
}

#: Optimizers of the enum whose packages our images do not have.
_OPTIMIZER_NEEDS = {
    "adamw_anyprecision": "torchdistx",
    "adamw_torch_npu_fused": "an Ascend NPU",
    "adamw_torch_xla": "a TPU",
    "apollo_adamw": "apollo-torch",
    "apollo_adamw_layerwise": "apollo-torch",
    "came_pytorch": "came-pytorch",
    "flash_adam": "flashoptim",
    "flash_adamw": "flashoptim",
    "flash_lion": "flashoptim",
    "flash_sgd": "flashoptim",
    "flash_sgdw": "flashoptim",
    "galore_adafactor": "galore-torch",
    "galore_adafactor_layerwise": "galore-torch",
    "galore_adamw": "galore-torch",
    "galore_adamw_8bit": "galore-torch",
    "galore_adamw_8bit_layerwise": "galore-torch",
    "galore_adamw_layerwise": "galore-torch",
    "grokadamw": "grokadamw",
    "optimi_adamw": "torch-optimi",
    "q_galore_adamw8bit": "q-galore-torch",
    "stable_adamw": "torch-optimi",
}

LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
_LOSSES = (
    "chunked_cross_entropy",
    "cut_cross_entropy",
    "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
)
_BNB_8BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")


def axolotl_table(config: ConfigMapping) -> EngineTable:
    """The table for this configuration: with the keys of its plugins, and the dataset type for its `rl`."""
    known = engine_table(Engine.AXOLOTL)
    root = known.facts["root"]
    for plugin, name in known.facts["plugins"].items():
        if plugin in (config.get("plugins") or []):
            known = known.with_keys(root, known.objects[name])
    if config.get("rl") in ("dpo", "ipo", "simpo"):
        preference: list[TypeAlternative] = [{"list": [{"object": "DPODataset"}]}, "null"]
        known = known.with_keys(root, {"datasets": preference, "test_datasets": preference})
    return known


def axolotl_rules(config: ConfigMapping, gpus: int) -> Iterator[Problem]:
    """Yield what is wrong with a combination of valid keys."""
    yield from missing_keys(config, engine_table(Engine.AXOLOTL).facts["required"], "Axolotl needs it")
    yield from _numbers(config)
    yield from _names(config)
    yield from _schedule(config)
    yield from _adapter(config)
    yield from _evaluation(config)
    yield from _data(config)
    yield from _batch(config)
    yield from _kernels(config)
    yield from _parallel(config, gpus)
    if config.get("rl"):
        yield from _preference_rules(config)
    if config.get("rl") == "grpo":
        yield from _group_rules(config, gpus)


def _numbers(config: ConfigMapping) -> Iterator[Problem]:
    for key in (
        "learning_rate",
        "num_epochs",
        "micro_batch_size",
        "gradient_accumulation_steps",
        "max_steps",
    ):
        yield from check_range(config, key, above=0)
    for key in ("sequence_len", "eval_batch_size", "eval_steps", "save_steps", "logging_steps", "lora_r"):
        yield from check_range(config, key, above=0)
    for key in ("warmup_steps", "weight_decay", "max_grad_norm", "val_set_size", "dataloader_num_workers"):
        yield from check_range(config, key, least=0)
    yield from check_range(config, "lora_alpha", above=0)
    yield from check_range(config, "lora_dropout", least=0, below=1)
    yield from check_range(config, "rl_beta", above=0)


def _names(config: ConfigMapping) -> Iterator[Problem]:
    facts = engine_table(Engine.AXOLOTL).facts
    yield from check_choice(config, "optimizer", facts["optimizers"])
    yield from check_choice(config, "adapter", ("lora", "qlora"))
    needed = _OPTIMIZER_NEEDS.get(str(config.get("optimizer")))
    if needed:
        yield invalid(config, "optimizer", f"needs {needed}, which our images do not have")
    attention = config.get("attn_implementation")
    if isinstance(attention, str) and "/" not in attention:  # a path names a kernel on the hub
        yield from check_choice(config, "attn_implementation", facts["attention"])
    for flag, name in facts["attention_flags"].items():
        if config.get(flag):
            yield invalid(config, flag, f"is the old name of attn_implementation: {name}")
    for entry in config.get("datasets") or []:
        template = entry.get("chat_template") if isinstance(entry, dict) else None
        choices = facts["chat_templates"]
        if (
            template is not None
            and template not in choices
            and not str(template).startswith("tokenizer_default")
        ):
            yield from check_choice({"chat_template": template}, "chat_template", choices)


def _schedule(config: ConfigMapping) -> Iterator[Problem]:
    known = engine_table(Engine.AXOLOTL).facts["schedulers"]
    yield from check_choice(config, "lr_scheduler", known)
    name, arguments = config.get("lr_scheduler"), config.get("lr_scheduler_kwargs") or {}
    if name not in known or not isinstance(arguments, dict):
        return
    for key in arguments:
        if key not in known[name] and "*" not in known[name]:
            takes = ", ".join(known[name]) or "nothing"
            yield Problem(f"lr_scheduler_kwargs.{key}", shown_value(arguments[key]), f"{name} takes {takes}")
    if "min_lr_rate" in known[name] and not {"min_lr", "min_lr_rate"} & arguments.keys():
        yield invalid(config, "lr_scheduler_kwargs", f"{name} needs min_lr or min_lr_rate")
    if name == "warmup_stable_decay" and "num_decay_steps" not in arguments:
        yield invalid(config, "lr_scheduler_kwargs", f"{name} needs num_decay_steps")
    if name == "reduce_lr_on_plateau" and not _has_eval_set(config):
        yield invalid(config, "lr_scheduler", "needs an evaluation set")
    if name == "one_cycle" and config.get("cosine_min_lr_ratio"):
        yield invalid(config, "cosine_min_lr_ratio", f"{name} ignores it")
    if config.get("warmup_steps") and config.get("warmup_ratio"):
        yield invalid(config, "warmup_ratio", "and warmup_steps exclude each other")


def _adapter(config: ConfigMapping) -> Iterator[Problem]:
    if not config.get("adapter"):
        return
    yield from missing_keys(
        config, ("lora_r", "lora_alpha"), "an adapter without it crashes after loading the model"
    )
    if config["adapter"] == "qlora" and not config.get("load_in_4bit"):
        yield invalid(config, "load_in_4bit", "qlora needs it")
    if not (config.get("lora_target_linear") or config.get("lora_target_modules")):
        yield Problem("lora_target_linear", "", "is missing: no layer would carry the adapter")


def _evaluation(config: ConfigMapping) -> Iterator[Problem]:
    evaluates, evaluate, save = _has_eval_set(config), config.get("eval_steps"), config.get("save_steps")
    if evaluate and not evaluates:
        yield invalid(config, "eval_steps", "there is no evaluation set: test_datasets or val_set_size")
    aligned = evaluates and evaluate and save and save % evaluate == 0
    for key in ("early_stopping_patience", "load_best_model_at_end"):
        if config.get(key) and not aligned:
            rule = "needs an evaluation set, eval_steps, and save_steps that eval_steps divides"
            tail = "; it would silently be off" if key == "load_best_model_at_end" else ""
            yield invalid(config, key, rule + tail)
    for step, epoch in (("eval_steps", "evals_per_epoch"), ("save_steps", "saves_per_epoch")):
        if config.get(step) and config.get(epoch):
            yield invalid(config, epoch, f"and {step} exclude each other")


def _has_eval_set(config: ConfigMapping) -> bool:
    return bool(config.get("test_datasets") or config.get("val_set_size"))


def _data(config: ConfigMapping) -> Iterator[Problem]:
    yield from missing_keys(config, ("datasets",), "there is nothing to train on")
    why = "prepared rows are found again by the settings, not by the file's content: use a new folder per job"
    yield from missing_keys(config, ("dataset_prepared_path",), why)
    if config.get("sample_packing"):
        attention = engine_table(Engine.AXOLOTL).facts["attention"]
        used = config.get("attn_implementation")
        if "/" not in str(used) and not attention.get(str(used)):
            apart = ", ".join(name for name, keeps in attention.items() if keeps)
            rule = f"packed rows would attend to each other; these keep them apart: {apart}"
            yield invalid(config, "attn_implementation", rule)
        if config.get("group_by_length"):
            yield Problem("group_by_length", "true", "has no effect with sample_packing")
    if config.get("dataloader_num_workers") == 0 and config.get("dataloader_prefetch_factor") is not None:
        given = shown_value(config["dataloader_prefetch_factor"])
        yield Problem("dataloader_prefetch_factor", given, "is an error without dataloader_num_workers")


def _batch(config: ConfigMapping) -> Iterator[Problem]:
    if config.get("batch_size") and config.get("gradient_accumulation_steps"):
        yield invalid(config, "batch_size", "excludes gradient_accumulation_steps")
    for key in ("max_memory", "gpu_memory_limit"):
        if config.get(key):
            rule = "limits nothing while training, and under DDP puts the model of every process on one GPU"
            yield invalid(config, key, f"{rule}; limits.gpu_memory in the profile is meant for this")


def _kernels(config: ConfigMapping) -> Iterator[Problem]:
    losses = [key for key in _LOSSES if config.get(key)]
    if len(losses) > 1:
        yield Problem(losses[0], "true", f"excludes {', '.join(losses[1:])}")
    if config.get("bf16") is True and config.get("fp16"):
        yield Problem("fp16", "true", "bf16 wins, fp16 would have no effect")
    if config.get("fp8") and not config.get("torch_compile"):
        yield Problem("fp8", "true", "is several times slower than bf16 without torch_compile")
    kernels = [key for key in LORA_KERNELS if config.get(key)]
    for key in ("load_in_8bit", "trust_remote_code"):
        if kernels and config.get(key):
            yield Problem(kernels[0], "true", f"is refused together with {key}")
    if config.get("gradient_checkpointing") == "unsloth":
        yield Problem(
            "gradient_checkpointing", '"unsloth"', "is no longer known; true or activation_offloading"
        )


def _parallel(config: ConfigMapping, gpus: int) -> Iterator[Problem]:
    fsdp, optimizer = config.get("fsdp_config"), config.get("optimizer")
    if config.get("fsdp"):
        yield invalid(config, "fsdp", "is FSDP1's key; fsdp_version: 2 and fsdp_config")
    if config.get("deepspeed"):
        yield invalid(config, "deepspeed", "is not in our images; use fsdp_config")
    if not fsdp:
        return
    if str(config.get("fsdp_version")) != "2":
        yield invalid(config, "fsdp_version", "must be 2: FSDP1 is on its way out")
    if gpus < 2:
        yield invalid(config, "fsdp_config", f"shards over several GPUs, the plan has {gpus}")
    if optimizer in _BNB_8BIT:
        yield invalid(config, "optimizer", "does not work with FSDP2; adamw_torch_8bit does")
    if (
        isinstance(fsdp, dict)
        and fsdp.get("activation_checkpointing")
        and config.get("gradient_checkpointing")
    ):
        yield Problem(
            "gradient_checkpointing", "true", "and fsdp_config.activation_checkpointing do it twice"
        )
    if isinstance(fsdp, dict) and fsdp.get("cpu_ram_efficient_loading") and config.get("load_in_4bit"):
        yield Problem("fsdp_config.cpu_ram_efficient_loading", "true", "hangs with load_in_4bit under FSDP2")
