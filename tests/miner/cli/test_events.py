from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest
from typer.testing import CliRunner

from miner.__main__ import app
from miner.cli.events import follow_events
from miner.observe.alerts import gpu_subject
from miner.store import database
from miner.store.database import add_event
from miner.store.events import EventRow, list_events
from tests.miner.offers.builders import offer
from tests.miner.offers.filled import job, store

NOON = 1_759_320_000.0


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    with store(tmp_path) as connection:
        job(connection, offer(task_id="t1"))
        job(connection, offer(task_id="t2"))
        connection.execute("DELETE FROM events")
        add_event(connection, NOON, "job_training", "t1", job_id=1)
        add_event(
            connection, NOON + 1, "attempt_ended", "t1", job_id=1, attempt=1, reason="oom", detail="step 3"
        )
        add_event(
            connection, NOON + 2, "job_failed", None, job_id=1, alert=True, text="oom, \x1b[2Jin step 3"
        )
        add_event(connection, NOON + 3, "job_cancelled", "t2", job_id=2)
        add_event(
            connection, NOON + 4, "gpu_lost", None, alert=True, text="it is gone", **gpu_subject("3").fields
        )
        add_event(connection, NOON + 5, "job_failed", None, job_id=12, alert=True, text="crashed")
    return tmp_path


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["events", *words])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), [1, 2, 3, 4, 5, 6]),
        (("--limit", "2"), [5, 6]),
        (("--alerts",), [3, 5, 6]),
        (("--kind", "job_*", "--alerts"), [3, 6]),
        (("--kind", "gpu_lost", "--kind", "attempt_ended"), [2, 5]),
        (("--job", "1"), [1, 2, 3]),
        (("--job", "t2"), [4]),
        (("--since", "2025-10-01T12:00:03Z"), [4, 5, 6]),
    ],
)
def test_events_are_chosen(data_dir: Path, words: tuple[str, ...], expected: list[int]) -> None:
    found = json.loads(run(*words, "--json"))
    first = min(one["id"] for one in json.loads(run("--json")))
    assert [one["id"] - first + 1 for one in found] == expected


def test_events_say_what_happened_to_people_and_to_programs(data_dir: Path) -> None:
    lines = run().splitlines()
    assert lines[1].split(maxsplit=3)[2:] == ["attempt_ended", "job 1: attempt 1: oom: step 3"]
    assert lines[2].split()[2:7] == ["job_failed", "ALERT:", "job", "1:", "oom,"]
    assert lines[4].split()[2:7] == ["gpu_lost", "ALERT:", "GPU", "3:", "it"]
    assert "\N{REPLACEMENT CHARACTER}[2J" in lines[2]
    assert max(map(len, lines)) <= 80
    (lost,) = json.loads(run("--kind", "gpu_lost", "--json"))
    assert (lost["at"], lost["alert"], lost["gpu"]) == ("2025-10-01T12:00:04.000Z", True, "3")


def test_following_shows_what_is_there_and_then_each_event_once(data_dir: Path) -> None:
    with closing(database.connect(data_dir / database.FILE_NAME)) as connection:

        def look(after: int) -> list[EventRow]:
            return list_events(connection, after=after)

        def wait(_seconds: float) -> None:
            add_event(connection, NOON + 9, "job_queued", "t9", job_id=9)

        shown: Iterator[EventRow] = follow_events(look, wait)
        assert [one.task_id for one in islice(shown, 8)][-3:] == [None, "t9", "t9"]
