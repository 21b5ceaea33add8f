"""The ledger of GPUs: one rule at a time, then all of them in a state machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from core.domain.keys import (
    GpuReservation,
    NamedLane,
    Placement,
    ReservationKind,
    TaskKey,
    gpu_on_node,
    nodes_of,
)
from core.domain.selectors import Lane
from miner.fleet.base import Gpu, GpuOption
from miner.fleet.ledger import GpuLedger
from miner.fleet.placement import FOREVER, OVERDUE_SECONDS
from miner.fleet.schedule import MAX_PLANNED_CLAIMS, ClaimStage, GpuClaim, QueueRules
from tests.miner.fleet.setups import HOUR, fleet, make_gpus, place

A, B, C, D = (TaskKey("v", name) for name in "abcd")


def ledger(count: int = 4, **rules: Any) -> GpuLedger:
    on = GpuLedger(QueueRules(**rules))
    on.set_gpus(make_gpus(count))
    return on


def at(*gpus: int, start: float = 0.0, hours: float = 4.0) -> Placement:
    return Placement(tuple(f"g{index}" for index in gpus), start, start + hours * HOUR)


def reserve(on: GpuLedger, key: TaskKey, where: Placement, now: float = 0.0, **more: Any) -> bool:
    return on.reserve(key, where, now=now, **more)


def ask(
    on: GpuLedger,
    key: TaskKey,
    *counts: int,
    now: float = 0.0,
    hours: float = 4.0,
    priority: float = 0.0,
    **more: Any,
) -> list[TaskKey]:
    """Who got GPUs by it."""
    until = now + hours * HOUR
    if on.claim(key) is None:
        on.start(key, now=now, until=until, priority=priority)
    on.request(key, [GpuOption(count) for count in counts], now=now, until=until, **more)
    return scheduled(on, now)


def scheduled(on: GpuLedger, now: float = 0.0) -> list[TaskKey]:
    """Who gets GPUs now."""
    return [claim.key for claim in on.schedule(now)]


def has(on: GpuLedger, key: TaskKey) -> tuple[int, ...] | None:
    claim = on.claim(key)
    return tuple(int(name[1:]) for name in claim.gpus) if claim and claim.is_running else None


def planned(on: GpuLedger, key: TaskKey) -> tuple[tuple[int, ...], float]:
    claim = on.claim(key)
    return tuple(int(name[1:]) for name in claim.gpus), claim.starts_at


# Reservations


def test_a_gpu_is_reserved_once_at_a_time() -> None:
    on = ledger(2)
    assert reserve(on, A, at(0, 1, hours=2))
    assert not reserve(on, B, at(1))
    assert reserve(on, B, at(1, start=2 * HOUR, hours=2))
    assert not reserve(on, C, at(1, start=3 * HOUR))
    assert [reservation.key for reservation in on.reservations] == [A, B]


@pytest.mark.parametrize("where", [at(7), at(), at(0, 7), at(0)])
def test_gpus_that_are_missing_or_unusable_are_not_reserved(where: Placement) -> None:
    on = ledger()
    on.set_gpus(make_gpus(4, unusable=[0]))
    assert not reserve(on, A, where)


def test_a_second_reservation_replaces_the_first() -> None:
    on = ledger()
    assert reserve(on, A, at(0, 1))
    assert reserve(on, A, at(1, 2), priority=2.0)
    assert on.reservations == (GpuReservation(A, ReservationKind.OFFER, ("g1", "g2"), 0.0, 4 * HOUR, 2.0),)


def test_a_job_offered_again_keeps_its_gpus() -> None:
    on = ledger()
    ask(on, A, 2)
    assert reserve(on, A, at(3))
    assert has(on, A) == (0, 1)


def test_a_reservation_becomes_a_job_and_gets_its_gpus() -> None:
    on = ledger()
    reserve(on, A, at(2, 3))
    on.start(A, now=60.0, until=5 * HOUR)
    assert on.schedule(60.0) == []
    assert on.reservations == (GpuReservation(A, ReservationKind.JOB, ("g2", "g3"), 60.0, 60.0 + 4 * HOUR),)
    assert ask(on, A, 2, now=120.0) == [A]
    assert has(on, A) == (2, 3)


def test_a_job_that_may_take_longer_than_planned_does_not_wait_for_those_planned_after_it() -> None:
    on = ledger(1)
    reserve(on, A, at(0, hours=2))
    reserve(on, B, at(0, start=2 * HOUR, hours=2))
    on.start(A, now=300.0, until=8 * HOUR)
    assert ask(on, A, 1, now=300.0, hours=7.9) == [A]
    assert planned(on, B) == ((0,), 300.0 + 2 * HOUR)


def test_starting_again_and_again_makes_no_window_longer() -> None:
    on = ledger(1)
    reserve(on, A, at(0, hours=2))
    for now in (100.0, 200.0, 300.0):
        on.renew(A, now)
        on.start(A, now=now, until=now + 8 * HOUR)
    assert on.reservations[0].ends_at == 300.0 + 2 * HOUR


def test_reserved_gpus_are_not_granted_to_others() -> None:
    on = ledger(2)
    reserve(on, A, at(0, 1))
    assert ask(on, B, 1, priority=100.0) == []
    assert ask(on, A, 2) == [A]


def test_a_reservation_of_more_gpus_later_begins_when_they_are_free_or_takes_fewer_when_it_is_time() -> None:
    for is_late in (False, True):
        on = ledger(2)
        ask(on, A, 1, hours=1)
        assert reserve(on, B, at(0, 1, start=1.1 * HOUR))
        on.start(B, now=60.0, until=9 * HOUR)
        assert ask(on, B, 2, 1, now=60.0, hours=9) == []
        assert planned(on, B) == ((0, 1), 1.1 * HOUR)
        if not is_late:
            on.release(A)
        assert scheduled(on, 1.2 * HOUR if is_late else 120.0) == [B]
        assert has(on, B) == ((1,) if is_late else (0, 1))


@pytest.mark.parametrize(
    ("gpus", "lane", "unusable", "moved"),
    [
        ((0, 1), None, (1,), (2, 3)),
        ((2,), ("large", Lane(gpus=[2, 3])), (2,), (3,)),
        ((0, 1, 2, 3), None, (1, 2), (0, 3)),
        ((0, 1, 2, 3), None, (0, 1, 2, 3), ()),
    ],
    ids=["to others", "within its lane", "to fewer", "to none"],
)
def test_a_reservation_whose_gpu_fails_moves(
    gpus: tuple[int, ...], lane: NamedLane | None, unusable: tuple[int, ...], moved: tuple[int, ...]
) -> None:
    on = ledger(4)
    reserve(on, A, at(*gpus), lane=lane)
    on.set_gpus(make_gpus(4, unusable=unusable))
    on.schedule(0.0)
    assert planned(on, A)[0] == moved


def test_a_started_job_is_moved_before_an_offer() -> None:
    on = ledger(2)
    reserve(on, A, at(0))
    reserve(on, B, at(1))
    on.start(B, now=0.0, until=4 * HOUR)
    on.set_gpus(make_gpus(2, unusable=[1]))
    on.schedule(0.0)
    assert planned(on, A)[0] == (0,)  # it stands where it is, and B comes when it is over
    assert planned(on, B)[0] == ()
    on.release(A)
    on.schedule(0.0)
    assert planned(on, B) == ((0,), 0.0)


def test_a_job_keeps_its_gpu_up_to_when_others_use_it() -> None:
    on = GpuLedger()
    on.set_gpus(make_gpus(2, node="n1", busy={0: (3 * HOUR, 5 * HOUR)}))
    reserve(on, A, Placement(("g0@n1",), 0.0, 2 * HOUR))
    ask(on, A, 1, hours=9)
    assert on.extend(A, 2.5 * HOUR, 0.0) == 2.5 * HOUR
    assert on.extend(A, 6 * HOUR, 0.0) == 3 * HOUR
    assert on.free_until(("g0@n1", "g1@n1"), 0.0) == 3 * HOUR
    assert on.free_until(("g1@n1",), 0.0) == on.free_until(("g0@n1",), 4 * HOUR) == FOREVER


def test_a_start_that_nobody_accepted_begins_before_others_use_the_gpus_if_that_is_long_enough() -> None:
    on = GpuLedger()
    on.set_gpus(make_gpus(1, node="n1", busy={0: (3 * HOUR, 12 * HOUR)}))
    assert ask(on, A, 1, hours=9) == []
    assert ask(on, A, 1, hours=9, needs=3.5 * HOUR) == []
    assert ask(on, A, 1, hours=9, needs=2 * HOUR) == [A]
    claim = on.claim(A)
    assert claim.until == 2 * HOUR


def test_a_job_that_takes_longer_keeps_its_gpu_up_to_the_next_reservation() -> None:
    on = ledger(2)
    reserve(on, A, at(0, hours=2))
    on.start(A, now=0.0, until=9 * HOUR)
    ask(on, A, 1, hours=9)
    assert on.extend(A, 3 * HOUR, 0.0) == 3 * HOUR
    reserve(on, B, at(0, start=4 * HOUR))
    assert on.extend(A, 6 * HOUR, 0.0) == 4 * HOUR
    assert on.extend(A, HOUR, 0.0) == 4 * HOUR
    on.schedule(0.0)
    assert planned(on, B) == ((0,), 4 * HOUR)
    assert on.extend(C, HOUR, 0.0) == HOUR


# The queue


def test_the_first_count_that_is_free_is_granted() -> None:
    on = ledger(4)
    ask(on, A, 2)
    assert ask(on, B, 4, 2, 1) == [B]
    assert has(on, B) == (2, 3)


@pytest.mark.parametrize("lower", [1.0, float("nan")])
def test_the_higher_priority_goes_first(lower: float) -> None:
    on = ledger(1)
    ask(on, A, 1)
    ask(on, B, 1, now=1.0, hours=9, priority=lower)
    ask(on, C, 1, now=2.0, hours=9, priority=2.0)
    assert [claim.key for claim in on.queue(2.0)] == [C, B]
    on.release(A)
    assert scheduled(on, 3.0) == [C]


def test_a_long_wait_goes_before_any_priority() -> None:
    on = ledger(1, patience=600.0)
    ask(on, A, 1, hours=9)
    ask(on, B, 1, now=1.0, hours=9, priority=-1e9)
    ask(on, C, 1, now=500.0, hours=9, priority=1e9)
    on.release(A)
    assert scheduled(on, 601.0) == [B]


def test_nobody_starves_under_a_stream_of_better_jobs() -> None:
    on = ledger(2, patience=600.0)
    running = [*ask(on, B, 1, hours=1000), *ask(on, C, 1, hours=1000)]
    ask(on, A, 2, now=1.0, hours=5000)  # wants both, and small ones that are worth more never stop coming
    now = 1.0
    while A not in running and now < HOUR:
        now += 60.0
        running += ask(on, TaskKey("v", f"n{now}"), 1, now=now, hours=1000, priority=9.0)
        on.release(running.pop(0))
        running += scheduled(on, now)
    assert has(on, A) == (0, 1)
    assert 600.0 < now <= 600.0 + 3 * 60.0


def test_a_job_that_cannot_begin_in_time_blocks_nobody() -> None:
    on = ledger(2)
    ask(on, A, 1, hours=9)
    ask(on, B, 2, hours=5, priority=9.0)
    assert planned(on, B)[0] == ()
    assert ask(on, C, 1) == [C]
    on.release(A)
    on.release(C)  # both ended early
    assert scheduled(on) == [B]


def test_a_small_job_overtakes_a_large_one_only_without_delaying_it() -> None:
    on = ledger(4)
    ask(on, A, 2, hours=3)
    ask(on, B, 4, hours=20, priority=5.0)
    assert planned(on, B) == ((0, 1, 2, 3), 3 * HOUR)
    assert ask(on, C, 1, hours=4) == []  # it would still be there in three hours
    assert ask(on, D, 1, hours=2) == [D]


def test_as_many_run_as_may() -> None:
    on = ledger(4, max_running=1)
    assert ask(on, A, 1) == [A]
    assert ask(on, B, 1) == []
    on.release(A)
    assert scheduled(on) == [B]
    for key in (C, D):
        on.request(key, [GpuOption(1)], now=0.0, until=HOUR)
    on.release(B)
    assert len(on.schedule(0.0)) == 1


def test_a_long_queue_is_planned_up_to_its_limit() -> None:
    on = ledger(1)
    for number in range(3 * MAX_PLANNED_CLAIMS):
        on.request(TaskKey("v", str(number)), [GpuOption(1)], now=float(number), until=1e9)
    assert scheduled(on, 1000.0) == [TaskKey("v", "0")]
    assert len(on.queue(1000.0)) == 3 * MAX_PLANNED_CLAIMS - 1


def test_a_start_without_an_offer_joins_the_queue() -> None:
    on = ledger(1)
    ask(on, A, 1, hours=1)
    on.start(B, now=0.0, until=9 * HOUR)
    on.schedule(0.0)
    assert planned(on, B) == ((0,), HOUR)
    assert ask(on, B, 1) == []


def test_a_job_stays_in_its_lane() -> None:
    on, lane = ledger(4), ("large", Lane(gpus=[2, 3]))
    assert ask(on, A, 2, lane=lane) == [A]
    assert has(on, A) == (2, 3)
    assert ask(on, B, 1, lane=lane) == []
    assert ask(on, C, 2, lane=("large", Lane(gpus=[2, 3], overflow=True))) == [C]
    assert has(on, C) == (0, 1)


def test_an_exclusive_job_gets_only_unshared_gpus() -> None:
    on = ledger(2)
    on.set_gpus(make_gpus(2), shared=["g0"])
    assert ask(on, A, 2, exclusive=True) == []
    assert ask(on, A, 2, 1, exclusive=True) == [A]
    assert has(on, A) == (1,)


def test_unclean_gpus_are_reserved_but_not_granted_yet() -> None:
    on = ledger(1)
    on.set_gpus(make_gpus(1), unclean=["g0"])
    assert reserve(on, A, at(0))
    assert ask(on, A, 1) == []
    on.set_gpus(make_gpus(1))
    assert scheduled(on, 1.0) == [A]


# Asking again, leaving, coming back


def test_a_job_that_requests_more_keeps_its_gpus_while_they_are_of_use() -> None:
    on = ledger(4)
    ask(on, A, 2)
    ask(on, B, 2)
    assert ask(on, A, 4, 2) == [A]  # its own two again, at once
    assert has(on, A) == (0, 1)
    assert ask(on, A, 4, hours=9) == []
    on.release(B)
    assert scheduled(on) == [A]
    assert has(on, A) == (0, 1, 2, 3)


def test_two_jobs_that_both_want_more_do_not_block_each_other() -> None:
    on = ledger(4)
    ask(on, A, 2, hours=9)
    ask(on, B, 2, hours=9)
    assert ask(on, A, 4, hours=9) == []
    assert ask(on, B, 4, now=1.0, hours=9) == [B]
    on.release(B)
    assert scheduled(on, 2.0) == [A]


def test_an_impossible_request_blocks_nobody() -> None:
    on = ledger(3)
    reserve(on, A, at(0))
    assert ask(on, A, 4) == []
    assert ask(on, B, 3, now=1.0) == [B]


def test_a_reservation_stays_after_leaving_the_queue() -> None:
    on = ledger(1)
    reserve(on, A, at(0))
    ask(on, A, 1)
    on.leave(A)
    assert ask(on, B, 1) == []
    on.release(A)
    on.release(A)
    assert scheduled(on) == [B]


def test_a_run_that_goes_on_is_adopted_where_it_runs_unless_its_gpu_is_gone_or_taken() -> None:
    on = ledger(4)
    on.set_gpus(make_gpus(4, unusable=[1, 3]), failed=["g3"])
    assert on.adopt(A, ["g1", "g2"], now=0.0, until=HOUR), "a busy GPU is not a failed one"
    assert has(on, A) == (1, 2)
    for gpus in (["g2"], ["g3"], ["g9"], []):
        assert not on.adopt(B, gpus, now=0.0, until=HOUR)


def test_restored_reservations_are_placed_again() -> None:
    on = ledger(2)
    on.restore(GpuReservation(A, ReservationKind.OFFER, ("g0",), 0.0, HOUR, 1.0), firm=True, now=10.0)
    on.restore(GpuReservation(B, ReservationKind.JOB, ("gone",), 0.0, HOUR, 1.0), firm=True, now=10.0)
    on.restore(GpuReservation(C, ReservationKind.JOB, (), 0.0, 3 * HOUR), firm=False, now=10.0)
    on.schedule(10.0)
    assert planned(on, A) == ((0,), 0.0)
    assert planned(on, B) == ((1,), 10.0)
    assert planned(on, C)[1] == HOUR


def test_an_accepted_job_survives_a_wait_longer_than_its_planned_duration() -> None:
    on = ledger(1)
    reserve(on, A, at(0, hours=1))
    on.set_gpus(make_gpus(1, unusable=[0]))
    on.schedule(5.0)
    on.start(A, now=10.0, until=6 * HOUR)
    assert ask(on, A, 1, now=20.0, hours=6) == []
    for quarter in range(1, 12):
        assert on.schedule(quarter * HOUR / 4) == []
    on.set_gpus(make_gpus(1))
    assert scheduled(on, 3 * HOUR) == [A]
    assert on.reservations == (GpuReservation(A, ReservationKind.JOB, ("g0",), 3 * HOUR, 4 * HOUR),)


def test_an_accepted_job_gets_its_gpus_when_the_one_before_is_hours_late() -> None:
    on = ledger(1)
    ask(on, A, 1, hours=2)
    reserve(on, B, at(0, start=2 * HOUR, hours=2))
    on.start(B, now=60.0, until=12 * HOUR)
    assert ask(on, B, 1, now=60.0, hours=11.9) == []
    for hour in range(1, 6):
        assert on.schedule(hour * HOUR) == []
    assert planned(on, B) == ((0,), 5 * HOUR + OVERDUE_SECONDS)
    on.release(A)
    assert scheduled(on, 5 * HOUR + 60) == [B]


def test_a_job_that_waits_is_over_by_its_deadline_all_the_same() -> None:
    on = ledger(1)
    ask(on, A, 1, hours=20)
    reserve(on, B, at(0, start=20 * HOUR, hours=2))
    on.start(B, now=0.0, until=22 * HOUR)
    ask(on, B, 1, hours=22)
    on.schedule(21 * HOUR)
    claim = on.claim(B)
    assert claim.until == 22 * HOUR
    on.release(A)
    assert on.schedule(22 * HOUR) == []


def test_an_offer_whose_gpu_is_excluded_is_not_postponed_past_its_end() -> None:
    on = ledger(1)
    reserve(on, A, at(0, hours=2))
    on.set_gpus(make_gpus(1, unusable=[0]))
    on.schedule(HOUR)
    on.set_gpus(make_gpus(1))
    on.schedule(HOUR + 60)
    assert on.reservations == (GpuReservation(A, ReservationKind.OFFER, ("g0",), HOUR + 60, 2 * HOUR),)


def test_the_planned_duration_survives_a_restart_without_a_gpu() -> None:
    on = ledger(1)
    reserve(on, A, at(0, hours=2))
    on.set_gpus(make_gpus(1, unusable=[0]))
    on.start(A, now=0.0, until=9 * HOUR)
    on.schedule(HOUR)
    (written,) = on.reservations
    again = ledger(1)
    again.restore(written, firm=True, now=5 * HOUR)
    assert ask(again, A, 1, now=5 * HOUR) == [A]
    assert again.reservations[0].ends_at == 7 * HOUR


# Several nodes


def cluster(*sizes: int, **rules: Any) -> GpuLedger:
    """`n0` with so many GPUs, `n1` with so many…"""
    on = GpuLedger(QueueRules(**rules))
    on.set_gpus([gpu for number, size in enumerate(sizes) for gpu in make_gpus(size, node=f"n{number}")])
    return on


def nodes_given(on: GpuLedger, *options: GpuOption, key: TaskKey = A) -> tuple[str, ...]:
    on.start(key, now=0.0, until=4 * HOUR)
    on.request(key, options, now=0.0, until=4 * HOUR)
    on.schedule(0.0)
    (claim,) = (claim for claim in on.claims if claim.key == key)
    return nodes_of(claim.gpus) if claim.is_running else ()


def test_a_job_waits_for_one_node_rather_than_use_two() -> None:
    on = cluster(4, 4)
    assert nodes_given(on, GpuOption(2), key=B) == ("n0",)
    assert nodes_given(on, GpuOption(4), key=C) == ("n1",)
    assert nodes_given(on, GpuOption(4), GpuOption(3), key=D) == ()
    on.release(B)
    assert scheduled(on) == [D]


def test_the_node_that_is_filled_by_it_is_taken_and_whole_nodes_stay_whole() -> None:
    on = cluster(8, 4, 8)
    assert nodes_given(on, GpuOption(4), key=A) == ("n1",)
    assert nodes_given(on, GpuOption(2), key=B) == ("n0",)
    assert nodes_given(on, GpuOption(4), key=C) == ("n0",)
    assert nodes_given(on, GpuOption(8), key=D) == ("n2",)


def test_options_name_their_nodes_in_the_order_of_what_is_wanted() -> None:
    on = cluster(8, 4)
    wanted = (GpuOption(8, frozenset(["n0"])), GpuOption(4, frozenset(["n1"])))
    assert nodes_given(on, *wanted, key=A) == ("n0",)
    assert nodes_given(on, *wanted, key=B) == ("n1",)
    assert nodes_given(on, *wanted, key=C) == ()


def test_two_whole_nodes_are_taken_at_one_moment() -> None:
    on = cluster(4, 4, 4)
    assert nodes_given(on, GpuOption(1), key=B) == ("n0",)
    assert nodes_given(on, GpuOption(8, None, 2), key=A) == ("n1", "n2")
    on.release(A)
    assert nodes_given(on, GpuOption(1), key=C) == ("n0",)
    assert nodes_given(on, GpuOption(4), key=D) == ("n1",)
    assert nodes_given(on, GpuOption(8, None, 2), key=A) == ()
    on.release(D)
    assert scheduled(on) == [A]


def test_two_nodes_are_reserved_for_when_both_are_free() -> None:
    on = cluster(2, 2)
    on.set_gpus(
        [*make_gpus(2, node="n0", busy={0: (0, HOUR)}), *make_gpus(2, node="n1", busy={1: (0, 2 * HOUR)})]
    )
    nodes_given(on, GpuOption(4, None, 2))
    (claim,) = on.claims
    assert (nodes_of(claim.gpus), claim.starts_at) == (("n0", "n1"), 2 * HOUR)


def test_what_others_use_is_neither_reserved_nor_given_out() -> None:
    on = cluster(2)
    on.set_gpus(make_gpus(2, node="n0", busy={0: (HOUR, 2 * HOUR)}))
    mine, other = (gpu_on_node(f"g{index}", "n0") for index in range(2))
    assert not reserve(on, A, Placement((mine,), 0.0, 2 * HOUR))
    assert reserve(on, A, Placement((other,), 0.0, 2 * HOUR))
    assert nodes_given(on, GpuOption(2), key=B) == ()


def test_an_accepted_offer_moves_when_others_take_its_gpus_and_stays_in_its_class() -> None:
    on = cluster(2, 2, 2)
    where = Placement((gpu_on_node("g0", "n0"),), HOUR, 2 * HOUR)
    assert reserve(on, A, where, others=frozenset(["n0", "n2"]))
    taken = make_gpus(2, node="n0", busy={0: (0, 9 * HOUR), 1: (0, 9 * HOUR)})
    on.set_gpus([*taken, *make_gpus(2, node="n1"), *make_gpus(2, node="n2")])
    on.schedule(0.0)
    (claim,) = on.claims
    assert (nodes_of(claim.gpus), claim.until - claim.starts_at) == (("n2",), HOUR)


def test_a_reservation_over_two_nodes_is_taken_up_after_a_restart() -> None:
    on = cluster(2, 2)
    gpus = tuple(gpu_on_node(f"g{index}", node) for node in ("n0", "n1") for index in range(2))
    on.restore(GpuReservation(A, ReservationKind.OFFER, gpus, HOUR, 3 * HOUR), firm=True, now=0.0)
    on.schedule(0.0)
    (claim,) = on.claims
    assert (claim.gpus, claim.options) == (gpus, (GpuOption(4, None, 2),))
    on.start(A, now=HOUR, until=9 * HOUR)
    on.request(A, claim.options, now=HOUR, until=9 * HOUR)
    assert scheduled(on, HOUR) == [A]
    assert on.reservations[0].gpus == gpus


# Everything at once

NAMES = [f"g{index}{node}" for node in ("", "@n1", "@n2") for index in range(8)]


class Anything(RuleBasedStateMachine):
    """Whatever happens in whatever order: no GPU is two jobs' at a time, no two windows on a GPU overlap,
    and in the end everybody who can be served is."""

    keys: Bundle[TaskKey] = Bundle("keys")

    @initialize(count=st.integers(1, 8), limit=st.sampled_from([1, 3, 100]), nodes=st.integers(1, 3))
    def begin(self, count: int, limit: int, nodes: int) -> None:
        self.now, self.count = 0.0, count
        self.nodes = ["", "n1", "n2"][:nodes]
        self.over: dict[TaskKey, int] = {}
        self.on = ledger(count, patience=4 * HOUR, max_running=limit)
        self.on.set_gpus(self.gpus())
        self.number = 0
        self.reserved: dict[TaskKey, float] = {}

    def gpus(
        self, unusable: Sequence[str] = (), busy: Mapping[str, tuple[float, float]] | None = None
    ) -> list[Gpu]:
        windows = busy or {}
        every = [gpu for node in self.nodes for gpu in make_gpus(self.count, node=node)]
        return [
            replace(
                gpu,
                unusable_reason="broken" if gpu.id in unusable else None,
                busy=(windows[gpu.id],) if gpu.id in windows else (),
            )
            for gpu in every
        ]

    def settle(self) -> None:
        self.on.schedule(self.now)

    @rule(target=keys, count=st.integers(1, 8), hours=st.integers(1, 12), wait=st.integers(0, 12))
    def offer(self, count: int, hours: int, wait: int) -> TaskKey:
        """As the offer service does: placed on a snapshot and reserved in one step, which always holds."""
        self.number += 1
        key = TaskKey("v", str(self.number))
        snapshot = replace(fleet(self.on.gpus, self.on.reservations), taken_at=self.now)
        where = place(
            snapshot, [count], now=self.now, duration_s=hours * HOUR, latest_start=self.now + wait * HOUR
        )
        if where is not None:
            assert self.on.reserve(key, where, now=self.now)
        return key

    @rule(key=keys, hours=st.integers(0, 24))
    def start(self, key: TaskKey, hours: int) -> None:
        self.on.start(key, now=self.now, until=self.now + hours * HOUR)
        self.settle()

    @rule(
        key=keys,
        counts=st.lists(st.integers(1, 8), min_size=1, max_size=3),
        hours=st.integers(1, 24),
        priority=st.floats(),
    )
    def ask(self, key: TaskKey, counts: list[int], hours: int, priority: float) -> None:
        ask(self.on, key, *counts, now=self.now, hours=hours, priority=priority)

    @rule(key=keys, each=st.integers(1, 8), over=st.integers(2, 3), hours=st.integers(1, 24))
    def ask_for_nodes(self, key: TaskKey, each: int, over: int, hours: int) -> None:
        self.over[key] = max(over, self.over.get(key, 1))
        self.on.request(
            key, [GpuOption(each * over, None, over)], now=self.now, until=self.now + hours * HOUR
        )
        self.settle()

    @rule(key=keys)
    def leave(self, key: TaskKey) -> None:
        self.on.leave(key)
        self.settle()

    @rule(key=keys, hours=st.integers(0, 24))
    def extend(self, key: TaskKey, hours: int) -> None:
        self.on.extend(key, self.now + hours * HOUR, self.now)
        self.settle()

    @rule(key=consumes(keys))
    def release(self, key: TaskKey) -> None:
        self.on.release(key)
        self.settle()

    @rule(key=keys, gpu=st.integers(0, 7))
    def adopt(self, key: TaskKey, gpu: int) -> None:
        self.on.adopt(key, [f"g{gpu}"], now=self.now, until=self.now + HOUR)
        self.settle()

    @rule(
        unusable=st.sets(st.sampled_from(NAMES)),
        unclean=st.sets(st.sampled_from(NAMES)),
        busy=st.dictionaries(st.sampled_from(NAMES), st.tuples(st.integers(-2, 9), st.integers(1, 9))),
    )
    def gpus_change(self, unusable: set[str], unclean: set[str], busy: dict[str, tuple[int, int]]) -> None:
        windows = {
            gpu: (self.now + start * HOUR, self.now + (start + hours) * HOUR)
            for gpu, (start, hours) in busy.items()
        }
        self.on.set_gpus(self.gpus(sorted(unusable), windows), unclean=unclean)
        self.settle()

    @rule(hours=st.floats(0.01, 5))
    def time_passes(self, hours: float) -> None:
        self.now += hours * HOUR
        self.settle()

    @invariant()
    def no_gpu_is_two_jobs(self) -> None:
        running = [set(claim.gpus) for claim in self.claims() if claim.is_running]
        assert all(first.isdisjoint(second) for first, second in combinations(running, 2))

    @invariant()
    def no_two_windows_overlap(self) -> None:
        """Those of jobs past their time, which keep their GPUs until they are done, left out."""
        for first, second in combinations(self.claims(), 2):
            if set(first.gpus) & set(second.gpus):
                start = max(first.starts_at, second.starts_at, self.now)
                assert start >= min(first.until, second.until), (first, second)

    @invariant()
    def windows_are_on_usable_gpus(self) -> None:
        usable = {gpu.id for gpu in self.on.gpus if gpu.unusable_reason is None}
        for claim in self.claims():
            assert claim.is_running or claim.until <= self.now or usable.issuperset(claim.gpus)

    @invariant()
    def a_job_is_in_one_node_unless_it_asked_for_more(self) -> None:
        for claim in self.claims():
            assert len(nodes_of(claim.gpus)) <= self.over.get(claim.key, 1)

    @invariant()
    def nothing_is_planned_while_others_use_a_gpu(self) -> None:
        busy = {gpu.id: gpu.busy for gpu in self.on.gpus} if self.claims() else {}
        for claim in self.claims():
            if not claim.is_running and claim.until > self.now:
                start = max(claim.starts_at, self.now)
                assert not any(
                    first < claim.until and start < last for gpu in claim.gpus for first, last in busy[gpu]
                )

    def claims(self) -> list[GpuClaim]:
        return self.on.claims if hasattr(self, "on") else []

    def teardown(self) -> None:
        """Let everything run to its end: each that waits for what is there gets it, none is forgotten."""
        if not hasattr(self, "on"):
            return
        self.on.set_gpus(self.gpus())
        served = set()
        for _ in range(len(self.claims()) + 1):
            self.settle()
            for claim in self.claims():
                if claim.is_running:
                    served.add(claim.key)
                    self.on.release(claim.key)
                elif claim.stage is ClaimStage.RESERVED:
                    self.on.release(claim.key)
        left = [
            claim
            for claim in self.claims()
            if claim.until > self.now
            if any(
                option.over <= len(self.nodes) and option.gpus <= self.count * option.over
                for option in claim.options
            )
        ]
        assert left == []


Anything.TestCase.settings = settings(stateful_step_count=40, deadline=None)
TestAnything = Anything.TestCase
