"""What a policy would have done: offers played again against a policy, a profile and a fleet, in memory.

Every accepted offer is taken to be started at once and to hold its GPUs for the window that the decision gave
it, unless it is known that its start never came. Own history grows as it did: a decision knows only jobs that
had ended by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from core.hardware import Hardware, Link
from core.profile.load import LoadedProfile
from miner.fleet.base import FleetSnapshot, Gpu, Hold, HoldKind, TaskKey
from miner.offers.decide import decide
from miner.offers.decision import Decision
from miner.offers.history import History, Outcome
from miner.offers.policies.load import LoadedPolicy
from miner.offers.stream import Offered


class Known(StrEnum):
    """What became of an offer in fact."""

    REFUSED = "refused"
    LAPSED = "lapsed"  # accepted, and never started
    OPEN = "open"
    PUBLISHED = "published"
    FAILED = "failed"


class Entry(NamedTuple):
    offered: Offered
    decision: Decision


@dataclass
class Replay:
    policy: LoadedPolicy
    gpus: int
    #: In the order in which the offers came.
    entries: list[Entry] = field(default_factory=list)

    @property
    def accepted(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.decision.accepted]


def idle_fleet(hardware: Hardware) -> FleetSnapshot:
    """All cards of a kind in one host, linked as such cards are."""
    count = hardware.gpus.count
    linked = hardware.gpus.link is Link.NVLINK
    ids = [str(index) for index in range(count)]
    gpus = tuple(
        Gpu(
            id=ids[index],
            index=index,
            kind=hardware.gpus.kind,
            linked=frozenset(ids) - {ids[index]} if linked else _partner(ids, index, hardware),
        )
        for index in range(count)
    )
    return FleetSnapshot(gpus, (), hardware, 0.0)


def _partner(ids: Sequence[str], index: int, hardware: Hardware) -> frozenset[str]:
    """Bridges join neighbours."""
    other = index ^ 1
    paired = hardware.gpus.kind.link is Link.NVLINK_PAIR and other < len(ids)
    return frozenset({ids[other]}) if paired else frozenset()


def replay(
    offers: Iterable[Offered],
    policy: LoadedPolicy,
    profile: LoadedProfile,
    hardware: Hardware,
    outcomes: Iterable[Outcome] = (),
) -> Replay:
    """Offers in the order of their arrival."""
    idle = idle_fleet(hardware)
    found, holds = Replay(policy, hardware.gpus.count), list[Hold]()
    history, ended = History(), deque(sorted(outcomes, key=lambda one: one.ended_at))
    for offered in offers:
        while ended and ended[0].ended_at <= offered.at:
            history.add(ended.popleft())
        holds = [hold for hold in holds if hold.ends_at > offered.at]
        fleet = FleetSnapshot(idle.gpus, tuple(holds), hardware, offered.at)
        decision = decide(offered.offer, offered.at, fleet, history, policy, profile)
        found.entries.append(Entry(offered, decision))
        if decision.accepted and decision.placement is not None:
            holds.append(_hold(offered, decision))
    return found


def _hold(offered: Offered, decision: Decision) -> Hold:
    placement = decision.placement
    assert placement is not None
    key = TaskKey("replayed", offered.offer.task_id)
    return Hold(
        key, HoldKind.OFFER, placement.gpus, placement.starts_at, placement.ends_at, decision.priority
    )
