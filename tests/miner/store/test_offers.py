from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings

from core.domain.decisions import Decision, ExpectedValue, PlanBrief, Reason, ScoreFactor, just_below
from core.domain.job_states import EndReason, JobState
from core.domain.keys import Placement, ReservationKind, TaskKey
from core.domain.tasks import TaskType
from core.domain.wire import MinerTaskOffer
from miner.store import offers
from miner.store.database import StoreUnavailable
from miner.store.events import prune_history
from miner.store.offers import (
    OpenReservation,
    ReceivedOffer,
    RecordedOffer,
    ReservationRow,
    StandingRule,
    decision_columns,
    decision_from,
    lapse_reservations,
    open_reservations,
    record_offer,
    record_offered_start,
)
from miner.store.store import Store
from tests.miner.offers.builders import decided, fleet, policy
from tests.miner.offers.test_decide_properties import OFFERS, POLICIES
from tests.miner.store.rows import KEY, column, reservation, rows, start_request

YES = Decision(
    True, "Taken", "plain", "h1", (Reason("room", True, "0 of 1"),), 0.5, {"size": ScoreFactor(1.0, 0.5, "")}
)
NO = Decision(False, "Not taken", "plain", "h1", (Reason("room", False, "1 of 1"),))
#: Every offer with the answer that stands.
ANSWERS = (
    "SELECT task_id, accepted FROM offers JOIN decisions ON decisions.id = offers.decision_id "
    "ORDER BY offers.id"
)


def answers(store: Store) -> list[tuple[str, int]]:
    return [(row["task_id"], row["accepted"]) for row in rows(store, ANSWERS)]


def reserved(store: Store) -> list[OpenReservation]:
    return store.read_now(open_reservations)


async def record(
    store: Store,
    decision: Decision | None,
    *,
    validator: str = "v1",
    task_id: str = "t1",
    held: ReservationRow | None = None,
    now: float = 0.0,
    acceptance_holds: bool = False,
    decision_id: int | None = None,
) -> RecordedOffer:
    if held is None and decision is not None and decision.accepted:
        held = reservation(task_id)
    offer = MinerTaskOffer(model="a/b", hours_to_complete=2, task_id=task_id, task_type=TaskType.DPO)
    return await store.write(
        record_offer,
        ReceivedOffer(validator, offer, b'{"new_field": 1}', now),
        decision,
        held,
        StandingRule(acceptance_holds, refusal_stands_for=600.0),
        decision_id=decision_id,
    )


# Offers


async def test_an_offer_is_stored_raw_with_its_decision_and_its_reservation(store: Store) -> None:
    recorded = await record(store, YES)
    assert (recorded.decision, recorded.repeated) == (YES, False)
    assert rows(store, "SELECT raw, decision_id FROM offers") == [
        {"raw": b'{"new_field": 1}', "decision_id": 1}
    ]
    (decision,) = rows(store, "SELECT * FROM decisions")
    assert (decision["offer_id"], decision["accepted"], decision["policy_hash"]) == (1, 1, "h1")
    reason = json.loads(decision["reasons"])[0]
    assert (reason["rule"], reason["passed"]) == ("room", True)
    (held,) = rows(store, "SELECT * FROM reservations")
    assert (held["validator"], held["task_id"], held["state"]) == ("v1", "t1", "held")
    assert reserved(store) == [OpenReservation(reservation(), None)]


async def test_a_refusal_stands_for_a_while_and_is_decided_again_then(store: Store) -> None:
    await record(store, NO)
    again = await record(store, YES, now=599.0)
    assert (again.repeated, again.decision) == (True, NO)
    assert reserved(store) == []
    later = await record(store, YES, now=600.0)
    assert (later.repeated, later.decision) == (False, YES)
    assert column(store, "SELECT accepted FROM decisions ORDER BY id") == [0, 1]
    assert rows(store, "SELECT times_seen, decision_id FROM offers") == [{"times_seen": 3, "decision_id": 2}]
    await record(store, NO, task_id="t2", now=5000.0)
    after_the_clock_was_set_back = await record(store, YES, task_id="t2", now=100.0)
    assert after_the_clock_was_set_back.decision == YES


