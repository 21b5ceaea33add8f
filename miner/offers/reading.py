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
from miner.offers.history import Outcome
from miner.offers.record import decision_from
from miner.offers.replay import Known
from miner.offers.stream import Offered
from miner.store import database
from miner.store.outcomes import outcomes


class NoSuchOffer(GodMinerError):
    code = "no_such_offer"


class NoBooks(GodMinerError):
    code = "no_books"


class StoredOffer(NamedTuple):
    id: int
    validator: str
    received_at: float
    times_seen: int
    offer: MinerTaskOffer
    decision: Decision
    known: Known

    @property
    def offered(self) -> Offered:
        return Offered(self.received_at, self.offer)


#: How a job is told apart by the validator who named the task.
_SELECT = """
SELECT offers.*, decisions.*, reservations.state AS held, jobs.state AS job
FROM offers
JOIN decisions ON decisions.offer_id = offers.id
LEFT JOIN reservations ON reservations.offer_id = offers.id
LEFT JOIN jobs ON jobs.task_id = offers.task_id AND jobs.validator = offers.validator
"""


@contextmanager
def reading(data_dir: Path) -> Iterator[sqlite3.Connection]:
    """The books of a data folder, beside a daemon that may be running."""
    path = data_dir / database.FILE_NAME
    if not path.exists():
        raise NoBooks(f"{path} is not there; the daemon makes it at its first start, or set DATA_DIR")
    with database.failures_told(path), closing(database.connect_for_reading(path)) as connection:
        yield connection


def stored_offers(
    connection: sqlite3.Connection,
    *,
    since: float = 0.0,
    accepted: bool | None = None,
    most: int | None = None,
) -> list[StoredOffer]:
    """Oldest first; of more than `most` the newest."""
    only = "" if accepted is None else f"AND decisions.accepted = {int(accepted)} "
    rows = connection.execute(
        f"{_SELECT} WHERE offers.received_at >= ? {only}ORDER BY offers.received_at DESC LIMIT ?",
        (since, -1 if most is None else most),
    ).fetchall()
    return [one for row in reversed(rows) for one in _stored(row)]


def stored_offer(connection: sqlite3.Connection, which: str) -> StoredOffer:
    """By its number in the list, or by the task's id; of several validators' with that id the newest."""
    number = int(which) if which.isdecimal() and len(which) < 18 else -1
    row = connection.execute(
        f"{_SELECT} WHERE offers.task_id = ? OR offers.id = ? "
        "ORDER BY offers.task_id = ? DESC, offers.received_at DESC LIMIT 1",
        (which, number, which),
    ).fetchone()
    found = next(_stored(row), None) if row else None
    if found is None:
        raise NoSuchOffer(f"no offer has the number or the task id {which!r}; see god-miner offers list")
    return found


def known_outcomes(connection: sqlite3.Connection, now: float) -> list[Outcome]:
    return outcomes(connection, now)


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
    details = row["details"] if "details" in row.keys() else ""  # noqa: SIM118 - a Row is no mapping
    yield StoredOffer(
        row["id"],
        row["validator"],
        row["received_at"],
        row["times_seen"],
        offer,
        decision_from(row, details),
        _known(row),
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
