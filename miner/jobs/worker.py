"""The worker of one job: look at its state, do what that state needs, and look again.

    QUEUED ─▶ PREPARING ─▶ TRAINING ─▶ PUBLISHING ─▶ DONE
                  ▲            │            │
                  └─ another ──┴────────────┘        FAILED and CANCELLED: from every state
                     attempt

Every state can be entered from the store and the disk alone: a restart does that, and so does a worker whose
job was changed meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from itertools import takewhile

from core.domain.job_states import EndReason, JobState, StepFailed
from miner.backends.base import BackendUnreachable, RunPhase
from miner.jobs.context import JobContext
from miner.jobs.figures import STORED_POINTS, RunFigures, read_figures
from miner.jobs.folder import AttemptFolder
from miner.jobs.history import history_of, read_result
from miner.jobs.launch import JobAttempt
from miner.jobs.prepare import keep_lesson, prepare
from miner.jobs.publishing import best_model, publish_best, rename_published
from miner.jobs.training import AttemptSupervisor
from miner.jobs.verdict import AttemptVerdict, NextAction, RetrySituation, next_action
from miner.observe.alerts import AlertKind
from miner.store import attempts as store_attempts
from miner.store.attempts import AttemptRow, StaleJob
from miner.store.database import StoreUnavailable
from miner.support.untrusted_files import touch_untrusted

log = logging.getLogger(__name__)

#: Seconds until a new attempt's first model, if no plan says more.
_UNPLANNED_NEED_S = 120.0
#: Bugs of ours that a job survives, and after how long without one they are forgotten.
_MAX_BUGS, _BUG_WINDOW_S = 1, 900.0


class JobWorker:
    def __init__(self, job: JobContext) -> None:
        self.job = job
        self._bugs = 0
        self._bug_at = float("-inf")

    async def run(self) -> None:
        """Work until nothing is left to do for the job. Cancelling it leaves the job as it is."""
        while True:
            try:
                try:
                    if await self._step():
                        return
                # Handling these needs the store as well, so it stands within the outer boundary.
                except StaleJob:
                    await self.job.reload()
                except StepFailed as failed:
                    await self._end_after(failed)
            except StoreUnavailable as error:
                await self._wait_for_the_store(str(error))
            except Exception:  # noqa: BLE001 - the boundary of everything that is done for a job
                await self._survive_bug()

    async def _step(self) -> bool:
        """Do what the job's state needs; return True when nothing is left to do."""
        job = self.job
        if job.row.state.is_over:
            return await self._clean_up_ended()
        if self._bugs > _MAX_BUGS:
            await self._end(
                EndReason.BUG, f"the worker failed {self._bugs} times; the log has the tracebacks"
            )
            self._bugs = 0
            return False
        if job.now() >= job.row.deadline_at:
            await self._end(EndReason.DEADLINE, "the deadline has come")
            return False
        match job.row.state:
            case JobState.QUEUED | JobState.PREPARING:
                if await self._end_runs(EndReason.STOPPED):
                    await prepare(job)
            case JobState.TRAINING:
                await self._train()
            case JobState.PUBLISHING:
                await self._publish()
        return False

    # Training

    async def _train(self) -> None:
        """Supervise the last attempt to its end, and decide what follows."""
        job = self.job
        attempts = await job.attempts()
        if attempts[-1].ended_at is None:
            attempt = await self._load_attempt(attempts[-1])
            if attempt is None or not await self._supervise(attempt):
                return
            attempts = await job.attempts()
        await self._decide(attempts)

    async def _load_attempt(self, row: AttemptRow) -> JobAttempt | None:
        """Read the attempt's plan and run. Without them its run cannot be supervised and is ended;
        another attempt follows."""
        try:
            return await asyncio.to_thread(JobAttempt.load, row)
        except (OSError, ValueError) as error:
            text = f"the plan and run of attempt {row.number} cannot be read any more: {error}"
        self.job.note("lost", text)
        self.job.alert(AlertKind.ATTEMPT_LOST, text)
        await self._end_run(row, EndReason.LOST, text)
        return None

    async def _supervise(self, attempt: JobAttempt) -> bool:
        """Return True if the attempt has ended, with its end in the store.

        If that is unknown and the time is up, the job goes on without it, and whatever still runs is ended
        once the backend answers.
        """
        job = self.job
        # After a restart every job comes here at once, and its file may be on a slow disk.
        await asyncio.to_thread(job.services.inputs.hold, job.task)
        if attempt.plan.launch.port is not None:
            job.services.ports[job.row.id] = attempt.plan.launch.port
        supervisor = AttemptSupervisor(job, attempt)
        try:
            verdict = await supervisor.run()
        except StepFailed as failed:
            if failed.reason is not EndReason.BACKEND_REJECTED:
                await self._end(failed.reason, str(failed))
                return False
            verdict = AttemptVerdict(failed.reason, str(failed))
        if verdict is None:
            await self._end(EndReason.DEADLINE, "its time was up, and its end was not confirmed")
            return False
        # The end goes into the store first: what is done after it can be repeated.
        await self._end_attempt(attempt.row, verdict.reason, verdict.detail, supervisor.figures)
        detail = f", {verdict.detail}" if verdict.detail else ""
        job.note("attempt_ended", f"attempt {attempt.row.number} ended: {verdict.reason}{detail}")
        if supervisor.measured_step_s is not None:
            await keep_lesson(job, attempt.plan, supervisor.measured_step_s)
        await self._remove_from_backend(attempt.row)
        return True

    async def _decide(self, attempts: list[AttemptRow]) -> None:
        """After the last attempt: publish, try again, or give up."""
        job = self.job
        history = await asyncio.to_thread(history_of, attempts, job.row.counted_from)
        reason, plan = history.ended_by or EndReason.LOST, history.plan
        times = job.timeline(
            reserve_s=plan.time.reserve_s if plan else 0.0, publish_s=plan.time["publish"] if plan else 60.0
        )
        situation = RetrySituation(
            reason=reason,
            history=history.failures,
            has_model=await best_model(job) is not None,
            left_s=times.end_by - job.now(),
            needs_s=plan.time.start_of("train") - plan.time["download"] if plan else _UNPLANNED_NEED_S,
        )
        match next_action(situation, job.services.timings):
            case NextAction.PUBLISH:
                await job.move(JobState.PUBLISHING)
            case NextAction.AGAIN:
                await self._pause_before_retry(reason, history.reasons)
                await job.move(JobState.PREPARING)
            case NextAction.GIVE_UP:
                await self._end(reason, attempts[-1].detail)

    async def _pause_before_retry(self, reason: EndReason, reasons: tuple[EndReason, ...]) -> None:
        """Back off: host problems rarely clear immediately."""
        job = self.job
        if reason is EndReason.DISK_FULL:
            await job.services.cleaner.remove_all_finished()
        if reason in (EndReason.OOM, EndReason.NAN):
            return
        alike = len(list(takewhile(lambda other: other is reason, reversed(reasons))))
        pause = job.services.timings.pause(alike, job.services.random)
        job.live.trouble, job.live.retry_at = reason.value, job.now() + pause
        job.show_state()
        await job.pause(pause)

    # Publishing

    async def _publish(self) -> None:
        """Publish; if all models were refused, their attempts say so now, and the retry rule decides."""
        job = self.job
        if not await publish_best(job):
            attempts = await job.attempts()
            if not attempts or attempts[-1].end_reason is not EndReason.BAD_SUBMISSION:
                raise StepFailed(EndReason.BAD_SUBMISSION, "no attempt has left a model")
            await self._decide(attempts)

    # Ends

    async def _end_after(self, failed: StepFailed) -> None:
        job = self.job
        log.warning("job %d: %s (%s)", job.row.id, str(failed), failed.reason, extra=job.log)
        try:
            await self._end(failed.reason, str(failed))
        except StaleJob:
            await job.reload()

    async def _end(self, reason: EndReason, detail: str) -> None:
        """End the job, unless there is a model and time to publish it."""
        job, row = self.job, self.job.row
        may_publish = row.state is not JobState.PUBLISHING and job.now() < row.deadline_at
        if may_publish and await best_model(job) is not None:
            await job.move(JobState.PUBLISHING)
        elif row.submission is not None:
            await job.move(JobState.DONE, EndReason.PUBLISHED, f"published early; then: {reason}, {detail}")
        else:
            job.alert(AlertKind.JOB_FAILED, f"{reason}, {detail}")
            await job.move(JobState.FAILED, reason, detail)

    async def _clean_up_ended(self) -> bool:
        """Leave nothing running, held or misnamed; return True when all is done."""
        job = self.job
        reason = EndReason.CANCELLED if job.row.state is JobState.CANCELLED else EndReason.STOPPED
        if not await self._end_runs(reason):
            return False
        job.release_gpus()
        job.services.inputs.release(job.row.id)
        while job.row.state is JobState.DONE and job.row.misnamed and job.now() < job.row.deadline_at:
            try:
                await rename_published(job)  # and once more for a start that came meanwhile
            except StepFailed as failed:
                job.alert(AlertKind.JOB_MISNAMED, str(failed))
                log.warning("job %d keeps its old name: %s", job.row.id, str(failed), extra=job.log)
                break
        job.services.publisher.forget(job.row.id)
        return True

    async def _end_runs(self, reason: EndReason) -> bool:
        """End the runs of earlier attempts; return True when none is left.

        A job that was given up while its backend did not answer, and then started again, would train twice on
        the same GPUs.
        """
        for attempt in await self.job.attempts():
            if attempt.ended_at is None and not await self._end_run(attempt, reason, "ended with its job"):
                return False
        return True

    async def _end_run(self, attempt: AttemptRow, reason: EndReason, detail: str) -> bool:
        """Ask an abandoned run to end, then kill it; return True when it is gone."""
        job, timings = self.job, self.job.services.timings
        backend = job.services.backend_of(attempt)
        folder = AttemptFolder(attempt.folder)
        asked_at, force = job.now(), False
        await job.wait_until_submitted()
        try:
            ref = attempt.ref or await backend.find(attempt.key)
            while ref is not None:
                status = await backend.poll(ref, folder.path)
                if status.phase in (RunPhase.ENDED, RunPhase.LOST):
                    break
                if job.now() - asked_at >= timings.grace_s and not force:
                    force = True
                    await backend.stop(ref, force=True)
                elif not force:
                    await asyncio.to_thread(touch_untrusted, folder.stop)
                    await backend.stop(ref)
                await job.pause(timings.poll_s)
        except BackendUnreachable as error:
            log.warning("job %d: a run cannot be ended: %s", job.row.id, str(error), extra=job.log)
            await job.pause(timings.pause(3, job.services.random))
            return False
        await self._end_attempt(attempt, reason, detail)
        await self._remove_from_backend(attempt)
        return True

    async def _end_attempt(
        self, attempt: AttemptRow, reason: EndReason, detail: str, figures: RunFigures | None = None
    ) -> None:
        """Store how an attempt ended, with its final figures, read from the progress file if not given."""
        now = self.job.now()
        await self.job.services.store.write(store_attempts.end_attempt, attempt.id, now, reason, detail)
        folder = AttemptFolder(attempt.folder)
        if figures is None:
            figures = await asyncio.to_thread(read_figures, folder)
        snapshot = figures.snapshot(
            seconds=max(now - attempt.started_at, 0.0),
            result=await asyncio.to_thread(read_result, folder),
            utilization=await self._utilization(attempt, now),
            points=STORED_POINTS,
        )
        await self.job.services.store.write(store_attempts.save_figures, attempt.id, snapshot.to_stored())

    async def _utilization(self, attempt: AttemptRow, now: float) -> float | None:
        """Mean utilisation of the attempt's GPUs, from the store or, if it was short, from live samples."""
        stored = await self.job.services.store.read(
            store_attempts.mean_utilization, attempt.gpus, attempt.started_at, now
        )
        if stored is not None:
            return stored
        live = self.job.services.samples
        samples = [sample for gpu in attempt.gpus for sample in live.since(gpu, attempt.started_at)]
        known = [sample.utilization for sample in samples if sample.utilization is not None]
        return sum(known) / len(known) if known else None

    async def _remove_from_backend(self, row: AttemptRow) -> None:
        backend = self.job.services.backend_of(row)
        try:
            ref = row.ref or await backend.find(row.key)
            if ref is not None:
                await backend.remove(ref)
        except BackendUnreachable as error:  # recovery removes it later
            log.warning("attempt %s is left in the backend: %s", row.key, str(error), extra=self.job.log)

    # Trouble of our own

    async def _wait_for_the_store(self, why: str) -> None:
        job = self.job
        log.warning("job %d waits for the store: %s", job.row.id, why, extra=job.log)
        pause = job.services.timings.pause(1, job.services.random)
        job.live.trouble, job.live.retry_at = why, job.now() + pause
        job.show_state()
        with contextlib.suppress(StoreUnavailable):  # the store says which jobs are over
            await job.services.cleaner.remove_all_finished()
        await job.pause(pause)
        job.live.trouble, job.live.retry_at = "", None

    async def _survive_bug(self) -> None:
        """Try once more after a pause; then the job ends with what it has.

        A run of a day is not given up for two bugs that have nothing to do with each other.
        """
        job, now = self.job, self.job.now()
        self._bugs = self._bugs + 1 if abs(now - self._bug_at) < _BUG_WINDOW_S else 1
        self._bug_at = now
        log.exception("the worker of job %d failed (%d)", job.row.id, self._bugs, extra=job.log)
        job.alert(AlertKind.JOB_BUG, "the worker failed, see the log")
        await job.pause(job.services.timings.pause(self._bugs, job.services.random))
        try:
            await job.reload()
        except StoreUnavailable:
            log.warning("job %d: the store cannot be read, trying again", job.row.id, extra=job.log)
