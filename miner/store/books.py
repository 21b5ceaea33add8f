"""The books: what the daemon writes and asks, as one object per data folder.

Writes go through the one writer and are on disk when their future is done; they run in the order submitted.
The methods that return plain values read directly and are for start-up and the operator's pages.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from core.errors import GodMinerError
from core.wire import MinerSubmission, MinerTaskOffer
from miner.fleet.base import TaskKey
from miner.jobs.states import EndReason
from miner.offers.decision import Decision
from miner.offers.history import Outcome
from miner.store import database, history, jobs, offers, outcomes
from miner.store.jobs import Start, Started
from miner.store.offers import Place, Recorded, Taken
from miner.store.sql import insert_into, note
from miner.store.writer import Work, Writer

T = TypeVar("T")

_INSERT_NONCE = insert_into("nonces", ("signer", "nonce", "expires_at"))
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
        decision: Decision | None,
        place: Place | None,
        *,
        now: float,
        is_kept: bool,
        refusal_stands_for: float,
        shared: int | None = None,
        through: Submit | None = None,
    ) -> asyncio.Future[Recorded]:
        """Store an offer, its decision and the place it holds; see `offers.record`."""
        return (through or self.writer.submit)(
            lambda connection: offers.record(
                connection,
                validator,
                offer,
                raw,
                decision,
                place,
                now=now,
                is_kept=is_kept,
                refusal_stands_for=refusal_stands_for,
                shared=shared,
            )
        )

    def record_start(
        self,
        validator: str,
        start: Start,
        place: Place | None = None,
        *,
        now: float,
        decision: Decision | None = None,
        hopeless: EndReason | None = None,
        through: Submit | None = None,
    ) -> asyncio.Future[Started]:
        """Store a start, the place that its job has, and what was decided where no accepted offer was."""

        def work(connection: sqlite3.Connection) -> Started:
            started = jobs.record_start(connection, validator, start, now, hopeless=hopeless)
            if decision is not None:
                offers.record_start_decision(connection, started.job_id, decision, now)
            if place is not None and not started.state.is_over:
                offers.save_place(connection, place, None, now)
            return started

        return (through or self.writer.submit)(work)

    def submission(
        self, key: TaskKey, *, through: Submit | None = None
    ) -> asyncio.Future[MinerSubmission | None]:
        """Through the writer, so that the answer and the request's nonce are one round trip."""
        return (through or self.writer.submit)(lambda connection: jobs.submission(connection, key))

    def record_submission(self, key: TaskKey, made: MinerSubmission) -> asyncio.Future[bool]:
        now = time.time()
        return self.writer.submit(lambda connection: jobs.record_submission(connection, key, made, now))

    # Promises

    def lapse(self, keys: Collection[TaskKey], now: float) -> asyncio.Future[None]:
        """Note that the starts of these offers never came."""

        def work(connection: sqlite3.Connection) -> None:
            offers.lapse(connection, keys)
            for key in keys:
                note(connection, now, "reservation_lapsed", key.task_id)

        return self.writer.submit(work)

    def fail_late(self, now: float) -> asyncio.Future[list[TaskKey]]:
        """End the jobs past their deadline; which they were."""

        def work(connection: sqlite3.Connection) -> list[TaskKey]:
            late = jobs.fail_late(connection, now)
            for key in late:
                note(connection, now, "job_failed", key.task_id, reason=EndReason.DEADLINE)
            return late

        return self.writer.submit(work)

    def taken(self) -> list[Taken]:
        """What earlier lives of this daemon have promised."""
        with self.reading() as connection:
            open_jobs = {
                TaskKey(row[0], row[1]): row[2] for row in connection.execute(jobs.SELECT_OPEN).fetchall()
            }
            return offers.taken(connection, open_jobs)

    # History

    def note(self, kind: str, task_id: str | None = None, **data: Any) -> asyncio.Future[None]:
        """Add a line to the operator's history."""
        now = time.time()
        return self.writer.submit(lambda connection: note(connection, now, kind, task_id, **data))

    def outcomes(self, now: float, since: float = 0.0) -> list[Outcome]:
        """Jobs that have ended since, to learn from."""
        with self.reading() as connection:
            return outcomes.outcomes(connection, now, since=since)

    def prune(self, before: float) -> asyncio.Future[int]:
        """Forget some of the offers and events from before then; how many they were."""
        return self.writer.submit(lambda connection: history.prune(connection, before))

    # The operator's view

    def summary(self) -> dict[str, dict[str, int]]:
        with self.reading() as connection:
            by_state = connection.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall()
            by_answer = connection.execute(
                "SELECT accepted, count(*) FROM offers "
                "JOIN decisions ON decisions.id = offers.decision_id GROUP BY 1"
            ).fetchall()
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
