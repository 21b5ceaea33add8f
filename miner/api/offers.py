"""Offers, decisions and backtests."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, JsonValue

from core.domain.records import Record
from core.domain.tasks import TaskType
from core.domain.wire import MinerTaskOffer
from miner.api.base import Answer

MAX_DAYS = 366.0


class OfferOutcome(StrEnum):
    """The fate of an offer."""

    REFUSED = "refused"
    LAPSED = "lapsed"  # accepted, and never started
    OPEN = "open"
    PUBLISHED = "published"
    FAILED = "failed"


class OfferSummary(Answer):
    """An offer as it came, the answer and the outcome."""

    #: None: it is the start of a task that was never offered.
    id: int | None
    received_at: float
    decided_at: float | None
    validator: str
    task_id: str
    task_type: TaskType
    model: str
    params: int | None
    hours: float
    ds_size: int | None
    times_seen: int
    accepted: bool
    message: str
    score: float | None
    points: float | None
    #: The failed rules in words.
    why: str | None
    became: OfferOutcome
    policy: str
    policy_hash: str


class OfferList(Answer):
    """Offers, newest first. `next`: the value of `before` for earlier ones; None at the end."""

    offers: list[OfferSummary]
    next: int | None


class DecisionReason(Answer):
    """One rule's verdict, in words that an operator can act on."""

    rule: str
    passed: bool
    text: str
    #: The change that would let a failed rule pass.
    way: str


class DecisionFactor(Answer):
    """One part of the score."""

    #: From 0 to 1.
    value: float
    #: Value × weight.
    contribution: float
    #: Source of the value.
    text: str
    weight: float


class DecisionPlan(Answer):
    """The numbers of the plan that led to the decision."""

    gpus: int
    busy_s: float
    wait_s: float
    epochs: float
    share: float


class DecisionPlacement(Answer):
    gpus: list[str]
    starts_at: float
    ends_at: float
    why: str


class DecisionValue(Answer):
    """The worth of a task in the validators' points; docs/acceptance.md states the assumptions."""

    work: float
    success: float
    win: float
    punished: float
    points: float
    gpu_hours: float
    per_gpu_hour: float


class DecisionDetails(Answer):
    """A decision with every rule and every factor."""

    offer: MinerTaskOffer
    accepted: bool
    message: str
    policy: str
    policy_hash: str
    profile: str | None
    profile_hash: str | None
    score: float | None
    #: The score that was needed.
    threshold: float | None
    reasons: list[DecisionReason]
    factors: dict[str, DecisionFactor]
    plan: DecisionPlan | None
    placement: DecisionPlacement | None
    value: DecisionValue | None


class OfferDetails(OfferSummary):
    """An offer with its decision, and the settings that would have let it pass."""

    is_start: bool
    explanation: DecisionDetails
    #: By dotted path.
    overrides: dict[str, str]


# Backtests


class BacktestFigures(Answer):
    """Results of one policy over some offers."""

    offers: int
    accepted: int
    #: By rule: offers that it refused.
    refused: dict[str, int]
    fleet_gpu_hours: float
    held_gpu_hours: float
    occupancy: float
    occupancy_over_time: list[float]
    expected_points: float
    points_per_fleet_gpu_hour: float
    points_per_held_gpu_hour: float
    #: Accepted offers by what became of them.
    known: dict[OfferOutcome, int]
    realised_points: float | None


class BacktestAnswer(Answer):
    """One offer, answered by the policy of a backtest."""

    task_id: str
    at: float
    accepted: bool
    score: float | None
    points: float | None
    gpus: list[str] | None
    #: Rules that failed.
    failed: list[str]


class PolicyBacktest(BacktestFigures):
    """Results of one policy with every answer."""

    policy: str
    answers: list[BacktestAnswer]


class ChangedAnswer(Answer):
    """An offer that the changed policy answers differently."""

    at: float
    task_id: str
    task_type: TaskType
    model: str
    hours: float
    accepted: bool
    why: str
    points: float | None


class BacktestComparison(Answer):
    """Two policies over the same offers."""

    offers: int
    #: Only the newest offers were taken.
    is_limited: bool
    policy: str
    profile: str
    gpus: str
    before: BacktestFigures
    after: BacktestFigures
    changed: int
    #: The newest of them.
    changes: list[ChangedAnswer]


class BacktestReport(BacktestComparison):
    """The policy in force against the same with other values."""

    days: float
    overrides: dict[str, JsonValue]


class BacktestRequest(Record):
    days: float = Field(default=7.0, gt=0, le=MAX_DAYS)
    #: By dotted path, like `rules.max_hours`.
    overrides: dict[Annotated[str, Field(max_length=200)], JsonValue] = Field(min_length=1, max_length=50)
