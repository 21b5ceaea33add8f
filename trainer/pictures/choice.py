"""Choose by held-out pictures: how many are held out, when the curve is past its optimum, and which candidate
wins.

Candidates are compared on the same cases. A difference counts where it is larger than its standard error over
the cells of picture, text and band.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from trainer.pictures.adapter import AdapterWeights

#: An array of losses by picture, text (the caption, then the empty one) and band, each the mean of its draws.
Losses = Any

#: Later scores without a better one before the optimum counts as past.
PATIENCE = 3
#: Trained so many times as long as to the best score without a better one, the optimum is past in any case.
PATIENT_SHARE = 1.5
#: Before so many steps nothing is past: the rate has just risen, and scores differ by chance.
FEWEST_STEPS = 100


def held_out_count(pictures: int, share: float, least: int) -> int:
    """Never more than a third, and none of a single picture."""
    wanted = max(math.ceil(share * pictures), least)
    return min(wanted, max(pictures // 3, 1)) if pictures > 1 and wanted else 0


class Kind(IntEnum):
    """The less noisy a candidate's making, the later here."""

    RAW = 0
    AVERAGE = 1  # over the latest steps
    MEAN = 2  # of several candidates


@dataclass(frozen=True)
class Candidate:
    kind: Kind
    #: Steps of its own training, and which training that was.
    step: int
    member: int
    weights: AdapterWeights = field(repr=False)
    losses: Losses = field(repr=False)

    @property
    def score(self) -> float:
        return float(self.losses.mean())

    def __str__(self) -> str:
        words = {Kind.RAW: "weights", Kind.AVERAGE: "average", Kind.MEAN: "mean"}
        return f"{words[self.kind]} of training {self.member + 1}, step {self.step:,}"


class PairedDifference(NamedTuple):
    """Mean of `second - first` over the cells, and its standard error."""

    mean: float
    error: float


def compare(first: Losses, second: Losses) -> PairedDifference:
    differences = (second - first).ravel()
    error = float(differences.std(ddof=1) / math.sqrt(differences.size)) if differences.size > 1 else 0.0
    return PairedDifference(float(differences.mean()), error)


def is_past_optimum(curve: Sequence[Candidate]) -> bool:
    """Return whether the scores of one training, oldest first, say that it only gets worse from here."""
    best = min(range(len(curve)), key=lambda at: curve[at].score)
    later = curve[best + 1 :]
    if len(later) < PATIENCE or later[-1].step < FEWEST_STEPS:
        return False
    if later[-1].step >= PATIENT_SHARE * max(curve[best].step, 1):
        return True
    return all(
        difference.mean > difference.error
        for difference in (compare(curve[best].losses, candidate.losses) for candidate in later[-PATIENCE:])
    )


def is_still_better(curve: Sequence[Candidate]) -> bool:
    """Return whether the last score of one training is as good as its best within the error."""
    return len(curve) > 1 and any(candidate is curve[-1] for candidate in as_good_as_best(curve))


def best_of(candidates: Sequence[Candidate]) -> Candidate:
    """The one-standard-error rule: of those that are as good as the best within the error, the least noisy
    kind, and of these the earliest."""
    return min(
        as_good_as_best(candidates), key=lambda candidate: (-candidate.kind, candidate.step, candidate.score)
    )


def as_good_as_best(candidates: Sequence[Candidate]) -> list[Candidate]:
    best = min(candidates, key=lambda candidate: candidate.score)
    return [
        candidate
        for candidate in candidates
        if candidate is best
        or (difference := compare(best.losses, candidate.losses)).mean <= difference.error
    ]