async def test_an_acceptance_stands_as_long_as_it_holds(store: Store) -> None:
    await record(store, YES)
    renewed = reservation(lapses_at=9900.0)
    again = await record(store, None, now=9000.0, acceptance_holds=True, held=renewed)
    assert (again.repeated, again.decision) == (True, YES)
    assert reserved(store) == [OpenReservation(renewed, None)]
    with_open_job = await record(store, NO, now=9000.0, acceptance_holds=True)
    assert (with_open_job.repeated, with_open_job.decision) == (True, YES)
    lapsed = await record(store, NO, now=9001.0)
    assert (lapsed.repeated, lapsed.decision) == (False, NO)


async def test_an_answer_that_could_not_be_written_does_not_stand(store: Store) -> None:
    with pytest.raises(StoreUnavailable, match="ask again"):
        await record(store, None, acceptance_holds=True)
    assert rows(store, "SELECT * FROM offers") == []


async def test_the_same_task_id_of_another_validator_is_another_offer(store: Store) -> None:
    await record(store, YES)
    other = await record(store, NO, validator="v2")
    assert (other.repeated, other.decision) == (False, NO)


async def test_a_refusal_that_equal_offers_share_is_written_once_and_explains_each(store: Store) -> None:
    decision_id = None
    for number in range(3):
        recorded = await record(store, NO, task_id=f"t{number}", now=float(number), decision_id=decision_id)
        assert not recorded.repeated
        decision_id = recorded.decision_id
    other = replace(NO, message="Not taken: something else")
    await record(store, other, task_id="t3", now=3.0)
    assert column(store, "SELECT message FROM decisions") == [NO.message, other.message]
    assert answers(store) == [(f"t{number}", 0) for number in range(4)]
    again = await record(store, None, task_id="t2", now=4.0)
    assert (again.repeated, again.decision.message) == (True, NO.message)


# Reservations


async def test_a_reservation_that_lapses_is_recorded(store: Store) -> None:
    await record(store, YES)
    await store.write(lapse_reservations, [KEY], 61.0)
    assert reserved(store) == []
    assert column(store, "SELECT kind FROM events") == ["reservation_lapsed"]


async def test_a_start_turns_the_reservation_of_an_offer_into_a_jobs(store: Store) -> None:
    await record(store, YES)
    start, of_job = start_request(), reservation(kind=ReservationKind.JOB)
    started = await store.write(
        record_offered_start, "v1", start, of_job, now=30.0, decision=None, infeasible=None
    )
    assert (started.state, started.repeated) == (JobState.QUEUED, False)
    assert reserved(store) == [OpenReservation(of_job, start.deadline_at)]
    await store.write(lapse_reservations, [KEY], 61.0)
    assert len(reserved(store)) == 1
    assert rows(store, "SELECT offer_id, state FROM reservations") == [{"offer_id": 1, "state": "started"}]


async def test_a_job_without_gpus_is_restored_all_the_same(store: Store) -> None:
    start = start_request()
    await store.write(record_offered_start, "v1", start, None, now=30.0, decision=None, infeasible=None)
    ((row, deadline),) = reserved(store)
    assert (row.hold.key, row.hold.gpus, row.firm, deadline) == (KEY, (), False, start.deadline_at)


@pytest.mark.parametrize("infeasible", [None, EndReason.INFEASIBLE])
async def test_a_start_without_an_accepted_offer_keeps_its_decision_and_reserves_what_it_can(
    store: Store, infeasible: EndReason | None
) -> None:
    start, of_job = start_request(), reservation(kind=ReservationKind.JOB)
    started = await store.write(
        record_offered_start, "v1", start, of_job, now=30.0, decision=NO, infeasible=infeasible
    )
    (decision,) = rows(store, "SELECT offer_id, job_id, accepted FROM decisions")
    assert decision == {"offer_id": None, "job_id": started.job_id, "accepted": 0}
    assert started.state is (JobState.FAILED if infeasible else JobState.QUEUED)
    assert reserved(store) == ([] if infeasible else [OpenReservation(of_job, start.deadline_at)])


# Pruning


