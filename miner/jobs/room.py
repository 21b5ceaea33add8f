"""Room on the disk: what finished jobs have left is removed after a while, or at once when the disk is full.

Inputs, models and checkpoints go; plans, logs and results stay, being small and asked for later.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from core.units import show_bytes
from miner.jobs.book import JobBook
from miner.jobs.folder import job_folder
from miner.store import work

log = logging.getLogger(__name__)


class Room:
    def __init__(self, data_dir: Path, book: JobBook, *, keep_s: float) -> None:
        self._data_dir, self._book, self._keep_s = data_dir, book, keep_s
        #: Nothing is left of these; looking at a thousand folders again and again is not free.
        self._stripped: set[int] = set()
        self._busy = asyncio.Lock()

    async def tidy(self, now: float) -> int:
        """Remove what is old enough. Bytes freed."""
        return await self._strip(now - self._keep_s)

    async def make(self) -> int:
        """The disk is full: everything of every job that is over."""
        return await self._strip(self._book.clock())

    async def _strip(self, over_by: float) -> int:
        async with self._busy:
            jobs = await self._book.read(lambda db: work.finished_before(db, over_by))
            fresh = [one for one in jobs if one not in self._stripped]
            freed = await asyncio.to_thread(self._strip_all, fresh)
            self._stripped.update(fresh)
        if freed:
            log.info("removed %s of %d finished jobs", show_bytes(freed), len(fresh))
        return freed

    def _strip_all(self, jobs: list[int]) -> int:
        return sum(job_folder(self._data_dir, one).strip() for one in jobs)

    def used_again(self, job_id: int) -> None:
        """The job has another life."""
        self._stripped.discard(job_id)
