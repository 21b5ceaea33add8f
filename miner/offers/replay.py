"""What a policy would have done: offers played again against a policy, a profile and a fleet, in memory.

Every accepted offer is taken to be started at once and to hold its GPUs for the window that the decision gave
it, unless it is known that its start never came. Own history grows as it did: a decision knows only jobs that
had ended by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from core.hardware import Hardware, Link
from core.profile.load import LoadedProfile
from miner.fleet.base import FleetSnapshot, Gpu, Hold, HoldKind, TaskKey
from miner.offers.ask import understand
from miner.offers.decide import decide
from miner.offers.decision import Decision, ExpectedValue
from miner.offers.history import History, Outcome
from miner.offers.offered import Known, Offered
from miner.offers.policies.load import LoadedPolicy
from miner.offers.policies.schema import Policy
from miner.offers.scoring import expected_value

#: How long an offer whose start never came holds its place: the default of OFFER_HOLD_SECONDS.
LAPSES_AFTER = 900.0


class Entry(NamedTuple):
    offered: Offered
    decision: Decision
    #: By the terms that all compared policies are judged by; None: not known.
    value: ExpectedValue | None


def idle_fleet(hardware: Hardware) -> FleetSnapshot:
    """All cards of a kind in one host, linked as such cards are."""
    ids = [str(index) for index in range(hardware.gpus.count)]
    gpus = [
        Gpu(id=name, index=index, kind=hardware.gpus.kind, linked=_linked(ids, index, hardware))
        for index, name in enumerate(ids)
    ]
    return FleetSnapshot(tuple(gpus), (), hardware, 0.0)


def _linked(ids: Sequence[str], index: int, hardware: Hardware) -> frozenset[str]:
    """Switches join all cards, bridges neighbours."""
    link, other = hardware.gpus.kind.link, index ^ 1
    if link is Link.NVLINK:
        return frozenset(ids) - {ids[index]}
    return frozenset({ids[other]}) if link is Link.NVLINK_PAIR and other < len(ids) else frozenset()


def replay(
    offers: Iterable[Offered],
    policy: LoadedPolicy,
    profile: LoadedProfile,
    hardware: Hardware,
    outcomes: Iterable[Outcome] = (),
    judge: Policy | None = None,
) -> list[Entry]:
    """Offers in the order of their arrival. `judge`: the terms to reckon value by, else the policy's."""
    idle, holds, entries = idle_fleet(hardware), list[Hold](), list[Entry]()
    history, ended = History(), deque(sorted(outcomes, key=lambda one: one.ended_at))
    for offered in offers:
        while ended and ended[0].ended_at <= offered.at:
            history.add(ended.popleft())
        holds = [hold for hold in holds if hold.ends_at > offered.at]
        fleet = FleetSnapshot(idle.gpus, tuple(holds), hardware, offered.at)
        decision = decide(offered.offer, offered.at, fleet, history, policy, profile)
        entries.append(Entry(offered, decision, _value(offered, decision, history, judge)))
        if decision.accepted:
            holds.append(_hold(offered, decision))
    return entries


def _value(
    offered: Offered, decision: Decision, history: History, judge: Policy | None
) -> ExpectedValue | None:
    if judge is None or decision.value is None:
        return decision.value
    ask = understand(offered.offer)
    chances = history.chances(ask.kinds, ask.model.family, ask.params, judge.success, offered.at)
    return expected_value(ask, judge.value, chances, decision.plan, decision.value.gpu_hours)


def _hold(offered: Offered, decision: Decision) -> Hold:
    placement = decision.placement
    assert placement is not None
    key = TaskKey("replayed", offered.offer.task_id)
    ends_at = placement.ends_at
    if offered.known is Known.LAPSED:
        ends_at = min(ends_at, offered.at + LAPSES_AFTER)
    return Hold(key, HoldKind.OFFER, placement.gpus, placement.starts_at, ends_at, decision.priority)