async def test_old_offers_and_events_are_deleted_and_those_of_jobs_are_kept(store: Store) -> None:
    refused = None
    for number in range(5):
        decision = YES if number % 2 else NO
        recorded = await record(
            store,
            decision,
            task_id=f"t{number}",
            now=1000.0 * number,
            decision_id=None if number % 2 else refused,
        )
        refused = recorded.decision_id if decision is NO else refused
    await store.write(
        record_offered_start, "v1", start_request("t0"), None, now=10.0, decision=None, infeasible=None
    )
    await store.write(lapse_reservations, [TaskKey("v1", "t1")], 1500.0)
    assert await store.write(prune_history, 3000.0) == 4  # two offers, two events
    assert await store.write(prune_history, 3000.0) == 0
    assert column(store, "SELECT task_id FROM offers") == ["t0", "t3", "t4"]
    assert column(store, "SELECT offer_id FROM decisions") == [None, 4]
    assert answers(store) == [("t0", 0), ("t3", 1), ("t4", 0)]
    assert column(store, "SELECT task_id FROM reservations") == ["t3"]
    assert column(store, "SELECT task_id FROM jobs") == ["t0"]


async def test_a_shared_refusal_is_deleted_with_the_last_offer_that_has_it(store: Store) -> None:
    first = await record(store, NO, task_id="t0", now=1000.0)
    await record(store, NO, task_id="t1", now=2000.0, decision_id=first.decision_id)
    assert await store.write(prune_history, 1500.0) == 1
    assert answers(store) == [("t1", 0)]
    assert await store.write(prune_history, 2500.0) == 2  # the offer and its decision
    assert rows(store, "SELECT id FROM decisions") == []


async def test_a_refusal_that_another_replaced_is_deleted(store: Store) -> None:
    await record(store, NO, task_id="t0", now=1000.0)
    await record(store, replace(NO, message="Not taken: later"), task_id="t0", now=5000.0)
    assert await store.write(prune_history, 3000.0) == 1
    assert answers(store) == [("t0", 0)]


async def test_beyond_the_newest_offers_those_without_a_job_are_deleted_however_new(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miner.store.events.MAX_OFFERS", 2)
    for number in range(5):
        await record(store, NO, task_id=f"t{number}", now=1000.0 + number)
    while await store.write(prune_history, 0.0):
        pass
    assert column(store, "SELECT task_id FROM offers") == ["t2", "t3", "t4"]


async def test_pruning_goes_on_in_batches(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miner.store.events.MAX_PRUNED_ROWS", 1)
    for number in range(3):
        await record(store, YES, task_id=f"t{number}", now=1000.0 * number)
    await store.write(lapse_reservations, [KEY], 1500.0)
    batches = []
    while done := await store.write(prune_history, 9e9):
        batches.append(done)
    assert batches == [2, 1, 1]
    assert rows(store, "SELECT * FROM offers") == []


# Decisions as columns


@settings(max_examples=40)
@given(OFFERS, POLICIES)
def test_a_decision_is_read_as_it_was_stored(offer: MinerTaskOffer, name: str) -> None:
    decision = decided(offer, policy(name))
    assert decision_from(decision_columns(decision)) == decision


async def test_every_part_of_a_decision_is_read_as_it_was_stored(store: Store) -> None:
    decision = replace(
        YES,
        placement=Placement(("g0",), 1.0, 2.0, "one GPU"),
        value=ExpectedValue(2.0, 0.9, 0.1, 0.01, 0.3, 4.0),
        plan=PlanBrief(1, 3600.0, 0.0, 1.5, 1.0),
    )
    await record(store, decision)
    assert (await record(store, None, acceptance_holds=True)).decision == decision


def test_half_a_surrogate_pair_in_a_message_is_stored_and_read() -> None:
    idle = fleet()
    decision = decided(on=replace(idle, inventory=replace(idle.inventory, problem="no such file: \udcff")))
    assert decision_from(decision_columns(decision)) == decision


class _LaterReason(NamedTuple):
    """A reason as a later version may have it: with a field in the middle, and without `way`."""

    rule: str
    weight: float = 0.0
    passed: bool = True
    text: str = ""


def test_a_field_that_is_added_or_dropped_misreads_no_row() -> None:
    reason = Reason("hours", False, "3 h", "more")
    assert offers.read_part(_LaterReason, reason._asdict()) == _LaterReason("hours", 0.0, False, "3 h")
    with pytest.raises(offers.DecisionUnreadable, match="stored Reason cannot be read"):
        offers.read_part(Reason, {"rule": "hours"})


def test_a_limit_with_few_digits_lies_just_below() -> None:
    for value in (0.5, 0.1234, -0.5, 0.0, 1e-9, 3.0):
        assert value - 0.002 <= just_below(value) < value
