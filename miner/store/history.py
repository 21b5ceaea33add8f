"""What the books forget: old offers with their decisions, and old events. Jobs are kept for good.

The outcome of every job is what success is learned from, and an offer that became a job tells what it was
about; a year of them is a few megabytes. What came to nothing is of interest for a backtest of some weeks.
"""

from __future__ import annotations

import sqlite3

#: Rows of a kind in one write: each holds the event loop for some milliseconds.
AT_ONCE = 500

_OLD_OFFERS = """
SELECT id FROM offers WHERE received_at < ? AND last_seen_at < ? AND NOT EXISTS (
    SELECT 1 FROM jobs WHERE jobs.validator = offers.validator AND jobs.task_id = offers.task_id
) ORDER BY received_at LIMIT ?
"""
#: Refusals that no offer is left of, or that a later one took the place of. The index is named because SQLite
#: would choose another, and go through all decisions of years for it.
_OLD_REFUSALS = """
DELETE FROM decisions WHERE id IN (
    SELECT id FROM decisions INDEXED BY ix_decisions_shared
    WHERE offer_id IS NULL AND job_id IS NULL AND decided_at < ?
        AND NOT EXISTS (SELECT 1 FROM offers WHERE offers.decision_id = decisions.id)
    ORDER BY decided_at LIMIT ?
)
"""
_OLD_EVENTS = "DELETE FROM events WHERE id IN (SELECT id FROM events WHERE at < ? ORDER BY at LIMIT ?)"


def prune(connection: sqlite3.Connection, before: float) -> int:
    """Forget the oldest from before then; 0 when nothing is left of it."""
    offers = [(row[0],) for row in connection.execute(_OLD_OFFERS, (before, before, AT_ONCE)).fetchall()]
    for table, column in (("decisions", "offer_id"), ("reservations", "offer_id"), ("offers", "id")):
        connection.executemany(f"DELETE FROM {table} WHERE {column} = ?", offers)  # noqa: S608 - ours
    others = (connection.execute(old, (before, AT_ONCE)).rowcount for old in (_OLD_REFUSALS, _OLD_EVENTS))
    return len(offers) + sum(others)
