"""The one writer: a thread that commits many small pieces of work at once.

Every reply to a validator waits for its writes to be on disk (`synchronous=FULL`). One fsync per request
would cap the daemon at a few hundred requests a second; so the work that arrives while a commit runs is
gathered and committed together, and all those replies go out after one fsync. SQLite has one writer
anyway, so a second thread would only wait for locks.

Each piece runs under its own savepoint: one that fails is undone alone and its caller alone is told.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from core.errors import GodMinerError

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

#: Pieces in one commit. More would only make the first of them wait longer.
MAX_BATCH = 256
#: Pieces waiting. Beyond this the disk can't follow and new requests are turned away.
MAX_PENDING = 4096


class StoreUnavailable(GodMinerError):
    """The books can't be written: disk full, read-only, or too much waiting. Nothing was promised."""

    code = "store_unavailable"


@dataclass
class _Piece:
    work: Work[Any]
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = field(default=None)


class Writer:
    """Runs pieces of work in the writer thread; `submit` is called on the event loop."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._queue: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: sqlite3.Connection
        self._at_work: list[_Piece] = []
        self._pending = 0
        self._closed = False
        self.batches = 0
        self.pieces = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open the file here, so that what is wrong with it is raised to whoever starts the daemon."""
        self._connection = self._connect()
        self._loop = loop
        self._thread.start()

    @property
    def pending(self) -> int:
        return self._pending

    def submit(self, work: Work[T]) -> asyncio.Future[T]:
        """Queue `work`; the future is done once its commit is on disk. Pieces run in the order submitted."""
        if self._loop is None or self._closed:
            raise StoreUnavailable("the store is closed: the daemon is stopping")
        if self._pending >= MAX_PENDING:
            raise StoreUnavailable(f"{self._pending} writes are waiting for the disk; try again later")
        future: asyncio.Future[T] = self._loop.create_future()
        self._pending += 1
        self._queue.put(_Piece(work, future))
        return future

    async def close(self) -> None:
        """Finish what was submitted, then stop the thread."""
        if self._closed or self._loop is None:
            return
        self._closed = True
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.sleep(0)  # let the last results reach their futures

    def _run(self) -> None:
        try:
            while (batch := self._gather()) is not None:
                self._commit(self._connection, batch)
                self.batches += 1
                self.pieces += len(batch)
                self._send(batch)
        except BaseException:
            # A thread that dies in silence would leave every later request waiting for ever.
            log.critical("the store's writer failed; nothing is accepted until a restart", exc_info=True)
            self._closed = True
            self._turn_away()
        finally:
            self._connection.close()

    def _send(self, batch: list[_Piece]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._deliver, batch)
        except RuntimeError:  # the loop is gone: nobody waits for these results any more
            log.warning("the event loop closed before %d results could be delivered", len(batch))

    def _turn_away(self) -> None:
        """Answer all that still waits, the batch that was at work included."""
        while (batch := self._at_work or self._gather_now()) != []:
            for piece in batch:
                piece.error = StoreUnavailable("the store's writer failed; the daemon must be restarted")
            self._at_work = []
            self._send(batch)

    def _gather(self) -> list[_Piece] | None:
        """What waits, at least one piece; None when there is nothing more to come."""
        first = self._queue.get()
        if first is None:
            return None
        self._at_work = [first, *self._gather_now()]
        return self._at_work

    def _gather_now(self) -> list[_Piece]:
        batch: list[_Piece] = []
        while len(batch) < MAX_BATCH:
            try:
                piece = self._queue.get_nowait()
            except queue.Empty:
                break
            if piece is None:
                self._queue.put(None)  # stop after this batch
                break
            batch.append(piece)
        return batch

    def _commit(self, connection: sqlite3.Connection, batch: list[_Piece]) -> None:
        try:
            connection.execute("BEGIN IMMEDIATE")
            for piece in batch:
                self._run_piece(connection, piece)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            log.exception("a commit of %d writes failed", len(batch))
            for piece in batch:
                piece.error = StoreUnavailable(
                    f"the store can't be written ({error}); free disk space or check it"
                )

    @staticmethod
    def _run_piece(connection: sqlite3.Connection, piece: _Piece) -> None:
        connection.execute("SAVEPOINT piece")
        try:
            piece.result = piece.work(connection)
        except GodMinerError as error:
            piece.error = error
            connection.execute("ROLLBACK TO piece")
        except sqlite3.OperationalError:
            raise  # disk full, I/O error: SQLite may have rolled all back, so the batch fails as one
        except Exception as error:  # noqa: BLE001 - handed to the caller, who logs it with its traceback
            piece.error = error
            connection.execute("ROLLBACK TO piece")
        connection.execute("RELEASE piece")

    def _deliver(self, batch: list[_Piece]) -> None:
        self._pending -= len(batch)
        for piece in batch:
            if piece.future.done():  # the caller went away; what was written stays written
                continue
            if piece.error is not None:
                piece.future.set_exception(piece.error)
            else:
                piece.future.set_result(piece.result)
