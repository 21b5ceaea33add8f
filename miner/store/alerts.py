"""Alerts and silences in the store."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from core.domain.errors import GodMinerError
from miner.api.alerts import Severity, Silence
from miner.api.reports import AlertCount
from miner.observe.alerts import AlertSubject
from miner.store.database import add_event, insert_row

_MAX_TEXT_CHARS = 2000


class NoSuchSilence(GodMinerError):
    code = "no_such_silence"


@dataclass(frozen=True, slots=True)
class NewAlert:
    """An alert to raise, or one that is raised again."""

    #: A rule of alerts.yaml, or an `AlertKind`.
    rule: str
    subject: AlertSubject
    severity: Severity
    text: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class AlertRow(NewAlert):
    """An alert from when it was raised until it was resolved."""

    id: int = 0
    raised_at: float = 0.0
    last_at: float = 0.0
    times: int = 1
    resolved_at: float | None = None
    #: True if the operator is to be notified of it and of its end; and when that was last done.
    notify: bool = False
    notified_at: float | None = None


def record_alert(
    connection: sqlite3.Connection, alert: NewAlert, now: float, *, notify: bool
) -> list[AlertRow]:
    """Insert the alert, or count it once more if it is open, and add its event. Return it if the operator is
    to be notified of it now. `notify`: alerts of its rule are passed on."""
    about = {"alert": True, "severity": alert.severity, "value": alert.value}
    add_event(connection, now, alert.rule, None, text=alert.text, **alert.subject.fields, **about)
    row, is_new = raise_alert(connection, alert, now)
    if not (notify and is_new) or is_silenced(connection, row, now):
        return []
    connection.execute("UPDATE alerts SET notify = 1 WHERE id = ?", (row.id,))
    return [replace(row, notify=True)]


def raise_alert(connection: sqlite3.Connection, alert: NewAlert, now: float) -> tuple[AlertRow, bool]:
    """Insert the alert, or count it once more if it is open. Return it, and True if it is new."""
    values = {
        "rule": alert.rule,
        "subject": str(alert.subject),
        "severity": alert.severity,
        "text": alert.text[:_MAX_TEXT_CHARS],
        "value": alert.value,
        "last_at": now,
    }
    row = connection.execute(
        "UPDATE alerts SET text = :text, value = :value, severity = :severity, last_at = :last_at, "
        "times = times + 1 WHERE rule = :rule AND subject = :subject AND resolved_at IS NULL RETURNING *",
        values,
    ).fetchone()
    if row is not None:
        return _alert_from(row), False
    row_id = insert_row(connection, "alerts", **values, raised_at=now, times=1)
    row = connection.execute("SELECT * FROM alerts WHERE id = ?", (row_id,)).fetchone()
    return _alert_from(row), True


def record_resolution(
    connection: sqlite3.Connection,
    rules: Iterable[str],
    subject: AlertSubject,
    text: str,
    now: float,
    event: str = "",
) -> list[AlertRow]:
    """Resolve the open alerts of these rules and kinds, and add an event of the kind `event`, if any. Return
    those whose end is to be notified of too."""
    if event:
        add_event(connection, now, event, None, text=text, **subject.fields)
    ended = [row for rule in rules if (row := resolve_alert(connection, rule, subject, text, now))]
    silenced = [row for row in ended if row.notify and is_silenced(connection, row, now)]
    connection.executemany("UPDATE alerts SET notify = 0 WHERE id = ?", [(row.id,) for row in silenced])
    return [row for row in ended if row.notify and row not in silenced]


def mark_notified(connection: sqlite3.Connection, alert_ids: Iterable[int], now: float) -> None:
    """Note that the operator was notified of these alerts as they are now."""
    connection.executemany(
        "UPDATE alerts SET notified_at = ? WHERE id = ?", [(now, alert_id) for alert_id in alert_ids]
    )


def unsent_alerts(connection: sqlite3.Connection, since: float) -> list[AlertRow]:
    """Return the alerts since then of which no notification was sent, or not of their end; oldest first."""
    rows = connection.execute(
        "SELECT * FROM alerts WHERE notify AND last_at >= ? "
        "AND (notified_at IS NULL OR notified_at < resolved_at) ORDER BY id",
        (since,),
    )
    return [_alert_from(row) for row in rows]


def expire_alerts(connection: sqlite3.Connection, kinds: Sequence[str], before: float, now: float) -> int:
    """Close alerts that nothing resolves, and that have not come again since `before`; return the count."""
    marks = ", ".join("?" * len(kinds))
    changed = "UPDATE alerts SET resolved_at = ?, notify = 0 WHERE resolved_at IS NULL AND last_at < ?"
    expired = connection.execute(f"{changed} AND rule IN ({marks})", (now, before, *kinds))
    return expired.rowcount


def note_values(
    connection: sqlite3.Connection, values: Iterable[tuple[str, AlertSubject, float | None]], now: float
) -> None:
    """Store the present values of open alerts, each by its rule and subject."""
    connection.executemany(
        "UPDATE alerts SET value = ?, last_at = ? WHERE rule = ? AND subject = ? AND resolved_at IS NULL",
        [(value, now, rule, str(subject)) for rule, subject, value in values],
    )


def resolve_alert(
    connection: sqlite3.Connection, rule: str, subject: AlertSubject, text: str, now: float
) -> AlertRow | None:
    """Close the open alert of a rule and subject, if there is one. An empty text keeps the alert's own."""
    row = connection.execute(
        "UPDATE alerts SET resolved_at = ?, last_at = ?, text = iif(? = '', text, ?) "
        "WHERE rule = ? AND subject = ? AND resolved_at IS NULL RETURNING *",
        (now, now, text, text[:_MAX_TEXT_CHARS], rule, str(subject)),
    ).fetchone()
    return None if row is None else _alert_from(row)


