"""The validators' evaluation, and their ranking of models that were trained by rewards.

Offers come from validators of 2025, whose evaluation image pins TRL 0.17: preferences and prompts are
encoded without special tokens. The tournaments of 2026 are evaluated in an image with TRL 1.5: special
tokens are on, prompt and answer of a preference are encoded as one text, and a text that is too long loses
its end instead of its beginning. Both evaluate instruct and chat in the same way.

A mean reward counts as a share of the best one in the field. So the rewards of one submission are worth at
most one point together, whatever their size, while each nat of KL to the base costs half a point. Two
checkpoints are therefore compared in a field of the two and the base: a small reward that has grown a
hundredfold does not pay for any amount of KL.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Self

from pydantic import Field, model_validator

from core.domain.records import Record

#: Instruct and chat: rows longer than this are left out of the evaluation.
SEQUENCE_LIMIT = 4096
#: DPO: the beta of the loss, and the loss of an untrained model.
DPO_BETA = 0.1
UNTRAINED_DPO = math.log(2)
#: GRPO: completions per prompt, tokens per completion, the cost of a nat of KL on the prompts, and the prompt
#: length for it.
GRPO_GENERATIONS = 2
GRPO_COMPLETION = 256
GRPO_KL_WEIGHT = 0.5
GRPO_KL_LENGTH = 512
#: Of a model whose context window is unknown.
UNKNOWN_WINDOW = 8192


class Era(StrEnum):
    """The evaluator: the validators that send offers, or those that hold tournaments."""

    OFFERS = "2025"
    TOURNAMENTS = "2026"


class EvaluationRules(Record):
    """An era's evaluation of preferences and prompts."""

    era: Era
    #: Whether tokenizers add what they usually add (a token for the beginning) to preferences and prompts.
    special_tokens: bool
    #: DPO: prompt and answer encoded as one text, and then cut where the prompt's own encoding ends.
    dpo_joint: bool
    #: DPO: the prompt keeps this many of its last tokens, or all (None).
    dpo_prompt: int | None
    #: DPO: the longest pair, or the model's window (None).
    dpo_length: int | None
    #: DPO: whether a pair that is too long keeps its end, not its beginning.
    dpo_keep_end: bool
    #: GRPO: the prompt keeps this many of its last tokens, or all (None).
    grpo_prompt: int | None
    grpo_temperature: float
    #: 0: all of them.
    grpo_top_k: int

    def dpo_limit(self, window: int | None) -> int:
        return self.dpo_length or window or UNKNOWN_WINDOW


_RULES = {
    Era.OFFERS: EvaluationRules(
        era=Era.OFFERS,
        special_tokens=False,
        dpo_joint=False,
        dpo_prompt=512,
        dpo_length=1024,
        dpo_keep_end=True,
        grpo_prompt=512,
        grpo_temperature=0.9,
        grpo_top_k=50,
    ),
    Era.TOURNAMENTS: EvaluationRules(
        era=Era.TOURNAMENTS,
        special_tokens=True,
        dpo_joint=True,
        dpo_prompt=None,
        dpo_length=None,
        dpo_keep_end=False,
        grpo_prompt=None,
        grpo_temperature=1.0,
        grpo_top_k=0,
    ),
}


def evaluation_rules(era: Era) -> EvaluationRules:
    return _RULES[era]


def sequence_limit(window: int | None) -> int:
    """Instruct and chat: half the window where the window is small."""
    if window is not None and window < 2 * SEQUENCE_LIMIT:
        return max(math.ceil(window / 2), 1)
    return SEQUENCE_LIMIT


def normalised_rewards(raw: Sequence[Sequence[float]]) -> list[list[float]]:
    """Normalise rewards as validators do; `raw` has each model's mean of each function, higher is better.

    Each function's means are shifted by their minimum if that is negative, then divided by their maximum. A
    single model is not normalised.
    """
    if len(raw) < 2:
        return [list(means) for means in raw]
    columns = [_column(list(means)) for means in zip(*raw, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def _column(values: list[float]) -> list[float]:
    if min(values) < 0 and len(values) == 2:
        return [0.75 if value == max(values) else 0.25 for value in values]
    return _shares(values)


def _shares(values: list[float]) -> list[float]:
    # A reward function may return any number: differences must not overflow.
    if (size := max(map(abs, values))) > 1e100:
        values = [value / size for value in values]
    low = min(values)
    shifted = [value - low for value in values] if low < 0 else values
    most = max(shifted)
    return [value / most for value in shifted] if most > 0 else [1.0] * len(values)


def reward_standing(means: Sequence[float], kl: float, weights: Sequence[float]) -> float:
    return math.fsum(weight * mean for weight, mean in zip(weights, means, strict=True)) - GRPO_KL_WEIGHT * kl


class RewardScore(Record):
    """The rewards of a model and of its base."""

    #: The mean of each reward function; those of model and base are on the same prompts.
    means: tuple[float, ...] = Field(min_length=1)
    base: tuple[float, ...]
    weights: tuple[float, ...]
    #: Between model and base, on the prompts.
    kl: float

    @model_validator(mode="after")
    def _as_many_of_each(self) -> Self:
        if not len(self.means) == len(self.base) == len(self.weights):
            raise ValueError("a mean, a base's mean and a weight belong to each function")
        return self

    @property
    def margin(self) -> float:
        """The gain over the base in a field of the two; 0 for the base, at most 1 for weights of 1."""
        return gains_over_base([self])[0]

    def is_comparable(self, other: RewardScore) -> bool:
        """Return whether both were measured on the same prompts: then the base has the same means."""
        return self.weights == other.weights and all(
            math.isclose(own, theirs, rel_tol=1e-6, abs_tol=1e-12)
            for own, theirs in zip(self.base, other.base, strict=True)
        )

    def beats(self, other: RewardScore) -> bool:
        """Compare in a field of the two and the base; by the margins where that is impossible, and where only
        one is better than the base."""
        own, theirs = self.margin, other.margin
        if (own > 0) is (theirs > 0) and self.is_comparable(other):
            own, theirs = gains_over_base([self, other])
        return own > theirs


def gains_over_base(models: Sequence[RewardScore]) -> list[float]:
    """The gain of each model over the base in one field of all; all are measured on the same prompts."""
    field = [models[0].base, *(model.means for model in models)]
    columns = [_shares(list(column)) for column in zip(*field, strict=True)]
    base, *others = (
        reward_standing([column[at] for column in columns], kl, models[0].weights)
        for at, kl in enumerate([0.0, *(model.kl for model in models)])
    )
    return [standing - base for standing in others]
