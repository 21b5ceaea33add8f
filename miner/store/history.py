"""The operator's history: events and alerts; and what the books forget, which is old offers with their
decisions, and old events. Jobs are kept for good.

The outcome of every job is what success is learned from, and an offer that became a job tells what it was
about; a year of them is a few megabytes. What came to nothing is of interest for a backtest of some weeks.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miner.store.work import JobRow

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
#: Alerts about a job name it in front; they have no task of their own.
_EVENTS = """
SELECT * FROM events WHERE id > :after AND at >= :since AND (:job IS NULL OR task_id = :task
    OR json_extract(data, '$.job_id') = :job OR json_extract(data, '$.text') GLOB 'job ' || :job || '[ :,]*')
    AND (NOT :alerts OR json_extract(data, '$.alert'))
"""


#: What has a place of its own in an event's text, or none.
_NAMED = frozenset({"job_id", "attempt", "reason", "detail", "alert", "model_hash"})


@dataclass(frozen=True, slots=True)
class EventRow:
    id: int
    at: float
    kind: str
    task_id: str | None
    data: dict[str, Any]

    @property
    def text(self) -> str:
        """What happened, for people."""
        if "text" in self.data:
            return str(self.data["text"])
        about = f"attempt {self.data['attempt']}" if "attempt" in self.data else ""
        told = [about, self.data.get("reason"), self.data.get("detail")]
        told += [str(value) for key, value in self.data.items() if key not in _NAMED and value is not None]
        return ": ".join(word for word in told if word)

    def as_dict(self) -> dict[str, Any]:
        more = {key: value for key, value in self.data.items() if key not in ("alert", "text")}
        return {
            "id": self.id,
            "at": self.at,
            "kind": self.kind,
            "alert": bool(self.data.get("alert")),
            "task_id": self.task_id,
            "text": self.text,
            **more,
        }


def events(
    connection: sqlite3.Connection,
    *,
    after: int = 0,
    since: float = 0.0,
    kinds: Sequence[str] = (),
    job: JobRow | None = None,
    alerts: bool = False,
    most: int = 1000,
) -> list[EventRow]:
    """The newest so many, oldest first. Kinds may hold `*`."""
    wanted = {f"kind{place}": kind for place, kind in enumerate(kinds)}
    of_kinds = f" AND ({' OR '.join(f'kind GLOB :{name}' for name in wanted)})" if wanted else ""
    found = connection.execute(
        f"{_EVENTS}{of_kinds} ORDER BY id DESC LIMIT :most",
        {
            "after": after,
            "since": since,
            "job": job.id if job else None,
            "task": job.task_id if job else None,
            "alerts": alerts,
            "most": most,
            **wanted,
        },
    ).fetchall()
    return [
        EventRow(row["id"], row["at"], row["kind"], row["task_id"], json.loads(row["data"]))
        for row in reversed(found)
    ]


def prune(connection: sqlite3.Connection, before: float) -> int:
    """Forget the oldest from before then; 0 when nothing is left of it."""
    offers = [(row[0],) for row in connection.execute(_OLD_OFFERS, (before, before, AT_ONCE)).fetchall()]
    for table, column in (("decisions", "offer_id"), ("reservations", "offer_id"), ("offers", "id")):
        connection.executemany(f"DELETE FROM {table} WHERE {column} = ?", offers)  # noqa: S608 - ours
    others = (connection.execute(old, (before, AT_ONCE)).rowcount for old in (_OLD_REFUSALS, _OLD_EVENTS))
    return len(offers) + sum(others)
