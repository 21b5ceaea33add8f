"""A task of the operator's, from start to end, without a validator.

With a daemon on the data folder it is the daemon's to do, and only looked at from here. Without one, this
process does it itself: the same pipeline, nobody answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from core.errors import GodMinerError
from miner import running
from miner.fleet.build import build_fleet, build_inventory
from miner.jobs import shown
from miner.jobs.build import build_jobs
from miner.jobs.live import Bus
from miner.jobs.manager import Jobs, NotNow
from miner.jobs.states import OVER, EndReason
from miner.jobs.tasks import OPERATOR, TaskFile
from miner.offers.judge import Judge
from miner.settings import Settings
from miner.store import database, work
from miner.store.books import Books
from miner.store.database import DataDirLock

log = logging.getLogger(__name__)

#: Alerts whose words a note of the job, its picture or the page of its end has as well.
_SHOWN_BY_ITSELF = {"bad_submission", "attempt_lost", "job_failed", *(f"job_{end}" for end in EndReason)}

#: Hears of every change: an event's kind and data.
Told = Callable[[str, dict[str, Any]], None]


class DaemonLost(GodMinerError):
    """The daemon that had taken the task has ended."""

    code = "daemon_lost"


def by_daemon(settings: Settings, task: TaskFile, told: Told) -> dict[str, Any]:
    """Hand it over and look on; the job in the end. `NoDaemon` where none runs."""
    started = running.tell(settings, "/jobs", task.model_dump(mode="json"))
    path = f"/jobs/{started['job_id']}"
    with contextlib.suppress(running.NoDaemon):
        if _followed(settings, path, told):
            return running.ask(settings, path)
    raise DaemonLost(
        f"the daemon has ended; job {started['job_id']} goes on when it is started again, and "
        f"`god-miner jobs show {started['job_id']}` tells how far it is"
    )


def _followed(settings: Settings, path: str, told: Told) -> bool:
    """Whether to the job's end, and not only to the daemon's."""
    with running.follow(settings, f"{path}/events") as events:
        for kind, data in events:
            told(kind, data)
            if kind == "job" and data["state"] in OVER:
                return True
    return running.ask(settings, path)["state"] in OVER


def here(settings: Settings, task: TaskFile, told: Told) -> dict[str, Any]:
    """Do it in this process; the job in the end. The first SIGINT cancels it."""
    lock = DataDirLock(settings.data_dir)
    lock.acquire()
    try:
        return asyncio.run(_here(settings, task, told))
    finally:
        lock.release()


async def _here(settings: Settings, task: TaskFile, told: Told) -> dict[str, Any]:
    async with _pipeline(settings, told) as jobs:
        listening = asyncio.create_task(_listen(jobs.parts.bus, told))
        await asyncio.sleep(0)
        started = await jobs.take(task.start(time.time()), OPERATOR)
        with _cancelled_by_signal(jobs, started.job_id):
            await jobs.over(started.job_id)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        return await jobs.parts.book.read(
            lambda db: shown.whole(db, work.job(db, started.job_id), settings.data_dir)
        )


@asynccontextmanager
async def _pipeline(settings: Settings, told: Told) -> AsyncIterator[Jobs]:
    """What the daemon has, without the doors for validators and for the operator."""

    def alert(kind: str, text: str) -> None:
        if kind not in _SHOWN_BY_ITSELF:
            told("note", {"kind": kind, "text": text})
        log.warning("%s: %s", kind, text)

    books = Books(database.prepare(settings.data_dir))
    books.writer.start(asyncio.get_running_loop())
    fleet = build_fleet(settings, time.time)
    inventory = build_inventory(settings, fleet, lambda kind, text, gpu=None: alert(kind, text), time.time)
    await inventory.start()
    judge = Judge(settings, alert)
    judge.refresh(fleet.stock.hardware)
    try:
        jobs = await build_jobs(settings, books, fleet, lambda: judge.profile, alert=alert)
        await jobs.start()
        try:
            yield jobs
        finally:
            await jobs.close()
    finally:
        await inventory.stop()
        await books.writer.close()


async def _listen(bus: Bus, told: Told) -> None:
    async for change in bus.listen():
        told(change.kind, change.data)


@contextlib.contextmanager
def _cancelled_by_signal(jobs: Jobs, job_id: int) -> Iterator[None]:
    """Once: cancel the job, and wait for its training to end. Twice: leave; a later start takes it up."""
    loop = asyncio.get_running_loop()
    asked: list[asyncio.Future[None]] = []

    async def cancel() -> None:
        with contextlib.suppress(NotNow):
            await jobs.cancel(job_id)

    def on_signal() -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(asyncio.ensure_future(cancel()))

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
