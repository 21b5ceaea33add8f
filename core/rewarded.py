"""How validators rank models that were trained by rewards: relative to each other, less a part of the KL.

A mean reward counts as a share of the best one's in the field, so the rewards of one submission are worth one
point together and never more, whatever their size, while each nat of KL to the base costs half a point. Which
of two checkpoints is better is therefore asked of the pair, in a field with the base: a small reward that has
grown a hundredfold does not pay for any KL.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

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
    # Of what a program calls a reward any number may come: differences must not overflow.
    if (size := max(map(abs, values))) > 1e100:
        values = [value / size for value in values]
    low = min(values)
    shifted = [value - low for value in values] if low < 0 else values
    most = max(shifted)
    return [value / most for value in shifted] if most > 0 else [1.0] * len(values)


def standing(means: Sequence[float], kl: float, weights: Sequence[float]) -> float:
    return math.fsum(weight * mean for weight, mean in zip(weights, means, strict=True)) - GRPO_KL_WEIGHT * kl


class Rewarded(Record):
    """What a model's score by rewards is made of."""

    #: The mean of each reward function, of the model and of the base on the same prompts.
    means: tuple[float, ...] = Field(min_length=1)
    base: tuple[float, ...]
    weights: tuple[float, ...]
    #: To the base, on the prompts.
    kl: float

    @model_validator(mode="after")
    def _as_many_of_each(self) -> Self:
        if not len(self.means) == len(self.base) == len(self.weights):
            raise ValueError("a mean, a base's mean and a weight belong to each function")
        return self

    @property
    def margin(self) -> float:
        """Over the base, in a field of the two; 0 for the base itself, never over 1 for weights of 1."""
        return gains([self])[0]

    def is_comparable(self, other: Rewarded) -> bool:
        """Whether both were measured on the same prompts: then the base did the same."""
        return self.weights == other.weights and all(
            math.isclose(one, two, rel_tol=1e-6, abs_tol=1e-12)
            for one, two in zip(self.base, other.base, strict=True)
        )

    def beats(self, other: Rewarded) -> bool:
        """In a field of the two and the base, where they are comparable; by their margins otherwise, and also
        where only one of them is better than the base."""
        own, theirs = self.margin, other.margin
        if (own > 0) is (theirs > 0) and self.is_comparable(other):
            own, theirs = gains([self, other])
        return own > theirs


def gains(models: Sequence[Rewarded]) -> list[float]:
    """What each stands over the base, in one field of the base and all of these; measured on the same
    prompts."""
    field = [models[0].base, *(one.means for one in models)]
    columns = [_shares(list(column)) for column in zip(*field, strict=True)]
    base, *others = (
        standing([column[at] for column in columns], kl, models[0].weights)
        for at, kl in enumerate([0.0, *(one.kl for one in models)])
    )
    return [one - base for one in others]
