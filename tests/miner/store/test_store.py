from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import pytest

from core.domain.errors import GodMinerError
from miner.api.status import StoreCounts
from miner.chain.nonces import insert_nonce
from miner.store.database import StoreUnavailable, connect
from miner.store.jobs import record_start
from miner.store.store import Store, StoreWriter
from tests.miner.store.rows import start_request
from tests.miner.store.test_offers import NO, YES, record


async def test_the_summary_counts(store: Store) -> None:
    await record(store, YES)
    await record(store, NO, task_id="t2")
    await store.write(record_start, "v1", start_request("t1"), 1.0)
    assert await store.summary() == StoreCounts(jobs={"queued": 1}, offers={"accepted": 1, "refused": 1})


async def test_a_reader_cannot_write(store: Store) -> None:
    with pytest.raises(Exception, match="readonly"):
        await store.read(insert_nonce, b"k" * 32, "1_a", 100.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with closing(connect(tmp_path / "x.sqlite3")) as connection:
        connection.execute("CREATE TABLE t (a INTEGER PRIMARY KEY, b BLOB)")
    return tmp_path / "x.sqlite3"


@pytest.fixture
async def writer(path: Path) -> AsyncIterator[StoreWriter]:
    writer = StoreWriter(lambda: connect(path))
    writer.start(asyncio.get_running_loop())
    yield writer
    await writer.close()


def insert(value: int, size: int = 0) -> Callable[[sqlite3.Connection], int | None]:
    statement = "INSERT INTO t VALUES (?, zeroblob(?))"
    return lambda connection: connection.execute(statement, (value, size)).lastrowid


def count(connection: sqlite3.Connection) -> int:
    return connection.execute("SELECT count(*) FROM t").fetchone()[0]


async def test_work_runs_in_the_order_submitted_and_is_on_disk_then(writer: StoreWriter, path: Path) -> None:
    first, second = writer.submit(insert(1)), writer.submit(count)
    assert (await first, await second) == (1, 1)
    with closing(connect(path)) as other:
        assert count(other) == 1  # seen by another connection: committed


async def test_work_that_waits_is_committed_together(writer: StoreWriter) -> None:
    await asyncio.gather(*(writer.submit(insert(value)) for value in range(100)))
    assert writer.writes == 100
    assert writer.batches <= 3


async def test_work_that_fails_is_undone_alone(writer: StoreWriter) -> None:
    def half(connection: sqlite3.Connection) -> None:
        insert(7)(connection)
        raise GodMinerError("no")

    good, bad, late = writer.submit(insert(1)), writer.submit(half), writer.submit(insert(2))
    assert (await good, await late) == (1, 2)
    with pytest.raises(GodMinerError, match="no"):
        await bad
    assert await writer.submit(count) == 2


async def test_a_bug_in_one_work_reaches_its_caller_only(writer: StoreWriter) -> None:
    with pytest.raises(ZeroDivisionError):
        await writer.submit(lambda connection: 1 / 0)
    with pytest.raises(sqlite3.IntegrityError):
        await asyncio.gather(writer.submit(insert(1)), writer.submit(insert(1)))
    assert await writer.submit(count) == 1


async def test_a_full_disk_fails_the_batch_and_heals(path: Path) -> None:
    def small_disk() -> sqlite3.Connection:
        connection = connect(path)
        connection.execute("PRAGMA max_page_count=8")  # SQLite's own full disk
        return connection

    writer = StoreWriter(small_disk)
    writer.start(asyncio.get_running_loop())
    with pytest.raises(StoreUnavailable, match="full"):
        await writer.submit(insert(1, size=200_000))
    await writer.submit(insert(2))
    assert await writer.submit(count) == 1
    await writer.close()


async def test_too_much_waiting_is_turned_away(writer: StoreWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miner.store.store.MAX_PENDING", 3)
    taken = [writer.submit(count) for _ in range(3)]
    with pytest.raises(StoreUnavailable, match="3 writes are waiting"):
        writer.submit(count)
    await asyncio.gather(*taken)
    assert await writer.submit(count) == 0


async def test_another_process_that_holds_the_lock_does_not_stop_the_loop(
    writer: StoreWriter, path: Path
) -> None:
    with closing(connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        waiting = writer.submit(insert(1))
        for _ in range(50):  # the loop goes on while the writer waits for the lock
            await asyncio.sleep(0)
        assert not waiting.done()
        other.execute("COMMIT")
        assert await waiting == 1


async def test_a_caller_that_goes_away_loses_nothing_for_others(writer: StoreWriter) -> None:
    gone, stays = writer.submit(insert(1)), writer.submit(insert(2))
    gone.cancel()
    assert await stays == 2
    assert await writer.submit(count) == 2  # what was begun is kept


async def test_closing_finishes_what_was_submitted(writer: StoreWriter) -> None:
    pieces = [writer.submit(insert(value)) for value in range(300)]
    await writer.close()
    assert [await piece for piece in pieces][-1] == 299
    with pytest.raises(StoreUnavailable, match="stopping"):
        writer.submit(count)


async def test_a_file_that_cannot_be_opened_is_reported_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError):
        StoreWriter(lambda: connect(tmp_path / "no" / "such.sqlite3")).start(asyncio.get_running_loop())


class Failing(sqlite3.Connection):
    """Fails as on a broken file whenever it executes `statement`."""

    statement = ""

    def execute(self, sql: str, *more: object) -> sqlite3.Cursor:
        if self.statement and sql.startswith(self.statement):
            raise sqlite3.DatabaseError("database disk image is malformed")
        return super().execute(sql, *more)


async def test_a_file_that_breaks_while_in_use_is_reported_and_nobody_waits_for_ever(path: Path) -> None:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=Failing)
    writer = StoreWriter(lambda: connection)
    writer.start(asyncio.get_running_loop())
    for number, statement in enumerate(("BEGIN", "INSERT", "COMMIT"), 1):
        connection.statement = statement
        with pytest.raises(StoreUnavailable, match="malformed"):
            await asyncio.wait_for(writer.submit(insert(number)), 60)
        connection.statement = ""
        assert await asyncio.wait_for(writer.submit(insert(number)), 60) == number
    await writer.close()
