"""For a key that does not exist: which one was meant, and where it belongs."""

from __future__ import annotations

import difflib
import types
import typing
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from core.profile.schema import Profile
from core.profile.yaml_lines import Path, dotted

#: What other tools and the seeds call our keys.
SYNONYMS: dict[str, str] = {
    "network_dim": "lora_r",
    "lora_rank": "lora_r",
    "rank": "lora_r",
    "r": "lora_r",
    "network_alpha": "lora_alpha",
    "alpha": "lora_alpha",
    "train_batch_size": "micro_batch_size",
    "per_device_train_batch_size": "micro_batch_size",
    "batch_size": "effective_batch_size",
    "gradient_accumulation": "gradient_accumulation_steps",
    "epoch": "num_epochs",
    "epochs": "num_epochs",
    "max_train_epochs": "num_epochs",
    "max_train_steps": "max_steps",
    "lr": "learning_rate",
    "unet_lr": "learning_rate",
    "max_memory_MB": "gpu_memory",
    "max_memory": "gpu_memory",
    "scheduler": "lr_scheduler",
    "lr_scheduler_num_cycles": "lr_cycles",
    "loss_type": "image_loss",
    "flash_attention": "attention",
    "xformers_attention": "attention",
    "attn_implementation": "attention",
    "torch_compile": "compile_mode",
    "optimizer_type": "optimizer",
    "ema_update_every": "ema_every",
    "shm_size": "shm",
    "max_seq_length": "sequence_len",
    "clip_grad_norm": "max_grad_norm",
    "backward_prefetch": "fsdp_backward_prefetch",
    "forward_prefetch": "fsdp_forward_prefetch",
    "limit_all_gathers": "fsdp_limit_all_gathers",
}


def model_at(path: Path) -> type[BaseModel] | None:
    """The part of the schema that a path leads to; None where keys are free or values are plain."""
    kind: Any = Profile
    for step in path:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            field = _fields(kind).get(str(step))
            kind = None if field is None else _inner(field.annotation)
        elif get_origin(kind) in (dict, list):
            kind = _inner(get_args(kind)[-1])
        else:
            return None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _inner(annotation: Any) -> Any:
    """The type without Optional and Annotated around it."""
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return _inner(get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return _inner(kinds[0]) if kinds else None
    return annotation


def homes_of(key: str) -> list[str]:
    """The parts of a profile that have this key."""
    parts: list[Path] = [(), ("targets",), ("limits",), ("container",)]
    return [dotted(part) or "the top level" for part in parts if key in keys_at(part)]


def keys_at(path: Path) -> list[str]:
    model = model_at(path)
    return list(_fields(model)) if model is not None else []


def advice(path: Path) -> str:
    """`no such key here; nearest is lora_r`, or where the key is at home."""
    *parent, key = path
    valid, name = keys_at(tuple(parent)), str(key)
    meant = SYNONYMS.get(name, name)
    if meant in valid:
        return f"no such key; here it is called {meant}"
    if homes := homes_of(meant):
        called = "" if meant == name else f"; here it is called {meant}, and"
        return f"no such key{called or ';'} it belongs under {' or '.join(homes)}"
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
    return f"no such key; nearest is {close[0]}" if close else "no such key"
