"""Take up jobs after a restart, and remove orphaned runs from the backend.

Running attempts are adopted, with their GPUs, before a waiting job may ask for any; nothing is launched
twice.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3

from miner.backends.base import Backend, BackendRun, BackendUnreachable, RunPhase
from miner.jobs.context import JobContext, JobServices
from miner.jobs.timeline import JobTimings
from miner.store import attempts
from miner.store import jobs as store_jobs
from miner.store.attempts import AttemptRow
from miner.store.database import StoreUnavailable
from miner.store.jobs import JobRow

log = logging.getLogger(__name__)

#: Jobs that are taken up before others have their turn.
ADOPTED_AT_A_TIME = 50
#: Between two searches for orphaned runs.
SWEEP_SECONDS = 1800.0


async def adopt_open_jobs(services: JobServices) -> list[tuple[JobRow, JobContext]]:
    """Return every job that needs a worker, with its GPUs adopted; those that hold GPUs come first."""
    now = services.clock()

    def query(db: sqlite3.Connection) -> tuple[list[JobRow], dict[int, AttemptRow]]:
        rows = {row.id: row for row in store_jobs.open_jobs(db, now)}
        running = {attempt.job_id: attempt for attempt in attempts.open_attempts(db)}
        for job_id in running.keys() - rows.keys():  # over, but not cleaned up
            rows[job_id] = store_jobs.get_job(db, job_id)
        return list(rows.values()), running

    rows, running = await services.store.read(query)
    rows.sort(key=lambda row: (row.id not in running, row.id))
    services.inputs.release_all_but({row.id for row in rows})
    contexts = []
    for number, row in enumerate(rows, 1):
        if number % ADOPTED_AT_A_TIME == 0:
            await asyncio.sleep(0)
        context = JobContext(services, row)
        if (attempt := running.get(row.id)) is not None:
            context.adopt_gpus(attempt.gpus)
        contexts.append((row, context))
    if rows:
        log.info("taking up %d jobs, %d of them with a run", len(rows), len(running))
    return contexts


async def sweep_orphans_forever(services: JobServices) -> None:
    """Sweep again and again: a backend may carry out a request long after its caller has gone."""
    while True:
        await sweep_orphans(services)
        await asyncio.sleep(SWEEP_SECONDS)


async def sweep_orphans(services: JobServices) -> None:
    """Remove the runs of this data directory that a backend has and no job knows."""
    await asyncio.gather(*(_sweep(services, backend) for backend in services.all_backends))


async def _sweep(services: JobServices, backend: Backend) -> None:
    failures = 0
    while True:
        try:
            await _sweep_once(services, backend)
        except (BackendUnreachable, StoreUnavailable) as error:
            failures += 1
            log.warning("cannot look for orphaned runs: %s", str(error))
        else:
            return
        await asyncio.sleep(services.timings.pause(failures, services.random))


async def _sweep_once(services: JobServices, backend: Backend) -> None:
    runs = await backend.list_runs()
    # Read after the backend was asked: an attempt is in the store before the backend gets it.
    known = {attempt.key for attempt in await services.store.read(attempts.open_attempts)}
    for run in runs:
        tried = {trials.running_key for trials in services.trials.values()}
        if run.key not in known and run.key not in tried:
            await _remove_orphan(backend, run, services.timings)


async def _remove_orphan(backend: Backend, run: BackendRun, timings: JobTimings) -> None:
    if run.run_dir is not None:
        waited = 0.0
        while (await backend.poll(run.ref, run.run_dir)).phase in (RunPhase.RUNNING, RunPhase.QUEUED):
            if waited == 0.0:
                log.warning("ending the run %s: no job knows it", run.key)
                await backend.stop(run.ref, force=True)
            if waited > timings.grace_s:
                log.error("the run %s does not end", run.key)
                return
            waited += timings.poll_s
            await asyncio.sleep(timings.poll_s)
    await backend.remove(run.ref)
    log.info("removed what the backend had of %s", run.key)
