"""Backtest policies: replay offers against each, in memory, and compare how many were accepted and what
that was worth.

Every accepted offer is assumed to start at once and to hold its GPUs for the window of its decision,
unless it is known that its start never came. History grows as it did: a decision knows only jobs that
had ended by then.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from core.domain.decisions import Decision, ExpectedValue
from core.domain.hardware import GpuLink, Hardware
from core.domain.keys import GpuReservation, ReservationKind, TaskKey
from core.profile.resolve import LoadedProfile
from miner.api.offers import OfferOutcome
from miner.fleet.base import FleetNode, FleetSnapshot, Gpu, InventoryState
from miner.offers.decide import decide, expected_value
from miner.offers.history import JobOutcome, SuccessHistory, job_outcomes
from miner.offers.parsed_offer import parse_offer
from miner.offers.past_offers import HistoricalOffer, OfferFilter, StoredOffer, stored_offers
from miner.offers.policies.load import LoadedPolicy
from miner.offers.policies.schema import Policy, ValueTerms

#: Seconds that an offer whose start never came holds its place: the default of OFFER_HOLD_SECONDS.
LAPSES_AFTER = 900.0


class ReplayedOffer(NamedTuple):
    historical: HistoricalOffer
    decision: Decision
    #: By the terms that all compared policies are valued by, if known.
    value: ExpectedValue | None

    @property
    def held_gpus(self) -> tuple[float, float, int]:
        """Begin and end, and the number of GPUs."""
        placement = self.decision.placement
        if placement is None:
            return self.historical.at, self.historical.at, 0
        return placement.starts_at, placement.ends_at, len(placement.gpus)

    @property
    def has_lapsed(self) -> bool:
        return self.historical.outcome is OfferOutcome.LAPSED


def idle_fleet(hardware: Hardware) -> FleetSnapshot:
    """All GPUs of a kind in one host, linked as such GPUs are."""
    kind, ids = hardware.gpus.kind, [str(index) for index in range(hardware.gpus.count)]
    gpus = []
    for index, gpu in enumerate(ids):
        linked = frozenset[str]()
        if kind.link is GpuLink.NVLINK:  # switches join all
            linked = frozenset(ids) - {gpu}
        elif kind.link is GpuLink.NVLINK_PAIR:  # bridges join neighbours
            linked = frozenset(ids[index ^ 1 : (index ^ 1) + 1])
        gpus.append(Gpu(id=gpu, index=index, kind=kind, linked=linked))
    nodes = (FleetNode("", "", hardware, hardware),)
    return FleetSnapshot(InventoryState(tuple(gpus), nodes), (), 0.0)


def replay(
    offers: Iterable[HistoricalOffer],
    policy: LoadedPolicy,
    profile: LoadedProfile,
    hardware: Hardware,
    outcomes: Iterable[JobOutcome] = (),
    value_policy: Policy | None = None,
) -> list[ReplayedOffer]:
    """Decide about offers in the order of their arrival. `value_policy` values them instead of the policy's
    own terms."""
    idle, holds, entries = idle_fleet(hardware), list[GpuReservation](), list[ReplayedOffer]()
    history, ended = SuccessHistory(), deque(sorted(outcomes, key=lambda outcome: outcome.ended_at))
    for historical in offers:
        offer, now = historical.offer, historical.at
        while ended and ended[0].ended_at <= now:
            history.add(ended.popleft())
        holds = [hold for hold in holds if hold.ends_at > now]
        fleet = FleetSnapshot(idle.inventory, tuple(holds), now)
        decision = decide(offer, now, fleet, history, policy, profile)
        value = decision.value
        if value_policy is not None and value is not None:
            parsed = parse_offer(offer)
            family, success = parsed.model.family, value_policy.success
            chances = history.chances(parsed.kinds, family, parsed.params, success, now)
            value = expected_value(parsed, value_policy.value, chances, decision.plan, value.gpu_hours)
        entries.append(ReplayedOffer(historical, decision, value))
        if decision.accepted:
            holds.append(_hold(entries[-1]))
    return entries


def _hold(entry: ReplayedOffer) -> GpuReservation:
    historical, decision, placement = entry.historical, entry.decision, entry.decision.placement
    assert placement is not None
    ends_at = placement.ends_at
    if entry.has_lapsed:
        ends_at = min(ends_at, historical.at + LAPSES_AFTER)
    key = TaskKey("replayed", historical.offer.task_id)
    kind, start = ReservationKind.OFFER, placement.starts_at
    return GpuReservation(key, kind, placement.gpus, start, ends_at, decision.priority)


@dataclass(frozen=True)
class ReplaySummary:
    name: str
    offers: int
    accepted: int
    #: First rule that failed → how many offers.
    refused: dict[str, int]
    #: GPU-hours of the fleet between the first and the last offer.
    fleet_hours: float
    #: GPU-hours that accepted offers held in that time.
    held_hours: float
    #: Expected points in that time; a job that reaches beyond its end counts for its part.
    points: float
    #: Share of the GPUs held, in intervals of equal length.
    occupancy: tuple[float, ...]
    #: Outcomes of the accepted offers, as far as they were accepted then.
    outcomes: dict[OfferOutcome, int]
    #: Points of those that were published or failed, if any was.
    realised: float | None

    @property
    def per_fleet_hour(self) -> float:
        return self.points / self.fleet_hours if self.fleet_hours else 0.0

    @property
    def per_held_hour(self) -> float:
        return self.points / self.held_hours if self.held_hours else 0.0

    @property
    def mean_occupancy(self) -> float:
        return self.held_hours / self.fleet_hours if self.fleet_hours else 0.0


def summarize_replay(
    name: str, entries: Sequence[ReplayedOffer], gpus: int, terms: ValueTerms, intervals: int = 60
) -> ReplaySummary:
    taken = [entry for entry in entries if entry.decision.accepted]
    refused = Counter(entry.decision.failed[0].rule for entry in entries if entry.decision.failed)
    start, end = (entries[0].historical.at, entries[-1].historical.at) if entries else (0.0, 0.0)
    occupancy = _occupancy(taken, gpus, start, end, intervals)
    realised = [points for entry in taken if (points := _realised(entry, terms)) is not None]
    fleet_hours = gpus * (end - start) / 3600
    return ReplaySummary(
        name=name,
        offers=len(entries),
        accepted=len(taken),
        refused=dict(refused.most_common()),
        fleet_hours=fleet_hours,
        held_hours=sum(occupancy) / len(occupancy) * fleet_hours if occupancy else 0.0,
        points=sum(_expected(entry, start, end) for entry in taken),
        occupancy=occupancy,
        outcomes=dict(Counter(entry.historical.outcome for entry in taken if entry.historical.outcome)),
        realised=sum(realised) if realised else None,
    )


def _expected(entry: ReplayedOffer, start: float, end: float) -> float:
    if entry.value is None or entry.has_lapsed:
        return 0.0
    first, last, _ = entry.held_gpus
    inside = min(last, end) - max(first, start)
    return entry.value.points * (max(min(inside / (last - first), 1.0), 0.0) if last > first else 1.0)


def _realised(entry: ReplayedOffer, terms: ValueTerms) -> float | None:
    """Value the outcome. The winner is unknown: a published task counts by its chance to win."""
    value = entry.value
    if value is None:
        return None
    if entry.historical.outcome is OfferOutcome.FAILED:
        return -value.work * terms.penalty
    if entry.historical.outcome is OfferOutcome.PUBLISHED:
        return value.work * (terms.win_points * value.win - terms.penalty * value.punished)
    return None


def _occupancy(
    taken: Sequence[ReplayedOffer], gpus: int, start: float, end: float, intervals: int
) -> tuple[float, ...]:
    if end <= start or gpus < 1:
        return ()
    length = (end - start) / intervals
    held = [0.0] * intervals
    for entry in taken:
        if entry.has_lapsed:
            continue
        first, last, count = entry.held_gpus
        for index in range(max(int((first - start) / length), 0), intervals):
            low = start + index * length
            if low >= last:
                break
            held[index] += count * max(min(last, low + length) - max(first, low), 0.0)
    return tuple(seconds / (gpus * length) for seconds in held)


@dataclass(frozen=True)
class PastOffers:
    """Stored offers and the outcomes of jobs, read from the store once."""

    stored: Sequence[StoredOffer] = ()
    outcomes: Sequence[JobOutcome] = ()

    @classmethod
    def read(cls, connection: sqlite3.Connection, wanted: OfferFilter, now: float) -> PastOffers:
        return cls(stored_offers(connection, wanted), job_outcomes(connection, now))

    def backtest(self, profile: LoadedProfile, hardware: Hardware, value_policy: Policy) -> Backtest:
        offers = [offer.historical for offer in self.stored]
        return Backtest(offers, profile, hardware, value_policy, self.outcomes)

    def as_decided(self, test: Backtest) -> BacktestRun:
        """Summarise the decisions that were made."""
        entries = [
            ReplayedOffer(offer.historical, offer.decision, offer.decision.value) for offer in self.stored
        ]
        return test.summarize("as decided", entries)


class BacktestRun(NamedTuple):
    summary: ReplaySummary
    entries: Sequence[ReplayedOffer]


class DecisionChange(NamedTuple):
    """An offer that two runs decide differently."""

    before: ReplayedOffer
    after: ReplayedOffer

    @property
    def why(self) -> str:
        """Return the reason of the run that refuses."""
        refused = self.after if self.before.decision.accepted else self.before
        return refused.decision.failed[0].text if refused.decision.failed else ""


class Backtest:
    """The offers, and the policy by whose terms all are valued: otherwise sums could not be compared."""

    def __init__(
        self,
        offers: Sequence[HistoricalOffer],
        profile: LoadedProfile,
        hardware: Hardware,
        value_policy: Policy,
        outcomes: Iterable[JobOutcome] = (),
    ) -> None:
        self.offers = offers
        self.profile, self.hardware = profile, hardware
        self.value_policy = value_policy
        self.outcomes = tuple(outcomes)

    def run(self, name: str, policy: LoadedPolicy) -> BacktestRun:
        return self.summarize(
            name, replay(self.offers, policy, self.profile, self.hardware, self.outcomes, self.value_policy)
        )

    def summarize(self, name: str, entries: Sequence[ReplayedOffer]) -> BacktestRun:
        return BacktestRun(
            summarize_replay(name, entries, self.hardware.gpus.count, self.value_policy.value), entries
        )


def decision_changes(before: BacktestRun, after: BacktestRun) -> list[DecisionChange]:
    pairs = zip(before.entries, after.entries, strict=True)
    return [DecisionChange(*pair) for pair in pairs if pair[0].decision.accepted != pair[1].decision.accepted]
