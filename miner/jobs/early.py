"""Publishing while the training goes on: the first model as soon as there is one, better ones now and then.

Whatever happens to this host afterwards, the validator finds something. An upload takes bandwidth and some of
the disk's time, so they are kept to a share of the whole, and none begins when the last one is due soon.
"""

from __future__ import annotations

import asyncio
import logging

from core.submission.folder import Identity
from miner.jobs.best import Candidate, Published, identity
from miner.jobs.desk import Desk
from miner.jobs.ports import StepFailed
from miner.jobs.publishing import publish_one
from miner.jobs.states import EndReason
from miner.watch.progress import Course

log = logging.getLogger(__name__)


class EarlyPublisher:
    def __init__(self, desk: Desk, attempt: int) -> None:
        self.desk, self.attempt = desk, attempt
        self._task: asyncio.Task[None] | None = None
        self._seen = 0
        self._not_before = 0.0
        self._took_s = 0.0
        self._failures = 0
        self._refused: Identity | None = None

    def look(self, course: Course, stop_at: float) -> None:
        """Begin an upload when there is something new and this is the time for it."""
        desk, now = self.desk, self.desk.now()
        if not desk.parts.pace.publish_early or course.submission is None:
            return
        if self._task is not None and not self._task.done():
            return
        if course.submissions == self._seen or now < self._not_before:
            return
        if self._seen and now + 2 * self._took_s > stop_at:
            return  # the last upload comes soon enough
        folder = desk.folder.attempt(self.attempt).submission
        told = course.submission
        self._seen = course.submissions
        model = Candidate(self.attempt, folder, told.score, told.step)
        self._task = asyncio.create_task(self._publish(model), name=f"early upload of job {desk.row.id}")

    async def close(self) -> None:
        """The last upload takes over, and goes on from what this one has done."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None

    async def _publish(self, model: Candidate) -> None:
        desk, began = self.desk, self.desk.now()
        if identity(model.folder) == self._refused or not await self._is_better(model):
            return
        try:
            async with desk.parts.book.step(desk.row, "publish early", model.attempt):
                await publish_one(desk, model, lambda _what, _done, _total: None)
        except StepFailed as failed:
            self._after_failure(model, failed)
        except Exception:
            log.exception("the early upload of job %d failed", desk.row.id, extra=desk.log)
            self._wait()
        else:
            self._failures, self._took_s = 0, desk.now() - began
            self._not_before = desk.now() + self._took_s / desk.parts.pace.early_share

    async def _is_better(self, model: Candidate) -> bool:
        """Than what an earlier attempt has published; within one attempt the trainer sees to that."""
        known = await asyncio.to_thread(Published.load, self.desk.folder)
        if known is None or self.desk.row.submission is None or known.attempt == model.attempt:
            return True
        return model.beats(Candidate(known.attempt, model.folder, known.score))

    def _after_failure(self, model: Candidate, failed: StepFailed) -> None:
        desk = self.desk
        log.warning("the early upload of job %d failed: %s", desk.row.id, str(failed), extra=desk.log)
        if failed.reason is EndReason.BAD_SUBMISSION:
            self._refused = identity(model.folder)
            desk.parts.alert("bad_submission", f"job {desk.row.id}, while training: {failed}")
        self._wait(failed.retry_after or 0.0)

    def _wait(self, at_least: float = 0.0) -> None:
        parts = self.desk.parts
        self._failures += 1
        self._seen = 0
        self._not_before = self.desk.now() + max(parts.pace.pause(self._failures, parts.random), at_least)
