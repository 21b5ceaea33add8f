import asyncio
import json
import time
from contextlib import closing
from pathlib import Path

import pytest

from core.tasks import TaskType
from core.wire import MinerSubmission, MinerTaskOffer
from miner.jobs.states import MEANING, EndReason, JobState
from miner.offers.decision import Decision, Factor, Reason
from miner.store import database
from miner.store.books import Books, Commitment, Freed, NonceUsed
from miner.store.jobs import ForeignJob, Start

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


async def test_an_offer_is_kept_raw_with_its_decision_and_its_hold(books: Books) -> None:
    recorded = await books.record_offer("v1", offer(), b'{"new_field": 1}', YES, hold_seconds=60)
    assert recorded == type(recorded)(YES, repeated=False, holds=True)
    (kept,) = rows(books, "SELECT * FROM offers JOIN decisions ON offer_id = offers.id")
    assert kept["raw"] == b'{"new_field": 1}'
    assert json.loads(kept["reasons"]) == [["room", True, "0 of 1", ""]]
    assert [hold.task_id for hold in books.commitments().holds] == ["t1"]


async def test_a_refused_offer_holds_nothing(books: Books) -> None:
    await books.record_offer("v1", offer(), b"{}", NO, hold_seconds=60)
    assert books.commitments().holds == ()


async def test_a_repeated_offer_gets_the_first_answer(books: Books) -> None:
    await books.record_offer("v1", offer(), b"{}", YES, hold_seconds=60)
    again = await books.record_offer("v1", offer(), b"{}", NO, hold_seconds=60)
    assert again.repeated
    assert again.decision == YES
    assert rows(books, "SELECT times_seen FROM offers") == [{"times_seen": 2}]


async def test_another_validator_with_the_same_task_id_is_judged_anew(books: Books) -> None:
    await books.record_offer("v1", offer(), b"{}", YES, hold_seconds=60)
    other = await books.record_offer("v2", offer(), b"{}", NO, hold_seconds=60)
    assert not other.repeated
    assert other.decision == NO


async def test_a_hold_lapses_when_no_start_comes_and_is_renewed_by_a_repeat(books: Books) -> None:
    await books.record_offer("v1", offer(), b"{}", YES, hold_seconds=60)
    assert await books.settle(time.time() + 30) == Freed()
    assert await books.settle(time.time() + 61) == Freed(holds=("t1",))
    assert books.commitments().holds == ()
    await books.record_offer("v1", offer(), b"{}", YES, hold_seconds=60)
    assert [hold.task_id for hold in books.commitments().holds] == ["t1"]


async def test_a_start_turns_the_hold_into_a_job(books: Books) -> None:
    await books.record_offer("v1", offer(), b"{}", YES, hold_seconds=60)
    begun = start()
    started = await books.record_start("v1", begun)
    assert (started.state, started.repeated) == (JobState.QUEUED, False)
    known = books.commitments()
    assert known.holds == ()
    assert known.jobs == (Commitment("t1", begun.deadline_at),)
    assert await books.settle(time.time() + 61) == Freed()


async def test_a_repeated_start_replaces_name_and_deadline_and_makes_no_second_job(books: Books) -> None:
    first = await books.record_start("v1", start(repo="r1", at=1000.0))
    again = await books.record_start("v1", start(repo="r2", at=2000.0))
    assert again.repeated
    assert again.job_id == first.job_id
    (job,) = rows(books, "SELECT * FROM jobs")
    assert (job["expected_repo_name"], job["deadline_at"], job["starts"]) == ("r2", 2000.0 + 7200, 2)
    assert job["lock_token"] == 2


async def test_another_validator_can_not_take_a_job_over(books: Books) -> None:
    await books.record_start("v1", start(repo="r1"))
    with pytest.raises(ForeignJob, match="'t1' was started by another validator"):
        await books.record_start("v2", start(repo="stolen"))
    assert rows(books, "SELECT expected_repo_name FROM jobs") == [{"expected_repo_name": "r1"}]


async def test_a_job_past_its_deadline_fails_with_its_reason(books: Books) -> None:
    await books.record_start("v1", start(at=time.time() - 7300))
    assert await books.settle(time.time()) == Freed(jobs=("t1",))
    (job,) = rows(books, "SELECT * FROM jobs")
    assert (job["state"], job["end_reason"]) == (JobState.FAILED, EndReason.DEADLINE)
    assert books.commitments().jobs == ()


async def test_a_failed_job_is_queued_again_when_the_validator_starts_it_again(books: Books) -> None:
    await books.record_start("v1", start(at=time.time() - 7300))
    await books.settle(time.time())
    again = await books.record_start("v1", start())
    assert again.state is JobState.QUEUED
    assert rows(books, "SELECT end_reason FROM jobs") == [{"end_reason": None}]


async def test_a_start_that_is_already_too_late_revives_nothing(books: Books) -> None:
    await books.record_start("v1", start(at=time.time() - 7300))
    await books.settle(time.time())
    again = await books.record_start("v1", start(at=time.time() - 7250))
    assert again.state is JobState.FAILED


async def test_a_submission_is_answered_once_there_is_one(books: Books) -> None:
    await books.record_start("v1", start())
    assert await books.submission("t1") is None
    made = MinerSubmission(repo="me/r1", model_hash="ab")
    assert await books.record_submission("t1", made)
    assert await books.submission("t1") == made
    assert not await books.record_submission("t9", made)


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
    await books.record_start("v1", start(at=time.time() - 7300))
    await books.settle(time.time())
    assert [row["kind"] for row in rows(books, "SELECT kind FROM events ORDER BY id")] == [
        "start",
        "job_failed",
    ]


async def test_the_summary_counts(books: Books) -> None:
    await books.record_offer("v1", offer("t1"), b"{}", YES, hold_seconds=60)
    await books.record_offer("v1", offer("t2"), b"{}", NO, hold_seconds=60)
    await books.record_start("v1", start("t1"))
    assert books.summary() == {"jobs": {"queued": 1}, "offers": {"accepted": 1, "refused": 1}}


def test_every_end_reason_has_its_meaning() -> None:
    assert set(MEANING) == set(EndReason)
