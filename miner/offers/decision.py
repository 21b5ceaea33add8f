"""What a policy answers. Everybody who stores, shows or sends a decision needs only this.

`miner.offers.decide.decide(offer, now, fleet, history, policy, profile)` makes one. It is pure: the caller
hands in the fleet's snapshot without what this very task holds already (`snapshot.without(key)`), stores the
decision whole, and gives a repeated offer the stored answer again. For a start without an accepted offer the
same function judges an offer made of the start, with the hours left and the image type that was sent.

For the books: `record.details_of(decision)` is the JSON text of everything that has no column of its own
(placement, expected value, plan, threshold), for one column `decisions.details`. `Decision.priority` orders
the fleet's queue.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from core.budget import Refusal
from miner.fleet.base import NamedLane, Placement


def below(value: float) -> float:
    """A limit that lets this value pass, with few digits."""
    return (math.ceil(value * 1000) - 1) / 1000


class Reason(NamedTuple):
    """One rule's verdict, in words that an operator can argue with."""

    rule: str
    passed: bool
    text: str
    #: For one that failed: what would have to change; where a policy's value would do, "KEY of VALUE".
    way: str = ""


class Factor(NamedTuple):
    """One part of the score."""

    #: From 0 to 1.
    value: float
    #: Value × weight: what it adds to the score.
    contribution: float
    #: Where the value comes from.
    text: str = ""
    weight: float = 0.0


class ExpectedValue(NamedTuple):
    """What taking the task is worth, in the validators' points; docs/acceptance.md says what is assumed."""

    #: The task's weight in the validators' sum: max(1, 2·√(hours·billions)).
    work: float
    #: That a valid model is published in time.
    success: float
    #: That it is the best one, once it is published.
    win: float
    #: That it is among the worst ones, which lose points as if it were none.
    punished: float
    #: work × (points of a win × success × win − penalty × (failure, or success × punished)).
    points: float
    gpu_hours: float

    @property
    def per_gpu_hour(self) -> float:
        return self.points / self.gpu_hours if self.gpu_hours > 0 else 0.0


class PlanBrief(NamedTuple):
    """What of the plan made the decision."""

    gpus: int
    #: From the first byte fetched to the model published, in seconds.
    busy_s: float
    #: Before it begins, in seconds: other jobs hold the GPUs.
    wait_s: float
    epochs: float
    #: Part of the training that the profile wishes for.
    share: float


@dataclass(frozen=True, slots=True)
class Decision:
    accepted: bool
    #: For the validator: short, true, no internals.
    message: str
    policy: str
    policy_hash: str
    #: Every rule's verdict, also of those behind the first that failed.
    reasons: tuple[Reason, ...] = ()
    score: float | None = None
    factors: Mapping[str, Factor] = field(default_factory=dict)
    profile_hash: str | None = None
    profile: str | None = None
    #: What the score had to reach.
    threshold: float | None = None
    #: The GPUs and the window that it would take; also of a refused offer, where it would have fitted.
    placement: Placement | None = None
    #: Whose cards it gets rather than others, should those be lost. Not kept in the books.
    lane: NamedLane | None = field(default=None, compare=False)
    #: Why there is no plan, where there is none.
    refusal: Refusal | None = None
    value: ExpectedValue | None = None
    plan: PlanBrief | None = None

    @property
    def priority(self) -> float:
        """For the fleet's queue: the value of an hour of a GPU spent on it."""
        return self.value.per_gpu_hour if self.value else 0.0

    @property
    def failed(self) -> tuple[Reason, ...]:
        return tuple(reason for reason in self.reasons if not reason.passed)
