"""A clock for upstream's runs, inside Axolotl, and what it takes to run on a CPU. Nothing else is changed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin
from transformers import TrainerCallback

from benchmarks.upstream import SECONDS


class ClockPlugin(BasePlugin):  # type: ignore[misc]
    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        cfg.device_map = None
        if cfg.rl == "dpo":
            _spare_the_garbage()

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        return {"use_cpu": True}

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        return [_Clock(float(os.environ[SECONDS]), Path(cfg.output_dir).with_name("told.json"))]


def _spare_the_garbage() -> None:
    """Axolotl collects garbage after each micro step of DPO: a small part of a real one, but many times that
    of so small a model. Ours does not, so neither does upstream here."""
    from axolotl.core.trainers.dpo.trainer import AxolotlDPOTrainer

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super(AxolotlDPOTrainer, self).training_step(*args, **kwargs)

    AxolotlDPOTrainer.training_step = step


class _Clock(TrainerCallback):  # type: ignore[misc]
    """From the first step on, in CPU seconds, as for the others."""

    def __init__(self, seconds: float, reported: Path) -> None:
        self._seconds, self._told, self._began = seconds, reported, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if time.process_time() - self._began >= self._seconds:
            control.should_training_stop = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        said = {
            "steps": state.global_step,
            "of": state.max_steps,
            "seconds": time.process_time() - self._began,
        }
        self._told.write_text(json.dumps(said), encoding="utf-8")
