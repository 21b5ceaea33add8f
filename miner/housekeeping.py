"""What is done now and then, beside answering."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

log = logging.getLogger(__name__)

#: How often what time has ended is noticed: lapsed holds, passed deadlines, expired nonces.
ROUND_SECONDS = 5.0


@dataclass
class Chore:
    name: str
    do: Callable[[], Awaitable[object]]
    #: At least so long between two times.
    every: float = 0.0
    last: float | None = None

    def is_due(self, now: float) -> bool:
        return self.last is None or now - self.last >= self.every


class Housekeeping:
    def __init__(self, chores: Sequence[Chore]) -> None:
        self._chores = tuple(chores)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="housekeeping")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def round(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        for chore in self._chores:
            if not chore.is_due(now):
                continue
            chore.last = now
            try:
                await chore.do()
            except Exception:  # a full disk must not end the housekeeping for good, nor one chore the others
                log.exception("housekeeping failed at: %s; it is tried again", chore.name)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(ROUND_SECONDS)
            await self.round()
