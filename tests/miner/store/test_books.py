import asyncio
import json
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from core.tasks import TaskType
from core.wire import MinerSubmission, MinerTaskOffer
from miner.fleet.base import Hold, HoldKind, Placement, TaskKey
from miner.jobs.states import MEANING, EndReason, JobState
from miner.offers.decision import Decision, ExpectedValue, Factor, PlanBrief, Reason
from miner.store import database
from miner.store.books import Books, NonceUsed
from miner.store.history import _OLD_REFUSALS
from miner.store.jobs import Start
from miner.store.offers import Place, Recorded, Taken
from miner.store.writer import StoreUnavailable

YES = Decision(
    True, "Taken", "plain", "h1", (Reason("room", True, "0 of 1"),), 0.5, {"size": Factor(1.0, 0.5, "")}
)
NO = Decision(False, "Not taken", "plain", "h1", (Reason("room", False, "1 of 1"),))


def offer(task_id: str = "t1") -> MinerTaskOffer:
    return MinerTaskOffer(model="a/b", hours_to_complete=2, task_id=task_id, task_type=TaskType.DPO)


def start(task_id: str = "t1", *, repo: str = "r1", at: float | None = None, hours: float = 2) -> Start:
    return Start(task_id, TaskType.DPO, "a/b", hours, repo, time.time() if at is None else at, b'{"raw": 1}')


@pytest.fixture
async def books(tmp_path: Path):
    made = Books(database.prepare(tmp_path))
    made.writer.start(asyncio.get_running_loop())
    yield made
    await made.writer.close()


def rows(books: Books, sql: str) -> list[dict]:
    with closing(database.connect(books.path)) as connection:
        return [dict(row) for row in connection.execute(sql)]


KEY = TaskKey("v1", "t1")


def place(task_id: str = "t1", *, kind: HoldKind = HoldKind.OFFER, lapses_at: float = 60.0) -> Place:
    hold = Hold(TaskKey("v1", task_id), kind, ("g0", "g1"), 0.0, 7200.0, 0.5)
    return Place(hold, firm=True, lapses_at=lapses_at)


#: Every offer with the answer that stands.
ANSWERS = (
    "SELECT task_id, accepted FROM offers JOIN decisions ON decisions.id = offers.decision_id "
    "ORDER BY offers.id"
)


async def record(
    books: Books,
    decision: Decision | None,
    *,
    validator: str = "v1",
    task_id: str = "t1",
    held: Place | None = None,
    now: float = 0.0,
    is_kept: bool = False,
    shared: int | None = None,
) -> Recorded:
    if held is None and decision is not None and decision.accepted:
        held = place(task_id)
    return await books.record_offer(
        validator,
        offer(task_id),
        b'{"new_field": 1}',
        decision,
        held,
        now=now,
        is_kept=is_kept,
        refusal_stands_for=600.0,
        shared=shared,
    )


async def test_an_offer_is_kept_raw_with_its_decision_and_its_place(books: Books) -> None:
    recorded = await record(books, YES)
    assert (recorded.decision, recorded.repeated) == (YES, False)
    (kept,) = rows(books, "SELECT raw, decision_id FROM offers")
    assert kept == {"raw": b'{"new_field": 1}', "decision_id": 1}
    (decision,) = rows(books, "SELECT * FROM decisions")
    assert (decision["offer_id"], decision["accepted"], decision["policy_hash"]) == (1, 1, "h1")
    reason = json.loads(decision["reasons"])[0]
    assert (reason["rule"], reason["passed"]) == ("room", True)
    (held,) = rows(books, "SELECT * FROM reservations")
    assert (held["validator"], held["task_id"], held["state"]) == ("v1", "t1", "held")
    assert (json.loads(held["gpus"]), held["ends_at"], held["priority"]) == (["g0", "g1"], 7200.0, 0.5)
    assert books.taken() == [Taken(place(), None)]


