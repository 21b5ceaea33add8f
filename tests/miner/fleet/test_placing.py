"""Where a task would run: pure placing on snapshots."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from core.profile import Lane
from miner.fleet.base import FleetSnapshot, Hold, HoldKind, Placement
from miner.fleet.calendar import OVERDUE_SECONDS
from tests.doubles.each import each
from tests.miner.fleet.setups import HOUR, cards, fleet, hold, place


def _place(
    snapshot: FleetSnapshot, *counts: int, hours: float = 2.0, wait: float = 0.0, **more: Any
) -> Placement | None:
    now = snapshot.taken_at
    return place(snapshot, counts, now=now, duration_s=hours * HOUR, latest_start=now + wait * HOUR, **more)


def _cards(found: Placement | None) -> list[int]:
    assert found is not None
    return [int(name[1:]) for name in found.gpus]


def test_an_empty_fleet_gives_the_first_wish_at_once() -> None:
    found = _place(fleet(cards(4)), 2, 1)
    assert found == Placement(("g0", "g1"), 0.0, 2 * HOUR, "2 linked cards")


def test_a_later_count_is_taken_when_the_first_can_not_begin_in_time() -> None:
    busy = fleet(cards(4), [hold([0, 1, 2], 0, 9 * HOUR)])
    assert _cards(_place(busy, 2, 1, wait=1)) == [3]
    assert _place(busy, 2, wait=1) is None


def test_a_task_waits_for_the_first_wish_where_there_is_time() -> None:
    busy = fleet(cards(4), [hold([0, 1, 2], 0, HOUR)])
    found = _place(busy, 4, 1, wait=1)
    assert found is not None
    assert (found.starts_at, found.ends_at) == (HOUR, 3 * HOUR)
    assert found.why == "4 linked cards in 1.0 h"


def test_nothing_is_placed_across_a_window_that_comes_later() -> None:
    promised = fleet(cards(1), [hold([0], HOUR, 3 * HOUR, kind=HoldKind.OFFER)])
    assert _place(promised, 1, hours=2) is None
    assert _cards(_place(promised, 1, hours=1)) == [0]


def test_an_offer_past_its_window_holds_nothing_and_a_job_past_its_own_does() -> None:
    gone = fleet(cards(1), [hold([0], 0, 50, kind=HoldKind.OFFER)], now=100)
    assert _cards(_place(gone, 1)) == [0]
    still = fleet(cards(1), [hold([0], 0, 50)], now=100)
    assert _place(still, 1) is None
    found = _place(still, 1, wait=1)
    assert found is not None
    assert found.starts_at == 100 + OVERDUE_SECONDS


def test_what_the_task_holds_itself_is_not_in_its_way() -> None:
    mine = hold([0], 0, HOUR)
    assert _cards(_place(fleet(cards(1), [mine]).without(mine.key), 1)) == [0]


def test_cards_that_are_out_are_not_given() -> None:
    assert _cards(_place(fleet(cards(4, out=[0, 2])), 2)) == [1, 3]
    assert _place(fleet(cards(2, out=[0, 1])), 1) is None


@each(
    ("taken", "count", "given"),
    [
        ([], 1, [0]),
        ([0], 1, [1]),  # its neighbour is taken already
        ([0], 2, [2, 3]),  # the whole pair in the broken quad
        ([0, 4], 1, [1]),
        ([2], 4, [4, 5, 6, 7]),  # the quad that is whole
        ([0, 1], 1, [2]),  # the quad that is broken, and one of its pairs
        ([0, 1, 2], 1, [3]),
        ([0, 3], 2, [1, 2]),  # rather both broken pairs than a whole one
        ([], 3, [0, 1, 2]),
        ([0, 1, 2, 3, 4, 5, 6], 1, [7]),
    ],
)
def test_pairs_and_quads_are_kept_whole(taken: list[int], count: int, given: list[int]) -> None:
    holds = [hold(taken, 0, 9 * HOUR)] if taken else []
    assert _cards(_place(fleet(cards(8), holds), count)) == given


def test_bridged_cards_go_together_wherever_they_sit() -> None:
    bridged = cards(4, links=[(0, 3), (1, 2)])
    assert _cards(_place(fleet(bridged), 2)) == [0, 3]
    found = _place(fleet(bridged, [hold([0], 0, 9 * HOUR)]), 2)
    assert _cards(found) == [1, 2]
    assert found is not None
    assert found.why == "2 linked cards"


def test_a_single_card_comes_out_of_a_broken_bridge() -> None:
    bridged = cards(4, links=[(0, 3), (1, 2)])
    assert _cards(_place(fleet(bridged, [hold([0], 0, 9 * HOUR)]), 1)) == [3]


def test_short_tasks_go_where_something_comes_soon() -> None:
    promised = [hold([1], 3 * HOUR, 9 * HOUR, kind=HoldKind.OFFER)]
    assert _cards(_place(fleet(cards(2, links=[]), promised), 1, hours=2)) == [1]


def test_a_lane_keeps_its_tasks_and_only_overflows_where_it_may() -> None:
    lane, taken = Lane(gpus=[2, 3]), [hold([2], 0, 9 * HOUR)]
    assert _cards(_place(fleet(cards(4)), 2, lane=("large", lane))) == [2, 3]
    assert _place(fleet(cards(4), taken), 2, lane=("large", lane)) is None
    found = _place(fleet(cards(4), taken), 2, lane=("large", lane.model_copy(update={"overflow": True})))
    assert _cards(found) == [0, 1]
    assert found is not None
    assert found.why == "beyond lane large: 2 linked cards"


def test_a_lane_of_cards_that_are_not_here_has_no_room() -> None:
    assert _place(fleet(cards(4)), 1, lane=("xlarge", Lane(gpus=[6, 7]))) is None


def test_large_hosts_are_filled_without_trying_every_set() -> None:
    assert _cards(_place(fleet(cards(16), [hold([1], 0, 9 * HOUR)]), 8)) == list(range(8, 16))
    assert _cards(_place(fleet(cards(64), [hold([63], 0, 9 * HOUR)]), 32)) == list(range(32))


_WINDOWS = st.lists(
    st.tuples(
        st.sets(st.integers(0, 7), min_size=1),
        st.integers(0, 10),
        st.integers(1, 10),
        st.sampled_from(HoldKind),
    ),
    max_size=12,
)


@given(_WINDOWS, st.integers(1, 9), st.integers(1, 8), st.integers(0, 12))
def test_a_placement_is_early_enough_and_free_altogether(
    windows: list[tuple[set[int], int, int, HoldKind]], count: int, hours: int, wait: int
) -> None:
    holds: list[Hold] = [
        hold(sorted(gpus), start * HOUR, (start + length) * HOUR, kind=kind)
        for gpus, start, length, kind in windows
    ]
    found = _place(fleet(cards(8), holds), count, hours=hours, wait=wait)
    if found is None:
        instants = [0.0, *(one.ends_at for one in holds if one.ends_at <= wait * HOUR)]
        assert all(len(_free(holds, at, at + hours * HOUR)) < count for at in instants)
        return
    assert len(set(found.gpus)) == count
    assert 0 <= found.starts_at <= wait * HOUR
    assert set(found.gpus) <= _free(holds, found.starts_at, found.ends_at)
    earlier = [one.ends_at for one in holds if one.ends_at < found.starts_at]
    assert all(len(_free(holds, at, at + hours * HOUR)) < count for at in earlier)


def _free(holds: list[Hold], start: float, end: float) -> set[str]:
    taken = {gpu for one in holds if one.starts_at < end and one.ends_at > start for gpu in one.gpus}
    return {f"g{index}" for index in range(8)} - taken
