"""The held-out rows of a run and the score of a model on them, in the validator's own metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from core.run_files import RunSpec
from trainer.inputs.text import PreparedText


@dataclass(frozen=True)
class Measured:
    """A score of some of the rows; the ranks of a run each measure their part and add them up."""

    total: float
    count: int
    metric: str
    lower_is_better: bool
    #: One value a row, in the order of the rows measured.
    rows: Sequence[float]

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else float("nan")


class HeldOut:
    """Opened once; `score` may be called at every evaluation."""

    @classmethod
    def open(cls, spec: RunSpec, files: PreparedText, tokenizer: Any) -> HeldOut:
        raise NotImplementedError

    def score(self, model: Any, *, reference: Any = None, rank: int = 0, world: int = 1) -> Measured:
        """The model's score on rows rank, rank + world, …

        `reference` is the base model for DPO, GRPO's KL and tasks with a KL term; None: the model's own
        adapter switched off, or what `remember_base` kept.
        """
        raise NotImplementedError

    def remember_base(self, model: Any, *, rank: int = 0, world: int = 1) -> Measured:
        """Called with the untrained model: keeps what later scores need of it, and returns its score."""
        raise NotImplementedError
