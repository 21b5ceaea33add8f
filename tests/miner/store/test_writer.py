import asyncio
import sqlite3
from pathlib import Path

import pytest

from core.errors import GodMinerError
from miner.store import writer as writing
from miner.store.database import connect
from miner.store.writer import StoreUnavailable, Writer


@pytest.fixture
async def writer(tmp_path: Path):
    path = tmp_path / "x.sqlite3"
    connect(path).execute("CREATE TABLE t (a INTEGER PRIMARY KEY)").connection.close()
    made = Writer(lambda: connect(path))
    made.start(asyncio.get_running_loop())
    yield made
    await made.close()


def insert(value: int):
    return lambda connection: connection.execute("INSERT INTO t VALUES (?)", (value,)).lastrowid


def count(connection: sqlite3.Connection) -> int:
    return connection.execute("SELECT count(*) FROM t").fetchone()[0]


async def test_work_runs_in_the_order_submitted_and_answers(writer: Writer) -> None:
    first, second = writer.submit(insert(1)), writer.submit(count)
    assert (await first, await second) == (1, 1)


async def test_work_that_waits_is_committed_together(writer: Writer) -> None:
    await asyncio.gather(*(writer.submit(insert(value)) for value in range(100)))
    assert writer.pieces == 100
    assert writer.batches <= 3


async def test_what_a_reply_waits_for_is_on_disk(writer: Writer, tmp_path: Path) -> None:
    await writer.submit(insert(1))
    assert count(connect(tmp_path / "x.sqlite3")) == 1  # seen by another connection: committed


async def test_a_piece_that_fails_is_undone_alone(writer: Writer) -> None:
    def half(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO t VALUES (7)")
        raise GodMinerError("no")

    good, bad, late = writer.submit(insert(1)), writer.submit(half), writer.submit(insert(2))
    assert (await good, await late) == (1, 2)
    with pytest.raises(GodMinerError, match="no"):
        await bad
    assert await writer.submit(count) == 2


async def test_a_bug_in_a_piece_reaches_its_caller_only(writer: Writer) -> None:
    with pytest.raises(ZeroDivisionError):
        await writer.submit(lambda connection: 1 / 0)
    with pytest.raises(sqlite3.IntegrityError):
        await asyncio.gather(writer.submit(insert(1)), writer.submit(insert(1)))
    assert await writer.submit(count) == 1


async def test_a_full_disk_fails_the_batch_and_heals(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite3"
    connect(path).execute("CREATE TABLE t (a BLOB)").connection.close()

    def small_disk() -> sqlite3.Connection:
        connection = connect(path)
        connection.execute("PRAGMA max_page_count=8")  # SQLite's own full disk
        return connection

    writer = Writer(small_disk)
    writer.start(asyncio.get_running_loop())
    fat = writer.submit(lambda connection: connection.execute("INSERT INTO t VALUES (zeroblob(200000))"))
    with pytest.raises(StoreUnavailable, match="full"):
        await fat
    await writer.submit(lambda connection: connection.execute("INSERT INTO t VALUES ('thin')"))
    assert await writer.submit(count) == 1
    await writer.close()


async def test_too_much_waiting_is_turned_away(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_PENDING", 3)
    taken = [writer.submit(count) for _ in range(3)]
    with pytest.raises(StoreUnavailable, match="3 writes are waiting"):
        writer.submit(count)
    await asyncio.gather(*taken)
    assert await writer.submit(count) == 0


async def test_another_process_that_holds_the_lock_does_not_stop_the_loop(
    writer: Writer, tmp_path: Path
) -> None:
    other = connect(tmp_path / "x.sqlite3")
    other.execute("BEGIN IMMEDIATE")
    waiting = writer.submit(insert(1))
    turns = 0
    while turns < 50:  # the loop goes round while the writer waits for the lock
        await asyncio.sleep(0)
        turns += 1
    assert not waiting.done()
    other.execute("COMMIT")
    assert await waiting == 1
    other.close()


async def test_a_caller_that_goes_away_loses_nothing_for_others(writer: Writer) -> None:
    gone, stays = writer.submit(insert(1)), writer.submit(insert(2))
    gone.cancel()
    assert await stays == 2
    assert await writer.submit(count) == 2  # what was begun is kept


async def test_closing_finishes_what_was_submitted(writer: Writer) -> None:
    pieces = [writer.submit(insert(value)) for value in range(300)]
    await writer.close()
    assert [await piece for piece in pieces][-1] == 299
    with pytest.raises(StoreUnavailable, match="stopping"):
        writer.submit(count)


async def test_a_file_that_can_not_be_opened_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError):
        Writer(lambda: connect(tmp_path / "no" / "such.sqlite3")).start(asyncio.get_running_loop())


class Failing(sqlite3.Connection):
    """Says that the file is broken whenever it is to do `what`."""

    what = ""

    def execute(self, sql: str, *more: object) -> sqlite3.Cursor:
        if self.what and sql.startswith(self.what):
            raise sqlite3.DatabaseError("database disk image is malformed")
        return super().execute(sql, *more)


@pytest.mark.parametrize("what", ["BEGIN", "INSERT", "COMMIT"])
async def test_a_file_that_breaks_while_in_use_is_told_and_nobody_waits_for_ever(
    tmp_path: Path, what: str
) -> None:
    path = tmp_path / "x.sqlite3"
    connect(path).execute("CREATE TABLE t (a INTEGER PRIMARY KEY)").connection.close()
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=Failing)
    made = Writer(lambda: connection)
    made.start(asyncio.get_running_loop())
    connection.what = what
    with pytest.raises(StoreUnavailable, match="malformed"):
        await asyncio.wait_for(made.submit(insert(1)), 60)
    connection.what = ""
    assert await asyncio.wait_for(made.submit(insert(2)), 60) == 2
    await made.close()
