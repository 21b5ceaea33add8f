"""The daemon's own state, and the overview."""

from __future__ import annotations

from core.domain.wire import TournamentType
from miner.api.alerts import Alert
from miner.api.base import Answer
from miner.api.fleet import FleetStatus
from miner.api.jobs import JobSummary, RunningJob
from miner.api.offers import OfferSummary
from miner.api.reports import Kpi, Money


class ChainStatus(Answer):
    """The metagraph's state. `last_error` is the latest refresh's, None if it worked."""

    source: str
    netuid: int
    block: int | None
    age: float | None
    nodes: int
    last_error: str | None
    last_error_at: float | None
    stale: bool


class ReservationCounts(Answer):
    jobs: int
    held_offers: int


class GpuCounts(Answer):
    known: int
    usable: int
    waiting_jobs: int
    trouble: str | None


class TrainingStatus(Answer):
    """Ability to train, and trainings now."""

    backend: str | None
    trouble: str | None
    no_sandbox: str | None
    #: By what is missing: the reason.
    lacks: dict[str, str]
    jobs_worked_on: int


class HubStatus(Answer):
    endpoint: str
    checked_at: float | None
    problem: str | None


class NotificationTarget(Answer):
    """A target of notifications by its name, which holds no secret."""

    target: str
    waiting: int
    failures: int
    error: str | None
    sent_at: float | None


class StoreCounts(Answer):
    #: Jobs by state, offers by answer.
    jobs: dict[str, int]
    offers: dict[str, int]


class DaemonStatus(Answer):
    """The daemon's own state."""

    version: str
    hotkey: str
    uid: int | None
    uptime_seconds: float
    chain: ChainStatus
    reservations: ReservationCounts
    gpus: GpuCounts
    training: TrainingStatus
    policy: str
    profile: str
    policy_problem: str | None
    profile_problem: str | None
    doubted_clock_seconds: float | None
    hub: HubStatus
    notifications: list[NotificationTarget]
    store: StoreCounts
    live_nonces: int


class ChainSummary(Answer):
    source: str
    block: int | None
    age: float | None


class DaemonSummary(Answer):
    version: str
    hotkey: str
    uptime_seconds: float
    backend: str | None
    policy: str
    profile: str
    open_jobs: int
    held_offers: int
    waiting_jobs: int
    chain: ChainSummary
    #: What is wrong, in words.
    troubles: list[str]


class Overview(Answer):
    """The page's first look: state, indicators, GPUs, jobs, alerts and the last decisions."""

    at: float
    daemon: DaemonSummary
    kpis: list[Kpi]
    #: Of the last 24 hours, or None if GPUs have no price.
    money: Money | None = None
    fleet: FleetStatus
    jobs: list[RunningJob]
    ended: list[JobSummary]
    alerts: list[Alert]
    decisions: list[OfferSummary]


class NextTournament(Answer):
    kind: TournamentType
    #: The next Monday on which one may begin.
    starts_at: float
    #: The repository that the daemon hands out for it, and its commit.
    entry: str | None


class Standing(Answer):
    """Daemon, GPUs, jobs, alerts and next tournaments, as `god-miner` alone prints them."""

    at: float
    #: None: no daemon answers; `problem` says why.
    daemon: DaemonSummary | None
    problem: str | None
    #: Without a daemon: None.
    fleet: FleetStatus | None
    jobs: list[JobSummary]
    ended: list[JobSummary]
    alerts: list[Alert]
    money: Money | None
    tournaments: list[NextTournament]
    #: What to do next: a command, and why.
    next_step: str
