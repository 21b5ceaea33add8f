"""What the search skips, against a search that skips nothing: the same decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

import pytest

from core.domain.decisions import Decision
from core.domain.wire import MinerTaskOffer
from core.planning.candidate import RunCandidate
from core.planning.memory import peak
from core.planning.search import fit as planning_fit
from core.planning.search import ladder
from core.planning.search.requirements import Requirements
from core.planning.search.timed_candidate import TimedCandidate
from miner.dev.samples import unknown_task
from miner.fleet.base import NodeGpus
from miner.fleet.placement import FreeWindow, GpuCalendar, topology_of
from miner.offers import fit as offers_fit
from miner.offers.decide import decide_parsed
from miner.offers.history import SuccessHistory
from miner.offers.parsed_offer import parse_offer
from tests.miner.offers.builders import NOON, fleet, hold, policy, profile

T = TypeVar("T")

BUSY = [
    hold(name, gpu, start=-1.0, end=1 + int(gpu) / 3) for name, gpu in zip("abcdefg", "0123456", strict=True)
]
#: Fleets idle, busy for a while and busy for long, each with a policy and a profile.
STATES = [
    (fleet("8xH100"), "h100x8", "h100x8"),
    (fleet("8xH100", *BUSY), "h100x8", "h100x8"),
    (fleet("4xH100", hold("a", "01"), hold("b", "2", start=1.0, end=3.0)), "everything-feasible", "h100x4"),
    (fleet("2xA6000", hold("a", "0", end=0.3)), "everything-feasible", "steady"),
    (fleet("8xH100", hold("a", "012345", end=0.4)), "everything-feasible", "h100-fast"),
    (fleet("4xH100", hold("a", "01", end=0.6), hold("b", "23", end=2)), "everything-feasible", "h100x4"),
    (fleet("8xH100", hold("a", "0123", end=9), hold("k", "567", end=9)), "everything-feasible", "h100x8"),
]
OFFERS = 60


def decisions() -> list[Decision]:
    random, results = Random(56), []
    for there, terms, plans in STATES:
        by, on, none = policy(terms, fitting__max_wait="30m"), profile(plans), SuccessHistory()
        for _ in range(OFFERS):
            asked = MinerTaskOffer(**unknown_task(random).offer())
            results.append(decide_parsed(parse_offer(asked), NOON, there, none, by, on))
    return results


def every_one(falling: Sequence[T], fits: Callable[[T], bool]) -> int | None:
    return next((at for at, item in enumerate(falling) if fits(item)), None)


def every_moment(candidate: RunCandidate, budget: float) -> bool:
    totals = (peak.terms_with_fragmentation(moment) for moment in peak.moments(candidate))
    return all(sum(term.bytes for term in terms) <= budget for terms in totals)


def any_count_that_exchanges_less(_: Requirements, best: TimedCandidate, count: int) -> bool:
    return best.step.seconds / best.step.compute_s * 1.35 * count / best.candidate.world > 1


def every_end(
    self: GpuCalendar,
    nodes: Sequence[NodeGpus],
    count: int,
    *,
    latest: float,
    end_of: Callable[[float], float],
    over: int = 1,
) -> FreeWindow | None:
    (node,) = nodes
    assert over == 1
    ends = {
        window.end
        for windows in self._taken.values()
        for window in windows
        if self.now < window.end <= latest
    }
    for start in sorted({self.now, *ends}):
        free = self.free_gpus(node.usable, start, end_of(start))
        if end_of(start) > start and len(free) >= count > 0:
            return FreeWindow(topology_of(node.every).choose(free, count, free), start, end_of(start))
    return None


def test_what_is_skipped_changes_no_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = decisions()
    monkeypatch.setattr(ladder, "_first", every_one)
    monkeypatch.setattr(peak, "fits_memory", every_moment)
    monkeypatch.setattr(planning_fit, "_could_beat", any_count_that_exchanges_less)
    monkeypatch.setattr(GpuCalendar, "earliest", every_end)
    assert decisions() == searched
    monkeypatch.setattr(offers_fit._FitSearch, "no_gpu_in_time", lambda self: None)
    for planned, decision in zip(decisions(), searched, strict=True):
        if planned != decision:
            assert decision.plan is None
            assert not decision.accepted
            assert not planned.accepted
    assert any(decision.plan is None for decision in searched)
    assert {decision.accepted for decision in searched} == {True, False}
