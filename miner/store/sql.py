"""SQL text made once from the typed tables.

The request path runs on the bare connection: a statement is a handful of microseconds there, and a fifth of
a request's whole cost through an ORM. The tables in `schema.py` stay the only place that names columns.
"""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from sqlalchemy import Table
from sqlalchemy.dialects import sqlite

from miner.store import schema


def insert_into(model: type[schema.Base], *leave_out: str, or_ignore: bool = False) -> str:
    """An INSERT that takes every column's value in the table's order, those left out excepted."""
    table = model.__table__
    assert isinstance(table, Table)
    columns = [column.name for column in table.columns if column.name not in leave_out]
    statement = sqlite.insert(table).values(dict.fromkeys(columns))
    if or_ignore:
        statement = statement.on_conflict_do_nothing()
    return str(statement.compile(dialect=sqlite.dialect(paramstyle="qmark"), column_keys=columns))


_INSERT_EVENT = insert_into(schema.Event, "id")


def note(connection: sqlite3.Connection, now: float, kind: str, task_id: str | None, **data: Any) -> None:
    """Add a line to the operator's history, in the transaction of what it tells."""
    connection.execute(_INSERT_EVENT, (now, kind, task_id, json.dumps(data)))
