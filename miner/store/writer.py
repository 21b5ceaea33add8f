"""The one writer: gathers what many requests want written into one commit.

Every reply to a validator waits for its writes to be on disk (`synchronous=FULL`). One fsync per request
would cap the daemon at a few hundred requests a second; so what arrives while a commit runs is gathered,
committed together, and all those replies go out after one fsync.

The statements run on the event loop, only taking the lock and the fsync run in a thread. Statements touch
memory and take microseconds; run in a thread they would hand the interpreter's lock back and forth at
every step, and a busy loop makes each of those wait up to 5 ms (measured: half the throughput, twice the
p99). The lock and the disk are what may block, and there the loop goes on.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from core.errors import GodMinerError

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

#: Pieces in one commit. More would hold the event loop too long at a time.
MAX_BATCH = 128
#: Pieces waiting. Beyond this the disk can't follow and new requests are turned away.
MAX_PENDING = 4096


class StoreUnavailable(GodMinerError):
    """The books can't be written: disk full, locked, or too much waiting. Nothing was promised."""

    code = "store_unavailable"


class _Piece(NamedTuple):
    work: Work[Any]
    future: asyncio.Future[Any]


class Writer:
    """Runs pieces of work, each all or nothing, in the order submitted. Used from one event loop."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._connection: sqlite3.Connection | None = None
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._waiting: deque[_Piece] = deque()
        self._at_work: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop
        self.batches = 0
        self.pieces = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open the file here, so that what is wrong with it is raised to whoever starts the daemon."""
        self._connection = self._connect()
        self._loop = loop

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def submit(self, work: Work[T]) -> asyncio.Future[T]:
        """Queue `work`; the future is done once its commit is on disk.

        `work` may run twice (see `_run_one_by_one`), so it changes nothing but the database.
        """
        if self._connection is None:
            raise StoreUnavailable("the store is closed: the daemon is stopping")
        if len(self._waiting) >= MAX_PENDING:
            raise StoreUnavailable(f"{len(self._waiting)} writes are waiting for the disk; try again later")
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting.append(_Piece(work, future))
        if self._at_work is None:
            self._at_work = self._loop.create_task(self._work_off(self._connection), name="store-writer")
        return future

    async def close(self) -> None:
        """Finish what was submitted, then close the file."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._at_work is not None:
            await self._at_work
        await self._loop.run_in_executor(self._disk, connection.close)
        self._disk.shutdown()

    async def _work_off(self, connection: sqlite3.Connection) -> None:
        try:
            while self._waiting:
                await self._commit_next(connection)
        finally:
            self._at_work = None

    async def _commit_next(self, connection: sqlite3.Connection) -> None:
        batch: list[_Piece] = []
        try:
            await self._in_thread(connection, "BEGIN IMMEDIATE")
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
            results = _run_together(connection, batch) or _run_one_by_one(connection, batch)
            await self._in_thread(connection, "COMMIT")
        except sqlite3.Error as error:
            if connection.in_transaction:
                await self._in_thread(connection, "ROLLBACK")
            batch = batch or [self._waiting.popleft() for _ in range(len(self._waiting))]
            log.exception("a commit of %d writes failed", len(batch))
            told = StoreUnavailable(f"the store can't be written ({error}); free disk space or check it")
            results = [told] * len(batch)
        self.batches += 1
        self.pieces += len(batch)
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():  # the caller went away; what was written stays written
                continue
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

    async def _in_thread(self, connection: sqlite3.Connection, statement: str) -> None:
        await self._loop.run_in_executor(self._disk, connection.execute, statement)


def _run_together(connection: sqlite3.Connection, batch: list[_Piece]) -> list[Any] | None:
    """The usual case: nothing fails, and no piece needs a savepoint of its own."""
    try:
        return [work(connection) for work, _ in batch]
    except sqlite3.OperationalError:
        raise  # disk full, I/O error: SQLite may have rolled all back, so the batch fails as one
    except Exception:  # noqa: BLE001 - told to its own caller in the second run
        connection.execute("ROLLBACK")
        connection.execute("BEGIN IMMEDIATE")
        return None


def _run_one_by_one(connection: sqlite3.Connection, batch: list[_Piece]) -> list[Any]:
    """Again from the start, so that the piece that failed is undone alone and its caller alone is told."""
    results: list[Any] = []
    for work, _ in batch:
        connection.execute("SAVEPOINT piece")
        try:
            results.append(work(connection))
        except sqlite3.OperationalError:
            raise
        except Exception as error:  # noqa: BLE001 - handed to the caller, who logs it with its traceback
            results.append(error)
            connection.execute("ROLLBACK TO piece")
        connection.execute("RELEASE piece")
    return results
