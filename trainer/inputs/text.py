"""A text task from its file to what the engine reads: the one door to the adapters.

task = read_task(spec, tokenizer)            # the rows in tokens, and the facts that a plan needs
files = write_task(task, plan, folder)       # training and held-out rows, for Axolotl and for the scores
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.data import DatasetFacts
from core.plan import TrainingPlan
from core.run_files import RunSpec
from trainer.inputs.rows import Row


@dataclass(frozen=True)
class TextTask:
    """A task's rows as its evaluation reads them."""

    spec: RunSpec
    rows: Sequence[Row]
    #: Why rows are missing, and how many for each reason.
    dropped: Mapping[str, int]
    #: Measured with the model's own tokenizer.
    facts: DatasetFacts
    #: The token to pad with where the tokenizer has none, for `RunInputs.pad_token`.
    pad_token: str | None


@dataclass(frozen=True)
class PreparedText:
    """What lies on disk for one attempt; goes into `RunInputs` and `HeldOut.open`."""

    train_path: Path
    eval_path: Path | None
    train_rows: int
    eval_rows: int
    #: Of the rows and of how they were cut: new data is a new path, so no cache can mix them up.
    digest: str
    #: GRPO: holds the module `task_rewards`; belongs on PYTHONPATH.
    rewards_dir: Path | None = None


def read_task(spec: RunSpec, tokenizer: Any) -> TextTask:
    """`BadData` (or `BadReward`) when nothing can be trained from it."""
    raise NotImplementedError


def write_task(task: TextTask, plan: TrainingPlan, folder: Path) -> PreparedText:
    """Rows longer than the plan's sequence are dropped or cut by the evaluation's rule; the rest is split."""
    raise NotImplementedError
