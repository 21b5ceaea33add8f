from __future__ import annotations

from pathlib import Path

import pytest

from miner.jobs.states import JobState
from miner.offers.offered import Known
from miner.offers.reading import NoBooks, NoSuchOffer, reading, stored_offer, stored_offers
from miner.store import database
from tests.miner.offers.builders import HOUR, NOON, decided, offer, policy
from tests.miner.offers.filled import VALIDATOR, answer, books, job, lapse

NO = policy(rules__max_jobs=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Offers a to f, an hour apart, one for each thing that can become of one."""
    with books(tmp_path) as connection:
        for number, task_id in enumerate("abcdef"):
            asked = offer(task_id=task_id)
            decision = decided(asked, NO) if task_id == "a" else None
            answer(connection, asked, NOON + number * HOUR, decision)
        lapse(connection, "b")
        job(connection, offer(task_id="d"), state=JobState.DONE)
        job(connection, offer(task_id="e"), state=JobState.FAILED)
        job(connection, offer(task_id="f"), state=JobState.TRAINING)
    return tmp_path


def test_offers_are_read_oldest_first_with_their_end(folder: Path) -> None:
    with reading(folder) as connection:
        found = stored_offers(connection)
    assert [(one.offer.task_id, one.known) for one in found] == [
        ("a", Known.REFUSED),
        ("b", Known.LAPSED),
        ("c", Known.OPEN),
        ("d", Known.PUBLISHED),
        ("e", Known.FAILED),
        ("f", Known.OPEN),
    ]
    assert [one.number for one in found] == [1, 2, 3, 4, 5, 6]
    assert {(one.validator, one.times_seen, one.is_start) for one in found} == {(VALIDATOR, 1, False)}
    assert found[0].offered.known is Known.REFUSED
    assert found[0].offer == offer(task_id="a")


def test_a_decision_is_read_as_it_was_made(folder: Path) -> None:
    with reading(folder) as connection:
        found = stored_offer(connection, "c")
    assert found.decision == decided(offer(task_id="c"), now=NOON + 2 * HOUR)
    assert found.decided_at == found.received_at == NOON + 2 * HOUR


def test_the_list_can_be_narrowed(folder: Path) -> None:
    with reading(folder) as connection:

        def tasks(**how: object) -> str:
            return "".join(one.offer.task_id for one in stored_offers(connection, **how))  # type: ignore[arg-type]

        assert tasks(since=NOON + 3 * HOUR) == "def"
        assert tasks(accepted=False) == "a"
        assert tasks(accepted=True) == "bcdef"
        assert tasks(most=2) == "ef"


def test_an_offer_is_found_by_number_and_by_task(folder: Path) -> None:
    with books(folder) as connection:
        answer(connection, offer(task_id="2"), NOON + 9 * HOUR)
        answer(connection, offer(task_id="c"), NOON + 10 * HOUR, validator="5Other")
    with reading(folder) as connection:
        assert stored_offer(connection, "3").offer.task_id == "c"
        assert stored_offer(connection, "2").offer.task_id == "2"  # a task's own name comes first
        assert stored_offer(connection, "c").validator == "5Other"  # the newer one
        for wrong in ("99", "nope", "9" * 40, "-1", "' OR 1=1"):
            with pytest.raises(NoSuchOffer, match="offers list"):
                stored_offer(connection, wrong)


def test_a_start_that_was_judged_without_an_offer_is_found_by_its_task(folder: Path) -> None:
    asked = offer(task_id="g")
    with books(folder) as connection:
        number = job(connection, asked, state=JobState.FAILED, decision=decided(asked, NO))
    with reading(folder) as connection:
        found = stored_offer(connection, "g")
        assert (found.is_start, found.number, found.known) == (True, number, Known.FAILED)
        assert found.decision.failed[0].rule == "jobs"
        assert "g" not in {one.offer.task_id for one in stored_offers(connection)}


def test_of_an_offer_asked_twice_the_answer_that_stands_is_read(folder: Path) -> None:
    with books(folder) as connection:
        answer(connection, offer(task_id="a"), NOON + 20 * HOUR)
    with reading(folder) as connection:
        found = stored_offer(connection, "a")
    assert found.decision.accepted
    assert (found.times_seen, found.received_at, found.decided_at) == (2, NOON, NOON + 20 * HOUR)


def test_without_books_of_this_version_it_is_said_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NoBooks, match="the daemon makes it"), reading(tmp_path):
        pass
    assert not (tmp_path / database.FILE_NAME).exists()
    with books(tmp_path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0000'")
    with pytest.raises(NoBooks, match="brings older books up to date"), reading(tmp_path):
        pass


def test_reading_does_not_wait_for_a_daemon_that_writes(folder: Path) -> None:
    with books(folder) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DELETE FROM reservations")
        with reading(folder) as other:
            assert len(stored_offers(other)) == 6
        connection.execute("ROLLBACK")
