"""Where and when a task would run, on snapshots."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from core.domain.keys import GpuReservation, Placement, ReservationKind
from core.domain.selectors import Lane
from miner.fleet.base import FleetSnapshot
from miner.fleet.placement import OVERDUE_SECONDS
from tests.doubles.each import each
from tests.miner.fleet.setups import HOUR, fleet, make_gpus, place, reservation


def _place(
    snapshot: FleetSnapshot, *counts: int, hours: float = 2.0, wait: float = 0.0, **more: Any
) -> Placement | None:
    now = snapshot.taken_at
    return place(snapshot, counts, now=now, duration_s=hours * HOUR, latest_start=now + wait * HOUR, **more)


def _indices(placement: Placement | None) -> list[int]:
    return [int(name[1:]) for name in placement.gpus]


def test_an_empty_fleet_gives_the_first_wish_at_once() -> None:
    placement = _place(fleet(make_gpus(4)), 2, 1)
    assert placement == Placement(("g0", "g1"), 0.0, 2 * HOUR, "2 linked GPUs")


def test_a_later_count_is_used_when_the_first_cannot_begin_in_time() -> None:
    busy = fleet(make_gpus(4), [reservation([0, 1, 2], 0, 9 * HOUR)])
    assert _indices(_place(busy, 2, 1, wait=1)) == [3]
    assert _place(busy, 2, wait=1) is None


def test_a_task_waits_for_the_first_wish_where_there_is_time() -> None:
    busy = fleet(make_gpus(4), [reservation([0, 1, 2], 0, HOUR)])
    placement = _place(busy, 4, 1, wait=1)
    assert (placement.starts_at, placement.ends_at) == (HOUR, 3 * HOUR)
    assert placement.why == "4 linked GPUs in 1.0 h"


def test_nothing_is_placed_across_a_window_that_comes_later() -> None:
    reserved = fleet(make_gpus(1), [reservation([0], HOUR, 3 * HOUR, kind=ReservationKind.OFFER)])
    assert _place(reserved, 1, hours=2) is None
    assert _indices(_place(reserved, 1, hours=1)) == [0]


def test_an_overdue_job_blocks_and_an_overdue_offer_does_not() -> None:
    gone = fleet(make_gpus(1), [reservation([0], 0, 50, kind=ReservationKind.OFFER)], now=100)
    assert _indices(_place(gone, 1)) == [0]
    still = fleet(make_gpus(1), [reservation([0], 0, 50)], now=100)
    assert _place(still, 1) is None
    placement = _place(still, 1, wait=1)
    assert placement.starts_at == 100 + OVERDUE_SECONDS


def test_unusable_gpus_are_not_placed() -> None:
    assert _indices(_place(fleet(make_gpus(4, unusable=[0, 2])), 2)) == [1, 3]
    assert _place(fleet(make_gpus(2, unusable=[0, 1])), 1) is None


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
    reservations = [reservation(taken, 0, 9 * HOUR)] if taken else []
    assert _indices(_place(fleet(make_gpus(8), reservations), count)) == given


def test_bridged_gpus_go_together_and_a_single_one_comes_from_a_broken_pair() -> None:
    bridged = make_gpus(4, links=[(0, 3), (1, 2)])
    assert _indices(_place(fleet(bridged), 2)) == [0, 3]
    without_first = fleet(bridged, [reservation([0], 0, 9 * HOUR)])
    assert _indices(_place(without_first, 2)) == [1, 2]
    assert _indices(_place(without_first, 1)) == [3]


def test_short_tasks_fill_short_gaps() -> None:
    reserved = [reservation([1], 3 * HOUR, 9 * HOUR, kind=ReservationKind.OFFER)]
    assert _indices(_place(fleet(make_gpus(2, links=[]), reserved), 1, hours=2)) == [1]


def test_a_lane_keeps_its_tasks_and_only_overflows_where_it_may() -> None:
    lane, taken = Lane(gpus=[2, 3]), [reservation([2], 0, 9 * HOUR)]
    assert _indices(_place(fleet(make_gpus(4)), 2, lane=("large", lane))) == [2, 3]
    assert _place(fleet(make_gpus(4), taken), 2, lane=("large", lane)) is None
    placement = _place(
        fleet(make_gpus(4), taken), 2, lane=("large", lane.model_copy(update={"overflow": True}))
    )
    assert _indices(placement) == [0, 1]
    assert placement.why == "beyond lane large: 2 linked GPUs"


def test_a_lane_of_missing_gpus_places_nothing() -> None:
    assert _place(fleet(make_gpus(4)), 1, lane=("xlarge", Lane(gpus=[6, 7]))) is None


def test_large_hosts_are_filled_without_trying_every_set() -> None:
    assert _indices(_place(fleet(make_gpus(16), [reservation([1], 0, 9 * HOUR)]), 8)) == list(range(8, 16))
    assert _indices(_place(fleet(make_gpus(64), [reservation([63], 0, 9 * HOUR)]), 32)) == list(range(32))


_WINDOWS = st.lists(
    st.tuples(
        st.sets(st.integers(0, 7), min_size=1),
        st.integers(0, 10),
        st.integers(1, 10),
        st.sampled_from(ReservationKind),
    ),
    max_size=12,
)


@given(_WINDOWS, st.integers(1, 9), st.integers(1, 8), st.integers(0, 12))
def test_a_placement_is_early_enough_and_free_altogether(
    windows: list[tuple[set[int], int, int, ReservationKind]], count: int, hours: int, wait: int
) -> None:
    reservations: list[GpuReservation] = [
        reservation(sorted(gpus), start * HOUR, (start + duration) * HOUR, kind=kind)
        for gpus, start, duration, kind in windows
    ]
    placement = _place(fleet(make_gpus(8), reservations), count, hours=hours, wait=wait)
    if placement is None:
        instants = [0.0, *(held.ends_at for held in reservations if held.ends_at <= wait * HOUR)]
        assert all(len(_free(reservations, at, at + hours * HOUR)) < count for at in instants)
        return
    assert len(set(placement.gpus)) == count
    assert 0 <= placement.starts_at <= wait * HOUR
    assert set(placement.gpus) <= _free(reservations, placement.starts_at, placement.ends_at)
    earlier = [held.ends_at for held in reservations if held.ends_at < placement.starts_at]
    assert all(len(_free(reservations, at, at + hours * HOUR)) < count for at in earlier)


def _free(reservations: list[GpuReservation], start: float, end: float) -> set[str]:
    taken = {
        gpu for held in reservations if held.starts_at < end and held.ends_at > start for gpu in held.gpus
    }
    return {f"g{index}" for index in range(8)} - taken