async def test_a_refused_offer_holds_nothing(books: Books) -> None:
    await record(books, NO)
    assert books.taken() == []


async def test_a_refusal_stands_for_a_while_and_is_decided_anew_then(books: Books) -> None:
    await record(books, NO)
    again = await record(books, YES, now=599.0)
    assert (again.repeated, again.decision) == (True, NO)
    assert books.taken() == []
    later = await record(books, YES, now=600.0)
    assert (later.repeated, later.decision) == (False, YES)
    assert [row["accepted"] for row in rows(books, "SELECT accepted FROM decisions ORDER BY id")] == [0, 1]
    assert rows(books, "SELECT times_seen, decision_id FROM offers") == [{"times_seen": 3, "decision_id": 2}]


async def test_a_clock_set_back_makes_no_refusal_stand_for_longer(books: Books) -> None:
    await record(books, NO, now=5000.0)
    assert (await record(books, YES, now=100.0)).decision == YES


async def test_an_acceptance_stands_as_long_as_it_is_kept(books: Books) -> None:
    await record(books, YES)
    kept = await record(books, None, now=9000.0, is_kept=True, held=place(lapses_at=9900.0))
    assert (kept.repeated, kept.decision) == (True, YES)
    assert books.taken() == [Taken(place(lapses_at=9900.0), None)]
    open_job = await record(books, NO, now=9000.0, is_kept=True)
    assert (open_job.repeated, open_job.decision) == (True, YES)
    lapsed = await record(books, NO, now=9001.0)
    assert (lapsed.repeated, lapsed.decision) == (False, NO)


async def test_an_answer_that_could_not_be_written_is_not_taken_to_stand(books: Books) -> None:
    with pytest.raises(StoreUnavailable, match="ask again"):
        await record(books, None, is_kept=True)
    assert rows(books, "SELECT * FROM offers") == []


async def test_another_validator_with_the_same_task_id_is_judged_anew(books: Books) -> None:
    await record(books, YES)
    other = await record(books, NO, validator="v2")
    assert not other.repeated
    assert other.decision == NO


async def test_what_a_decision_was_made_of_comes_back_with_it(books: Books) -> None:
    made = replace(
        YES,
        placement=Placement(("g0",), 1.0, 2.0, "one card"),
        value=ExpectedValue(2.0, 0.9, 0.1, 0.01, 0.3, 4.0),
        plan=PlanBrief(1, 3600.0, 0.0, 1.5, 1.0),
    )
    await record(books, made)
    assert (await record(books, None, is_kept=True)).decision == made


async def test_a_place_that_lapses_is_noted(books: Books) -> None:
    await record(books, YES)
    await books.lapse([KEY], 61.0)
    assert books.taken() == []
    assert [row["kind"] for row in rows(books, "SELECT kind FROM events")] == ["reservation_lapsed"]


async def test_a_start_turns_the_place_into_a_jobs(books: Books) -> None:
    await record(books, YES)
    begun = start()
    started = await books.record_start("v1", begun, place(kind=HoldKind.JOB), now=30.0)
    assert (started.state, started.repeated) == (JobState.QUEUED, False)
    assert books.taken() == [Taken(place(kind=HoldKind.JOB), begun.deadline_at)]
    await books.lapse([KEY], 61.0)
    assert len(books.taken()) == 1
    assert rows(books, "SELECT offer_id, state FROM reservations") == [{"offer_id": 1, "state": "started"}]


async def test_a_job_without_a_place_is_taken_up_all_the_same(books: Books) -> None:
    begun = start()
    await books.record_start("v1", begun, now=30.0)
    ((known, deadline),) = books.taken()
    assert (known.hold.key, known.hold.gpus, deadline) == (KEY, (), begun.deadline_at)
    assert not known.firm


async def test_a_start_that_nobody_accepted_keeps_what_was_decided_about_it(books: Books) -> None:
    started = await books.record_start("v1", start(), now=30.0, decision=NO)
    (decision,) = rows(books, "SELECT offer_id, job_id, accepted FROM decisions")
    assert decision == {"offer_id": None, "job_id": started.job_id, "accepted": 0}


