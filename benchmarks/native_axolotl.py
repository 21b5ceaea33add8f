"""Runs inside the training environment: real Axolotl over the same rows, for `native_worker.py`.

Axolotl loads the class `Stamps` from here as a plugin; it only looks at the clock.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from axolotl.integrations.base import BasePlugin
from transformers import TrainerCallback

from benchmarks.native_worker import now

stamps: list[tuple[float, float]] = []
tokens: list[int] = []


class _StepTimes(TrainerCallback):  # type: ignore[misc]
    def on_train_begin(self, *_: Any, **__: Any) -> None:
        stamps.append(now())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        stamps.append(now())


class Stamps(BasePlugin):  # type: ignore[misc]
    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        step = trainer.training_step

        def counted(model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            tokens.append(int(inputs["attention_mask"].ne(0).sum()))
            return step(model, inputs, *rest, **named)

        trainer.training_step = counted
        return [_StepTimes()]


def train(folder: Path, path: Path, made: list[tuple[list[int], int]], what: dict[str, Any]) -> Any:
    """The trained model; fills `stamps` and `tokens`."""
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.train import train as train_with
    from datasets import Dataset

    rows = [
        {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100] * prompt + ids[prompt:]}
        for ids, prompt in made
    ]
    if not (folder / "rows").exists():
        Dataset.from_list(rows).save_to_disk(str(folder / "rows"))
    (folder / "config.yml").write_text(yaml.safe_dump(_config(folder, path, what)))
    cfg = load_cfg(str(folder / "config.yml"))
    return train_with(cfg=cfg, dataset_meta=load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))[0]


def _config(folder: Path, path: Path, what: dict[str, Any]) -> dict[str, Any]:
    lora = {
        "adapter": "lora",
        "lora_r": 16,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "lora_target_linear": True,
        # Its own kernels are CUDA's, and it picks them by itself.
        **dict.fromkeys(
            ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), False
        ),
    }
    return {
        "base_model": str(path),
        "output_dir": str(folder / "output"),
        "dataset_prepared_path": str(folder / "prepared"),
        "datasets": [{"path": str(folder / "rows")}],
        "plugins": ["benchmarks.native_axolotl.Stamps"],
        "seed": what.get("seed", 0),
        "sequence_len": what["longest"],
        "sample_packing": False,
        "group_by_length": what["grouped"],
        "micro_batch_size": what["micro"],
        "gradient_accumulation_steps": 1,
        "max_steps": what["steps"],
        "learning_rate": 1e-3,
        "lr_scheduler": "constant",
        "optimizer": "adamw_torch_fused",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "attn_implementation": "sdpa",
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "val_set_size": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_wandb": False,
        "use_tensorboard": False,
        **({} if what["method"] == "full" else lora),
    }