def open_alerts(connection: sqlite3.Connection) -> list[AlertRow]:
    rows = connection.execute("SELECT * FROM alerts WHERE resolved_at IS NULL ORDER BY id DESC")
    return [_alert_from(row) for row in rows]


def newest_alerts(connection: sqlite3.Connection, limit: int, *, only_open: bool = False) -> list[AlertRow]:
    """Return alerts, newest first."""
    condition = "resolved_at IS NULL" if only_open else "1"
    query = f"SELECT * FROM alerts WHERE {condition} ORDER BY id DESC LIMIT ?"  # noqa: S608 - our own text
    return [_alert_from(row) for row in connection.execute(query, (limit,))]


def _alert_from(row: sqlite3.Row) -> AlertRow:
    typed = {
        "subject": AlertSubject.parse(row["subject"]),
        "severity": Severity(row["severity"]),
        "notify": bool(row["notify"]),
    }
    return AlertRow(**dict(row) | typed)


def count_alerts(connection: sqlite3.Connection, begins_at: float, ends_at: float) -> list[AlertCount]:
    """Count the alerts of a time by rule, the most frequent first."""
    rows = connection.execute(
        "SELECT rule, CASE WHEN max(severity = 'critical') THEN 'critical' "
        "WHEN max(severity = 'warning') THEN 'warning' ELSE 'info' END AS severity, "
        "count(*) AS raised, sum(times) AS times, sum(resolved_at IS NULL) AS still_open, "
        "max(text) AS example FROM alerts WHERE raised_at >= ? AND raised_at < ? "
        "GROUP BY rule ORDER BY raised DESC, rule",
        (begins_at, ends_at),
    )
    return [AlertCount(**row) for row in rows]


# Silences


def add_silence(
    connection: sqlite3.Connection, rule: str, subject: str, reason: str, now: float, until: float
) -> Silence:
    row_id = insert_row(
        connection, "silences", rule=rule, subject=subject, reason=reason, created_at=now, until=until
    )
    add_event(
        connection, now, "silence", None, text=f"{rule} of {subject} is silenced: {reason}", until=until
    )
    return Silence(id=row_id, rule=rule, subject=subject, reason=reason, created_at=now, until=until)


def end_silence(connection: sqlite3.Connection, silence_id: int, now: float) -> None:
    ended = connection.execute(
        "UPDATE silences SET until = ? WHERE id = ? AND until > ?", (now, silence_id, now)
    )
    if not ended.rowcount:
        raise NoSuchSilence(
            f"no silence {silence_id} is in force; `god-miner alerts list` shows those that are"
        )


def silences_in_force(connection: sqlite3.Connection, now: float) -> list[Silence]:
    rows = connection.execute("SELECT * FROM silences WHERE until > ? ORDER BY id", (now,))
    return [Silence(**row) for row in rows]


def is_silenced(connection: sqlite3.Connection, alert: AlertRow, now: float) -> bool:
    row = connection.execute(
        "SELECT 1 FROM silences WHERE until > ? AND ? GLOB rule AND ? GLOB subject LIMIT 1",
        (now, alert.rule, str(alert.subject)),
    ).fetchone()
    return row is not None


def prune_alerts(connection: sqlite3.Connection, before: float) -> None:
    """Delete the alerts and silences that were over before then."""
    connection.execute("DELETE FROM alerts WHERE resolved_at < ?", (before,))
    connection.execute("DELETE FROM silences WHERE until < ?", (before,))
