import asyncio
import sqlite3
import threading
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
    gate = threading.Event()
    blocked = writer.submit(lambda connection: gate.wait(5))
    rest = [writer.submit(insert(value)) for value in range(100)]
    gate.set()
    await asyncio.gather(blocked, *rest)
    assert writer.pieces == 101
    assert writer.batches <= 3


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
    gate = threading.Event()
    taken = [writer.submit(lambda connection: gate.wait(5)) for _ in range(3)]
    with pytest.raises(StoreUnavailable, match="3 writes are waiting"):
        writer.submit(count)
    gate.set()
    await asyncio.gather(*taken)
    assert await writer.submit(count) == 0


async def test_a_caller_that_goes_away_loses_nothing_for_others(writer: Writer) -> None:
    gate = threading.Event()
    blocked = writer.submit(lambda connection: gate.wait(5))
    gone = writer.submit(insert(1))
    gone.cancel()
    gate.set()
    await blocked
    assert await writer.submit(count) == 1  # what was begun is kept


async def test_closing_finishes_what_was_submitted(writer: Writer) -> None:
    pieces = [writer.submit(insert(value)) for value in range(300)]
    await writer.close()
    assert [await piece for piece in pieces][-1] == 299
    with pytest.raises(StoreUnavailable, match="stopping"):
        writer.submit(count)


async def test_a_writer_that_dies_answers_all_that_wait(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    blocked = writer.submit(lambda connection: gate.wait(5))

    def breaks(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(writer, "_commit", breaks)
    waiting = [blocked, *(writer.submit(insert(value)) for value in range(5))]
    gate.set()
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
    assert [type(result) for result in results[1:]] == [StoreUnavailable] * 5
    assert "must be restarted" in str(results[-1])
    assert "writer failed" in caplog.text
    with pytest.raises(StoreUnavailable):
        writer.submit(count)


async def test_a_file_that_can_not_be_opened_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError):
        Writer(lambda: connect(tmp_path / "no" / "such.sqlite3")).start(asyncio.get_running_loop())
