"""Events, the operator's history and its alerts; and pruning of old offers, decisions and events.

Jobs are kept for good: chances of success are learned from their outcomes, and a year of them is a few
megabytes. Offers without a job only matter for a backtest of some weeks. A cluster has thousands of jobs a
day: beyond the newest ones of each kind, their curves, steps and the reasons of their decisions go too.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from miner.observe.alerts import AlertSubject
from miner.store.database import insert_row
from miner.store.jobs import JobRow

#: Rows of a kind in one write: each holds the event loop for some milliseconds.
MAX_PRUNED_ROWS = 500
#: Beyond these numbers the oldest offers and events are deleted whatever their age, and attempts keep only
#: their results. One host has fewer in a quarter of a year.
MAX_OFFERS, MAX_EVENTS, MAX_DETAILED_ATTEMPTS = 20_000, 100_000, 5_000
#: Attempts beyond those numbers that are examined at once: more never come between two prunings.
_TRIMMED_AT_ONCE = 2000

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
#: The attempts of ended jobs, beyond the newest, that still have their curves.
_DETAILED = """
SELECT attempts.id, attempts.job_id FROM attempts JOIN attempt_figures ON attempt_id = attempts.id
JOIN jobs ON jobs.id = attempts.job_id
WHERE attempts.id <= :newest - :kept AND attempts.id > :newest - :kept - :span
    AND curves <> '' AND jobs.ended_at IS NOT NULL LIMIT :most
"""
_OLD_RESERVATION = (
    "DELETE FROM reservations WHERE (validator, task_id) = (SELECT validator, task_id FROM jobs WHERE id = ?)"
)
_DECISIONS_OF_JOB = """
SELECT * FROM decisions WHERE job_id = :job UNION SELECT decisions.* FROM decisions
JOIN offers ON offers.decision_id = decisions.id JOIN jobs USING (validator, task_id) WHERE jobs.id = :job
"""
_OLD_EVENTS = "DELETE FROM events WHERE id IN (SELECT id FROM events WHERE at < ? ORDER BY at LIMIT ?)"
#: Alerts about a job have no task id, but its number.
_EVENTS = """
SELECT * FROM events WHERE id > :after AND at >= :since AND (:job IS NULL OR task_id = :task
    OR json_extract(data, '$.job_id') = :job)
    AND (NOT :alerts OR json_extract(data, '$.alert'))
