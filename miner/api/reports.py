"""Indicators and reports."""

from __future__ import annotations

from enum import StrEnum

from miner.api.alerts import Severity
from miner.api.base import Answer, Number


class PeriodKind(StrEnum):
    DAILY = "daily"
    WEEKLY = "weekly"
    MONTHLY = "monthly"


class Kpi(Answer):
    """One of the five indicators."""

    name: str
    title: str
    value: float | None
    #: "share", "hours", "" for a plain number.
    unit: str
    target: Number | None
    #: None: not known.
    met: bool | None
    detail: str


class SummaryFigure(Answer):
    """One number of a report's summary, with its value in the period before and its target."""

    name: str
    title: str
    #: "share", "hours", "points", "dollars", "" for a count.
    unit: str
    value: Number | None
    before: Number | None = None
    target: Number | None = None
    #: None: there is no target, or nothing to compare with it.
    met: bool | None = None


class EndedJobs(Answer):
    ended: int
    states: dict[str, int]
    reasons: dict[str, int]


class SuccessFigures(Answer):
    """Success of some jobs."""

    jobs: int
    published: int
    rate: float | None
    mean_hours: float | None
    mean_gain: float | None


class SuccessRow(SuccessFigures):
    """Success of one group of jobs."""

    name: str


class SuccessTables(Answer):
    """Groups with the most jobs first."""

    type: list[SuccessRow]
    family: list[SuccessRow]
    size: list[SuccessRow]


class JobStatistics(SuccessTables):
    """Success of the jobs of some days."""

    days: float
    all: SuccessFigures


class GpuUse(Answer):
    measured_hours: float
    used_hours: float
    idle_hours: float
    utilization: float | None
    #: The same while a job had the GPU.
    utilization_of_jobs: float | None
    interval_s: float
    #: By GPU: the share of each interval in which a job had it, or None if it was not measured.
    occupancy: dict[str, list[float | None]]


class Rank(Answer):
    """The miner's place at one moment."""

    at: float
    block: int | None
    uid: int
    #: 1 is best; equals share a place.
    rank: int
    #: All registered hotkeys, validators too.
    miners: int
    incentive: float
    emission: float
    #: The emission at the subnet's price of then, or None if the price is not known.
    tao_per_day: float | None = None

    @property
    def share(self) -> float:
        """The place as a share of all: 0.05 is the best twentieth."""
        return self.rank / self.miners

    def differs(self, other: Rank) -> bool:
        """Return whether the place changed. Incentive and emission alone change with nearly every block."""
        return (self.uid, self.rank, self.miners) != (other.uid, other.rank, other.miners)


class RankPoint(Answer):
    at: float
    rank: int
    emission: float


class RankHistory(Answer):
    first: Rank | None
    last: Rank | None
    best: int | None
    worst: int | None
    history: list[RankPoint]


class JobGain(Answer):
    """Base and best score of a job, with its quality × work."""

    job_id: int
    kind: str
    model: str
    metric: str | None
    base: float | None
    best: float | None
    gain: float | None
    work: float | None
    quality: float | None
    final: float | None


class QualityWeek(Answer):
    begins_at: float
    jobs: int
    #: None: no job of that week has a score.
    quality: float | None
    final: float


class AlertCount(Answer):
    """Alerts of one rule in a period."""

    rule: str
    severity: Severity
    raised: int
    times: int
    still_open: int
    example: str


class ActionCount(Answer):
    rule: str
    kind: str
    outcome: str
    count: int


class GoalCheck(Answer):
    what: str
    value: Number | None
    target: Number
    met: bool | None


class GoalProgress(Answer):
    """A goal of the policy, and what is reached now."""

    name: str
    #: None: there was no job yet, from which the time counts.
    due_at: float | None
    checks: list[GoalCheck]
    met: bool
    text: str


class PolicyOutcome(Answer):
    """A policy's result with the offers of a report's period; the first is what was decided."""

    name: str
    offers: int
    accepted: int
    points: float
    points_per_gpu_hour: float


class Money(Answer):
    """Earned, spent and kept in a time, in dollars. None: not known."""

    #: For all GPUs; `idle` of it without a job.
    spent: float | None
    idle: float | None
    hours_without_price: float
    earned_tao: float | None
    earned: float | None
    kept: float | None


class Report(Answer):
    """A day, a week or a month, compared with the time before and with the policy's goals."""

    period: PeriodKind
    title: str
    begins_at: float
    ends_at: float
    #: None: GPUs have no price.
    money: Money | None = None
    kpis: list[Kpi]
    summary: list[SummaryFigure]
    jobs: EndedJobs
    success: SuccessTables
    gpus: GpuUse
    rank: RankHistory
    gains: list[JobGain]
    quality: list[QualityWeek]
    first_place: str
    tournaments: str
    alerts: list[AlertCount]
    actions: list[ActionCount]
    goals: list[GoalProgress]
    #: None: no other policy was tried.
    backtest: list[PolicyOutcome] | None
