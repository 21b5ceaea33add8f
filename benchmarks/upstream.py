"""Configuration of upstream's unmodified trainer: its templates' values, and its job handler's changes.

Values only, from upstream's two templates and handler. What a CPU cannot run is left out (`CPU`), for it as
for us. Upstream has no clock; here it gets one (`upstream_plugin`), which is more than it has: it is stopped
after the last step that fits and saves in peace, where in earnest it would be killed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from core.domain.tasks import ChatDataset, DatasetType, DpoDataset, GrpoDataset, InstructDataset

SECONDS = "UPSTREAM_SECONDS"
BASE: dict[str, Any] = {
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_linear": True,
    "sequence_len": 512,
    "sample_packing": False,
    "pad_to_sequence_len": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_epochs": 1,
    "max_steps": 10,
    "optimizer": "adamw_bnb_8bit",
    "lr_scheduler": "cosine",
    "learning_rate": 2e-4,
    "warmup_steps": 10,
    "weight_decay": 0.0,
    "val_set_size": 0.05,
    "evals_per_epoch": 4,
    "saves_per_epoch": 4,
    "gradient_checkpointing": True,
    "train_on_inputs": False,
    "chat_template": "llama3",
    "logging_steps": 1,
}
GRPO: dict[str, Any] = {
    "rl": "grpo",
    "micro_batch_size": 4,
    "trl": {"beta": 0.04, "max_completion_length": 256, "use_vllm": False, "num_generations": 4},
}
#: bf16 "auto" would silently be fp16, and Triton kernels and pinned loaders have no GPU. Three courtesies:
#: its padding of every row to 512 tokens makes a step ten times as slow here, its evaluations decide nothing,
#: and checkpointing saves memory that is not scarce.
CPU: dict[str, Any] = {
    "val_set_size": 0,
    "evals_per_epoch": None,
    "pad_to_sequence_len": False,
    "gradient_checkpointing": False,
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "flash_attention": False,
    "lora_mlp_kernel": False,
    "lora_qkv_kernel": False,
    "lora_o_kernel": False,
    "lora_embedding_kernel": False,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": False,
    "dataloader_prefetch_factor": None,
    "plugins": ["benchmarks.upstream_plugin.ClockPlugin"],
}


def write_config(
    folder: Path,
    model: Path,
    dataset: DatasetType,
    rows: list[dict[str, Any]],
    *,
    capped: bool,
    seed: int,
    full: bool = False,
    rate_factor: float = 1.0,
) -> Path:
    """The configuration with its data (and reward code) beside it. `full`: without the adapter."""
    folder.mkdir(parents=True)
    config = {**BASE, **(GRPO if isinstance(dataset, GrpoDataset) else {})}
    if not capped:
        del config["max_steps"]
    if full:
        config = {key: value for key, value in config.items() if not key.startswith(("adapter", "lora_"))}
    config["learning_rate"] *= rate_factor
    data = folder / "data.json"
    entry, ready = _dataset(dataset, rows)
    data.write_text(json.dumps(ready), encoding="utf-8")
    config |= CPU | {
        "base_model": str(model),
        "datasets": [{"path": str(data), "ds_type": "json", "split": "train", **entry}],
        "output_dir": str(folder / "output"),
        "dataset_prepared_path": str(folder / "prepared"),
        "seed": seed,
    }
    if isinstance(dataset, ChatDataset):
        config["chat_template"] = dataset.chat_template
    if isinstance(dataset, DpoDataset):
        config["rl"] = "dpo"
    if isinstance(dataset, GrpoDataset):
        config["trl"] = {**config["trl"], **_rewards(dataset, folder)}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def _dataset(dataset: DatasetType, rows: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The handler's dataset entry, and the rows under the names that it gives their columns."""
    if isinstance(dataset, InstructDataset):
        fields = {
            "field_instruction": dataset.field_instruction,
            "field_input": dataset.field_input,
            "field_output": dataset.field_output,
            "format": "{instruction} {input}",
            "no_input_format": "{instruction}",
            "system_prompt": "",
            "system_format": "{system}",
        }
        return {"type": fields}, rows
    if isinstance(dataset, ChatDataset):
        return {
            "type": "chat_template",
            "chat_template": dataset.chat_template,
            "field_messages": dataset.chat_column,
            "message_property_mappings": {
                "role": dataset.chat_role_field,
                "content": dataset.chat_content_field,
            },
            "roles": {
                "user": [dataset.chat_user_reference],
                "assistant": [dataset.chat_assistant_reference],
            },
        }, rows
    if isinstance(dataset, DpoDataset):
        names = {dataset.field_prompt: "question", dataset.field_chosen: "chosen"}
        names |= {dataset.field_rejected: "rejected"}
        renamed = [{names[key]: value for key, value in row.items() if key in names} for row in rows]
        return {"type": "chatml.default"}, renamed
    assert isinstance(dataset, GrpoDataset)
    return {}, [{"prompt": row[dataset.field_prompt or "prompt"]} for row in rows]


def _rewards(dataset: GrpoDataset, folder: Path) -> dict[str, Any]:
    names, sources = [], []
    for place, one in enumerate(dataset.reward_functions):
        name = one.reward_func.split("def ", 1)[1].split("(", 1)[0]
        sources.append(one.reward_func.replace(f"def {name}(", f"def {name}_{place}("))
        names.append(f"upstream_rewards.{name}_{place}")
    (folder / "upstream_rewards.py").write_text("\n\n".join(sources), encoding="utf-8")
    total = sum(one.reward_weight for one in dataset.reward_functions)
    return {
        "reward_funcs": names,
        "reward_weights": [one.reward_weight / total for one in dataset.reward_functions],
    }
