"""The last stretch: training on held-out rows at the end, judged by those of them that stay out.

From the best weights, one pass over rows that were never trained on, at a low rate that falls to nothing.
The optimizer keeps its averages of the gradients: begun anew, Adam's first steps move every weight by the
whole rate whatever the gradients say. On tiny models with 250 to 2,000 rows, a fifth of them held out, three
seeds each, at a quarter of the peak: all twelve losses on new rows fell, by 0.002 to 0.007. Begun anew, the
mean of a size changed by −0.013 to +0.004.

Nothing can be scored on rows that were trained on, so this comes last. The record keeps the score from
before, which later attempts compare with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from core.planning.plan import LastStretchPlan
from trainer.session.ranks import Communicator

#: Of the pass there must be time for this part: less is not worth its risk.
LEAST_PART = 0.5


class Stretcher(Protocol):
    """The engine's part. All ranks call every method, `begin` first."""

    def begin(self) -> int:
        """Divide the held-out rows; from now on `score` reads those that stay out. The steps of one pass over
        the others; 0: there are too few rows."""

    def score(self) -> float:
        """Of the rows that stay out; lower is better."""

    def step(self, factor: float, place: int) -> float:
        """An optimizer step at this factor on the peak rate, on the batch of this place; its loss."""


class StretchResult(NamedTuple):
    """Scores of the rows that stay out. Without steps, why there are none."""

    steps: int
    before: float = math.nan
    after: float = math.nan
    why: str = ""

    @property
    def accepted(self) -> bool:
        """Row by row the mean difference is the difference of the means."""
        return self.after <= self.before


@dataclass
class LastStretch:
    plan: LastStretchPlan
    stretcher: Stretcher
    ranks: Communicator
    #: The factor on the planned peak rate.
    peak: float
    #: Seconds that a step takes.
    step_s: float
    #: The same on all ranks: the seconds that are left for steps, beside all that follows them; negative as
    #: soon as there is a request to stop.
    seconds_left: Callable[[], float]

    def run(self) -> StretchResult:
        """Train; the weights are then those to submit, if accepted. Without time or rows for it no steps."""
        every = self.stretcher.begin()
        if not every:
            return StretchResult(0, why="they are too few")
        # Scored first: the steps are to fit into what is left afterwards.
        before = self.stretcher.score() if self.seconds_left() > 0 else math.nan
        steps = min(every, int(self.seconds_left() / max(self.step_s, 1e-6)))
        if steps < max(LEAST_PART * every, 1):
            return StretchResult(0, why="there is no time for it")
        for place in range(steps):
            factor = self.peak * self.plan.rate * (1 - place / steps)
            loss = self.ranks.from_first([self.stretcher.step(factor, place)])[0]
            if not math.isfinite(loss) or self.seconds_left() < 0:
                return StretchResult(place + 1, before)
        return StretchResult(steps, before, self.stretcher.score())
