"""Events, the operator's history and its alerts; and pruning of old offers, decisions and events.

Jobs are kept for good: chances of success are learned from their outcomes, and a year of them is a few
megabytes. Offers without a job only matter for a backtest of some weeks.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miner.store.jobs import JobRow

#: Rows of a kind in one write: each holds the event loop for some milliseconds.
MAX_PRUNED_ROWS = 500

_OLD_OFFERS = """
SELECT id FROM offers WHERE received_at < ? AND last_seen_at < ? AND NOT EXISTS (
    SELECT 1 FROM jobs WHERE jobs.validator = offers.validator AND jobs.task_id = offers.task_id
) ORDER BY received_at LIMIT ?
"""
#: Refusals that no offer names any more: it was pruned, or has a later decision. The index is named because
#: SQLite would choose another and scan the decisions of years.
_OLD_REFUSALS = """
DELETE FROM decisions WHERE id IN (
    SELECT id FROM decisions INDEXED BY ix_decisions_shared
    WHERE offer_id IS NULL AND job_id IS NULL AND decided_at < ?
        AND NOT EXISTS (SELECT 1 FROM offers WHERE offers.decision_id = decisions.id)
    ORDER BY decided_at LIMIT ?
)
"""
_OLD_EVENTS = "DELETE FROM events WHERE id IN (SELECT id FROM events WHERE at < ? ORDER BY at LIMIT ?)"
#: Alerts about a job have no task id; their text begins with its number.
_EVENTS = """
SELECT * FROM events WHERE id > :after AND at >= :since AND (:job IS NULL OR task_id = :task
    OR json_extract(data, '$.job_id') = :job OR json_extract(data, '$.text') GLOB 'job ' || :job || '[ :,]*')
    AND (NOT :alerts OR json_extract(data, '$.alert'))
"""

#: What is shown elsewhere in an event's text, or not at all.
_SHOWN_ELSEWHERE = frozenset({"job_id", "attempt", "reason", "detail", "alert", "model_hash"})


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
        others = [
            str(value)
            for key, value in self.data.items()
            if key not in _SHOWN_ELSEWHERE and value is not None
        ]
        parts = [about, self.data.get("reason"), self.data.get("detail"), *others]
        return ": ".join(part for part in parts if part)

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


def list_events(
    connection: sqlite3.Connection,
    *,
    after: int = 0,
    since: float = 0.0,
    kinds: Sequence[str] = (),
    job: JobRow | None = None,
    alerts: bool = False,
    limit: int = 1000,
) -> list[EventRow]:
    """Return the newest events, oldest first. Kinds may contain `*`."""
    patterns = {f"kind{index}": kind for index, kind in enumerate(kinds)}
    of_kinds = f" AND ({' OR '.join(f'kind GLOB :{name}' for name in patterns)})" if patterns else ""
    rows = connection.execute(
        f"{_EVENTS}{of_kinds} ORDER BY id DESC LIMIT :limit",
        {
            "after": after,
            "since": since,
            "job": job.id if job else None,
            "task": job.task_id if job else None,
            "alerts": alerts,
            "limit": limit,
            **patterns,
        },
    ).fetchall()
    return [
        EventRow(row["id"], row["at"], row["kind"], row["task_id"], json.loads(row["data"]))
        for row in reversed(rows)
    ]


def prune_history(connection: sqlite3.Connection, before: float) -> int:
    """Delete one batch of records older than `before`; return the count."""
    offers = connection.execute(_OLD_OFFERS, (before, before, MAX_PRUNED_ROWS)).fetchall()
    for table, column in (("decisions", "offer_id"), ("reservations", "offer_id"), ("offers", "id")):
        connection.executemany(f"DELETE FROM {table} WHERE {column} = ?", offers)  # noqa: S608 - ours
    refusals = connection.execute(_OLD_REFUSALS, (before, MAX_PRUNED_ROWS)).rowcount
    events = connection.execute(_OLD_EVENTS, (before, MAX_PRUNED_ROWS)).rowcount
    return len(offers) + refusals + events
