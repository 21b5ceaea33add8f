"""What decides which model is best: the validator's metric on held-out rows, or the engine's own loss."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from core.rewarded import Rewarded
from core.tasks import TaskType
from trainer.callbacks.ranks import Ranks
from trainer.inputs.text import PreparedText
from trainer.scoring.generation import PROMPTS
from trainer.scoring.held_out import HeldOut, Measured
from trainer.sheet import Prepared, Sheet

#: Rows that each rank reads at least: fewer say nothing, and tell how long a row takes.
FEWEST = 8


class EngineJudge:
    """The engine's evaluation loss on its evaluation set."""

    metric = "eval_loss"
    lower_is_better = True
    rewarded: Rewarded | None = None

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.pass_s = 0.0

    def begin(self, budget_s: float, untouched: bool) -> float:
        """A resumed training's first evaluation stands in for the base's: the engine knows no other model."""
        began = time.monotonic()
        value = self.judge()
        self.pass_s = time.monotonic() - began
        return value

    def judge(self) -> float:
        return float(self._trainer.evaluate()["eval_loss"])


class HeldOutJudge:
    """The validator's metric, computed by all ranks together.

    How many rows an evaluation can afford is measured: every `stride`-th row is read, so that it is the same
    sample each time, whatever the number of ranks.
    """

    def __init__(
        self, sheet: Sheet, trainer: Any, ranks: Ranks, base: Any = None, together: int = PROMPTS
    ) -> None:
        """`base`: the untrained model, where one is kept beside the trained one anyway. `together`: prompts
        that are answered at once, where rewards decide."""
        self._sheet, self._trainer, self._ranks, self._base = sheet, trainer, ranks, base
        files = files_of(sheet.prepared)
        self._held = HeldOut.open(sheet.run, files, trainer.processing_class, together=together)
        self._rows = len(self._held.rows)
        self.metric, self.lower_is_better = "eval_loss", True
        self.rewarded: Rewarded | None = None
        self._stride = 1
        self.pass_s = 0.0

    def begin(self, budget_s: float, untouched: bool) -> float:
        model = self._model()
        if not untouched and not has_adapter(model):
            model = frozen_base(self._sheet.run.model_path, model)
        self._stride = max(math.ceil(self._rows / (FEWEST * self._ranks.world)), 1)
        if self._sheet.run.task_type is not TaskType.GRPO:
            # The first pass of a process allocates and chooses kernels; beside generating that is nothing.
            self._of_base(model)
        measured = self._timed(model)
        # What one rank found holds for all: they are to read the same sample.
        per_row = self._ranks.from_first([self.pass_s / max(self._rows / self._world, 1)])[0]
        affordable = max(budget_s / max(per_row, 1e-6), FEWEST)
        stride = max(math.ceil(self._rows / self._ranks.world / affordable), 1)
        if stride < self._stride:
            self._stride = stride
            measured = self._timed(model)
        self.metric, self.lower_is_better = measured.metric, measured.lower_is_better
        self.rewarded = self._held.rewarded(measured)
        return measured.value

    def _timed(self, model: Any) -> Measured:
        began = time.monotonic()
        measured = self._of_base(model)
        self.pass_s = time.monotonic() - began
        return measured

    def judge(self) -> float:
        here = {"rank": self._ranks.rank, "world": self._world}
        measured = self._together(self._held.score(self._model(), reference=self._reference(), **here))
        self.rewarded = self._held.rewarded(measured)
        return measured.value

    @property
    def _world(self) -> int:
        return self._ranks.world * self._stride

    def _of_base(self, model: Any) -> Measured:
        here = {"rank": self._ranks.rank, "world": self._world}
        if has_adapter(model):
            with model.disable_adapter():
                self._held.base = self._together(self._held.remember_base(model, **here))
        else:
            self._held.base = self._together(self._held.remember_base(model, **here))
        return self._held.base

    def _together(self, measured: Measured) -> Measured:
        found = self._ranks.gather(measured.sums)
        width = len(measured.sums)
        return measured.merged([sum(found[place::width]) for place in range(width)])

    def _model(self) -> Any:
        """Sharded weights come together only in the wrapped model's forward pass."""
        if self._trainer.is_fsdp_enabled:
            return self._trainer.model
        return self._trainer.accelerator.unwrap_model(self._trainer.model, keep_torch_compile=False)

    def _reference(self) -> Any:
        """The base for the KL. A full fine-tune by rewards without one beside it is judged by rewards alone:
        against itself there is no KL."""
        kept = self._base if self._base is not None else getattr(self._trainer, "ref_model", None)
        model = self._model()
        if kept is None and self._sheet.run.task_type is TaskType.GRPO and not has_adapter(model):
            return model
        return kept


def has_adapter(model: Any) -> bool:
    """Whether switching something off gives the base model back."""
    return bool(getattr(model, "peft_config", None))


def frozen_base(path: str, like: Any) -> Any:
    """The untrained model, on the same device and in the same format as another."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(path, dtype=like.dtype)
    return base.to(like.device).eval().requires_grad_(False)


def files_of(prepared: Prepared) -> PreparedText:
    return PreparedText(
        train_path=Path(prepared.train_path),
        eval_path=Path(prepared.eval_path) if prepared.eval_path else None,
        train_rows=prepared.train_rows,
        eval_rows=prepared.eval_rows,
        dropped=prepared.dropped,
        digest=prepared.digest,
        rewards_dir=Path(prepared.rewards_dir) if prepared.rewards_dir else None,
        other_path=Path(prepared.other_path) if prepared.other_path else None,
    )
