"""What Axolotl 0.19 accepts and then ignores, and what it refuses only after loading the model.

The engine's own cross-field checks are repeated where a rendered configuration could run into them, so that
a machine without Axolotl sees them too; `core/recipes/engine_check.py` asks the engine itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.choices import Engine
from core.errors import Problem
from core.recipes.rules import axolotl_rl
from core.recipes.rules.common import Config, in_range, missing, one_of
from core.recipes.schema import Alternative, Table, shown, table

#: Well-known keys that Axolotl does not have, and what to do instead.
HINTS = {
    "max_memory_MB": "limits.gpu_memory in the profile bounds what a job may use",
    "ema": "ema_decay in the profile's targets",
    "use_ema": "ema_decay in the profile's targets",
    "ema_decay": "it belongs to the profile's targets, not to the engine",
    "fsdp_forward_prefetch": "FSDP2 prefetches by itself",
    "fsdp_backward_prefetch": "FSDP2 prefetches by itself",
    "fsdp_limit_all_gathers": "FSDP2 needs no such limit",
    "forward_prefetch": "FSDP2 prefetches by itself",
    "backward_prefetch": "FSDP2 prefetches by itself",
    "limit_all_gathers": "FSDP2 needs no such limit",
    "dataloader_persistent_workers": "it belongs to the profile's targets; the trainer's plugin sets it",
    "early_stopping_threshold": "only early_stopping_patience is read",
    "label_smoothing_factor": "there is none in supervised training; DPO has dpo_label_smoothing",
    "report_to": "use_wandb, use_tensorboard and the like",
    "hub_token": "HF_TOKEN in the environment",
    "push_to_hub": "the daemon publishes",
    "wandb_run": "wandb_name",
    "wandb_runid": "wandb_run_id",
    "ds_type": "preference data are read by the file's ending",
}

#: Optimizers of the enum whose packages no image of ours carries.
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

_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
_LOSSES = (
    "chunked_cross_entropy",
    "cut_cross_entropy",
    "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
)
_BNB_8BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")


def known_keys(config: Config) -> Table:
    """The table for this configuration: the keys of the plugins it lists, and the dataset its `rl` means."""
    known = table(Engine.AXOLOTL)
    root = known.facts["root"]
    for plugin, name in known.facts["plugins"].items():
        if plugin in (config.get("plugins") or []):
            known = known.with_keys(root, known.objects[name])
    if config.get("rl") in ("dpo", "ipo", "simpo"):
        preference: list[Alternative] = [{"list": [{"object": "DPODataset"}]}, "null"]
        known = known.with_keys(root, {"datasets": preference, "test_datasets": preference})
    return known


def rules(config: Config, gpus: int) -> Iterator[Problem]:
    """Everything that is wrong with keys that are each right by themselves."""
    yield from missing(config, table(Engine.AXOLOTL).facts["required"], "Axolotl needs it")
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
        yield from axolotl_rl.rules(config)
    if config.get("rl") == "grpo":
        yield from axolotl_rl.group_rules(config, gpus)


def _numbers(config: Config) -> Iterator[Problem]:
    for key in (
        "learning_rate",
        "num_epochs",
        "micro_batch_size",
        "gradient_accumulation_steps",
        "max_steps",
    ):
        yield from in_range(config, key, above=0)
    for key in ("sequence_len", "eval_batch_size", "eval_steps", "save_steps", "logging_steps", "lora_r"):
        yield from in_range(config, key, above=0)
    for key in ("warmup_steps", "weight_decay", "max_grad_norm", "val_set_size", "dataloader_num_workers"):
        yield from in_range(config, key, least=0)
    yield from in_range(config, "lora_alpha", above=0)
    yield from in_range(config, "lora_dropout", least=0, below=1)
    yield from in_range(config, "rl_beta", above=0)


def _names(config: Config) -> Iterator[Problem]:
    facts = table(Engine.AXOLOTL).facts
    yield from one_of(config, "optimizer", facts["optimizers"])
    yield from one_of(config, "adapter", ("lora", "qlora"))
    needed = _OPTIMIZER_NEEDS.get(str(config.get("optimizer")))
    if needed:
        yield Problem(
            "optimizer", shown(config["optimizer"]), f"needs {needed}, which our images do not carry"
        )
    attention = config.get("attn_implementation")
    if isinstance(attention, str) and "/" not in attention:  # a path names a kernel on the hub
        yield from one_of(config, "attn_implementation", facts["attention"])
    for flag, name in facts["attention_flags"].items():
        if config.get(flag):
            yield Problem(flag, shown(config[flag]), f"is the old name of attn_implementation: {name}")
    for entry in config.get("datasets") or []:
        template = entry.get("chat_template") if isinstance(entry, dict) else None
        choices = facts["chat_templates"]
        if (
            template is not None
            and template not in choices
            and not str(template).startswith("tokenizer_default")
        ):
            yield from one_of({"chat_template": template}, "chat_template", choices)


def _schedule(config: Config) -> Iterator[Problem]:
    known = table(Engine.AXOLOTL).facts["schedulers"]
    yield from one_of(config, "lr_scheduler", known)
    name, given = config.get("lr_scheduler"), config.get("lr_scheduler_kwargs") or {}
    if name not in known or not isinstance(given, dict):
        return
    for key in given:
        if key not in known[name] and "*" not in known[name]:
            takes = ", ".join(known[name]) or "nothing"
            yield Problem(f"lr_scheduler_kwargs.{key}", shown(given[key]), f"{name} takes {takes}")
    if "min_lr_rate" in known[name] and not {"min_lr", "min_lr_rate"} & given.keys():
        yield Problem("lr_scheduler_kwargs", shown(given), f"{name} needs min_lr or min_lr_rate")
    if name == "warmup_stable_decay" and "num_decay_steps" not in given:
        yield Problem("lr_scheduler_kwargs", shown(given), f"{name} needs num_decay_steps")
    if name == "reduce_lr_on_plateau" and not _has_eval_set(config):
        yield Problem("lr_scheduler", shown(name), "needs an evaluation set")
    if name == "one_cycle" and config.get("cosine_min_lr_ratio"):
        yield Problem("cosine_min_lr_ratio", shown(config["cosine_min_lr_ratio"]), f"{name} ignores it")
    if config.get("warmup_steps") and config.get("warmup_ratio"):
        yield Problem("warmup_ratio", shown(config["warmup_ratio"]), "and warmup_steps exclude each other")


def _adapter(config: Config) -> Iterator[Problem]:
    if not config.get("adapter"):
        return
    yield from missing(
        config, ("lora_r", "lora_alpha"), "an adapter without it crashes after loading the model"
    )
    if config["adapter"] == "qlora" and not config.get("load_in_4bit"):
        yield Problem("load_in_4bit", shown(config.get("load_in_4bit")), "qlora needs it")
    if not (config.get("lora_target_linear") or config.get("lora_target_modules")):
        yield Problem("lora_target_linear", "", "is missing: no layer would carry the adapter")


def _evaluation(config: Config) -> Iterator[Problem]:
    evaluates, evaluate, save = _has_eval_set(config), config.get("eval_steps"), config.get("save_steps")
    if evaluate and not evaluates:
        yield Problem(
            "eval_steps", shown(evaluate), "there is no evaluation set: test_datasets or val_set_size"
        )
    aligned = evaluates and evaluate and save and save % evaluate == 0
    for key in ("early_stopping_patience", "load_best_model_at_end"):
        if config.get(key) and not aligned:
            rule = "needs an evaluation set, eval_steps, and save_steps that eval_steps divides"
            tail = "; it would be off without a word" if key == "load_best_model_at_end" else ""
            yield Problem(key, shown(config[key]), rule + tail)
    for step, epoch in (("eval_steps", "evals_per_epoch"), ("save_steps", "saves_per_epoch")):
        if config.get(step) and config.get(epoch):
            yield Problem(epoch, shown(config[epoch]), f"and {step} exclude each other")


def _has_eval_set(config: Config) -> bool:
    return bool(config.get("test_datasets") or config.get("val_set_size"))


def _data(config: Config) -> Iterator[Problem]:
    yield from missing(config, ("datasets",), "there is nothing to train on")
    why = (
        "prepared rows are found again by the settings, not by the file's content: use a fresh folder per job"
    )
    yield from missing(config, ("dataset_prepared_path",), why)
    if config.get("sample_packing"):
        attention = table(Engine.AXOLOTL).facts["attention"]
        used = config.get("attn_implementation")
        if "/" not in str(used) and not attention.get(str(used)):
            apart = ", ".join(name for name, keeps in attention.items() if keeps)
            rule = f"packed rows would attend to each other; these keep them apart: {apart}"
            yield Problem("attn_implementation", shown(used), rule)
        if config.get("group_by_length"):
            yield Problem("group_by_length", "true", "has no effect with sample_packing")
    if config.get("dataloader_num_workers") == 0 and config.get("dataloader_prefetch_factor") is not None:
        given = shown(config["dataloader_prefetch_factor"])
        yield Problem("dataloader_prefetch_factor", given, "is an error without dataloader_num_workers")


def _batch(config: Config) -> Iterator[Problem]:
    if config.get("batch_size") and config.get("gradient_accumulation_steps"):
        yield Problem("batch_size", shown(config["batch_size"]), "excludes gradient_accumulation_steps")
    for key in ("max_memory", "gpu_memory_limit"):
        if config.get(key):
            rule = "limits nothing while training, and under DDP puts the model of every process on one GPU"
            yield Problem(
                key, shown(config[key]), f"{rule}; limits.gpu_memory in the profile is meant for this"
            )


def _kernels(config: Config) -> Iterator[Problem]:
    losses = [key for key in _LOSSES if config.get(key)]
    if len(losses) > 1:
        yield Problem(losses[0], "true", f"excludes {', '.join(losses[1:])}")
    if config.get("bf16") is True and config.get("fp16"):
        yield Problem("fp16", "true", "bf16 wins, fp16 would have no effect")
    if config.get("fp8") and not config.get("torch_compile"):
        yield Problem("fp8", "true", "is several times slower than bf16 without torch_compile")
    kernels = [key for key in _KERNELS if config.get(key)]
    for key in ("load_in_8bit", "trust_remote_code"):
        if kernels and config.get(key):
            yield Problem(kernels[0], "true", f"is refused together with {key}")
    if config.get("gradient_checkpointing") == "unsloth":
        yield Problem(
            "gradient_checkpointing", '"unsloth"', "is no longer known; true or activation_offloading"
        )


def _parallel(config: Config, gpus: int) -> Iterator[Problem]:
    fsdp, optimizer = config.get("fsdp_config"), config.get("optimizer")
    if config.get("fsdp"):
        yield Problem("fsdp", shown(config["fsdp"]), "is FSDP1's key; fsdp_version: 2 and fsdp_config")
    if config.get("deepspeed"):
        yield Problem("deepspeed", shown(config["deepspeed"]), "is not in our images; use fsdp_config")
    if not fsdp:
        return
    if str(config.get("fsdp_version")) != "2":
        yield Problem("fsdp_version", shown(config.get("fsdp_version")), "must be 2: FSDP1 is on its way out")
    if gpus < 2:
        yield Problem("fsdp_config", shown(fsdp), f"shards over several GPUs, the plan has {gpus}")
    if optimizer in _BNB_8BIT:
        yield Problem("optimizer", shown(optimizer), "does not work with FSDP2; adamw_torch_8bit does")
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
