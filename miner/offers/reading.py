"""Offers as they stand in the books, with what was decided and what became of them. Reads, never writes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from core.errors import GodMinerError
from core.tasks import TaskType
from core.wire import MinerTaskOffer
from miner.jobs.states import JobState, ReservationState
from miner.offers.decision import Decision
from miner.offers.offered import Known, Offered
from miner.offers.record import decision_from
from miner.store import database


class NoSuchOffer(GodMinerError):
    code = "no_such_offer"


class NoBooks(GodMinerError):
    code = "no_books"


class StoredOffer(NamedTuple):
    #: In the books: of the offer, or of the job for a start that no accepted offer went before.
    number: int
    validator: str
    received_at: float
    times_seen: int
    offer: MinerTaskOffer
    decision: Decision
    decided_at: float
    known: Known
    #: Not an offer but a start, judged as one.
    is_start: bool

    @property
    def offered(self) -> Offered:
        return Offered(self.received_at, self.offer, None, self.known)


_DECISION = """
decisions.accepted, decisions.message, decisions.score, decisions.factors, decisions.reasons,
decisions.details, decisions.policy, decisions.policy_hash, decisions.profile_hash, decisions.decided_at
"""
_OFFERS = f"""
SELECT offers.id AS number, offers.validator, offers.task_id, offers.task_type, offers.model, offers.params,
    offers.hours, offers.ds_size, offers.received_at, offers.times_seen, 0 AS is_start,
    reservations.state AS held, jobs.state AS job, {_DECISION}
FROM offers
JOIN decisions ON decisions.id = offers.decision_id
LEFT JOIN reservations ON (reservations.validator, reservations.task_id) = (offers.validator, offers.task_id)
LEFT JOIN jobs ON (jobs.validator, jobs.task_id) = (offers.validator, offers.task_id)
"""  # noqa: S608 - ours
_STARTS = f"""
SELECT jobs.id AS number, jobs.validator, jobs.task_id, jobs.task_type, jobs.model, NULL AS params,
    jobs.hours, NULL AS ds_size, jobs.started_at AS received_at, jobs.starts AS times_seen, 1 AS is_start,
    NULL AS held, jobs.state AS job, {_DECISION}
FROM jobs JOIN decisions ON decisions.job_id = jobs.id
"""  # noqa: S608 - ours


@contextmanager
def reading(data_dir: Path) -> Iterator[sqlite3.Connection]:
    """The books of a data folder, beside a daemon that may be running."""
    path = data_dir / database.FILE_NAME
    version = database.schema_version(path)
    if version is None:
        raise NoBooks(f"{path} is not there; the daemon makes it at its first start, or set DATA_DIR")
    if version != database.HEAD:
        raise NoBooks(
            f"{path} has schema {version}, this version reads {database.HEAD}; "
            "the daemon brings older books up to date when it starts"
        )
    with database.failures_told(path), closing(database.connect_for_reading(path)) as connection:
        yield connection


def stored_offers(
    connection: sqlite3.Connection,
    *,
    since: float = 0.0,
    accepted: bool | None = None,
    most: int | None = None,
) -> list[StoredOffer]:
    """With the answer that stands, oldest first; of more than `most` the newest."""
    only = "" if accepted is None else f"AND decisions.accepted = {int(accepted)} "
    rows = connection.execute(
        f"{_OFFERS} WHERE offers.received_at >= ? {only}ORDER BY offers.received_at DESC LIMIT ?",
        (since, -1 if most is None else most),
    ).fetchall()
    return [one for row in reversed(rows) for one in _stored(row)]


def stored_offer(connection: sqlite3.Connection, which: str) -> StoredOffer:
    """By its number in the list, or by the task's id; of several validators' with that id the newest. A task
    that was never offered, or whose offer was refused, may have been started and judged then: that counts."""
    number = int(which) if which.isdecimal() and len(which) < 18 else -1
    rows = [
        connection.execute(
            f"{_STARTS} WHERE jobs.task_id = ? ORDER BY decisions.decided_at DESC LIMIT 1", (which,)
        ).fetchone(),
        connection.execute(
            f"{_OFFERS} WHERE offers.task_id = ? OR offers.id = ? "
            "ORDER BY offers.task_id = ? DESC, offers.received_at DESC LIMIT 1",
            (which, number, which),
        ).fetchone(),
    ]
    found = [one for row in rows if row is not None for one in _stored(row)]
    if not found:
        raise NoSuchOffer(f"no offer has the number or the task id {which!r}; see god-miner offers list")
    return max(found, key=lambda one: one.decided_at)


def _stored(row: sqlite3.Row) -> Iterator[StoredOffer]:
    try:
        task_type = TaskType(row["task_type"])
    except ValueError:  # of a version that knew more types
        return
    offer = MinerTaskOffer(
        model=row["model"],
        hours_to_complete=row["hours"],
        task_id=row["task_id"],
        task_type=task_type,
        ds_size=row["ds_size"],
        model_params_count=row["params"],
    )
    yield StoredOffer(
        number=row["number"],
        validator=row["validator"],
        received_at=row["received_at"],
        times_seen=row["times_seen"],
        offer=offer,
        decision=decision_from(row, row["details"]),
        decided_at=row["decided_at"],
        known=_known(row),
        is_start=bool(row["is_start"]),
    )


def _known(row: sqlite3.Row) -> Known:
    if row["job"] == JobState.DONE:
        return Known.PUBLISHED
    if row["job"] == JobState.FAILED:
        return Known.FAILED
    if row["job"] is not None:
        return Known.OPEN
    if not row["accepted"]:
        return Known.REFUSED
    return Known.LAPSED if row["held"] == ReservationState.LAPSED else Known.OPEN
