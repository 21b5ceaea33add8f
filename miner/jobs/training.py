"""Supervise one attempt until it has ended, or until its time is up whatever it does.

The daemon enforces the deadline: the trainer has a clock of its own and normally ends before it is asked
to, but nothing here relies on that, nor on a backend that answers.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import takewhile
from pathlib import Path

from core.domain.job_states import EndReason, StepFailed
from core.planning.time.calibration import MeasuredRun, recalibrate, times_at
from core.runs.progress import NoteEvent
from miner.backends.base import (
    EXIT_FILE,
    BackendDiskFull,
    BackendRejected,
    BackendUnreachable,
    RunPhase,
    RunStatus,
)
from miner.jobs.context import JobContext
from miner.jobs.figures import RunFigures
from miner.jobs.history import is_model, read_result
from miner.jobs.launch import JobAttempt, attempt_spec
from miner.jobs.progress import MAX_READS, ProgressTail, RunProgress, idle_since_last_event, stall_reason
from miner.jobs.publishing import EarlyPublisher
from miner.jobs.running_training import RunningTraining
from miner.jobs.timeline import JobTimeline
from miner.jobs.verdict import AttemptVerdict, attempt_verdict
from miner.observe.alerts import AlertKind
from miner.store.attempts import set_backend_ref
from miner.support.untrusted_files import read_untrusted, touch_untrusted

log = logging.getLogger(__name__)

#: The plan's time is corrected each time this many steps are done.
RETIME_EVERY_STEPS = 50
#: Events that are added up before others have their turn: after a restart there can be tens of thousands.
EVENTS_AT_A_TIME = 200
#: Notes of one attempt in our log: a training may contain code that writes without end.
MAX_NOTES = 200
#: No real step is faster, and the numbers of one that claims to be would overflow somewhere.
MIN_STEP_S = 1e-4
#: Ignore GPU samples older than this.
_SAMPLE_COUNTS_S = 60.0
#: Seconds for a backend to kill a run before the job goes on without its answer.
_LAST_WAIT_S = 20.0


class AttemptSupervisor:
    def __init__(self, job: JobContext, attempt: JobAttempt) -> None:
        self.job, self.attempt = job, attempt
        self.timings, self.backend = job.services.timings, job.services.backend_of(attempt.row)
        self.progress = RunProgress(attempt.row.started_at)
        self.tail = ProgressTail(attempt.folder.progress)
        self.figures = RunFigures(attempt.plan)
        self.early = EarlyPublisher(job, attempt.row.number)
        #: The reason why it was asked to end.
        self.stop_verdict: AttemptVerdict | None = None
        self.stop_asked_at = 0.0
        self.forced_at: float | None = None
        self.warned_of_reserve = False
        self.retimed_at_step = 0
        self.measured_step_s: float | None = None
        #: Time at which this process last read its progress.
        self._read_at = 0.0
        self._polled_at = 0.0
        self._killed_lingering_at: float | None = None
        self._noted = 0
        self._ref = attempt.row.ref

    async def run(self) -> AttemptVerdict | None:
        """Return how it ended, or None if it may still be running and there is no time to wait for it."""
        self.job.live.attempt = self.attempt.row.number
        self.job.figures = self.figures
        try:
            self.job.adopt_gpus(self.attempt.row.gpus)
            await self._launch()
            self.job.training = self._running_training()
            while True:
                self.job.adopt_gpus(self.attempt.row.gpus)
                await self._read_progress()
                status = await self._status()
                if status is not None and status.phase in (RunPhase.ENDED, RunPhase.LOST):
                    return await self._ended(status)
                await self._enforce_times(status)
                if self._waited_long_enough():
                    return None
                self.early.maybe_start(self.progress, self.stop_at)
                await self.job.pause(self.timings.poll_s)
        finally:
            self.job.training = None
            await self.early.close()
            self.job.figures = None
            self.job.live.clear_run()

    def _running_training(self) -> RunningTraining:
        row = self.attempt.row
        return RunningTraining(
            self.job.live, row.number, row.started_at, self.attempt.plan, self.attempt.folder, self.progress
        )

    # Launch

    async def _launch(self) -> None:
        """Submit the run, also after a restart: a backend that has it already starts nothing."""
        if self._ref is not None:
            return
        free_until = self.job.services.fleet.free_until(self.attempt.row.gpus)
        spec = attempt_spec(self.job.row, self.attempt, self.job.now(), free_until)

        pending: asyncio.Future[str] | None = None

        async def submit() -> str:
            # The backend carries on even if its caller has gone; `JobContext.wait_until_submitted` waits for
            # that. So when a moved deadline brings us here again, the same submit is waited for.
            nonlocal pending
            if pending is None or pending.done():
                pending = self.job.pending_submit = asyncio.ensure_future(self.backend.submit(spec))
            try:
                return await asyncio.shield(pending)
            except BackendDiskFull as error:
                raise StepFailed(EndReason.DISK_FULL, str(error)) from None
            except BackendUnreachable as error:
                raise StepFailed(EndReason.BACKEND_GONE, str(error)) from None
            except BackendRejected as error:
                raise StepFailed(EndReason.BACKEND_REJECTED, str(error)) from None

        self.job.set_stage("launch")
        number = self.attempt.row.number
        self._ref = await self.job.run_step("launch", submit, lambda: self.kill_at, number)
        await self.job.services.store.write(set_backend_ref, self.attempt.row.id, self._ref)
        self.job.note("launched", f"attempt {number} runs on {self.backend.name}")

    # Progress and status

    async def _read_progress(self) -> None:
        now = self.job.now()
        if now - self._read_at > max(self.timings.stall_min_s / 2, 10 * self.timings.poll_s):
            # The host was suspended or too busy for this daemon: the training has had no time either.
            self.progress.excuse_silence(now)
        self._read_at = now
        before = self.progress.notes[-1] if self.progress.notes else None
        events = await asyncio.to_thread(self.tail.read)
        self.figures.gpu_memory = self._gpu_memory()
        for number, event in enumerate(events):
            if number % EVENTS_AT_A_TIME == EVENTS_AT_A_TIME - 1:
                await asyncio.sleep(0)
            self.progress.add(event, now)
            self.figures.add(event)
        self._forward_notes(before)
        await self._retime()
        self._show()

    def _gpu_memory(self) -> int | None:
        """Memory in use on the fullest of its GPUs, from the latest sample."""
        latest = [self.job.services.samples.latest(gpu) for gpu in self.attempt.row.gpus]
        since = self.job.now() - _SAMPLE_COUNTS_S
        fresh = [sample.memory_used for sample in latest if sample is not None and sample.at > since]
        return max((used for used in fresh if used is not None), default=None)

    def _forward_notes(self, before: NoteEvent | None) -> None:
        new = list(takewhile(lambda note: note is not before, reversed(self.progress.notes)))
        for note in reversed(new):
            self._noted += 1
            if self._noted < MAX_NOTES:
                self.job.note(note.kind, note.text)
            elif self._noted == MAX_NOTES:
                self.job.note("quiet", "the training writes too many notes: see its progress.jsonl")

    async def _status(self) -> RunStatus | None:
        """Poll the backend; return None if a poll is not due or the backend does not answer."""
        now, folder = self.job.now(), self.attempt.folder
        exit_file = await asyncio.to_thread(read_untrusted, folder.path / EXIT_FILE, 64 * 1024)
        due = now - self._polled_at >= self.timings.backend_poll_s
        if not (exit_file is not None or due or self.stop_verdict or self.progress.end):
            return None
        self._polled_at = now
        assert self._ref is not None
        try:
            status = await self.backend.poll(self._ref, folder.path)
        except BackendUnreachable as error:
            if self.job.live.trouble != str(error):
                log.warning("job %d: %s", self.job.row.id, str(error), extra=self.job.log)
            self.job.live.trouble = str(error)
            return None
        goes_on = status.phase in (RunPhase.QUEUED, RunPhase.RUNNING)
        self.job.live.trouble = status.detail if goes_on else ""
        return status

    async def _ended(self, status: RunStatus) -> AttemptVerdict:
        for _ in range(MAX_READS):  # what it wrote while no daemon ran may be long
            before = self.tail.offset
            await self._read_progress()
            if self.tail.offset == before:
                break
        result = await asyncio.to_thread(read_result, self.attempt.folder)
        has_model = is_model(self.attempt.folder.submission)
        return attempt_verdict(
            status, result, self.progress, stop_verdict=self.stop_verdict, has_model=has_model
        )

    # Time

    @property
    def stop_at(self) -> float:
        return min(self._times.stop_at, self._times.kill_at)

    @property
    def kill_at(self) -> float:
        return self._times.kill_at

    @property
    def _times(self) -> JobTimeline:
        plan = self.attempt.plan
        return self.job.timeline(reserve_s=plan.time.reserve_s, publish_s=plan.time["publish"])

    async def _enforce_times(self, status: RunStatus | None) -> None:
        now = self.job.now()
        if now >= self._times.end_by and not self.warned_of_reserve:
            self.warned_of_reserve = True
            self.job.note("reserve", "the training uses its reserve; it should have ended by itself")
        if self.progress.end is not None and self.stop_verdict is None:
            await self._kill_lingering(now)
        why = self._why_end(now, status)
        if self.stop_verdict is None and why is not None:
            await self._ask_to_end(why, now)
        overdue = self.stop_verdict is not None and self.forced_at is None and now >= self._force_at()
        if overdue and (await self._stop(force=True) or now >= self.kill_at):
            self.forced_at = now
            self.job.note("killed", "the training did not end by itself and is killed")

    def _why_end(self, now: float, status: RunStatus | None) -> AttemptVerdict | None:
        if self.job.gpu_lost is not None:
            return AttemptVerdict(EndReason.GPU_LOST, self.job.gpu_lost)
        if now >= self.stop_at:
            return AttemptVerdict(EndReason.DEADLINE, "its time is up")
        if _folder_is_gone(self.attempt.folder.path):
            return AttemptVerdict(EndReason.LOST, f"its folder was removed: {self.attempt.folder.path}")
        if self.progress.end is not None or (status is not None and status.phase is RunPhase.QUEUED):
            return None
        samples, gpus = self.job.services.samples, self.attempt.row.gpus
        idle = idle_since_last_event(self.progress, samples, gpus, self._read_at)
        plan = self.attempt.plan
        save_s = times_at(plan, plan.time.step_s).save_s
        hung = stall_reason(self.progress, self._read_at, self.timings, gpus_idle=idle, save_s=save_s)
        return AttemptVerdict(EndReason.HUNG, hung) if hung else None

    async def _kill_lingering(self, now: float) -> None:
        """Kill a process that has reported its end and does not exit; its report counts."""
        if now - self.progress.last_event_at > self.timings.grace_s and self._killed_lingering_at is None:
            self._killed_lingering_at = now
            self.job.note("killed", "the training reported its end but its process still runs; killing it")
            await self._stop(force=True)

    def _force_at(self) -> float:
        assert self.stop_verdict is not None
        if self.stop_verdict.reason is EndReason.DEADLINE:
            return self.kill_at
        wait = self.timings.dump_s if self.stop_verdict.reason is EndReason.HUNG else self.timings.grace_s
        return min(self.stop_asked_at + wait, max(self.kill_at, self.stop_asked_at))

    async def _ask_to_end(self, why: AttemptVerdict, now: float) -> None:
        self.stop_verdict, self.stop_asked_at = why, now
        self.job.note("stopping", f"asked to end: {why.detail}")
        if why.reason is EndReason.HUNG:
            self.job.alert(AlertKind.JOB_HUNG, why.detail)
            await self._dump()
            return
        await asyncio.to_thread(touch_untrusted, self.attempt.folder.stop)
        await self._stop(force=False)

    async def _dump(self) -> None:
        assert self._ref is not None
        try:
            await self.backend.dump_stacks(self._ref)
        except BackendUnreachable as error:
            log.warning("no stacks of job %d: %s", self.job.row.id, str(error), extra=self.job.log)

    async def _stop(self, *, force: bool) -> bool:
        """Return True if the backend has accepted the request."""
        assert self._ref is not None
        try:
            await self.backend.stop(self._ref, force=force)
        except BackendUnreachable as error:
            log.warning("job %d cannot be stopped: %s", self.job.row.id, str(error), extra=self.job.log)
            self.job.live.trouble = str(error)
            return False
        return True

    def _waited_long_enough(self) -> bool:
        """Return True once to publish although the backend has not confirmed the end of the killed run."""
        return self.forced_at is not None and self.job.now() >= self.forced_at + min(
            _LAST_WAIT_S, self.timings.grace_s
        )

    # Timing and display

    async def _retime(self) -> None:
        """Correct the plan's time by what the steps have taken, and show when the job will end."""
        progress, step_s = self.progress, self.progress.slow_step_s
        if (
            step_s is None
            or step_s < MIN_STEP_S
            or progress.steps_done < self.retimed_at_step + RETIME_EVERY_STEPS
        ):
            return
        first = self.retimed_at_step == 0
        self.retimed_at_step, self.measured_step_s = progress.steps_done, progress.median_step_s
        plan = self.attempt.plan
        planned_at = self.attempt.run.began_at
        elapsed = self.job.now() - planned_at
        try:
            run = MeasuredRun(
                steps_done=progress.steps_done,
                elapsed_s=max(elapsed, 0.0),
                step_s=step_s,
                eval_s=progress.eval_s,
            )
            measured = await asyncio.to_thread(recalibrate, plan, run)
        except (ValueError, ArithmeticError):  # impossible numbers
            log.warning("job %d reports impossible times", self.job.row.id, extra=self.job.log)
            return
        self.job.live.ends_at = ends_at = planned_at + measured.time.total_s
        # Jobs that are planned after it should know.
        self.job.services.fleet.extend(
            self.job.key, min(ends_at - measured.time["publish"], self.attempt.run.end_by)
        )
        if first:
            text = measured.reasons["steps.total"].text
            self.job.note("speed", f"{text}; {measured.steps.total:,} steps in all")

    def _show(self) -> None:
        live, progress = self.job.live, self.progress
        live.stage = progress.stage or "start"
        live.bytes_done = live.bytes_total = None
        live.score = progress.score.value if progress.score else None
        if (step := progress.step) is not None:
            live.step, live.steps, live.epoch = step.step, step.total, step.epoch
            live.loss, live.learning_rate = step.loss, step.lr
            if self.retimed_at_step == 0:
                live.ends_at = step.ends_at
        self.figures.show(live)
        self.job.show_state()


def _folder_is_gone(folder: Path) -> bool:
    """Return True if it was removed, and is not merely unreadable at the moment."""
    try:
        folder.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False
