"""Reward code from outside: checked as text, written to a module, called in a process of its own."""

from __future__ import annotations

from pathlib import Path

from core.tasks import GrpoDataset

#: The module that Axolotl is told of (`core.recipes.run.RunInputs.reward_module`).
MODULE = "task_rewards"


def write_rewards(dataset: GrpoDataset, folder: Path) -> Path:
    """Writes `task_rewards.py` with `reward_0 …`; returns the folder for PYTHONPATH."""
    raise NotImplementedError
