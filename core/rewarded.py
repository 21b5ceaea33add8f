"""How validators rank models that were trained by rewards: relative to each other, less a part of the KL.

A mean reward counts as a share of the best one's in the field, so the rewards of one submission are worth one
point together and never more, whatever their size, while each nat of KL to the base costs half a point. Which
of two checkpoints is better is therefore asked of the pair, in a field with the base: what a checkpoint gains
in a small reward that has grown a hundredfold does not pay for any KL.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from core.evaluation import GRPO_KL_WEIGHT
from core.facts import Record


def normalised(raw: Sequence[Sequence[float]]) -> list[list[float]]:
    """As validators compare submissions: `raw` has each model's mean of each function; higher is better.

    Of a function: less its minimum if that is negative, over its maximum. A single model is not normalised.
    """
    if len(raw) < 2:
        return [list(one) for one in raw]
    columns = [_column([one[place] for one in raw]) for place in range(len(raw[0]))]
    return [[column[at] for column in columns] for at in range(len(raw))]


def _column(values: list[float]) -> list[float]:
    if min(values) < 0 and len(values) == 2:
        return [0.75 if value == max(values) else 0.25 for value in values]
    return _shares(values)


def _shares(values: list[float]) -> list[float]:
    low = min(values)
    shifted = [value - low for value in values] if low < 0 else values
    most = max(shifted)
    return [value / most for value in shifted] if most > 0 else [1.0] * len(values)


def standing(means: Sequence[float], kl: float, weights: Sequence[float]) -> float:
    return math.fsum(weight * mean for weight, mean in zip(weights, means, strict=True)) - GRPO_KL_WEIGHT * kl


class Rewarded(Record):
    """What a model's score by rewards is made of."""

    #: The mean of each reward function, of the model and of the base on the same prompts.
    means: tuple[float, ...]
    base: tuple[float, ...]
    weights: tuple[float, ...]
    #: To the base, on the prompts.
    kl: float

    @property
    def margin(self) -> float:
        """Over the base, in a field of the two; 0 for the base itself, never over 1 for weights of 1."""
        base, own = self._field(self)
        return own - base

    def beats(self, other: Rewarded) -> bool:
        """In a field of the two and the base."""
        _, own, theirs = self._field(self, other)
        return own > theirs

    def _field(self, *models: Rewarded) -> list[float]:
        """Where the base and these models stand."""
        field = [(self.base, 0.0), *((one.means, one.kl) for one in models)]
        columns = [_shares([means[place] for means, _ in field]) for place in range(len(self.base))]
        return [
            standing([column[at] for column in columns], kl, self.weights) for at, (_, kl) in enumerate(field)
        ]
