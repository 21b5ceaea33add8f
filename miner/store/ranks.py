"""The miner's place in the subnet over time, a row per change and per hour, kept for good; and reports
that were sent."""

from __future__ import annotations

import sqlite3

from miner.api.reports import Rank
from miner.store.database import insert_row

#: Interval after which a row is added even if nothing has changed.
HOUR = 3600.0


def record_rank(connection: sqlite3.Connection, row: Rank) -> bool:
    """Add a row, unless the newest says the same and is less than an hour old; return whether it did."""
    last = newest_rank(connection, row.at)  # a clock that was ahead has left rows which are not over yet
    if last is not None and (row.at == last.at or (not row.differs(last) and row.at - last.at < HOUR)):
        return False
    insert_row(connection, "ranks", **row.model_dump())
    return True


def newest_rank(connection: sqlite3.Connection, until: float | None = None) -> Rank | None:
    """Return the place at a moment, by default now: the newest row up to then."""
    row = connection.execute(
        "SELECT * FROM ranks WHERE at <= ? ORDER BY at DESC LIMIT 1",
        (float("inf") if until is None else until,),
    ).fetchone()
    return None if row is None else Rank(**row)


def ranks_between(connection: sqlite3.Connection, begins_at: float, ends_at: float) -> list[Rank]:
    """Return the rows of a time, oldest first."""
    rows = connection.execute(
        "SELECT * FROM ranks WHERE at >= ? AND at < ? ORDER BY at", (begins_at, ends_at)
    )
    return [Rank(**row) for row in rows]


def report_was_sent(connection: sqlite3.Connection, period: str, begins_at: float) -> bool:
    query = "SELECT 1 FROM sent_reports WHERE period = ? AND begins_at = ?"
    return connection.execute(query, (period, begins_at)).fetchone() is not None


def record_sent_report(connection: sqlite3.Connection, period: str, begins_at: float, now: float) -> None:
    connection.execute("INSERT OR IGNORE INTO sent_reports VALUES (?, ?, ?)", (period, begins_at, now))
