"""Files of entries that nobody made: the true formats with invented figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml


def ai_toolkit_config(*, arch: str = "krea2", **train: Any) -> bytes:
    process = {
        "type": "diffusion_trainer",
        "model": {"name_or_path": "/x", "arch": arch},
        "network": {"type": "lora", "linear": 24, "linear_alpha": 12},
        "datasets": [{"folder_path": "/x", "caption_dropout_rate": 0.15, "resolution": [512, 640]}],
        "train": {
            "batch_size": 1,
            "steps": 700,
            "gradient_accumulation": 2,
            "lr": 3e-4,
            "optimizer": "adamw8bit",
            "lr_scheduler": "cosine",
            "lr_scheduler_params": {"eta_min": 3e-5},
            "loss_type": "mae",
            "ema_config": {"use_ema": True, "ema_decay": 0.97},
            **train,
        },
    }
    return yaml.safe_dump({"job": "extension", "config": {"name": "last", "process": [process]}}).encode()


def adapter(
    rank: int = 24, *, metadata: Mapping[str, str] | None = None, name: str = "transformer.blocks.0.q"
) -> bytes:
    """A whole safetensors file with one adapter."""
    shapes = {f"{name}.lora_A.weight": [rank, 64], f"{name}.lora_B.weight": [64, rank]}
    header: dict[str, Any] = {"__metadata__": dict(metadata or {})}
    at = 0
    for key, shape in shapes.items():
        size = shape[0] * shape[1] * 2
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(at)


def sd_scripts_metadata(**more: str) -> dict[str, str]:
    return {
        "ss_network_module": "networks.lora_flux",
        "ss_max_train_steps": "150",
        "ss_steps": "120",
        "ss_epoch": "40",
        "ss_total_batch_size": "4",
        "ss_gradient_accumulation_steps": "2",
        "ss_optimizer": "lion_pytorch.lion_pytorch.Lion(weight_decay=0.01)",
        "ss_unet_lr": "None",
        "ss_learning_rate": "6e-05",
        "ss_lr_scheduler": "cosine",
        "ss_lr_warmup_steps": "0",
        "ss_network_dim": "48",
        "ss_network_alpha": "24.0",
        "ss_caption_dropout_rate": "0.05",
        "ss_loss_type": "l2",
        "ss_resolution": "(1024, 1024)",
        "ss_num_train_images": "13",
        "ss_tag_frequency": json.dumps({"img": {"a caption of somebody": 1}}),
        **more,
    }


AXOLOTL_README = b"""---
base_model: invented/base
---
<details><summary>See axolotl config</summary>

```yaml
adapter: lora
learning_rate: 2e-4
lr_scheduler: cosine
micro_batch_size: 4
gradient_accumulation_steps: 3
num_epochs: 2
lora_r: 64
lora_alpha: 128
lora_dropout: 0.05
```
</details>
"""
TRANSFORMERS_README = b"""# model
The following hyperparameters were used during training:
- learning_rate: 5e-05
- train_batch_size: 8
- gradient_accumulation_steps: 2
- lr_scheduler_type: linear
- lr_scheduler_warmup_steps: 10
- training_steps: 300
"""


def image_task(task_id: str, **more: Any) -> dict[str, Any]:
    """The public API's answer about a task of pictures."""
    return {
        "task_id": task_id,
        "task_type": "ImageTask",
        "model_id": "invented/krea",
        "model_type": "krea2",
        "hours_to_complete": 0.75,
        "image_text_pairs": [{"image_url": f"https://example.org/{n}"} for n in range(21)],
        "hotkey_details": [],
        **more,
    }
