"""What a replay comes to: how many were taken, how busy the GPUs were, what it was worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from miner.offers.offered import Known
from miner.offers.policies.schema import Value
from miner.offers.replay import Entry


@dataclass(frozen=True)
class Summary:
    name: str
    offers: int
    accepted: int
    #: First rule that failed → how many offers.
    refused: dict[str, int]
    #: Of the fleet, between the first and the last offer.
    fleet_hours: float
    #: GPU-hours that accepted offers held in that time.
    held_hours: float
    #: Expected points in that time; a job that reaches beyond its end counts for its part.
    points: float
    #: Share of the GPUs held, in stretches of equal length.
    occupancy: tuple[float, ...]
    #: What became of the accepted ones in fact, as far as they were taken then.
    known: dict[Known, int]
    #: Points of those that were published or failed in fact; None: none was.
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


def summary(name: str, entries: Sequence[Entry], gpus: int, terms: Value, stretches: int = 60) -> Summary:
    taken = [entry for entry in entries if entry.decision.accepted]
    refused = Counter(entry.decision.failed[0].rule for entry in entries if entry.decision.failed)
    start, end = (entries[0].offered.at, entries[-1].offered.at) if entries else (0.0, 0.0)
    occupancy = _occupancy(taken, gpus, start, end, stretches)
    realised = [points for entry in taken if (points := _realised(entry, terms)) is not None]
    fleet_hours = gpus * (end - start) / 3600
    return Summary(
        name=name,
        offers=len(entries),
        accepted=len(taken),
        refused=dict(refused.most_common()),
        fleet_hours=fleet_hours,
        held_hours=sum(occupancy) / len(occupancy) * fleet_hours if occupancy else 0.0,
        points=sum(_expected(entry, start, end) for entry in taken),
        occupancy=occupancy,
        known=dict(Counter(entry.offered.known for entry in taken if entry.offered.known)),
        realised=sum(realised) if realised else None,
    )


def _held(entry: Entry) -> tuple[float, float, int]:
    """From, until, on how many GPUs."""
    placement = entry.decision.placement
    if placement is None:
        return entry.offered.at, entry.offered.at, 0
    return placement.starts_at, placement.ends_at, len(placement.gpus)


def _expected(entry: Entry, start: float, end: float) -> float:
    if entry.value is None or entry.offered.known is Known.LAPSED:
        return 0.0
    first, last, _ = _held(entry)
    inside = min(last, end) - max(first, start)
    return entry.value.points * (max(min(inside / (last - first), 1.0), 0.0) if last > first else 1.0)


def _realised(entry: Entry, terms: Value) -> float | None:
    """Who won is not told: what was published counts by the chance of it."""
    value = entry.value
    if value is None:
        return None
    if entry.offered.known is Known.FAILED:
        return -value.work * terms.penalty
    if entry.offered.known is Known.PUBLISHED:
        return value.work * (terms.win_points * value.win - terms.penalty * value.punished)
    return None


def _occupancy(
    taken: Sequence[Entry], gpus: int, start: float, end: float, stretches: int
) -> tuple[float, ...]:
    if end <= start or gpus < 1:
        return ()
    length = (end - start) / stretches
    held = [0.0] * stretches
    for entry in taken:
        first, last, count = _held(entry)
        if entry.offered.known is Known.LAPSED:
            continue
        for index in range(max(int((first - start) / length), 0), stretches):
            low = start + index * length
            if low >= last:
                break
            held[index] += count * max(min(last, low + length) - max(first, low), 0.0)
    return tuple(seconds / (gpus * length) for seconds in held)
