"""After a restart: the books say what should be, the engine what is, and nothing is launched twice.

What runs is adopted, and holds its GPUs, before any waiting job may ask for some. What ended meanwhile, is
complete or has vanished, each worker finds out for itself, by entering its job's state anew.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3

from miner.engines.base import Engine, Found, Phase, Unreachable
from miner.jobs.desk import Desk, Parts
from miner.jobs.times import Pace
from miner.store import work
from miner.store.work import AttemptRow, JobRow
from miner.store.writer import StoreUnavailable

log = logging.getLogger(__name__)

#: Between two looks for runs of nobody.
SWEEP_SECONDS = 1800.0


async def take_up(parts: Parts) -> list[tuple[JobRow, Desk]]:
    """Every job that needs a worker, those first that hold GPUs, with what they hold adopted."""
    now = parts.clock()

    def query(db: sqlite3.Connection) -> tuple[list[JobRow], dict[int, AttemptRow]]:
        rows = {row.id: row for row in work.open_jobs(db, now)}
        running = {one.job_id: one for one in work.open_attempts(db)}
        for job_id in running.keys() - rows.keys():  # over, and not tidied up after
            rows[job_id] = work.job(db, job_id)
        return list(rows.values()), running

    rows, running = await parts.book.read(query)
    rows.sort(key=lambda row: (row.id not in running, row.id))
    parts.inputs.release_all_but({row.id for row in rows})
    desks = []
    for row in rows:
        desk = Desk(parts, row)
        if (attempt := running.get(row.id)) is not None:
            desk.take_back(attempt.gpus)
        desks.append((row, desk))
    if rows:
        log.info("taking up %d jobs, %d of them with a run", len(rows), len(running))
    return desks


async def sweep_for_good(parts: Parts) -> None:
    """Also later on: an engine may carry out long after what nobody waited for any more."""
    while True:
        await sweep(parts)
        await asyncio.sleep(SWEEP_SECONDS)


async def sweep(parts: Parts) -> None:
    """Remove what the engine has of this data folder and no job knows: ended runs, and runs of nobody."""
    failures = 0
    while True:
        try:
            await _sweep_once(parts)
        except (Unreachable, StoreUnavailable) as error:
            failures += 1
            log.warning("orphans can't be looked for: %s", str(error))
        else:
            return
        await asyncio.sleep(parts.pace.pause(failures, parts.random))


async def _sweep_once(parts: Parts) -> None:
    for engine in (parts.engine, *parts.others.values()):
        found = await engine.ours()
        # Read after the engine was asked: an attempt is in the books before the engine hears of it.
        known = {one.key for one in await parts.book.read(work.open_attempts)}
        if parts.trials is not None and parts.trials.running is not None:
            known.add(parts.trials.running)
        for one in found:
            if one.key not in known:
                await _remove(engine, one, parts.pace)


async def _remove(engine: Engine, one: Found, pace: Pace) -> None:
    if one.run_dir is not None:
        waited = 0.0
        while (await engine.poll(one.ref, one.run_dir)).phase in (Phase.RUNNING, Phase.QUEUED):
            if waited == 0.0:
                log.warning("ending the run %s: no job knows it", one.key)
                await engine.stop(one.ref, force=True)
            if waited > pace.grace_s:
                log.error("the run %s does not end", one.key)
                return
            waited += pace.poll_s
            await asyncio.sleep(pace.poll_s)
    await engine.remove(one.ref)
    log.info("removed what the engine had of %s", one.key)
