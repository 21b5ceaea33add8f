"""INSERT statements, and the operator's history.

The daemon runs on bare connections: a statement is a handful of microseconds there, and a fifth of a
request's whole cost through an ORM, whose import alone is a third of the start. SQLAlchemy's tables in
`schema.py` are for the migrations.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any


def insert_into(table: str, columns: Sequence[str], or_ignore: bool = False) -> str:
    """An INSERT that takes the columns' values in their order."""
    verb = "INSERT OR IGNORE" if or_ignore else "INSERT"
    return f"{verb} INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"


def insert(connection: sqlite3.Connection, table: str, **values: Any) -> int:
    """Insert one row by names; its number."""
    cursor = connection.execute(insert_into(table, list(values)), list(values.values()))
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def note(connection: sqlite3.Connection, now: float, kind: str, task_id: str | None, **data: Any) -> None:
    """Add a line to the operator's history, in the transaction of what it tells."""
    insert(connection, "events", at=now, kind=kind, task_id=task_id, data=json.dumps(data))
