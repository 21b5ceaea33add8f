"""Measurements of GPUs in the store: a row for each GPU and minute, and for each hour, made from those."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

from core.domain.keys import TaskKey
from miner.api.samples import HIGHEST, ROLLUP_COLUMNS, GpuRollup
from miner.store.events import MAX_PRUNED_ROWS

MINUTE, HOUR = 60, 3600
_DAY = 86_400.0
#: Seconds for which minutes are kept.
MINUTES_KEPT_SECONDS = 7 * _DAY
#: Hours are kept at least so long, however short HISTORY_DAYS is: a report compares with the year before.
MIN_HOURS_KEPT_SECONDS = 400 * _DAY


_MEASURED = ROLLUP_COLUMNS[ROLLUP_COLUMNS.index("samples") + 1 :]


def _over_minutes(name: str) -> str:
    """The SQL of an hour's number. A mean is weighted by the samples that have the value."""
    if name in HIGHEST:
        return f"max({name})"
    return f"sum({name} * samples) / sum(iif({name} IS NULL, NULL, samples))"


_NAMES = ", ".join(ROLLUP_COLUMNS)
_INSERT = f"INSERT OR REPLACE INTO gpu_rollups ({_NAMES}) VALUES ({', '.join('?' * len(ROLLUP_COLUMNS))})"  # noqa: S608 - ours

#: `max(share)` picks the row of `job_id` with it.
_BUILD_HOUR = f"""
INSERT OR REPLACE INTO gpu_rollups ({_NAMES})
SELECT {HOUR}, :hour, minutes.gpu, longest.job_id,
    sum(watched) / {HOUR // MINUTE}, sum(busy) / {HOUR // MINUTE}, sum(samples),
    {", ".join(map(_over_minutes, _MEASURED))}
FROM gpu_rollups AS minutes
LEFT JOIN (
    SELECT gpu, job_id, max(share) FROM (
        SELECT gpu, job_id, sum(busy) AS share FROM gpu_rollups
        WHERE period = {MINUTE} AND at >= :hour AND at < :hour + {HOUR} AND job_id IS NOT NULL
        GROUP BY gpu, job_id
    ) GROUP BY gpu
) AS longest ON longest.gpu = minutes.gpu
WHERE period = {MINUTE} AND at >= :hour AND at < :hour + {HOUR}
GROUP BY minutes.gpu
"""  # noqa: S608 - ours
_PRUNE = """
DELETE FROM gpu_rollups WHERE (period, at, gpu) IN (
    SELECT period, at, gpu FROM gpu_rollups WHERE period = ? AND at < ? ORDER BY at LIMIT ?
)
"""


# Writing


def add_minutes(connection: sqlite3.Connection, minutes: Sequence[tuple[GpuRollup, TaskKey | None]]) -> None:
    """Add what was measured in some minutes, each with the task that had the GPU longest, and rebuild
    their hours. A minute that is there already (before a restart) is completed."""
    for minute, key in minutes:
        row = replace(minute, job_id=job_ids(connection, [key]).get(key) if key else None)
        before = _minute(connection, row.at, row.gpu)
        connection.execute(_INSERT, astuple(_completed(before, row) if before else row))
    for hour in sorted({minute.at // HOUR * HOUR for minute, _ in minutes}):
        connection.execute(_BUILD_HOUR, {"hour": hour})


def record_gpus(connection: sqlite3.Connection, kinds: Mapping[str, str]) -> None:
    """Store the kinds of these GPUs."""
    connection.executemany("INSERT OR REPLACE INTO gpus (id, kind) VALUES (?, ?)", kinds.items())


def prune_rollups(connection: sqlite3.Connection, now: float, history_seconds: float) -> int:
    """Delete one batch of rows that are too old; return the count."""
    kept = {MINUTE: MINUTES_KEPT_SECONDS, HOUR: max(history_seconds, MIN_HOURS_KEPT_SECONDS)}
    return sum(
        connection.execute(_PRUNE, (period, now - seconds, MAX_PRUNED_ROWS)).rowcount
        for period, seconds in kept.items()
    )


def _completed(before: GpuRollup, more: GpuRollup) -> GpuRollup:
    """One minute in two parts, as one."""
    merged: dict[str, Any] = {
        name: (_highest if name in HIGHEST else _mean)(before, more, name) for name in _MEASURED
    }
    return replace(
        before,
        job_id=more.job_id if more.busy > before.busy else before.job_id,
        watched=min(before.watched + more.watched, 1.0),
        busy=min(before.busy + more.busy, 1.0),
        samples=before.samples + more.samples,
        **merged,
    )


def _highest(before: GpuRollup, more: GpuRollup, name: str) -> float | None:
    values = [value for part in (before, more) if (value := getattr(part, name)) is not None]
    return max(values, default=None)


def _mean(before: GpuRollup, more: GpuRollup, name: str) -> float | None:
    parts = [part for part in (before, more) if getattr(part, name) is not None]
    samples = sum(part.samples for part in parts)
    return sum(getattr(part, name) * part.samples for part in parts) / samples if samples else None


# Reading


def gpu_kinds(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the kind of every GPU that was ever here."""
    return dict(connection.execute("SELECT id, kind FROM gpus").fetchall())


def rollups(
    connection: sqlite3.Connection, period: int, since: float, until: float = float("inf")
) -> list[GpuRollup]:
    """The rows of the periods that began in this time, oldest first. The last one is still being measured."""
    rows = connection.execute(
        f"SELECT {_NAMES} FROM gpu_rollups "  # noqa: S608 - ours
        "WHERE period = ? AND at >= ? AND at < ? ORDER BY at, gpu",
        (period, since, until),
    )
    return [GpuRollup(*row) for row in rows]


def job_ids(connection: sqlite3.Connection, keys: Iterable[TaskKey]) -> dict[TaskKey, int]:
    """The jobs of these tasks."""
    ids = {}
    for key in keys:
        row = connection.execute("SELECT id FROM jobs WHERE validator = ? AND task_id = ?", key).fetchone()
        if row is not None:
            ids[key] = int(row[0])
    return ids


def _minute(connection: sqlite3.Connection, at: int, gpu: str) -> GpuRollup | None:
    row = connection.execute(
        f"SELECT {_NAMES} FROM gpu_rollups WHERE period = ? AND at = ? AND gpu = ?",  # noqa: S608
        (MINUTE, at, gpu),
    ).fetchone()
    return GpuRollup(*row) if row else None