"""

#: Fields that an event's text shows elsewhere, or not at all.
_SHOWN_ELSEWHERE = frozenset({"job_id", "attempt", "reason", "detail", "alert", "model_hash"})


@dataclass(frozen=True, slots=True)
class EventRow:
    id: int
    at: float
    kind: str
    task_id: str | None
    data: dict[str, Any]

    @property
    def about(self) -> str:
        """The job, task, GPU or validator of the event, if any."""
        if "job_id" in self.data:
            return f"job {self.data['job_id']}"
        if "subject" in self.data:
            return AlertSubject.parse(self.data["subject"]).label
        return f"task {self.task_id}" if self.task_id else ""

    @property
    def text(self) -> str:
        """The event in words."""
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

    def as_dict(self) -> dict[str, object]:
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


class EventFilter(NamedTuple):
    """The events to list: all, unless it says less."""

    since: float = 0.0
    #: May contain `*`.
    kinds: Sequence[str] = ()
    job: JobRow | None = None
    #: Only alerts.
    alerts: bool = False


ALL_EVENTS = EventFilter()


def list_events(
    connection: sqlite3.Connection, wanted: EventFilter = ALL_EVENTS, *, after: int = 0, limit: int = 1000
) -> list[EventRow]:
    """Return the newest events whose number is above `after`, oldest first."""
    patterns = {f"kind{index}": kind for index, kind in enumerate(wanted.kinds)}
    of_kinds = f" AND ({' OR '.join(f'kind GLOB :{name}' for name in patterns)})" if patterns else ""
    rows = connection.execute(
        f"{_EVENTS}{of_kinds} ORDER BY id DESC LIMIT :limit",
        {
            "after": after,
            "since": wanted.since,
            "job": wanted.job.id if wanted.job else None,
            "task": wanted.job.task_id if wanted.job else None,
            "alerts": wanted.alerts,
            "limit": limit,
            **patterns,
        },
    ).fetchall()
    return [
        EventRow(row["id"], row["at"], row["kind"], row["task_id"], json.loads(row["data"]))
        for row in reversed(rows)
    ]


def prune_history(connection: sqlite3.Connection, before: float) -> int:
    """Delete one batch of records that are older than `before` or beyond the newest; return the count."""
    offers_before = max(before, _nth_newest(connection, "offers", "received_at", MAX_OFFERS))
    offers = connection.execute(_OLD_OFFERS, (offers_before, offers_before, MAX_PRUNED_ROWS)).fetchall()
    for table, column in (("decisions", "offer_id"), ("reservations", "offer_id"), ("offers", "id")):
        connection.executemany(f"DELETE FROM {table} WHERE {column} = ?", offers)  # noqa: S608 - ours
    refusals = connection.execute(_OLD_REFUSALS, (offers_before, MAX_PRUNED_ROWS)).rowcount
    events_before = max(before, _nth_newest(connection, "events", "at", MAX_EVENTS))
    events = connection.execute(_OLD_EVENTS, (events_before, MAX_PRUNED_ROWS)).rowcount
    return len(offers) + refusals + events + _trim_attempts(connection)


def _nth_newest(connection: sqlite3.Connection, table: str, column: str, number: int) -> float:
    """Return the time of the record with `number` newer ones, or 0 if there are fewer."""
    query = f"SELECT {column} FROM {table} ORDER BY {column} DESC LIMIT 1 OFFSET ?"  # noqa: S608 - ours
    row = connection.execute(query, (number,)).fetchone()
    return float(row[0]) if row is not None else 0.0


def _trim_attempts(connection: sqlite3.Connection) -> int:
    """Reduce one batch of attempts to their results; return the count."""
    (newest,) = connection.execute("SELECT max(id) FROM attempts").fetchone()
    span = {"kept": MAX_DETAILED_ATTEMPTS, "span": _TRIMMED_AT_ONCE, "most": MAX_PRUNED_ROWS}
    rows = connection.execute(_DETAILED, {"newest": newest or 0, **span}).fetchall()
    for attempt, job in rows:
        connection.execute("DELETE FROM steps WHERE job_id = ?", (job,))
        connection.execute(_OLD_RESERVATION, (job,))
        # Their decisions keep the message, the score and what was planned.
        for decision in connection.execute(_DECISIONS_OF_JOB, {"job": job}).fetchall():
            kept = {"factors": "{}", "reasons": "[]", "details": _rounded(decision["details"])}
            _replace_row(connection, "decisions", {**dict(decision), **kept})
        query = connection.execute("SELECT * FROM attempt_figures WHERE attempt_id = ?", (attempt,))
        row = dict(query.fetchone())
        _replace_row(
            connection, "attempt_figures", {**row, "figures": _rounded(row["figures"]), "curves": ""}
        )
    return len(rows)


def _rounded(text: str) -> str:
    """Shorten the numbers of JSON to six digits, and times to a tenth of a second."""

    def number(digits: str) -> float:
        value = float(digits)
        return round(value, 1) if abs(value) >= 1e6 else float(f"{value:.6g}")

    return json.dumps(json.loads(text, parse_float=number), separators=(",", ":"))


def _replace_row(connection: sqlite3.Connection, table: str, values: Mapping[str, Any]) -> None:
    """Delete the row and insert it again: a row that only gets shorter leaves the rest of its page unused."""
    key = next(iter(values))
    connection.execute(f"DELETE FROM {table} WHERE {key} = ?", (values[key],))  # noqa: S608 - ours
    insert_row(connection, table, **values)
