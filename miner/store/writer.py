"""The one writer: gathers what many requests want written into one commit.

Every reply to a validator waits for its writes to be on disk (`synchronous=FULL`). One fsync per request
would cap the daemon at a few hundred requests a second; so what arrives while a commit runs is gathered,
committed together, and all those replies go out after one fsync.

The statements run on the event loop, only the fsync and waiting for a lock run in a thread. Statements touch
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
#: How long another process may hold the file's lock before writes are refused: less than a validator waits.
LOCK_SECONDS = 2.0


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
        self._busy = False
        self._scheduled = False
        self._idle = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self.batches = 0
        self.pieces = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open the file here, so that what is wrong with it is raised to whoever starts the daemon."""
        self._connection = self._connect()
        self._connection.execute("PRAGMA busy_timeout=0")  # on the loop nothing waits; see `_begin`
        self._loop = loop
        self._idle.set()

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
        if not self._busy and not self._scheduled:
            # After this round of the loop: whatever a burst of requests brings goes into one commit.
            self._scheduled = True
            self._loop.call_soon(self._begin, self._connection)
        return future

    async def close(self) -> None:
        """Finish what was submitted, then close the file."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._waiting or self._busy:
            self._idle.clear()
            await self._idle.wait()
        await self._loop.run_in_executor(self._disk, connection.close)
        self._disk.shutdown()

    # A commit is a chain of callbacks: begin, run the pieces, commit in the thread, deliver, begin again.

    def _begin(self, connection: sqlite3.Connection) -> None:
        self._scheduled = False
        if self._busy or not self._waiting:
            return
        self._busy = True
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.Error:  # mostly another process has the lock: wait for it off the loop
            self._in_thread(lambda: _wait_for_lock(connection), lambda error: self._run(connection, error))
        else:
            self._run(connection, None)

    def _run(self, connection: sqlite3.Connection, error: BaseException | None) -> None:
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
        results: list[Any] = []
        try:
            if error is not None:
                raise error
            together = _run_together(connection, batch)
            results = _run_one_by_one(connection, batch) if together is None else together
        except sqlite3.Error as failure:
            self._undo(connection, batch, failure)
        else:
            self._in_thread(
                lambda: connection.execute("COMMIT"),
                lambda failure: self._committed(connection, batch, results, failure),
            )

    def _committed(
        self,
        connection: sqlite3.Connection,
        batch: list[_Piece],
        results: list[Any],
        failure: BaseException | None,
    ) -> None:
        if failure is None:
            self._deliver(connection, batch, results)
        else:
            self._undo(connection, batch, failure)

    def _undo(self, connection: sqlite3.Connection, batch: list[_Piece], failure: BaseException) -> None:
        self._in_thread(lambda: _rollback(connection), lambda _: self._fail(connection, batch, failure))

    def _fail(self, connection: sqlite3.Connection, batch: list[_Piece], failure: BaseException) -> None:
        log.error("a commit of %d writes failed", len(batch), exc_info=failure)
        told = StoreUnavailable(f"the store can't be written ({failure}); free disk space or check it")
        self._deliver(connection, batch, [told] * len(batch))

    def _deliver(self, connection: sqlite3.Connection, batch: list[_Piece], results: list[Any]) -> None:
        self.batches += 1
        self.pieces += len(batch)
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():  # the caller went away; what was written stays written
                continue
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)
        self._busy = False
        if self._waiting:
            self._begin(connection)
        else:
            self._idle.set()

    def _in_thread(self, work: Callable[[], object], then: Callable[[BaseException | None], None]) -> None:
        def run() -> None:
            error: BaseException | None = None
            try:
                work()
            except BaseException as raised:  # noqa: BLE001 - handed on to the loop
                error = raised
            self._loop.call_soon_threadsafe(then, error)

        self._disk.submit(run)


def _wait_for_lock(connection: sqlite3.Connection) -> None:
    connection.execute(f"PRAGMA busy_timeout={int(LOCK_SECONDS * 1000)}")
    try:
        connection.execute("BEGIN IMMEDIATE")
    finally:
        connection.execute("PRAGMA busy_timeout=0")


def _rollback(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def _run_together(connection: sqlite3.Connection, batch: list[_Piece]) -> list[Any] | None:
    """The usual case: nothing fails, and no piece needs a savepoint of its own."""
    try:
        return [work(connection) for work, _ in batch]
    except Exception as error:  # told to its own caller in the second run
        if _is_of_the_file(error):
            raise  # SQLite may have rolled all back, so the batch fails as one
        connection.execute("ROLLBACK")
        connection.execute("BEGIN IMMEDIATE")
        return None


def _is_of_the_file(error: Exception) -> bool:
    """Disk full, I/O error, malformed: no piece's own fault, as a broken constraint is."""
    return isinstance(error, sqlite3.OperationalError) or type(error) is sqlite3.DatabaseError


def _run_one_by_one(connection: sqlite3.Connection, batch: list[_Piece]) -> list[Any]:
    """Again from the start, so that the piece that failed is undone alone and its caller alone is told."""
    results: list[Any] = []
    for work, _ in batch:
        connection.execute("SAVEPOINT piece")
        try:
            results.append(work(connection))
        except Exception as error:  # handed to the caller, who logs it with its traceback
            if _is_of_the_file(error):
                raise
            results.append(error)
            connection.execute("ROLLBACK TO piece")
        connection.execute("RELEASE piece")
    return results
