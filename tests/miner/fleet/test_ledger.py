"""Who holds what: one rule at a time, then everything at once in a state machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from core.profile import Lane
from miner.fleet.base import Hold, HoldKind, Placement, TaskKey
from miner.fleet.calendar import OVERDUE_SECONDS
from miner.fleet.claims import Claim, Stage
from miner.fleet.ledger import Ledger
from miner.fleet.schedule import MOST_PLANNED, Rules
from tests.miner.fleet.setups import HOUR, cards, fleet, place

A, B, C, D = (TaskKey("v", name) for name in "abcd")


def ledger(count: int = 4, **rules: Any) -> Ledger:
    made = Ledger(Rules(**rules))
    made.set_cards(cards(count))
    return made


def at(*gpus: int, start: float = 0.0, hours: float = 4.0) -> Placement:
    return Placement(tuple(f"g{index}" for index in gpus), start, start + hours * HOUR)


def promise(on: Ledger, key: TaskKey, where: Placement, now: float = 0.0, **more: Any) -> bool:
    return on.promise(key, where, now=now, until=where.ends_at, **more)


def ask(
    on: Ledger,
    key: TaskKey,
    *counts: int,
    now: float = 0.0,
    hours: float = 4.0,
    priority: float = 0.0,
    **more: Any,
) -> list[TaskKey]:
    """Who got GPUs by it."""
    on.ask(key, counts, now=now, until=now + hours * HOUR, priority=priority, **more)
    return [claim.key for claim in on.arrange(now)]


def has(on: Ledger, key: TaskKey) -> tuple[int, ...] | None:
    claim = on.claim(key)
    return tuple(int(name[1:]) for name in claim.gpus) if claim and claim.is_running else None


def planned(on: Ledger, key: TaskKey) -> tuple[tuple[int, ...], float]:
    claim = on.claim(key)
    assert claim is not None
    return tuple(int(name[1:]) for name in claim.gpus), claim.starts_at


# Promises


def test_two_offers_can_not_both_have_the_last_cards() -> None:
    on = ledger(2)
    assert promise(on, A, at(0, 1))
    assert not promise(on, B, at(1))
    assert [hold.key for hold in on.holds] == [A]


def test_one_card_may_be_promised_twice_for_different_times() -> None:
    on = ledger(1)
    assert promise(on, A, at(0, hours=2))
    assert promise(on, B, at(0, start=2 * HOUR, hours=2))
    assert not promise(on, C, at(0, start=3 * HOUR))


@pytest.mark.parametrize("where", [at(7), at(), at(0, 7)])
def test_cards_that_are_not_there_are_not_promised(where: Placement) -> None:
    assert not promise(ledger(4), A, where)


def test_cards_that_are_out_are_not_promised() -> None:
    on = ledger()
    on.set_cards(cards(4, out=[0]))
    assert not promise(on, A, at(0))


def test_a_promise_made_again_takes_the_place_of_the_first() -> None:
    on = ledger()
    assert promise(on, A, at(0, 1))
    assert promise(on, A, at(1, 2), priority=2.0)
    assert on.holds == (Hold(A, HoldKind.OFFER, ("g1", "g2"), 0.0, 4 * HOUR, 2.0),)


def test_a_job_offered_once_more_keeps_its_cards() -> None:
    on = ledger()
    ask(on, A, 2)
    assert promise(on, A, at(3))
    assert has(on, A) == (0, 1)


def test_a_promise_turns_into_a_job_and_into_cards() -> None:
    on = ledger()
    promise(on, A, at(2, 3))
    on.start(A, now=60.0, until=5 * HOUR)
    assert on.arrange(60.0) == []
    assert on.holds == (Hold(A, HoldKind.JOB, ("g2", "g3"), 60.0, 60.0 + 4 * HOUR),)
    assert ask(on, A, 2, now=120.0) == [A]
    assert has(on, A) == (2, 3)


def test_a_job_that_may_take_longer_than_planned_does_not_wait_for_those_planned_after_it() -> None:
    on = ledger(1)
    promise(on, A, at(0, hours=2))
    promise(on, B, at(0, start=2 * HOUR, hours=2))
    on.start(A, now=300.0, until=8 * HOUR)
    assert ask(on, A, 1, now=300.0, hours=7.9) == [A]
    assert planned(on, B) == ((0,), 300.0 + 2 * HOUR)


def test_starting_again_and_again_makes_no_window_longer() -> None:
    on = ledger(1)
    promise(on, A, at(0, hours=2))
    for now in (100.0, 200.0, 300.0):
        on.renew(A, now)
        on.start(A, now=now, until=now + 8 * HOUR)
    assert on.holds[0].ends_at == 300.0 + 2 * HOUR


def test_what_is_promised_is_not_given_to_somebody_who_asks() -> None:
    on = ledger(2)
    promise(on, A, at(0, 1))
    assert ask(on, B, 1, priority=100.0) == []
    assert ask(on, A, 2) == [A]


def test_a_promised_job_waits_for_the_one_before_it() -> None:
    on = ledger(1)
    ask(on, A, 1, hours=1)
    assert promise(on, B, at(0, start=1.1 * HOUR))
    assert ask(on, B, 1, now=60.0) == []
    on.release(A)
    assert [claim.key for claim in on.arrange(120.0)] == [B]


def test_who_was_promised_more_for_later_does_not_begin_with_less() -> None:
    on = ledger(2)
    ask(on, A, 1, hours=1)
    assert promise(on, B, at(0, 1, start=1.1 * HOUR))
    on.start(B, now=60.0, until=9 * HOUR)
    assert ask(on, B, 2, 1, now=60.0, hours=9) == []
    assert planned(on, B) == ((0, 1), 1.1 * HOUR)
    # The one before it takes its time: by now half is better than nothing.
    assert [claim.key for claim in on.arrange(1.2 * HOUR)] == [B]
    assert has(on, B) == (1,)


def test_who_was_promised_more_for_later_begins_when_there_is_as_much() -> None:
    on = ledger(2)
    ask(on, A, 1, hours=1)
    assert promise(on, B, at(0, 1, start=1.1 * HOUR))
    assert ask(on, B, 2, 1, now=60.0, hours=9) == []
    on.release(A)
    assert [claim.key for claim in on.arrange(120.0)] == [B]
    assert has(on, B) == (0, 1)


def test_a_promise_moves_within_its_lane() -> None:
    on, lane = ledger(4), ("large", Lane(gpus=[2, 3]))
    promise(on, A, at(2), lane=lane)
    on.set_cards(cards(4, out=[2]))
    on.arrange(0.0)
    assert planned(on, A) == ((3,), 0.0)


def test_a_promise_moves_when_its_card_breaks() -> None:
    on = ledger(4)
    promise(on, A, at(0, 1))
    on.set_cards(cards(4, out=[1]))
    on.arrange(0.0)
    assert planned(on, A) == ((2, 3), 0.0)


def test_a_promise_that_can_not_be_kept_whole_gets_what_there_is() -> None:
    on = ledger(4)
    promise(on, A, at(0, 1, 2, 3))
    on.set_cards(cards(4, out=[1, 2]))
    on.arrange(0.0)
    assert planned(on, A) == ((0, 3), 0.0)
    on.set_cards(cards(4, out=[0, 1, 2, 3]))
    on.arrange(0.0)
    assert planned(on, A)[0] == ()


def test_a_started_job_is_saved_before_an_offer() -> None:
    on = ledger(2)
    promise(on, A, at(0))
    promise(on, B, at(1))
    on.start(B, now=0.0, until=4 * HOUR)
    on.set_cards(cards(2, out=[1]))
    on.arrange(0.0)
    assert planned(on, A)[0] == (0,)  # it stands where it is, and B comes when it is over
    assert planned(on, B)[0] == ()
    on.release(A)
    on.arrange(0.0)
    assert planned(on, B) == ((0,), 0.0)


def test_a_job_that_takes_longer_keeps_its_card_up_to_what_was_promised_to_others() -> None:
    on = ledger(2)
    promise(on, A, at(0, hours=2))
    on.start(A, now=0.0, until=9 * HOUR)
    ask(on, A, 1, hours=9)
    assert on.extend(A, 3 * HOUR) == 3 * HOUR
    promise(on, B, at(0, start=4 * HOUR))
    assert on.extend(A, 6 * HOUR) == 4 * HOUR
    assert on.extend(A, HOUR) == 4 * HOUR
    on.arrange(0.0)
    assert planned(on, B) == ((0,), 4 * HOUR)
    assert on.extend(C, HOUR) == HOUR


# The queue


def test_the_first_count_that_can_be_had_is_given() -> None:
    on = ledger(4)
    ask(on, A, 2)
    assert ask(on, B, 4, 2, 1) == [B]
    assert has(on, B) == (2, 3)


def test_the_higher_priority_goes_first() -> None:
    on = ledger(1)
    ask(on, A, 1)
    ask(on, B, 1, now=1.0, hours=9, priority=1.0)
    ask(on, C, 1, now=2.0, hours=9, priority=2.0)
    assert [claim.key for claim in on.queue(2.0)] == [C, B]
    on.release(A)
    assert [claim.key for claim in on.arrange(3.0)] == [C]


def test_whoever_has_waited_long_goes_before_any_priority() -> None:
    on = ledger(1, patience=600.0)
    ask(on, A, 1, hours=9)
    ask(on, B, 1, now=1.0, hours=9, priority=-1e9)
    ask(on, C, 1, now=500.0, hours=9, priority=1e9)
    on.release(A)
    assert [claim.key for claim in on.arrange(601.0)] == [B]


def test_nobody_starves_under_a_stream_of_better_jobs() -> None:
    on = ledger(2, patience=600.0)
    running = [*ask(on, B, 1, hours=1000), *ask(on, C, 1, hours=1000)]
    ask(on, A, 2, now=1.0, hours=5000)  # wants both, and small ones that are worth more never stop coming
    now = 1.0
    while A not in running and now < HOUR:
        now += 60.0
        running += ask(on, TaskKey("v", f"n{now}"), 1, now=now, hours=1000, priority=9.0)
        on.release(running.pop(0))
        running += [claim.key for claim in on.arrange(now)]
    assert has(on, A) == (0, 1)
    assert 600.0 < now <= 600.0 + 3 * 60.0


def test_who_can_not_begin_before_its_deadline_holds_nobody_up() -> None:
    on = ledger(2)
    ask(on, A, 1, hours=9)
    ask(on, B, 2, hours=5, priority=9.0)
    assert planned(on, B)[0] == ()
    assert ask(on, C, 1) == [C]
    on.release(A)
    on.release(C)  # both ended early
    assert [claim.key for claim in on.arrange(0.0)] == [B]


def test_a_small_job_goes_ahead_of_a_large_one_only_where_that_costs_it_nothing() -> None:
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
    assert [claim.key for claim in on.arrange(0.0)] == [B]
    for key in (C, D):
        on.ask(key, [1], now=0.0, until=HOUR, priority=0.0)
    on.release(B)
    assert len(on.arrange(0.0)) == 1


def test_a_queue_without_end_is_planned_as_far_as_it_may_get() -> None:
    on = ledger(1)
    for number in range(3 * MOST_PLANNED):
        on.ask(TaskKey("v", str(number)), [1], now=float(number), until=1e9, priority=0.0)
    on.arrange(1000.0)
    assert sum(claim.is_running for claim in map(on.claim, [TaskKey("v", "0")]) if claim) == 1
    assert len(on.queue(1000.0)) == 3 * MOST_PLANNED - 1


def test_an_unsolicited_start_takes_its_place_in_the_queue() -> None:
    on = ledger(1)
    ask(on, A, 1, hours=1)
    on.start(B, now=0.0, until=9 * HOUR)
    on.arrange(0.0)
    assert planned(on, B) == ((0,), HOUR)
    assert ask(on, B, 1) == []


def test_a_job_stays_in_its_lane() -> None:
    on, lane = ledger(4), ("large", Lane(gpus=[2, 3]))
    assert ask(on, A, 2, lane=lane) == [A]
    assert has(on, A) == (2, 3)
    assert ask(on, B, 1, lane=lane) == []
    assert ask(on, C, 2, lane=("large", Lane(gpus=[2, 3], overflow=True))) == [C]
    assert has(on, C) == (0, 1)


def test_an_exclusive_job_gets_cards_that_nobody_else_uses_at_all() -> None:
    on = ledger(2)
    on.set_cards(cards(2), shared=["g0"])
    assert ask(on, A, 2, exclusive=True) == []
    assert ask(on, A, 2, 1, exclusive=True) == [A]
    assert has(on, A) == (1,)


def test_cards_with_the_last_jobs_memory_on_them_are_promised_and_not_given_out_yet() -> None:
    on = ledger(1)
    on.set_cards(cards(1), unclean=["g0"])
    assert promise(on, A, at(0))
    assert ask(on, A, 1) == []
    on.set_cards(cards(1))
    assert [claim.key for claim in on.arrange(1.0)] == [A]


def test_nan_is_no_priority() -> None:
    on = ledger(1)
    ask(on, A, 1, hours=2)
    ask(on, B, 1, hours=9, priority=float("nan"))
    ask(on, C, 1, hours=9, priority=1.0)
    assert [claim.key for claim in on.queue(0.0)] == [C, B]


# Asking again, leaving, coming back


def test_a_job_that_asks_for_more_keeps_what_it_has_while_that_is_of_use() -> None:
    on = ledger(4)
    ask(on, A, 2)
    ask(on, B, 2)
    assert ask(on, A, 4, 2) == [A]  # its own two again, at once
    assert has(on, A) == (0, 1)
    assert ask(on, A, 4, hours=9) == []
    on.release(B)
    assert [claim.key for claim in on.arrange(0.0)] == [A]
    assert has(on, A) == (0, 1, 2, 3)


def test_two_jobs_that_both_want_more_do_not_block_each_other() -> None:
    on = ledger(4)
    ask(on, A, 2, hours=9)
    ask(on, B, 2, hours=9)
    assert ask(on, A, 4, hours=9) == []
    assert ask(on, B, 4, now=1.0, hours=9) == [B]
    on.release(B)
    assert [claim.key for claim in on.arrange(2.0)] == [A]


def test_a_promised_job_that_asks_for_what_can_not_be_had_blocks_nobody() -> None:
    on = ledger(3)
    promise(on, A, at(0))
    assert ask(on, A, 4) == []
    assert ask(on, B, 3, now=1.0) == [B]


def test_who_leaves_the_queue_keeps_its_promise_until_released() -> None:
    on = ledger(1)
    promise(on, A, at(0))
    ask(on, A, 1)
    on.leave(A)
    assert ask(on, B, 1) == []
    on.release(A)
    on.release(A)
    assert [claim.key for claim in on.arrange(0.0)] == [B]


def test_a_run_that_goes_on_is_adopted_where_it_runs() -> None:
    on = ledger(4)
    assert on.adopt(A, ["g1", "g2"], now=0.0, until=HOUR)
    assert has(on, A) == (1, 2)
    assert not on.adopt(B, ["g2"], now=0.0, until=HOUR)
    assert not on.adopt(B, ["g9"], now=0.0, until=HOUR)
    assert not on.adopt(B, [], now=0.0, until=HOUR)


def test_a_busy_card_is_adopted_and_a_broken_one_is_not() -> None:
    on = ledger(2)
    on.set_cards(cards(2, out=[0, 1]), failed=["g1"])
    assert on.adopt(A, ["g0"], now=0.0, until=HOUR)
    assert not on.adopt(B, ["g1"], now=0.0, until=HOUR)


def test_restored_promises_find_their_places_again() -> None:
    on = ledger(2)
    on.restore(Hold(A, HoldKind.OFFER, ("g0",), 0.0, HOUR, 1.0), firm=True, now=10.0)
    on.restore(Hold(B, HoldKind.JOB, ("gone",), 0.0, HOUR, 1.0), firm=True, now=10.0)
    on.restore(Hold(C, HoldKind.JOB, (), 0.0, 3 * HOUR), firm=False, now=10.0)
    on.arrange(10.0)
    assert planned(on, A) == ((0,), 0.0)
    assert planned(on, B) == ((1,), 10.0)
    assert planned(on, C)[1] == HOUR


def test_a_job_past_its_time_is_not_counted_on_to_end_at_once() -> None:
    on = ledger(1)
    ask(on, A, 1, hours=1)
    ask(on, B, 1, now=HOUR + 5, hours=3)
    assert planned(on, B) == ((0,), HOUR + 5 + OVERDUE_SECONDS)


def test_an_accepted_job_outlives_a_wait_that_is_longer_than_it_was_planned_to_take() -> None:
    on = ledger(1)
    promise(on, A, at(0, hours=1))
    on.set_cards(cards(1, out=[0]))
    on.arrange(5.0)
    on.start(A, now=10.0, until=6 * HOUR)
    assert ask(on, A, 1, now=20.0, hours=6) == []
    for quarter in range(1, 12):
        assert on.arrange(quarter * HOUR / 4) == []
    on.set_cards(cards(1))
    assert [claim.key for claim in on.arrange(3 * HOUR)] == [A]
    assert on.holds == (Hold(A, HoldKind.JOB, ("g0",), 3 * HOUR, 4 * HOUR),)


def test_an_accepted_job_gets_its_cards_when_the_one_before_it_is_late_by_hours() -> None:
    on = ledger(1)
    ask(on, A, 1, hours=2)
    promise(on, B, at(0, start=2 * HOUR, hours=2))
    on.start(B, now=60.0, until=12 * HOUR)
    assert ask(on, B, 1, now=60.0, hours=11.9) == []
    for hour in range(1, 6):
        assert on.arrange(hour * HOUR) == []
    assert planned(on, B) == ((0,), 5 * HOUR + OVERDUE_SECONDS)
    on.release(A)
    assert [claim.key for claim in on.arrange(5 * HOUR + 60)] == [B]


def test_a_job_that_waits_is_over_by_its_deadline_all_the_same() -> None:
    on = ledger(1)
    ask(on, A, 1, hours=20)
    promise(on, B, at(0, start=20 * HOUR, hours=2))
    on.start(B, now=0.0, until=22 * HOUR)
    ask(on, B, 1, hours=22)
    on.arrange(21 * HOUR)
    claim = on.claim(B)
    assert claim is not None
    assert claim.until == 22 * HOUR
    on.release(A)
    assert on.arrange(22 * HOUR) == []


def test_an_offer_whose_card_is_out_is_not_put_off_past_its_end() -> None:
    on = ledger(1)
    promise(on, A, at(0, hours=2))
    on.set_cards(cards(1, out=[0]))
    on.arrange(HOUR)
    on.set_cards(cards(1))
    on.arrange(HOUR + 60)
    assert on.holds == (Hold(A, HoldKind.OFFER, ("g0",), HOUR + 60, 2 * HOUR),)


def test_how_long_was_planned_survives_a_restart_without_a_card() -> None:
    on = ledger(1)
    promise(on, A, at(0, hours=2))
    on.set_cards(cards(1, out=[0]))
    on.start(A, now=0.0, until=9 * HOUR)
    on.arrange(HOUR)
    (written,) = on.holds
    again = ledger(1)
    again.restore(written, firm=True, now=5 * HOUR)
    assert ask(again, A, 1, now=5 * HOUR) == [A]
    assert again.holds[0].ends_at == 7 * HOUR


# Everything at once


class Anything(RuleBasedStateMachine):
    """Whatever happens in whatever order: no card is two jobs' at a time, no two windows on a card overlap,
    and in the end everybody who can be served is."""

    keys: Bundle[TaskKey] = Bundle("keys")

    @initialize(count=st.integers(1, 8), limit=st.sampled_from([1, 3, 100]))
    def begin(self, count: int, limit: int) -> None:
        self.now, self.count = 0.0, count
        self.on = ledger(count, patience=4 * HOUR, max_running=limit)
        self.number = 0
        self.promised: dict[TaskKey, float] = {}

    def settle(self) -> None:
        self.on.arrange(self.now)

    @rule(target=keys, count=st.integers(1, 8), hours=st.integers(1, 12), wait=st.integers(0, 12))
    def offer(self, count: int, hours: int, wait: int) -> TaskKey:
        """As the inbox does it: placed on a snapshot and promised in the same breath, which always holds."""
        self.number += 1
        key = TaskKey("v", str(self.number))
        snapshot = replace(fleet(self.on.gpus, self.on.holds), taken_at=self.now)
        found = place(
            snapshot, [count], now=self.now, duration_s=hours * HOUR, latest_start=self.now + wait * HOUR
        )
        if found is not None:
            assert self.on.promise(key, found, now=self.now, until=found.ends_at)
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
        self.on.ask(key, counts, now=self.now, until=self.now + hours * HOUR, priority=priority)
        self.settle()

    @rule(key=keys)
    def leave(self, key: TaskKey) -> None:
        self.on.leave(key)
        self.settle()

    @rule(key=keys, hours=st.integers(0, 24))
    def extend(self, key: TaskKey, hours: int) -> None:
        self.on.extend(key, self.now + hours * HOUR)
        self.settle()

    @rule(key=consumes(keys))
    def release(self, key: TaskKey) -> None:
        self.on.release(key)
        self.settle()

    @rule(key=keys, card=st.integers(0, 7))
    def adopt(self, key: TaskKey, card: int) -> None:
        self.on.adopt(key, [f"g{card}"], now=self.now, until=self.now + HOUR)
        self.settle()

    @rule(out=st.sets(st.integers(0, 7)), unclean=st.sets(st.integers(0, 7)))
    def cards_change(self, out: set[int], unclean: set[int]) -> None:
        known = [card for card in out if card < self.count]
        self.on.set_cards(cards(self.count, out=known), unclean=[f"g{card}" for card in unclean])
        self.settle()

    @rule(hours=st.floats(0.01, 5))
    def time_passes(self, hours: float) -> None:
        self.now += hours * HOUR
        self.settle()

    @invariant()
    def no_card_is_two_jobs(self) -> None:
        running = [set(claim.gpus) for claim in self.claims() if claim.is_running]
        assert all(one.isdisjoint(other) for one, other in combinations(running, 2))

    @invariant()
    def no_two_windows_overlap(self) -> None:
        """Those of jobs past their time, which hold their cards until they are done, left out."""
        for one, other in combinations(self.claims(), 2):
            if set(one.gpus) & set(other.gpus):
                start = max(one.starts_at, other.starts_at, self.now)
                assert start >= min(one.until, other.until), (one, other)

    @invariant()
    def windows_are_on_cards_that_may_be_used(self) -> None:
        usable = {gpu.id for gpu in self.on.gpus if gpu.out is None}
        for claim in self.claims():
            assert claim.is_running or claim.until <= self.now or usable.issuperset(claim.gpus)

    def claims(self) -> list[Claim]:
        return self.on.claims if hasattr(self, "on") else []

    def teardown(self) -> None:
        """Let everything run to its end: each that waits for what is there gets it, none is forgotten."""
        if not hasattr(self, "on"):
            return
        self.on.set_cards(cards(self.count))
        served = set()
        for _ in range(len(self.claims()) + 1):
            self.settle()
            for claim in self.claims():
                if claim.is_running:
                    served.add(claim.key)
                    self.on.release(claim.key)
                elif claim.stage is Stage.PROMISED:
                    self.on.release(claim.key)
        left = [
            claim for claim in self.claims() if claim.until > self.now and min(claim.counts) <= self.count
        ]
        assert left == []


Anything.TestCase.settings = settings(stateful_step_count=40, deadline=None)
TestAnything = Anything.TestCase
