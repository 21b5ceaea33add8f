"""Remove inputs, models and checkpoints of finished jobs, after a while or at once when the disk is full.

Plans, logs and results stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from core.domain.units import show_bytes
from miner.jobs.folder import job_folder
from miner.store.jobs import jobs_finished_before
from miner.store.store import Store

log = logging.getLogger(__name__)


class FinishedJobCleaner:
    def __init__(self, data_dir: Path, store: Store, *, keep_s: float, clock: Callable[[], float]) -> None:
        self._data_dir, self._store, self._keep_s, self._clock = data_dir, store, keep_s, clock
        #: Nothing is left of these; to look at a thousand directories again and again is not free.
        self._stripped: set[int] = set()
        #: These were started again during a clean-up.
        self._revived: set[int] = set()
        self._busy = asyncio.Lock()

    async def remove_expired(self) -> int:
        """Remove the files of jobs that ended long enough ago; return the bytes freed."""
        return await self._strip(self._clock() - self._keep_s)

    async def remove_all_finished(self) -> int:
        """The disk is full: remove the files of every job that is over; return the bytes freed."""
        return await self._strip(self._clock())

    async def _strip(self, over_by: float) -> int:
        freed = 0
        async with self._busy:
            self._revived.clear()
            jobs = await self._store.read(jobs_finished_before, over_by)
            for job_id in jobs:  # terabytes take minutes, in which a validator may start one of them again
                if job_id not in self._stripped and job_id not in self._revived:
                    self._stripped.add(job_id)
                    freed += await asyncio.to_thread(self._strip_one, job_id)
        if freed:
            log.info("removed %s of finished jobs", show_bytes(freed))
        return freed

    def _strip_one(self, job_id: int) -> int:
        try:
            return job_folder(self._data_dir, job_id).strip()
        except OSError as error:
            log.warning("the files of job %d cannot be removed: %s", job_id, error)
            return 0

    def revived(self, job_id: int) -> None:
        """The job was started again: spare its files."""
        self._stripped.discard(job_id)
        self._revived.add(job_id)
