"""Score a checkpoint: by the validator's metric on held-out rows, or by the engine's own loss."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from core.domain.evaluation import RewardScore
from trainer.handoff import LaunchSpec
from trainer.scoring.generation import PROMPTS
from trainer.scoring.held_out import HeldOut, HeldOutSums
from trainer.session.ranks import Communicator

#: Rows that each rank reads at least: fewer are no sample. They also show how long a row takes.
MIN_ROWS = 8


class EngineScorer:
    """The engine's evaluation loss on its evaluation set."""

    metric = "eval_loss"
    lower_is_better = True
    rewarded: RewardScore | None = None

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.pass_seconds = 0.0

    def score_base(self, budget_s: float, untouched: bool) -> float:
        """In a resumed training the first evaluation stands in for the base's: the engine has no other
        model."""
        began = time.monotonic()
        value = self.score()
        self.pass_seconds = time.monotonic() - began
        return value

    def score(self) -> float:
        return float(self._trainer.evaluate()["eval_loss"])


class HeldOutScorer:
    """The validator's metric, computed by all ranks together.

    How many rows an evaluation can afford is measured: every `stride`-th row is read, so that it is the same
    sample each time, whatever the number of ranks.
    """

    def __init__(
        self, spec: LaunchSpec, trainer: Any, ranks: Communicator, base: Any = None, together: int = PROMPTS
    ) -> None:
        """`base`: the untrained model, where one is kept beside the trained one anyway. `together`: prompts
        that are answered at once, where rewards decide."""
        self._spec, self._trainer, self._ranks, self._base = spec, trainer, ranks, base
        self._held = HeldOut.open(spec.run, spec.prepared, trainer.processing_class, together=together)
        self._rows = len(self._held.rows)
        self.metric, self.lower_is_better = "eval_loss", True
        self.rewarded: RewardScore | None = None
        self._stride = 1
        self.pass_seconds = 0.0

    def score_base(self, budget_s: float, untouched: bool) -> float:
        model = self._model()
        if not untouched and not has_adapter(model):
            model = frozen_base(self._spec.run.model_path, model, self._trainer.args.device)
        self._stride = max(math.ceil(self._rows / (MIN_ROWS * self._ranks.world)), 1)
        if not self._spec.run.task_type.generates:
            # The first pass of a process allocates and chooses kernels; beside generating that is nothing.
            self._of_base(model)
        measured = self._timed(model)
        # What one rank found holds for all: they are to read the same sample.
        per_row = self._ranks.from_first([self.pass_seconds / max(self._rows / self._world, 1)])[0]
        affordable = max(budget_s / max(per_row, 1e-6), MIN_ROWS)
        stride = max(math.ceil(self._rows / self._ranks.world / affordable), 1)
        if stride < self._stride:
            self._stride = stride
            measured = self._timed(model)
        self.metric, self.lower_is_better = measured.metric, measured.lower_is_better
        self.rewarded = self._held.rewarded(measured)
        return measured.value

    def _timed(self, model: Any) -> HeldOutSums:
        began = time.monotonic()
        measured = self._of_base(model)
        self.pass_seconds = time.monotonic() - began
        return measured

    def score(self) -> float:
        rank = {"rank": self._ranks.rank, "world": self._world}
        measured = self._together(self._held.score(self._model(), reference=self._reference(), **rank))
        self.rewarded = self._held.rewarded(measured)
        return measured.value

    @property
    def _world(self) -> int:
        return self._ranks.world * self._stride

    def _of_base(self, model: Any) -> HeldOutSums:
        rank = {"rank": self._ranks.rank, "world": self._world}
        with model.disable_adapter() if has_adapter(model) else nullcontext():
            self._held.base = self._together(self._held.remember_base(model, **rank))
        return self._held.base

    def _together(self, measured: HeldOutSums) -> HeldOutSums:
        sums = self._ranks.gather(measured.sums)
        width = len(measured.sums)
        return measured.merged([sum(sums[place::width]) for place in range(width)])

    def _model(self) -> Any:
        """The model to score: sharded weights are gathered only in the wrapped model's forward pass."""
        if self._trainer.is_fsdp_enabled:
            return self._trainer.model
        return self._trainer.accelerator.unwrap_model(self._trainer.model, keep_torch_compile=False)

    def _reference(self) -> Any:
        """The base for the KL. A full GRPO fine-tune without one is scored by rewards alone: against itself
        the KL is zero."""
        kept = self._base if self._base is not None else getattr(self._trainer, "ref_model", None)
        model = self._model()
        if kept is None and self._spec.run.task_type.generates and not has_adapter(model):
            return model
        return kept


def has_adapter(model: Any) -> bool:
    """Return True if disabling the adapter gives the base model."""
    return bool(getattr(model, "peft_config", None))


def frozen_base(path: str, like: Any, device: Any) -> Any:
    """The untrained model in the same format as another, whole on every rank."""
    from transformers import AutoModelForCausalLM

    attention = like.config._attn_implementation
    with _read_by_all_ranks():
        base = AutoModelForCausalLM.from_pretrained(path, dtype=like.dtype, attn_implementation=attention)
    return base.to(device).eval().requires_grad_(False)


@contextmanager
def _read_by_all_ranks() -> Iterator[None]:
    """Under FSDP transformers reads weights on one rank of a machine, and leaves zeros on the others."""
    name = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    before = os.environ.pop(name, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
