from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.domain.errors import ConfigError
from core.domain.job_states import JobState
from miner.api.offers import OfferOutcome
from miner.offers.backtest.synthetic import synthetic_offers
from miner.offers.past_offers import (
    MAX_LINE_LENGTH,
    HistoricalOffer,
    NoSuchOffer,
    OfferFilter,
    find_stored_offer,
    offer_to_line,
    read_offer_lines,
    stored_offers,
)
from miner.store import database
from miner.store.database import NoStore, open_store
from tests.doubles.each import each
from tests.miner.offers.builders import HOUR, NOON, decided, offer, policy
from tests.miner.offers.filled import VALIDATOR, answer, job, lapse, store

NO = policy(rules__max_jobs=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with offers a to f, an hour apart, one for each outcome, and g, a start without an offer."""
    with store(tmp_path) as connection:
        for number, task_id in enumerate("abcdef"):
            asked = offer(task_id=task_id)
            decision = decided(asked, NO) if task_id == "a" else None
            answer(connection, asked, NOON + number * HOUR, decision)
        lapse(connection, "b")
        job(connection, offer(task_id="d"), state=JobState.DONE)
        job(connection, offer(task_id="e"), state=JobState.FAILED)
        job(connection, offer(task_id="f"), state=JobState.TRAINING)
        refused = decided(offer(task_id="g"), NO)
        job(connection, offer(task_id="g"), state=JobState.FAILED, decision=refused)
    return tmp_path


def test_offers_are_read_oldest_first_with_their_outcome(folder: Path) -> None:
    with open_store(folder) as connection:
        offers = stored_offers(connection)
    assert [(past.offer.task_id, past.outcome.value) for past in offers] == [
        ("a", "refused"),
        ("b", "lapsed"),
        ("c", "open"),
        ("d", "published"),
        ("e", "failed"),
        ("f", "open"),
    ]
    assert [past.number for past in offers] == [1, 2, 3, 4, 5, 6]
    assert {(past.validator, past.times_seen, past.is_start) for past in offers} == {(VALIDATOR, 1, False)}
    assert offers[0].historical == HistoricalOffer(NOON, offer(task_id="a"), None, OfferOutcome.REFUSED)


def test_the_list_can_be_narrowed(folder: Path) -> None:
    with open_store(folder) as connection:

        def tasks(**how: Any) -> str:
            return "".join(past.offer.task_id for past in stored_offers(connection, OfferFilter(**how)))

        assert tasks(since=NOON + 3 * HOUR) == "def"
        assert tasks(accepted=False) == "a"
        assert tasks(accepted=True) == "bcdef"
        assert tasks(most=2) == "ef"


def test_an_offer_or_start_is_found_by_number_and_by_task_with_the_decision_that_stands(folder: Path) -> None:
    with store(folder) as connection:
        answer(connection, offer(task_id="2"), NOON + 9 * HOUR)
        answer(connection, offer(task_id="c"), NOON + 10 * HOUR, validator="5Other")
        answer(connection, offer(task_id="a"), NOON + 20 * HOUR)
    with open_store(folder) as connection:
        by_number = find_stored_offer(connection, "3")
        assert by_number.decision == decided(offer(task_id="c"), now=NOON + 2 * HOUR)
        assert by_number.decided_at == by_number.received_at == NOON + 2 * HOUR
        assert find_stored_offer(connection, "2").offer.task_id == "2"  # a task's own id comes first
        assert find_stored_offer(connection, "c").validator == "5Other"  # the newer one
        again = find_stored_offer(connection, "a")
        assert again.decision.accepted
        assert (again.times_seen, again.received_at, again.decided_at) == (2, NOON, NOON + 20 * HOUR)
        start = find_stored_offer(connection, "g")
        assert (start.is_start, start.outcome) == (True, OfferOutcome.FAILED)
        assert start.decision.failed[0].rule == "jobs"
        for wrong in ("99", "nope", "9" * 40, "-1", "' OR 1=1"):
            with pytest.raises(NoSuchOffer, match="offers list"):
                find_stored_offer(connection, wrong)


def test_a_missing_or_older_store_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoStore, match="the daemon creates it"), open_store(tmp_path):
        pass
    assert not (tmp_path / database.FILE_NAME).exists()
    with store(tmp_path):
        pass
    monkeypatch.setattr(database, "SCHEMA_VERSION", database.SCHEMA_VERSION + 1)
    with pytest.raises(NoStore, match="brings an older store up to date"), open_store(tmp_path):
        pass


def test_reading_does_not_wait_for_a_daemon_that_writes(folder: Path) -> None:
    with store(folder) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DELETE FROM reservations")
        with open_store(folder) as other:
            assert len(stored_offers(other)) == 6
        connection.execute("ROLLBACK")


def test_offers_come_back_from_their_lines_as_they_were() -> None:
    offers = list(synthetic_offers(3, days=2, per_day=30, start=NOON))
    offers.append(HistoricalOffer(NOON + 99 * HOUR, offer(), None, OfferOutcome.FAILED))
    assert read_offer_lines(map(offer_to_line, offers), "x.jsonl") == offers


def test_an_offer_with_a_date_is_enough_and_order_does_not_matter() -> None:
    late, early = '"received_at": "2025-10-02T00:00:00"', '"received_at": "2025-10-01T12:00:00Z"'
    rest = '"model": "a/b-7b", "hours_to_complete": 2, "task_id": "t", "task_type": "DpoTask", "new_key": 1'
    offers = read_offer_lines([f"{{{late}, {rest}}}", "", f"{{{early}, {rest}}}"], "x.jsonl")
    assert [past.at for past in offers] == [NOON, NOON + 12 * 3600]


@each(
    ("line", "said"),
    [
        ("{}", "received_at: Field required"),
        ("not json", "JSON"),
        (json.dumps({"model": "x" * MAX_LINE_LENGTH}), "longer than"),
        ('{"received_at": "yesterday"}', "received_at: Value error"),
        ('{"received_at": -1}', "received_at"),
    ],
)
def test_a_bad_line_is_reported_with_its_number(line: str, said: str) -> None:
    good = offer_to_line(HistoricalOffer(NOON, offer()))
    with pytest.raises(ConfigError) as caught:
        read_offer_lines([good, line], "mine.jsonl")
    (problem,) = caught.value.problems
    assert problem.where == "mine.jsonl:2"
    assert said in problem.rule


@given(
    st.text(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: st.dictionaries(st.sampled_from(["received_at", "model", "rows", "task_type"]), inner),
        max_leaves=5,
    ).map(json.dumps)
)
def test_any_line_is_an_offer_or_a_reported_problem(line: str) -> None:
    with contextlib.suppress(ConfigError):
        assert len(read_offer_lines([line], "x")) <= 1