async def test_a_hopeless_start_is_noted_as_failed_and_may_be_tried_again(books: Books) -> None:
    given_up = await books.record_start("v1", start(), now=1.0, decision=NO, hopeless=EndReason.INFEASIBLE)
    assert (given_up.state, given_up.end_reason) == (JobState.FAILED, EndReason.INFEASIBLE)
    again = await books.record_start("v1", start(), now=2.0, hopeless=EndReason.INFEASIBLE)
    assert (again.state, again.repeated) == (JobState.FAILED, True)
    assert books.taken() == []
    taken = await books.record_start("v1", start(), place(kind=HoldKind.JOB), now=3.0)
    assert (taken.state, taken.end_reason) == (JobState.QUEUED, None)
    kinds = [row["kind"] for row in rows(books, "SELECT kind FROM events ORDER BY id")]
    assert kinds == ["start", "job_failed", "start_repeated", "job_failed", "start_repeated"]


async def test_a_repeated_start_replaces_name_and_deadline_and_makes_no_second_job(books: Books) -> None:
    first = await books.record_start("v1", start(repo="r1", at=1000.0), now=time.time())
    again = await books.record_start("v1", start(repo="r2", at=2000.0), now=time.time())
    assert again.repeated
    assert again.job_id == first.job_id
    (job,) = rows(books, "SELECT * FROM jobs")
    assert (job["expected_repo_name"], job["deadline_at"], job["starts"]) == ("r2", 2000.0 + 7200, 2)
    assert job["lock_token"] == 2


async def test_a_repeated_start_turns_no_job_into_another_one(books: Books) -> None:
    def asked(kind: TaskType = TaskType.DPO, model: str = "a/b", **data: object) -> Start:
        text = {"dataset": "https://h/rows.json?sig=1", "dataset_type": {"field_chosen": "c"}, **data}
        return replace(start(), task_type=kind, model=model, request=json.dumps(text).encode())

    first = asked()
    await books.record_start("v1", first, now=time.time())
    others = (
        asked(TaskType.INSTRUCT),
        asked(model="a/c"),
        asked(dataset="https://h/other.json?sig=1"),
        asked(dataset_type={"field_chosen": "d"}),
    )
    for number, other in enumerate(others):
        renamed = replace(other, expected_repo_name=f"n{number}", hours=5.0)
        assert (await books.record_start("v1", renamed, now=time.time())).differs
        (job,) = rows(books, "SELECT * FROM jobs")
        assert (job["task_type"], job["model"], job["request"]) == (TaskType.DPO, "a/b", first.request)
        assert (job["expected_repo_name"], job["hours"]) == (f"n{number}", 5.0)
    signed_anew = asked(dataset="https://h/rows.json?sig=2")
    assert not (await books.record_start("v1", signed_anew, now=time.time())).differs
    assert rows(books, "SELECT request FROM jobs") == [{"request": signed_anew.request}]
    late = replace(first, started_at=time.time() - 7300)
    await books.record_start("v1", late, now=time.time())
    await books.fail_late(time.time())
    again = await books.record_start("v1", asked(TaskType.INSTRUCT), now=time.time())
    assert (again.differs, again.state) == (False, JobState.QUEUED)
    assert rows(books, "SELECT task_type FROM jobs") == [{"task_type": TaskType.INSTRUCT}]


async def test_two_validators_may_use_one_task_id(books: Books) -> None:
    first = await books.record_start("v1", start(repo="r1"), now=1.0)
    second = await books.record_start("v2", start(repo="r2"), now=1.0)
    assert first.job_id != second.job_id
    made = MinerSubmission(repo="me/r2", model_hash=None)
    assert await books.record_submission(TaskKey("v2", "t1"), made)
    assert await books.submission(TaskKey("v2", "t1")) == made
    assert await books.submission(KEY) is None


