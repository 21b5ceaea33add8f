"""The best score so far, and when to stop waiting for a better one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from core.run_files import Score


@dataclass
class Best:
    #: Evaluations without a better one before the training stops; None: never.
    patience: int | None = None
    score: Score | None = None
    #: The untouched model's.
    base: Score | None = None
    waited: int = 0

    def judge(self, score: Score) -> bool:
        """Whether this is better than everything before. What is no number is never better."""
        better = math.isfinite(score.value) and score.beats(self.score)
        if better:
            self.score, self.waited = score, 0
        else:
            self.waited += 1
        return better

    @property
    def exhausted(self) -> bool:
        return self.patience is not None and self.waited >= self.patience
