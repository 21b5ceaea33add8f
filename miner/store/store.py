"""The store of one data directory, as the daemon uses it.

What is written and read are functions of `offers`, `jobs`, `attempts`, `events` and `nonces`, each with a
connection as its first argument: `await store.write(jobs.record_submission, key, submission, now)`. Several
in one function are one transaction.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from miner.store import database
from miner.store.database import add_event
from miner.store.writer import StoreWriter

P = ParamSpec("P")
T = TypeVar("T")

Connection = sqlite3.Connection


class Store:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = StoreWriter(self._connect)

    def _connect(self) -> Connection:
        with database.store_errors(self.path):
            return database.connect(self.path)

    def write(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Run `work` in the writer, in the order of the calls; its future is done once it is on disk."""
        return self.writer.submit(lambda connection: work(connection, *args, **kwargs))

    async def read(
        self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `query` in a thread, on a connection of its own."""
        return await asyncio.to_thread(lambda: self.read_now(query, *args, **kwargs))

    def read_now(
        self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `query` in this thread: at the start, and off the event loop."""
        with (
            database.store_errors(self.path),
            closing(database.connect_for_reading(self.path)) as connection,
        ):
            return query(connection, *args, **kwargs)

    def add_event(self, kind: str, task_id: str | None = None, **data: Any) -> asyncio.Future[None]:
        """Add an event to the operator's history."""
        return self.write(add_event, time.time(), kind, task_id, **data)

    async def summary(self) -> dict[str, dict[str, int]]:
        """Count the jobs by state and the offers by answer."""
        return await self.read(_summary)


def _summary(connection: Connection) -> dict[str, dict[str, int]]:
    jobs = connection.execute("SELECT state, count(*) FROM jobs GROUP BY state")
    offers = connection.execute(
        "SELECT iif(accepted, 'accepted', 'refused'), count(*) FROM offers "
        "JOIN decisions ON decisions.id = offers.decision_id GROUP BY accepted"
    )
    return {"jobs": dict(jobs.fetchall()), "offers": dict(offers.fetchall())}
