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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from core.planning.finishing import LEAST_OUT, out_every
from core.planning.plan import LastStretchPlan
from trainer.session.ranks import Communicator

#: Of the pass there must be time for this part: less is not worth its risk.
LEAST_PART = 0.5
#: The rows that stay out are of so many clusters at least.
LEAST_CLUSTERS = 5


class HeldOutParts(NamedTuple):
    """Places of held-out rows."""

    #: They stay out, and judge the training on the others.
    judges: list[int]
    trained: list[int]


def divided(scored: Sequence[int], clusters: Sequence[int]) -> HeldOutParts | None:
    """Divide the held-out rows; None where too few could judge. `scored`: the places of those that an
    evaluation reads. `clusters`: of all of them.

    Near-duplicates go to the same side: a row whose double is trained on says nothing of new rows. Clusters
    that are too large to stay out are trained on."""
    every = out_every(len(scored))
    if not every:
        return None
    sizes = Counter(clusters[place] for place in scored)
    most = max(len(scored) // every // LEAST_CLUSTERS, 1)
    out, rows_out, seen = set[int](), 0, 0
    for cluster, size in sizes.items():
        if size <= most and rows_out * every <= seen:
            out.add(cluster)
            rows_out += size
        seen += size
    judges = [place for place in scored if clusters[place] in out]
    trained = [place for place, cluster in enumerate(clusters) if cluster not in out]
    return HeldOutParts(judges, trained) if trained and rows_out >= LEAST_OUT else None


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
        before = self._score() if self.seconds_left() > 0 else math.nan
        steps = min(every, int(self.seconds_left() / max(self.step_s, 1e-6)))
        if steps < max(LEAST_PART * every, 1):
            return StretchResult(0, why="there is no time for it")
        for place in range(steps):
            factor = self.peak * self.plan.rate * (1 - place / steps)
            loss = self.ranks.from_first([self.stretcher.step(factor, place)])[0]
            if not math.isfinite(loss) or self.seconds_left() < 0:
                return StretchResult(place + 1, before)
        return StretchResult(steps, before, self._score())

    def _score(self) -> float:
        """The first rank's: no two may judge differently."""
        return self.ranks.from_first([self.stretcher.score()])[0]
