"""The store of one data directory, and its one writer, which commits together what many requests want.

What is written and read are functions of `offers`, `jobs`, `attempts` and `events`, each with a connection as
its first argument: `await store.write(jobs.record_submission, key, submission, now)`. Several in one function
are one transaction.

Every reply to a validator waits for its writes to be on disk (`synchronous=FULL`). One fsync per request
would cap the daemon at a few hundred requests a second, so what arrives while a commit runs is committed
together after it.

Statements run on the event loop; only the fsync and waiting for a lock run in a thread. Statements take
microseconds: in a thread they would pass the interpreter's lock back and forth at every step, and a busy
loop makes each of those wait up to 5 ms (measured: half the throughput, twice the p99).
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from miner.api.status import StoreCounts
from miner.store import database
from miner.store.database import StoreUnavailable, add_event
from miner.store.jobs import count_by_state

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

Connection = sqlite3.Connection
StoreWork = Callable[[Connection], T]

#: Writes in one commit. More would hold the event loop too long at a time.
MAX_BATCH = 128
#: Writes waiting. Beyond this the disk cannot keep up and new requests are turned away.
MAX_PENDING = 4096
#: How long another process may hold the file's lock before writes are refused: less than a validator waits.
LOCK_SECONDS = 2.0


class _PendingWork(NamedTuple):
    work: StoreWork[Any]
    future: asyncio.Future[Any]


class StoreWriter:
    """Runs pieces of work, each all or nothing, in the order submitted. Used from one event loop.

    A commit is a chain of callbacks: begin, run the work, commit in the thread, deliver the results, begin
    again.
    """

    _connection: sqlite3.Connection
    _loop: asyncio.AbstractEventLoop

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._waiting: deque[_PendingWork] = deque()
        self._is_open = self._is_scheduled = self._is_busy = False
        self._idle = asyncio.Event()
        self.batches = 0
        self.writes = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open the file now, so that an error is raised to whoever starts the daemon."""
        self._connection = self._connect()
        self._connection.execute("PRAGMA busy_timeout=0")  # nothing waits on the loop; see `_begin`
        self._loop = loop
        self._is_open = True
        self._idle.set()

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def submit(self, work: StoreWork[T]) -> asyncio.Future[T]:
        """Queue `work`; its future is done once the commit is on disk.

        `work` may run twice (see `_run_one_by_one`), so it must change nothing but the database.
        """
        if not self._is_open:
            raise StoreUnavailable("the store is closed: the daemon is stopping")
        if len(self._waiting) >= MAX_PENDING:
            raise StoreUnavailable(f"{len(self._waiting)} writes are waiting for the disk; try again later")
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting.append(_PendingWork(work, future))
        if not self._is_busy and not self._is_scheduled:
            # After this round of the loop: whatever a burst of requests brings goes into one commit.
            self._is_scheduled = True
            self._loop.call_soon(self._begin)
        return future

    async def close(self) -> None:
        """Finish what was submitted, then close the file."""
        if not self._is_open:
            return
        self._is_open = False
        if self._waiting or self._is_busy:
            self._idle.clear()
            await self._idle.wait()
        await self._loop.run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()

    def _begin(self) -> None:
        self._is_scheduled = False
        if self._is_busy or not self._waiting:
            return
        self._is_busy = True
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        except sqlite3.Error:  # usually another process has the lock: wait for it in the thread
            self._in_thread(self._wait_for_lock, self._run)
        else:
            self._run(None)

    def _wait_for_lock(self) -> None:
        self._connection.execute(f"PRAGMA busy_timeout={int(LOCK_SECONDS * 1000)}")
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        finally:
            self._connection.execute("PRAGMA busy_timeout=0")

    def _run(self, error: BaseException | None) -> None:
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
        try:
            if error is not None:
                raise error
            results = self._run_together(batch)
            if results is None:
                results = self._run_one_by_one(batch)
        except sqlite3.Error as failure:
            self._fail(batch, failure)
        else:
            delivered = results

            def committed(failure: BaseException | None) -> None:
                self._deliver(batch, delivered) if failure is None else self._fail(batch, failure)

            self._in_thread(lambda: self._connection.execute("COMMIT"), committed)

    def _run_together(self, batch: list[_PendingWork]) -> list[Any] | None:
        """Run the usual batch: nothing fails, nothing needs a savepoint. None if something failed."""
        try:
            return [work(self._connection) for work, _ in batch]
        except Exception as error:  # raised to its own caller by the second run
            if _is_file_error(error):
                raise  # SQLite may have rolled everything back, so the whole batch fails
            self._connection.execute("ROLLBACK")
            self._connection.execute("BEGIN IMMEDIATE")
            return None

    def _run_one_by_one(self, batch: list[_PendingWork]) -> list[Any]:
        """Run the batch again with savepoints: only failing work is undone, and only its caller notices."""
        results: list[Any] = []
        for work, _ in batch:
            self._connection.execute("SAVEPOINT work")
            try:
                results.append(work(self._connection))
            except Exception as error:  # passed to the caller, who logs it with its traceback
                if _is_file_error(error):
                    raise
                results.append(error)
                self._connection.execute("ROLLBACK TO work")
            self._connection.execute("RELEASE work")
        return results

    def _fail(self, batch: list[_PendingWork], failure: BaseException) -> None:
        """Roll back, and give every caller the reason."""
        error = StoreUnavailable(f"the store cannot be written ({failure}); free disk space or check it")

        def rolled_back(_: BaseException | None) -> None:
            log.error("a commit of %d writes failed", len(batch), exc_info=failure)
            self._deliver(batch, [error] * len(batch))

        self._in_thread(self._rollback, rolled_back)

    def _rollback(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def _deliver(self, batch: list[_PendingWork], results: list[Any]) -> None:
        self.batches += 1
        self.writes += len(batch)
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():  # the caller went away; its write stays
                continue
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)
        self._is_busy = False
        if self._waiting:
            self._begin()
        else:
            self._idle.set()

    def _in_thread(self, work: Callable[[], object], then: Callable[[BaseException | None], None]) -> None:
        def run() -> None:
            error: BaseException | None = None
            try:
                work()
            except BaseException as raised:  # noqa: BLE001 - passed to the loop
                error = raised
            self._loop.call_soon_threadsafe(then, error)

        self._thread.submit(run)


