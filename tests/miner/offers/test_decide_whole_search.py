"""What the search skips, against a search that skips nothing: the same decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

import pytest

from core.planning import fit, ladder, memory
from core.planning.setup import Setup
from core.planning.wishes import Wish
from core.wire import MinerTaskOffer
from miner.dev.samples import unknown_task
from miner.fleet.base import Gpu
from miner.fleet.calendar import Calendar, Found
from miner.fleet.layout import Layout
from miner.offers import fitting
from miner.offers.ask import understand
from miner.offers.decide import decide_ask
from miner.offers.decision import Decision
from miner.offers.history import History
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
    random, found = Random(56), []
    for there, terms, plans in STATES:
        by, on, none = policy(terms, fitting__max_wait="30m"), profile(plans), History()
        for _ in range(OFFERS):
            asked = MinerTaskOffer(**unknown_task(random).offer())
            found.append(decide_ask(understand(asked), NOON, there, none, by, on))
    return found


def every_one(falling: Sequence[T], fits: Callable[[T], bool]) -> int | None:
    return next((at for at, one in enumerate(falling) if fits(one)), None)


def every_moment(setup: Setup, budget: float) -> bool:
    return all(sum(term.bytes for term in memory._whole(one)) <= budget for one in memory.moments(setup))


def any_count_that_exchanges_less(_: Wish, best: fit.Timed, count: int) -> bool:
    return best.step.seconds / best.step.compute_s * 1.35 * count / best.setup.world > 1


def every_end(
    self: Calendar,
    pool: Sequence[Gpu],
    count: int,
    layout: Layout,
    *,
    first: float,
    latest: float,
    end_of: Callable[[float], float],
) -> Found | None:
    ends = {one.end for windows in self._taken.values() for one in windows if first < one.end <= latest}
    for start in sorted({first, *ends}):
        free = self.free(pool, start, end_of(start))
        if end_of(start) > start and len(free) >= count > 0:
            return Found(layout.choose(free, count, free), start, end_of(start))
    return None


def test_what_is_skipped_changes_no_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    found = decisions()
    monkeypatch.setattr(ladder, "_first", every_one)
    monkeypatch.setattr(memory, "fits", every_moment)
    monkeypatch.setattr(fit, "_could_beat", any_count_that_exchanges_less)
    monkeypatch.setattr(Calendar, "earliest", every_end)
    assert decisions() == found
    monkeypatch.setattr(fitting._Tries, "no_gpu_in_time", lambda self: None)
    for planned, one in zip(decisions(), found, strict=True):
        if planned != one:
            assert one.plan is None
            assert not one.accepted
            assert not planned.accepted
    assert any(one.plan is None for one in found)
    assert {one.accepted for one in found} == {True, False}
