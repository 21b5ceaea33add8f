"""The decision on an offer: accepted or not, its reasons, score, expected value and placement.

Everything that stores, shows or sends a decision needs only this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from core.domain.choices import Refusal
from core.domain.keys import NamedLane, Placement


def just_below(value: float) -> float:
    """A limit with few digits that this value passes."""
    return (math.ceil(value * 1000) - 1) / 1000


class Reason(NamedTuple):
    """One rule's verdict, in words that an operator can act on."""

    rule: str
    passed: bool
    text: str
    #: Of a failed rule: what would have to change; where a policy's value would do, "KEY of VALUE".
    way: str = ""


class ScoreFactor(NamedTuple):
    """One part of the score."""

    #: From 0 to 1.
    value: float
    #: Value × weight: what it adds to the score.
    contribution: float
    #: Where the value comes from.
    text: str = ""
    weight: float = 0.0


class ExpectedValue(NamedTuple):
    """The worth of a task in the validators' points; docs/acceptance.md states the assumptions."""

    #: The task's weight in the validators' sum: max(1, 2·√(hours·billions)).
    work: float
    #: The chance that a valid model is published in time.
    success: float
    #: The chance that a published model is the best.
    win: float
    #: The chance that it is among the worst, which lose points as if nothing were published.
    punished: float
    #: work × (points of a win × success × win − penalty × (failure, or success × punished)).
    points: float
    gpu_hours: float

    @property
    def per_gpu_hour(self) -> float:
        return self.points / self.gpu_hours if self.gpu_hours > 0 else 0.0


class TrainingWorth(NamedTuple):
    """The worth of a training, and of its GPU-hours to other tasks: `by_value` chooses the number of GPUs by
    both."""

    #: Worth of all the training that the profile asks for, in the validators' points.
    points: float = 1.0
    #: A share s of that training is worth s to this power: the first passes teach most. Passes beyond it are
    #: worth nothing.
    exponent: float = 0.3
    #: Points that other tasks are expected to bring in an hour of the first GPU, the second, and so on.
    prices: tuple[float, ...] = ()

    def net(self, share: float, gpus: int, hours: float) -> float:
        """Return the worth of a share of the training, less what others would pay for its GPU-hours."""
        return self.points * math.pow(share, self.exponent) - hours * sum(self.prices[:gpus])


#: No other task wants the GPUs.
IDLE_HOST = TrainingWorth()


class PlanBrief(NamedTuple):
    """The numbers of the plan that led to the decision."""

    gpus: int
    #: From the first byte fetched to the model published, in seconds.
    busy_s: float
    #: Until other jobs release the GPUs, in seconds.
    wait_s: float
    epochs: float
    #: The share of the training that the profile asks for.
    share: float


@dataclass(frozen=True, slots=True)
class Decision:
    accepted: bool
    #: For the validator: short, true, no internals.
    message: str
    policy: str
    policy_hash: str
    #: The verdicts of all rules, also after the first failure.
    reasons: tuple[Reason, ...] = ()
    score: float | None = None
    factors: Mapping[str, ScoreFactor] = field(default_factory=dict)
    profile_hash: str | None = None
    profile: str | None = None
    #: What the score had to reach.
    threshold: float | None = None
    #: The GPUs and the window that it would take; also of a refused offer that would have fitted.
    placement: Placement | None = None
    #: The lane whose GPUs it gets, also when some are lost. Not stored.
    lane: NamedLane | None = field(default=None, compare=False)
    #: Why there is no plan, where there is none.
    refusal: Refusal | None = None
    value: ExpectedValue | None = None
    plan: PlanBrief | None = None

    @property
    def priority(self) -> float:
        """The value of one GPU hour spent on it, for the fleet's queue."""
        return self.value.per_gpu_hour if self.value else 0.0

    @property
    def failed(self) -> tuple[Reason, ...]:
        return tuple(reason for reason in self.reasons if not reason.passed)