def _is_file_error(error: Exception) -> bool:
    """Return True if the file is at fault (disk full, I/O error), not the work (a broken constraint)."""
    return isinstance(error, sqlite3.OperationalError) or type(error) is sqlite3.DatabaseError


class Store:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = StoreWriter(self._connect)

    def _connect(self) -> Connection:
        with database.store_errors(self.path):
            return database.connect(self.path)

    def write(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Run `work` in the writer, in the order of the calls; its future is done once it is on disk."""
        return self.writer.submit(lambda connection: work(connection, *args, **kwargs))

    async def read(
        self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `query` in a thread, on a connection of its own."""
        return await asyncio.to_thread(lambda: self.read_now(query, *args, **kwargs))

    def read_now(
        self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `query` in this thread: at the start, and off the event loop."""
        with (
            database.store_errors(self.path),
            closing(database.connect_for_reading(self.path)) as connection,
        ):
            return query(connection, *args, **kwargs)

    def add_event(self, kind: str, task_id: str | None = None, **data: Any) -> asyncio.Future[None]:
        """Add an event to the operator's history."""
        return self.write(add_event, time.time(), kind, task_id, **data)

    async def summary(self) -> StoreCounts:
        """Count the jobs by state and the offers by answer."""
        return await self.read(_summary)


def _summary(connection: Connection) -> StoreCounts:
    offers = connection.execute(
        "SELECT iif(accepted, 'accepted', 'refused'), count(*) FROM offers "
        "JOIN decisions ON decisions.id = offers.decision_id GROUP BY accepted"
    )
    return StoreCounts(jobs=count_by_state(connection), offers=dict(offers.fetchall()))
