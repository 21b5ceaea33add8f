"""Books of earlier versions: what is in them is there afterwards, under the new keys."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from miner.fleet.base import HoldKind, TaskKey
from miner.store import database
from miner.store.books import Books

_FIRST_BOOKS = """
INSERT INTO offers VALUES (1, 'v1', 'held', 'DpoTask', 'a/b', 7, 2.0, 5, 100.0, 100.0, 1, x'7b7d');
INSERT INTO offers VALUES (2, 'v2', 'refused', 'DpoTask', 'a/b', 7, 2.0, 5, 100.0, 100.0, 1, x'7b7d');
INSERT INTO offers VALUES (3, 'v1', 'started', 'DpoTask', 'a/b', 7, 2.0, 5, 100.0, 100.0, 1, x'7b7d');
INSERT INTO decisions VALUES (1, 1, 'yes', NULL, '{}', '[["room", true, "free"]]', 'plain', 'h', NULL, 100.0);
INSERT INTO decisions VALUES (2, 0, 'no', NULL, '{}', '[]', 'plain', 'h', NULL, 100.0);
INSERT INTO decisions VALUES (3, 1, 'yes', NULL, '{}', '[]', 'plain', 'h', NULL, 100.0);
INSERT INTO reservations VALUES (1, 'held', 'held', '[]', 100.0, 1000.0);
INSERT INTO reservations VALUES (3, 'started', 'started', '[]', 100.0, 1000.0);
INSERT INTO jobs VALUES (9, 'started', 'v1', 'DpoTask', 'a/b', 2.0, 'r', 'queued', NULL, 200.0, 7400.0, 1,
    x'7b7d', NULL, NULL, NULL, 1, 200.0);
INSERT INTO attempts VALUES (4, 9, 1, 'docker', NULL, 'jobs/9/attempt_1', 300.0, NULL, NULL);
"""


@pytest.fixture
def first_books(tmp_path: Path) -> Path:
    path = tmp_path / database.FILE_NAME
    database.migrate(path, "0001")
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(_FIRST_BOOKS)
    return path


def test_the_first_books_are_brought_up_to_date_whole(first_books: Path) -> None:
    path = database.prepare(first_books.parent)
    with closing(database.connect(path)) as connection:
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        assert [row[0] for row in connection.execute("PRAGMA integrity_check")] == ["ok"]
        answers = connection.execute(
            "SELECT task_id, message FROM offers "
            "JOIN decisions ON decisions.id = decision_id ORDER BY task_id"
        ).fetchall()
        assert [tuple(row) for row in answers] == [("held", "yes"), ("refused", "no"), ("started", "yes")]
        job_id, attempt = connection.execute(
            "SELECT jobs.id, attempts.id FROM jobs JOIN attempts ON job_id = jobs.id"
        ).fetchone()
        assert (job_id, attempt) == (9, 4)
        connection.execute("INSERT INTO jobs SELECT * FROM jobs WHERE 0")
    taken = {one.place.hold.key: one for one in Books(path).taken()}
    held, started = taken[TaskKey("v1", "held")], taken[TaskKey("v1", "started")]
    assert (held.place.hold.kind, held.place.hold.ends_at, held.place.lapses_at) == (
        HoldKind.OFFER,
        7300.0,
        1000.0,
    )
    assert (started.place.hold.kind, started.deadline_at) == (HoldKind.JOB, 7400.0)
    assert held.place.firm


def test_two_validators_may_use_one_task_id_from_then_on(first_books: Path) -> None:
    path = database.prepare(first_books.parent)
    copy = "INSERT INTO jobs SELECT {} FROM jobs WHERE id = 9"
    with closing(database.connect(path)) as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(jobs)")]
        as_other = ", ".join({"id": "10", "validator": "'v2'"}.get(name, name) for name in columns)
        connection.execute(copy.format(as_other))
        as_same = ", ".join({"id": "11"}.get(name, name) for name in columns)
        with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
            connection.execute(copy.format(as_same))


def test_the_books_as_they_were_are_kept_beside(first_books: Path) -> None:
    database.prepare(first_books.parent)
    backup = first_books.with_name(f"{first_books.name}.before-{database.HEAD}")
    with closing(sqlite3.connect(backup)) as connection:
        assert connection.execute("SELECT count(*) FROM offers").fetchone() == (3,)
