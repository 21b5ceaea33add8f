"""What a daemon has stored."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

#: All that a request may leave behind, but for its nonce; of events not those that time brings, nor alerts,
#: which have no task.
TABLES = (
    "offers",
    "decisions",
    "reservations",
    "jobs",
    "events WHERE task_id IS NOT NULL AND kind NOT IN ('job_failed', 'reservation_lapsed')",
)


def stored_rows(file: Path, sql: str, *values: Any) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(file)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(sql, values)]


def stored_counts(file: Path) -> dict[str, int]:
    return {name: stored_rows(file, f"SELECT count(*) AS n FROM {name}")[0]["n"] for name in TABLES}