async def test_a_job_past_its_deadline_fails_with_its_reason(books: Books) -> None:
    await books.record_start("v1", start(at=time.time() - 7300), now=time.time())
    assert await books.fail_late(time.time()) == [KEY]
    (job,) = rows(books, "SELECT * FROM jobs")
    assert (job["state"], job["end_reason"]) == (JobState.FAILED, EndReason.DEADLINE)
    assert books.taken() == []


async def test_a_failed_job_is_queued_again_when_the_validator_starts_it_again(books: Books) -> None:
    await books.record_start("v1", start(at=time.time() - 7300), now=time.time())
    await books.fail_late(time.time())
    again = await books.record_start("v1", start(), now=time.time())
    assert again.state is JobState.QUEUED
    assert rows(books, "SELECT end_reason FROM jobs") == [{"end_reason": None}]


async def test_a_start_that_is_already_too_late_revives_nothing(books: Books) -> None:
    await books.record_start("v1", start(at=time.time() - 7300), now=time.time())
    await books.fail_late(time.time())
    again = await books.record_start("v1", start(at=time.time() - 7250), now=time.time())
    assert again.state is JobState.FAILED


async def test_a_submission_is_answered_once_there_is_one(books: Books) -> None:
    await books.record_start("v1", start(), now=time.time())
    assert await books.submission(KEY) is None
    made = MinerSubmission(repo="me/r1", model_hash="ab")
    assert await books.record_submission(KEY, made)
    assert await books.submission(KEY) == made
    assert not await books.record_submission(TaskKey("v1", "t9"), made)


async def test_a_nonce_is_good_once_also_at_the_same_moment(books: Books) -> None:
    uses = [books.save_nonce(b"k" * 32, "1_a", 100.0) for _ in range(10)]
    results = await asyncio.gather(*uses, return_exceptions=True)
    assert [type(result) for result in results].count(NonceUsed) == 9
    await books.save_nonce(b"j" * 32, "1_a", 100.0)  # another signer's nonce is another nonce


async def test_expired_nonces_are_dropped_and_live_ones_come_back(books: Books) -> None:
    await books.save_nonce(b"k" * 32, "old", 100.0)
    await books.save_nonce(b"k" * 32, "new", 300.0)
    assert books.live_nonces(200.0) == [(b"k" * 32, "new", 300.0)]
    assert await books.drop_nonces(200.0) == 1
    assert rows(books, "SELECT nonce FROM nonces") == [{"nonce": "new"}]


async def test_what_happened_is_told_in_order(books: Books) -> None:
    await books.record_start("v1", start(at=time.time() - 7300), now=time.time())
    await books.fail_late(time.time())
    assert [row["kind"] for row in rows(books, "SELECT kind FROM events ORDER BY id")] == [
        "start",
        "job_failed",
    ]


async def test_the_summary_counts(books: Books) -> None:
    await record(books, YES)
    await record(books, NO, task_id="t2")
    await books.record_start("v1", start("t1"), now=time.time())
    assert books.summary() == {"jobs": {"queued": 1}, "offers": {"accepted": 1, "refused": 1}}


# History


async def offers_and_events(books: Books) -> None:
    refused = None
    for number in range(5):
        shared = None if number % 2 else refused
        answer = YES if number % 2 else NO
        kept = await record(books, answer, task_id=f"t{number}", now=1000.0 * number, shared=shared)
        refused = kept.decision_id if answer is NO else refused
    await books.record_start("v1", start("t0"), now=10.0)
    await books.lapse([TaskKey("v1", "t1")], 1500.0)


