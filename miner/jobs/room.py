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
        #: These have begun another life while room was being made.
        self._alive: set[int] = set()
        self._busy = asyncio.Lock()

    async def tidy(self, now: float) -> int:
        """Remove what is old enough. Bytes freed."""
        return await self._strip(now - self._keep_s)

    async def make(self) -> int:
        """The disk is full: everything of every job that is over."""
        return await self._strip(self._book.clock())

    async def _strip(self, over_by: float) -> int:
        freed = 0
        async with self._busy:
            self._alive.clear()
            jobs = await self._book.read(lambda db: work.finished_before(db, over_by))
            for one in jobs:  # terabytes take minutes, in which a validator may start one of them again
                if one not in self._stripped and one not in self._alive:
                    self._stripped.add(one)
                    freed += await asyncio.to_thread(self._strip_one, one)
        if freed:
            log.info("removed %s of finished jobs", show_bytes(freed))
        return freed

    def _strip_one(self, job_id: int) -> int:
        try:
            return job_folder(self._data_dir, job_id).strip()
        except OSError as error:
            log.warning("what job %d has left can't be removed: %s", job_id, error)
            return 0

    def used_again(self, job_id: int) -> None:
        """The job has another life."""
        self._stripped.discard(job_id)
        self._alive.add(job_id)
