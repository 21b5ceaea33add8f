"""The worker of one job: looks at its state, does what that state needs, and looks again.

Every state can be entered anew from the books and the disk alone: a restart does that, and so does a worker
whose job somebody else has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from miner.engines.base import Phase, Unreachable
from miner.jobs.best import best_of
from miner.jobs.desk import Desk
from miner.jobs.folder import AttemptFolder
from miner.jobs.launch import Attempt
from miner.jobs.past import candidates, past_of
from miner.jobs.ports import StepFailed
from miner.jobs.prepare import keep_lesson, prepare
from miner.jobs.publishing import publish, rename
from miner.jobs.retry import Next, Situation, after_attempt
from miner.jobs.states import EndReason, JobState
from miner.jobs.tasks import task_of, wanted_of
from miner.jobs.training import Training
from miner.jobs.verdict import Verdict
from miner.store.work import AttemptRow, Stale
from miner.store.writer import StoreUnavailable
from miner.watch import files

log = logging.getLogger(__name__)

#: What a new attempt takes until its first model, where no plan says more.
_NEEDS_S = 120.0
#: Mistakes of our own that a job outlives, and after how long without one it counts as none.
_MOST_BUGS, _FORGIVEN_S = 1, 900.0


class Worker:
    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self._bugs = 0
        self._bug_at = float("-inf")

    async def run(self) -> None:
        """Until nothing is left to do for the job. Cancelling it leaves the job as it is."""
        while True:
            try:
                if await self._round():
                    return
            except StoreUnavailable as error:
                await self._wait_for_the_store(str(error))
            except Exception:  # noqa: BLE001 - the boundary of everything that is done for a job
                await self._bug()

    async def _round(self) -> bool:
        """What is done about a failure needs the store as well, so it stands inside of the same boundary."""
        try:
            return await self._next()
        except Stale:
            await self.desk.reload()
        except StepFailed as failed:
            await self._failed(failed)
        return False

    async def _wait_for_the_store(self, why: str) -> None:
        desk = self.desk
        log.warning("job %d waits for the store: %s", desk.row.id, why, extra=desk.log)
        pause = desk.parts.pace.pause(1, desk.parts.random)
        desk.live.trouble, desk.live.retry_at = why, desk.now() + pause
        desk.show()
        with contextlib.suppress(StoreUnavailable):  # which jobs are over stands in the store
            await desk.parts.make_room()
        await desk.pause(pause)
        desk.live.trouble, desk.live.retry_at = "", None

    async def _next(self) -> bool:
        row = self.desk.row
        if row.state.is_over:
            return await self._over()
        if self._bugs > _MOST_BUGS:
            await self._end(
                EndReason.BUG, f"the worker failed {self._bugs} times; the log has the tracebacks"
            )
            self._bugs = 0
            return False
        if self.desk.now() >= row.deadline_at:
            await self._end(EndReason.DEADLINE, "the deadline has come")
            return False
        match row.state:
            case JobState.QUEUED | JobState.PREPARING:
                if await self._end_runs(EndReason.STOPPED):
                    await prepare(self.desk)
            case JobState.TRAINING:
                await self._train()
            case JobState.PUBLISHING:
                await self._publish()
        return False

    # Training

    async def _train(self) -> None:
        desk = self.desk
        attempts = await desk.parts.book.attempts(desk.row.id)
        current = attempts[-1]
        if current.ended_at is None:
            attempt = await self._loaded(current)
            if attempt is None or not await self._watch(attempt):
                return
            attempts = await desk.parts.book.attempts(desk.row.id)
        await self._decide(attempts)

    async def _loaded(self, current: AttemptRow) -> Attempt | None:
        """What the attempt was told. Without it nobody can look after its run: that is ended, and another
        attempt follows."""
        try:
            return await asyncio.to_thread(Attempt.load, current)
        except (OSError, ValueError) as error:
            text = f"what attempt {current.number} was told can't be read any more: {error}"
        desk = self.desk
        desk.note("lost", text)
        desk.parts.alert("attempt_lost", f"job {desk.row.id}: {text}")
        await self._end_run(current, EndReason.LOST, text)
        return None

    async def _watch(self, attempt: Attempt) -> bool:
        """Whether the attempt has ended. If nobody can tell and the time is up, the job goes on without it,
        and whatever runs still is ended once the engine answers."""
        desk = self.desk
        task = task_of(desk.row)
        desk.parts.inputs.hold(wanted_of(desk.row, task, desk.folder))
        if attempt.plan.launch.port is not None:
            desk.parts.ports[desk.row.id] = attempt.plan.launch.port
        training = Training(desk, attempt, task)
        try:
            ended = await training.run()
        except StepFailed as failed:
            if failed.reason is not EndReason.ENGINE_REJECTED:
                await self._end(failed.reason, str(failed))
                return False
            ended = Verdict(failed.reason, str(failed))
        if ended is None:
            await self._end(EndReason.DEADLINE, "its time was up, and nobody could say that it had ended")
            return False
        await self._close(attempt, ended, training.measured_step_s)
        return True

    async def _close(self, attempt: Attempt, ended: Verdict, measured_step_s: float | None) -> None:
        """The end goes into the books first: what is done after it can be done again."""
        desk, parts = self.desk, self.desk.parts
        await parts.book.end_attempt(attempt.row, ended.reason, ended.detail)
        why = f", {ended.detail}" if ended.detail else ""
        desk.note("attempt_ended", f"attempt {attempt.row.number} ended: {ended.reason}{why}")
        if measured_step_s is not None:
            await keep_lesson(desk, attempt.plan, measured_step_s)
        await self._forget(attempt.row)

    async def _forget(self, row: AttemptRow) -> None:
        engine = self.desk.parts.engine_of(row)
        try:
            ref = row.ref or await engine.find(row.key)
            if ref is not None:
                await engine.remove(ref)
        except Unreachable as error:  # recovery sweeps it up
            log.warning("attempt %s is left in the engine: %s", row.key, str(error), extra=self.desk.log)

    async def _decide(self, attempts: list[AttemptRow]) -> None:
        desk, row = self.desk, self.desk.row
        past = await asyncio.to_thread(past_of, attempts, row.counted_from)
        reason = past.ended_by or EndReason.LOST
        has_model = await asyncio.to_thread(lambda: best_of(candidates(attempts)) is not None)
        plan = past.plan
        times = desk.times(
            reserve_s=plan.time.reserve_s if plan else 0.0, publish_s=plan.time["publish"] if plan else 60.0
        )
        situation = Situation(
            reason=reason,
            history=past.history,
            has_model=has_model,
            left_s=times.end_by - desk.now(),
            needs_s=plan.time.start_of("train") - plan.time["download"] if plan else _NEEDS_S,
        )
        match after_attempt(situation, desk.parts.pace):
            case Next.PUBLISH:
                await desk.move(JobState.PUBLISHING)
            case Next.AGAIN:
                await self._breathe(reason, past.history)
                await desk.move(JobState.PREPARING)
            case Next.GIVE_UP:
                await self._end(reason, attempts[-1].detail)

    async def _breathe(self, reason: EndReason, history: tuple[EndReason, ...]) -> None:
        """What is wrong with this host does not get better by being tried again at once."""
        desk = self.desk
        if reason is EndReason.DISK_FULL:
            await desk.parts.make_room()
        if reason in (EndReason.OOM, EndReason.NAN):
            return
        alike = 0
        for one in reversed(history):
            if one is not reason:
                break
            alike += 1
        pause = desk.parts.pace.pause(alike, desk.parts.random)
        desk.live.trouble, desk.live.retry_at = reason.value, desk.now() + pause
        desk.show()
        await desk.pause(pause)

    async def _publish(self) -> None:
        """Where all models were refused, their attempts say so now, and the rule decides what follows."""
        desk = self.desk
        if not await publish(desk):
            attempts = await desk.parts.book.attempts(desk.row.id)
            if not attempts or attempts[-1].end_reason is not EndReason.BAD_SUBMISSION:
                raise StepFailed(EndReason.BAD_SUBMISSION, "no attempt has left a model")
            await self._decide(attempts)

    # Ends

    async def _failed(self, failed: StepFailed) -> None:
        desk = self.desk
        log.warning("job %d: %s (%s)", desk.row.id, str(failed), failed.reason, extra=desk.log)
        try:
            await self._end(failed.reason, str(failed))
        except Stale:
            await desk.reload()

    async def _bug(self) -> None:
        """Our own mistake. Once more after a pause; then the job ends with whatever there is. A day's run is
        not given up for two that have nothing to do with each other."""
        desk, now = self.desk, self.desk.now()
        self._bugs = self._bugs + 1 if abs(now - self._bug_at) < _FORGIVEN_S else 1
        self._bug_at = now
        log.exception("the worker of job %d failed (%d)", desk.row.id, self._bugs, extra=desk.log)
        desk.parts.alert("job_bug", f"job {desk.row.id}: the worker failed, see the log")
        await desk.pause(desk.parts.pace.pause(self._bugs, desk.parts.random))
        try:
            await desk.reload()
        except StoreUnavailable:
            log.warning("job %d is looked at again", desk.row.id, extra=desk.log)

    async def _end(self, reason: EndReason, detail: str) -> None:
        """With a model somewhere and time to publish it, that is not the end yet."""
        desk, row = self.desk, self.desk.row
        if row.state is not JobState.PUBLISHING and desk.now() < row.deadline_at:
            attempts = await desk.parts.book.attempts(row.id)
            if await asyncio.to_thread(lambda: best_of(candidates(attempts))):
                await desk.move(JobState.PUBLISHING)
                return
        if row.submission is not None:
            await desk.move(JobState.DONE, EndReason.PUBLISHED, f"published early; then: {reason}, {detail}")
        else:
            desk.parts.alert("job_failed", f"job {row.id}: {reason}, {detail}")
            await desk.move(JobState.FAILED, reason, detail)

    async def _over(self) -> bool:
        """Nothing may be left running, held or misnamed. True when all is done."""
        desk = self.desk
        reason = EndReason.CANCELLED if desk.row.state is JobState.CANCELLED else EndReason.STOPPED
        if not await self._end_runs(reason):
            return False
        desk.release_gpus()
        desk.parts.inputs.release(desk.row.id)
        while desk.row.state is JobState.DONE and desk.row.misnamed and desk.now() < desk.row.deadline_at:
            if not await self._rename():  # and once more for a start that came meanwhile
                break
        desk.parts.publisher.forget(desk.row.id)
        return True

    async def _rename(self) -> bool:
        try:
            await rename(self.desk)
        except StepFailed as failed:
            self.desk.parts.alert("job_misnamed", f"job {self.desk.row.id}: {failed}")
            log.warning("job %d keeps its old name: %s", self.desk.row.id, str(failed), extra=self.desk.log)
            return False
        return True

    async def _end_runs(self, reason: EndReason) -> bool:
        """Nothing of earlier attempts runs any more: true when that is so. A job that was given up while its
        engine did not answer, and then started again, would train twice on the same cards."""
        for one in await self.desk.parts.book.attempts(self.desk.row.id):
            if one.ended_at is None and not await self._end_run(one, reason, "ended with its job"):
                return False
        return True

    async def _end_run(self, attempt: AttemptRow, reason: EndReason, detail: str) -> bool:
        """End a run that nobody waits for: asked, then killed. True when it is gone."""
        desk, pace = self.desk, self.desk.parts.pace
        engine = desk.parts.engine_of(attempt)
        folder = AttemptFolder(Path(attempt.folder))
        asked_at, force = desk.now(), False
        await desk.submitted()
        try:
            ref = attempt.ref or await engine.find(attempt.key)
            while ref is not None:
                status = await engine.poll(ref, folder.path)
                if status.phase in (Phase.ENDED, Phase.LOST):
                    break
                if desk.now() - asked_at >= pace.grace_s and not force:
                    force = True
                    await engine.stop(ref, force=True)
                elif not force:
                    await asyncio.to_thread(files.touch, folder.stop)
                    await engine.stop(ref)
                await desk.pause(pace.poll_s)
        except Unreachable as error:
            log.warning("job %d: a run can't be ended: %s", desk.row.id, str(error), extra=desk.log)
            await desk.pause(pace.pause(3, desk.parts.random))
            return False
        await desk.parts.book.end_attempt(attempt, reason, detail)
        await self._forget(attempt)
        return True
