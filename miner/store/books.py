"""The books: what the daemon writes and asks, as one object per data folder.

Writes go through the one writer and are on disk when their future is done; they run in the order submitted.
The methods that return plain values read directly and are for start-up and the operator's pages.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from core.errors import GodMinerError
from core.wire import MinerSubmission, MinerTaskOffer
from miner.offers.decision import Decision
from miner.store import database, jobs, offers, schema
from miner.store.jobs import Start, Started
from miner.store.offers import Recorded
from miner.store.sql import insert_into, note
from miner.store.writer import Work, Writer

T = TypeVar("T")

_INSERT_NONCE = insert_into(schema.Nonce)
#: Half a million expired nonces, as after a busy hour and a restart, would hold the event loop for a second.
NONCES_DROPPED_AT_ONCE = 5000
_DROP_NONCES = (
    "DELETE FROM nonces WHERE (signer, nonce) IN "
    "(SELECT signer, nonce FROM nonces WHERE expires_at <= ? ORDER BY expires_at LIMIT ?)"
)


class Submit(Protocol):
    """How a piece of work gets to the writer."""

    def __call__(self, work: Work[T], /) -> asyncio.Future[T]: ...


class NonceUsed(GodMinerError):
    code = "nonce_used"


def insert_nonce(connection: sqlite3.Connection, signer: bytes, nonce: str, expires_at: float) -> None:
    try:
        connection.execute(_INSERT_NONCE, (signer, nonce, expires_at))
    except sqlite3.IntegrityError:
        raise NonceUsed("this nonce was used before; every request needs a new one") from None


@dataclass(frozen=True, slots=True)
class Commitment:
    task_id: str
    until: float


@dataclass(frozen=True, slots=True)
class Commitments:
    """What is promised: jobs until their deadline, held offers until they lapse."""

    jobs: tuple[Commitment, ...]
    holds: tuple[Commitment, ...]


@dataclass(frozen=True, slots=True)
class Freed:
    """Tasks that nobody holds any more, and those whose job has ended."""

    holds: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()


class Books:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = Writer(self._connect)

    def _connect(self) -> sqlite3.Connection:
        with database.failures_told(self.path):
            return database.connect(self.path)

    # Nonces

    def save_nonce(self, signer: bytes, nonce: str, expires_at: float) -> asyncio.Future[None]:
        return self.writer.submit(lambda connection: insert_nonce(connection, signer, nonce, expires_at))

    def drop_nonces(self, now: float) -> asyncio.Future[int]:
        """The oldest of those that expired; how many they were."""
        return self.writer.submit(
            lambda connection: connection.execute(_DROP_NONCES, (now, NONCES_DROPPED_AT_ONCE)).rowcount
        )

    def live_nonces(self, now: float) -> list[tuple[bytes, str, float]]:
        with self.reading() as connection:
            rows = connection.execute(
                "SELECT signer, nonce, expires_at FROM nonces WHERE expires_at > ?", (now,)
            )
            return [(row["signer"], row["nonce"], row["expires_at"]) for row in rows]

    # Offers and jobs

    def record_offer(
        self,
        validator: str,
        offer: MinerTaskOffer,
        raw: bytes,
        decision: Decision,
        *,
        hold_seconds: float,
        through: Submit | None = None,
    ) -> asyncio.Future[Recorded]:
        """Store an offer, its decision and the place it holds. A repeat keeps the first answer."""
        now = time.time()
        return (through or self.writer.submit)(
            lambda connection: offers.record(
                connection, validator, offer, raw, decision, now=now, hold_seconds=hold_seconds
            )
        )

    def record_start(
        self, validator: str, start: Start, *, through: Submit | None = None
    ) -> asyncio.Future[Started]:
        now = time.time()

        def work(connection: sqlite3.Connection) -> Started:
            started = jobs.record_start(connection, validator, start, now)
            offers.started(connection, validator, start.task_id)
            return started

        return (through or self.writer.submit)(work)

    def submission(
        self, task_id: str, *, through: Submit | None = None
    ) -> asyncio.Future[MinerSubmission | None]:
        """Through the writer, so that the answer and the request's nonce are one round trip."""
        return (through or self.writer.submit)(lambda connection: jobs.submission(connection, task_id))

    def record_submission(self, task_id: str, made: MinerSubmission) -> asyncio.Future[bool]:
        now = time.time()
        return self.writer.submit(lambda connection: jobs.record_submission(connection, task_id, made, now))

    # Promises

    def settle(self, now: float) -> asyncio.Future[Freed]:
        """End what time has ended: holds without a start, jobs past their deadline."""

        def work(connection: sqlite3.Connection) -> Freed:
            lapsed, late = offers.lapse(connection, now), jobs.fail_late(connection, now)
            for task_id in lapsed:
                note(connection, now, "reservation_lapsed", task_id)
            for task_id in late:
                note(connection, now, "job_failed", task_id, reason="deadline")
            return Freed(holds=tuple(lapsed), jobs=tuple(late))

        return self.writer.submit(work)

    def commitments(self) -> Commitments:
        with self.reading() as connection:
            open_jobs = connection.execute(jobs.SELECT_OPEN).fetchall()
            holds = offers.held(connection)
        return Commitments(
            tuple(Commitment(*row) for row in open_jobs),
            tuple(Commitment(*entry) for entry in holds.items()),
        )

    # The operator's view

    def summary(self) -> dict[str, dict[str, int]]:
        with self.reading() as connection:
            by_state = connection.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall()
            by_answer = connection.execute("SELECT accepted, count(*) FROM decisions GROUP BY 1").fetchall()
        return {
            "jobs": {row[0]: row[1] for row in by_state},
            "offers": {"accepted" if row[0] else "refused": row[1] for row in by_answer},
        }

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with (
            database.failures_told(self.path),
            closing(database.connect_for_reading(self.path)) as connection,
        ):
            yield connection
