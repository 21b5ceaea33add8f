"""Bring a profile's raw engine keys up to today's engine.

Guides for older releases are full of keys that were renamed, that were never Axolotl's, or that now do harm.
Each is translated or left out, and leaves a note. Any other key is passed on unchanged, to the validation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RawKeys = Mapping[str, Any]

_FSDP1 = "a setting of FSDP1; FSDP2 prefetches and bounds its gathers by itself"
_MEMORY = "limits nothing while training; limits.gpu_memory of the profile does"
_EMA = "Axolotl has no moving average; ema_decay among the profile's targets has the trainer's plugin do it"

#: Left out of an Axolotl file, with the reason.
DROPPED_AXOLOTL = {
    "max_memory_MB": _MEMORY,
    "max_memory": _MEMORY,
    "gpu_memory_limit": _MEMORY,
    "ema": _EMA,
    "use_ema": _EMA,
    "ema_decay": _EMA,
    "ema_update_every": _EMA,
    "fsdp_forward_prefetch": _FSDP1,
    "fsdp_backward_prefetch": _FSDP1,
    "fsdp_limit_all_gathers": _FSDP1,
    "dataloader_persistent_workers": "no key of Axolotl's; set it among the profile's targets",
    "early_stopping_threshold": "Axolotl reads early_stopping_patience alone",
    "xformers_attention": "broken with transformers 5; attention among the profile's targets decides",
    "hub_token": "tokens are set in the environment, never in a file",
    "push_to_hub": "the daemon publishes",
    "hub_model_id": "the daemon publishes; Axolotl would create the repository before the training",
    "hub_strategy": "the daemon publishes",
    "report_to": "Axolotl has use_wandb, use_tensorboard and the like",
    "rope_scaling": "belongs into model_config, as rope_parameters",
}

#: Written under another name.
RENAMED_AXOLOTL = {
    "noisy_embedding_alpha": "neftune_noise_alpha",
    "dpo_beta": "rl_beta",
    "evaluation_strategy": "eval_strategy",
    "dataset_processes": "dataset_num_proc",
    "wandb_run": "wandb_name",
    "wandb_runid": "wandb_run_id",
    "sequence_parallel_degree": "context_parallel_size",
    "liger_swiglu": "liger_glu_activation",
}

_NO_EMA = "sd-scripts has no moving average; a schedule-free optimizer is the nearest"
_HUB = "the daemon publishes; even an empty value makes sd-scripts try the hub at every checkpoint"

#: Left out of a file for sd-scripts, with the reason.
DROPPED_KOHYA = {
    "epoch": "sd-scripts has no such key; max_steps or num_epochs among the profile's targets",
    "ema": _NO_EMA,
    "use_ema": _NO_EMA,
    "ema_decay": _NO_EMA,
    "noise_offset_type": "sd-scripts has no such key, noise_offset alone decides",
    "mem_eff_save": "only full-model trainers have it",
    "xformers": "torch's attention is used, which needs no package of its own",
    "fused_backward_pass": "has no effect on a network's training",
    "huggingface_repo_id": _HUB,
    "huggingface_repo_type": _HUB,
    "huggingface_repo_visibility": _HUB,
    "huggingface_path_in_repo": _HUB,
    "huggingface_token": _HUB,
    "save_every_n_steps": "validators do not recognise step files; save_every_epochs among the targets",
}

#: Flags that became a value of `attn_implementation`.
_ATTENTION = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "flex_attention": "flex_attention",
    "eager_attention": "eager",
    "sage_attention": "sage",
}
#: Values that became others, by key.
_VALUES: dict[str, dict[str, Any]] = {
    "optimizer": {"adamw_hf": "adamw_torch", "adamw_apex_fused": "adamw_torch_fused"},
    "gradient_checkpointing": {"unsloth": True},
    "bf16": {"full": True},
}


def translated_axolotl(raw: RawKeys) -> tuple[dict[str, Any], list[str]]:
    """Translate raw keys for today's Axolotl; return them with a note for each that changed."""
    config: dict[str, Any] = {}
    notes: list[str] = []
    for key, value in raw.items():
        if key in DROPPED_AXOLOTL:
            notes.append(f"{key}: left out, {DROPPED_AXOLOTL[key]}")
        elif key in _ATTENTION:
            notes.append(_attention(config, key, value, raw))
        elif key in ("fsdp", "fsdp_config"):
            _sharding(config, key, value, notes)
        elif key in RENAMED_AXOLOTL:
            config[RENAMED_AXOLOTL[key]] = value
            notes.append(f"{key}: is called {RENAMED_AXOLOTL[key]} today")
        else:
            config[key] = _VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value
            if config[key] != value:
                notes.append(f"{key} {value}: is {config[key]} today")
    return config, notes


def translated_kohya(raw: RawKeys) -> tuple[dict[str, Any], list[str]]:
    """Drop the raw keys that sd-scripts does not have or should not get; return the rest, and notes."""
    kept = {key: value for key, value in raw.items() if key not in DROPPED_KOHYA}
    return kept, [f"{key}: left out, {DROPPED_KOHYA[key]}" for key in raw if key in DROPPED_KOHYA]


def _attention(config: dict[str, Any], key: str, value: Any, raw: RawKeys) -> str:
    if not value or "attn_implementation" in raw:
        return f"{key}: left out, attn_implementation decides"
    # Of several flags the fastest wins: guides set flash and xformers or sdp side by side.
    if config.get("attn_implementation") != "flash_attention_2":
        config["attn_implementation"] = _ATTENTION[key]
    return f"{key}: is attn_implementation: {_ATTENTION[key]} today"


def _sharding(config: dict[str, Any], key: str, value: Any, notes: list[str]) -> None:
    if key == "fsdp":
        notes.append("fsdp: left out, FSDP1's key; fsdp_above among the profile's targets decides")
        return
    if not isinstance(value, Mapping):
        config[key] = value
        return
    kept = {}
    for name, setting in value.items():
        bare = str(name).removeprefix("fsdp_")
        if bare in ("forward_prefetch", "backward_prefetch", "limit_all_gathers"):
            notes.append(f"fsdp_config.{name}: left out, {_FSDP1}")
            continue
        kept[bare] = setting
        if bare != name:
            notes.append(f"fsdp_config.{name}: is called {bare} today")
    if kept:
        config[key] = kept
