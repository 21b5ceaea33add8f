"""Run one task of the operator from start to end, without a validator.

If a daemon uses the data directory, it gets the task and is followed. Otherwise this process runs the
same pipeline itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

from core.domain.errors import GodMinerError
from core.domain.job_states import FINAL_STATES
from miner import daemon_client
from miner.api.jobs import JobDetails, StartedJob
from miner.backends.build_fleet import build_fleet, build_inventory
from miner.fleet.costs import GpuCosts
from miner.fleet.fleet_file import gpu_prices
from miner.fleet.nvml import NvmlSource
from miner.jobs import views
from miner.jobs.build import build_jobs
from miner.jobs.events import JobEventBus
from miner.jobs.manager import JobManager, JobStateConflict
from miner.jobs.tasks import OPERATOR, TaskFile
from miner.observe.alerts import MINER, STEP_FAILURES, AlertKind, AlertSubject
from miner.offers.policy_runtime import PolicyRuntime
from miner.settings import Settings
from miner.store import database
from miner.store import jobs as store_jobs
from miner.store.database import DataDirLock
from miner.store.samples import record_gpus
from miner.store.store import Store

log = logging.getLogger(__name__)

#: Alerts whose text also appears in a job's note, its state or its final page.
_ALERTS_SHOWN_OTHERWISE = {
    AlertKind.BAD_SUBMISSION,
    AlertKind.ATTEMPT_LOST,
    AlertKind.JOB_FAILED,
    *STEP_FAILURES.values(),
}

#: Called for every change with an event's kind and data.
EventCallback = Callable[[str, dict[str, object]], None]


class DaemonLost(GodMinerError):
    """The daemon that had taken the task has ended."""

    code = "daemon_lost"


def run_in_daemon(settings: Settings, task: TaskFile, on_event: EventCallback) -> JobDetails:
    """Hand the task to the daemon, follow it, and return the finished job. Raise `NoDaemon` if none runs."""
    job_id = daemon_client.post(settings, "/jobs", StartedJob, task).job_id
    path = f"/jobs/{job_id}"
    with contextlib.suppress(daemon_client.NoDaemon):
        if _follow_to_end(settings, path, on_event):
            return daemon_client.get(settings, path, JobDetails)
    raise DaemonLost(
        f"the daemon has ended; job {job_id} goes on when it is started again, and "
        f"`god-miner jobs show {job_id}` shows how far it is"
    )


def _follow_to_end(settings: Settings, path: str, on_event: EventCallback) -> bool:
    """Follow the job; return whether the job ended, rather than the daemon."""
    with daemon_client.follow_page_events(settings, f"{path}/events") as events:
        for kind, data in events:
            on_event(kind, data)
            if kind == "job" and data["state"] in FINAL_STATES:
                return True
    return daemon_client.get(settings, path, JobDetails).state in FINAL_STATES


def run_here(settings: Settings, task: TaskFile, on_event: EventCallback) -> JobDetails:
    """Run the task in this process and return the finished job. The first SIGINT cancels it."""
    lock = DataDirLock(settings.data_dir, settings.store_dir)
    lock.acquire()
    try:
        return asyncio.run(_run_here(settings, task, on_event))
    finally:
        lock.release()


async def _run_here(settings: Settings, task: TaskFile, on_event: EventCallback) -> JobDetails:
    async with _pipeline(settings, on_event) as jobs:
        listening = asyncio.create_task(_forward_events(jobs.services.events, on_event))
        await asyncio.sleep(0)
        started = await jobs.start_own(task.start(time.time()), OPERATOR)
        with _cancelled_by_signal(jobs, started.job_id):
            await jobs.wait_until_over(started.job_id)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)

        def ended(db: sqlite3.Connection) -> JobDetails:
            costs = GpuCosts.read(db, gpu_prices(settings))
            row = store_jobs.get_job(db, started.job_id)
            return views.job_details(db, row, settings.data_dir, costs=costs)

        return await jobs.services.store.read(ended)


@asynccontextmanager
async def _pipeline(settings: Settings, on_event: EventCallback) -> AsyncIterator[JobManager]:
    """Build the daemon's pipeline without its two HTTP servers."""

    def alert(kind: AlertKind, text: str, subject: AlertSubject = MINER) -> None:
        text = subject.with_text(text)
        if kind not in _ALERTS_SHOWN_OTHERWISE:
            on_event("note", {"kind": kind, "text": text})
        log.warning("%s: %s", kind, text)

    store = Store(database.prepare_store(settings.store_dir))
    store.writer.start(asyncio.get_running_loop())
    fleet = build_fleet(settings, time.time)
    inventory = build_inventory(settings, fleet, NvmlSource(), alert, time.time)
    await inventory.start()
    await store.write(record_gpus, fleet.inventory.kinds)
    policy_runtime = PolicyRuntime(settings, alert)
    policy_runtime.refresh(fleet.inventory.hardware)
    try:
        jobs = await build_jobs(
            settings,
            store,
            fleet,
            lambda: policy_runtime.profile,
            alert=alert,
            worth=policy_runtime.training_worth,
        )
        await jobs.start()
        try:
            yield jobs
        finally:
            await jobs.close()
    finally:
        await inventory.stop()
        await store.writer.close()


async def _forward_events(bus: JobEventBus, on_event: EventCallback) -> None:
    async for change in bus.listen():
        on_event(change.kind, change.data)


@contextlib.contextmanager
def _cancelled_by_signal(jobs: JobManager, job_id: int) -> Iterator[None]:
    """First signal: cancel the job and wait for its training. Second: leave; a later start resumes it."""
    loop = asyncio.get_running_loop()
    asked: list[asyncio.Future[None]] = []

    async def cancel() -> None:
        with contextlib.suppress(JobStateConflict):
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