async def test_old_offers_and_events_are_forgotten_and_those_of_jobs_are_kept(books: Books) -> None:
    await offers_and_events(books)
    assert await books.prune(3000.0) == 4  # two offers, two events
    assert await books.prune(3000.0) == 0
    assert [row["task_id"] for row in rows(books, "SELECT task_id FROM offers")] == ["t0", "t3", "t4"]
    assert [row["offer_id"] for row in rows(books, "SELECT offer_id FROM decisions")] == [None, 4]
    assert [tuple(row.values()) for row in rows(books, ANSWERS)] == [("t0", 0), ("t3", 1), ("t4", 0)]
    assert [row["task_id"] for row in rows(books, "SELECT task_id FROM reservations")] == ["t3"]
    assert [row["task_id"] for row in rows(books, "SELECT task_id FROM jobs")] == ["t0"]


async def test_a_refusal_that_like_offers_share_is_written_once_and_explains_each(books: Books) -> None:
    row = None
    for number in range(3):
        found = await record(books, NO, task_id=f"t{number}", now=float(number), shared=row)
        assert not found.repeated
        row = found.decision_id
    other = replace(NO, message="Not taken: something else")
    await record(books, other, task_id="t3", now=3.0)
    assert [row["message"] for row in rows(books, "SELECT message FROM decisions")] == [
        NO.message,
        other.message,
    ]
    assert [tuple(row.values()) for row in rows(books, ANSWERS)] == [(f"t{number}", 0) for number in range(4)]
    again = await record(books, None, task_id="t2", now=4.0)
    assert (again.repeated, again.decision.message) == (True, NO.message)


async def test_acceptances_share_nothing(books: Books) -> None:
    for number in range(2):
        await record(books, YES, task_id=f"t{number}")
    assert [row["offer_id"] for row in rows(books, "SELECT offer_id FROM decisions")] == [1, 2]


async def test_a_shared_refusal_is_forgotten_with_the_last_offer_that_has_it(books: Books) -> None:
    first = await record(books, NO, task_id="t0", now=1000.0)
    await record(books, NO, task_id="t1", now=2000.0, shared=first.decision_id)
    assert await books.prune(1500.0) == 1
    assert [tuple(row.values()) for row in rows(books, ANSWERS)] == [("t1", 0)]
    assert await books.prune(2500.0) == 2  # the offer, and what was said to it
    assert rows(books, "SELECT id FROM decisions") == []


async def test_a_refusal_that_another_took_the_place_of_is_forgotten(books: Books) -> None:
    await record(books, NO, task_id="t0", now=1000.0)
    await record(books, replace(NO, message="Not taken: later"), task_id="t0", now=5000.0)
    assert len(rows(books, "SELECT id FROM decisions")) == 2
    assert await books.prune(3000.0) == 1
    assert [tuple(row.values()) for row in rows(books, ANSWERS)] == [("t0", 0)]


async def test_forgetting_goes_through_shared_refusals_alone(books: Books) -> None:
    await record(books, NO, task_id="t0")
    plan = rows(books, f"EXPLAIN QUERY PLAN {_OLD_REFUSALS}".replace("?", "1"))
    assert any("ix_decisions_shared" in row["detail"] for row in plan)
    assert not any("B-TREE" in row["detail"] for row in plan)


async def test_forgetting_goes_on_in_slices(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miner.store.history.AT_ONCE", 1)
    await offers_and_events(books)
    slices = []
    while done := await books.prune(9e9):
        slices.append(done)
    assert slices == [2, 2, 1, 1]
    assert [row["task_id"] for row in rows(books, "SELECT task_id FROM offers")] == ["t0"]


async def test_jobs_that_have_ended_are_there_to_be_learned_from(books: Books) -> None:
    await books.record_start("v1", start("t1", at=time.time() - 7300), now=time.time())
    await books.record_start("v1", start("t2"), now=1.0, hopeless=EndReason.INFEASIBLE)
    await books.fail_late(time.time())
    assert [(one.task_type, one.published) for one in books.outcomes(time.time())] == [(TaskType.DPO, False)]
    assert books.outcomes(time.time(), since=time.time() + 60) == []


def test_every_end_reason_has_its_meaning() -> None:
    assert set(MEANING) == set(EndReason)
