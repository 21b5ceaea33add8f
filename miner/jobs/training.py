"""Watching over one attempt until it has ended, or until its time is up whatever it does.

The deadline is ours: the trainer has a clock of its own and normally ends before it is asked to, but nothing
here leans on that, nor on an engine that answers.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from core.progress import NoteEvent
from core.run_files import Score
from miner.engines.base import EXIT_FILE, NoSpace, Phase, Rejected, Status, Unreachable
from miner.jobs import plans
from miner.jobs.best import is_model
from miner.jobs.desk import Desk, unreachable
from miner.jobs.early import EarlyPublisher
from miner.jobs.launch import Attempt, engine_spec
from miner.jobs.past import read_result
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason
from miner.jobs.tasks import Task
from miner.jobs.times import Timeline
from miner.jobs.verdict import Verdict, verdict
from miner.watch import files
from miner.watch.progress import Course, Tail
from miner.watch.stall import stalled

log = logging.getLogger(__name__)

#: Steps after which the plan's time is reckoned anew, and again every so many.
RECKON_EVERY = 50
#: Of one attempt, in our log: a training may hold code that talks without end.
MOST_NOTES = 200
#: No real step is faster, and what is told of one that is would overflow somewhere.
LEAST_STEP_S = 1e-4
#: What an engine gets to end what it was told to kill, before the job goes on without its word.
_LAST_WAIT_S = 20.0


class Training:
    def __init__(self, desk: Desk, attempt: Attempt, task: Task) -> None:
        self.desk, self.attempt, self.task = desk, attempt, task
        self.pace, self.engine = desk.parts.pace, desk.parts.engine_of(attempt.row)
        self.course = Course(attempt.row.started_at)
        self.tail = Tail(attempt.folder.progress)
        self.early = EarlyPublisher(desk, attempt.row.number)
        #: Why it was told to end.
        self.asked: Verdict | None = None
        self.asked_at = 0.0
        self.forced_at: float | None = None
        self.warned = False
        self.reckoned_at = 0
        self.measured_step_s: float | None = None
        #: The last look at what it says; none by this process yet.
        self._looked_at = 0.0
        self._polled_at = 0.0
        self._hurried_at: float | None = None
        self._noted = 0
        self._ref = attempt.row.ref

    async def run(self) -> Verdict | None:
        """How it ended; None when it may be running still and there is no time to wait for it."""
        self.desk.live.attempt = self.attempt.row.number
        try:
            self.desk.take_back(self.attempt.row.gpus)
            await self._launch()
            while True:
                self.desk.take_back(self.attempt.row.gpus)
                await self._look()
                status = await self._status()
                if status is not None and status.phase in (Phase.ENDED, Phase.LOST):
                    return await self._ended(status)
                await self._keep_time(status)
                if self._given_up_on():
                    return None
                self.early.look(self.course, self.stop_at)
                await self.desk.pause(self.pace.poll_s)
        finally:
            await self.early.close()
            self.desk.live.forget_run()

    # Beginning

    async def _launch(self) -> None:
        """Also after a restart: an engine that has it already says so, and starts nothing."""
        if self._ref is not None:
            return
        spec = engine_spec(self.desk.row, self.attempt, hostile=self.task.is_hostile, now=self.desk.now())

        sent: asyncio.Future[str] | None = None

        async def submit() -> str:
            # An engine goes on with it, whoever stops waiting: `Desk.submitted` is for those who must know.
            # So where a moved deadline brings us here again, it is the same one that is waited for.
            nonlocal sent
            if sent is None or sent.done():
                sent = self.desk.submitting = asyncio.ensure_future(self.engine.submit(spec))
            try:
                return await asyncio.shield(sent)
            except NoSpace as error:
                raise StepFailed(EndReason.DISK_FULL, str(error)) from None
            except Unreachable as error:
                raise unreachable(error) from None
            except Rejected as error:
                raise StepFailed(EndReason.ENGINE_REJECTED, str(error)) from None

        self.desk.doing("launch")
        number = self.attempt.row.number
        self._ref = await self.desk.persist("launch", submit, lambda: self.kill_at, number)
        await self.desk.parts.book.set_ref(self.attempt.row, self._ref)
        self.desk.note("launched", f"attempt {number} runs on {self.engine.name}")

    # Looking

    async def _look(self) -> None:
        now = self.desk.now()
        if now - self._looked_at > max(self.pace.stall_min_s / 2, 10 * self.pace.poll_s):
            # A host that was suspended, or too busy for this daemon: the training has had no time either.
            self.course.away(now)
        self._looked_at = now
        before = self.course.notes[-1] if self.course.notes else None
        for event in await asyncio.to_thread(self.tail.read):
            self.course.take(event, now)
        self._tell_notes(before)
        await self._reckon()
        self._show()

    def _tell_notes(self, before: NoteEvent | None) -> None:
        fresh: list[NoteEvent] = []
        for note in reversed(self.course.notes):
            if note is before:
                break
            fresh.append(note)
        for note in reversed(fresh):
            self._noted += 1
            if self._noted < MOST_NOTES:
                self.desk.note(note.kind, note.text)
            elif self._noted == MOST_NOTES:
                self.desk.note("quiet", "the training says too much: the rest is in its progress.jsonl")

    async def _status(self) -> Status | None:
        """The engine's word; None when it is not asked yet or does not answer."""
        now, folder = self.desk.now(), self.attempt.folder
        ended = await asyncio.to_thread(files.read, folder.path / EXIT_FILE, 64 * 1024) is not None
        due = now - self._polled_at >= self.pace.engine_poll_s
        if not (ended or due or self.asked or self.course.end):
            return None
        self._polled_at = now
        assert self._ref is not None
        try:
            status = await self.engine.poll(self._ref, folder.path)
        except Unreachable as error:
            if self.desk.live.trouble != str(error):
                log.warning("job %d: %s", self.desk.row.id, str(error), extra=self.desk.log)
            self.desk.live.trouble = str(error)
            return None
        self.desk.live.trouble = status.detail if status.phase is Phase.RUNNING else ""
        return status

    async def _ended(self, status: Status) -> Verdict:
        await self._look()
        result = await asyncio.to_thread(read_result, self.attempt.folder)
        has_model = is_model(self.attempt.folder.submission)
        return verdict(status, result, self.course, asked=self.asked, has_model=has_model)

    # Time

    @property
    def stop_at(self) -> float:
        return min(self._times.stop_at, self._times.kill_at)

    @property
    def kill_at(self) -> float:
        return self._times.kill_at

    @property
    def _times(self) -> Timeline:
        plan = self.attempt.plan
        return self.desk.times(reserve_s=plan.time.reserve_s, publish_s=plan.time["publish"])

    async def _keep_time(self, status: Status | None) -> None:
        now = self.desk.now()
        if now >= self._times.end_by and not self.warned:
            self.warned = True
            self.desk.note("reserve", "the training is into its reserve; it should have ended by itself")
        if self.course.end is not None and self.asked is None:
            await self._hurry(now)
        why = self._why_end(now, status)
        if self.asked is None and why is not None:
            await self._ask(why, now)
        overdue = self.asked is not None and self.forced_at is None and now >= self._force_at()
        if overdue and (await self._stop(force=True) or now >= self.kill_at):
            self.forced_at = now
            self.desk.note("killed", "the training did not end by itself and is killed")

    def _why_end(self, now: float, status: Status | None) -> Verdict | None:
        if self.desk.gpu_lost is not None:
            return Verdict(EndReason.GPU_LOST, self.desk.gpu_lost)
        if now >= self.stop_at:
            return Verdict(EndReason.DEADLINE, "its time is up")
        if _is_gone(self.attempt.folder.path):
            return Verdict(EndReason.LOST, f"its folder was removed: {self.attempt.folder.path}")
        if self.course.end is not None or (status is not None and status.phase is Phase.QUEUED):
            return None
        idle = self.desk.parts.gpus_idle(self.attempt.row.gpus)
        hung = stalled(self.course, self._looked_at, self.pace, idle)
        return Verdict(EndReason.HUNG, hung) if hung else None

    async def _hurry(self, now: float) -> None:
        """It has said its last word and does not go: the word stands."""
        if now - self.course.heard_at > self.pace.grace_s and self._hurried_at is None:
            self._hurried_at = now
            self.desk.note("killed", "the training has ended and its process lingers: it is killed")
            await self._stop(force=True)

    def _force_at(self) -> float:
        assert self.asked is not None
        if self.asked.reason is EndReason.DEADLINE:
            return self.kill_at
        wait = self.pace.dump_s if self.asked.reason is EndReason.HUNG else self.pace.grace_s
        return min(self.asked_at + wait, max(self.kill_at, self.asked_at))

    async def _ask(self, why: Verdict, now: float) -> None:
        self.asked, self.asked_at = why, now
        self.desk.note("stopping", f"asked to end: {why.detail}")
        if why.reason is EndReason.HUNG:
            self.desk.parts.alert("job_hung", f"job {self.desk.row.id}: {why.detail}")
            await self._dump()
            return
        await asyncio.to_thread(files.touch, self.attempt.folder.stop)
        await self._stop(force=False)

    async def _dump(self) -> None:
        assert self._ref is not None
        try:
            await self.engine.dump_stacks(self._ref)
        except Unreachable as error:
            log.warning("no stacks of job %d: %s", self.desk.row.id, str(error), extra=self.desk.log)

    async def _stop(self, *, force: bool) -> bool:
        """Whether the engine has taken it."""
        assert self._ref is not None
        try:
            await self.engine.stop(self._ref, force=force)
        except Unreachable as error:
            log.warning("job %d can't be stopped: %s", self.desk.row.id, str(error), extra=self.desk.log)
            self.desk.live.trouble = str(error)
            return False
        return True

    def _given_up_on(self) -> bool:
        """Killed, and still no word that it is gone: what is there must be published all the same."""
        return self.forced_at is not None and self.desk.now() >= self.forced_at + min(
            _LAST_WAIT_S, self.pace.grace_s
        )

    # Reckoning and showing

    async def _reckon(self) -> None:
        """Correct the plan's time by what the steps have taken, and say when the job will end."""
        course, step_s = self.course, self.course.slow_step_s
        if step_s is None or step_s < LEAST_STEP_S or course.steps_done < self.reckoned_at + RECKON_EVERY:
            return
        first = self.reckoned_at == 0
        self.reckoned_at, self.measured_step_s = course.steps_done, course.median_step_s
        plan = self.attempt.plan
        planned_at = self.attempt.run.began_at
        elapsed = self.desk.now() - planned_at
        try:
            found = await asyncio.to_thread(
                plans.measured_plan, plan, course.steps_done, elapsed, step_s, course.eval_s
            )
        except (ValueError, ArithmeticError):  # numbers that no training has
            log.warning("job %d tells impossible times", self.desk.row.id, extra=self.desk.log)
            return
        self.desk.live.ends_at = ends_at = planned_at + found.time.total_s
        # Whoever plans after it should know.
        self.desk.parts.fleet.extend(
            self.desk.key, min(ends_at - found.time["publish"], self.attempt.run.end_by)
        )
        if first:
            text = found.reasons["steps.total"].text
            self.desk.note("speed", f"{text}; {found.steps.total:,} steps in all")

    def _show(self) -> None:
        live, course = self.desk.live, self.course
        live.stage = course.stage or "start"
        live.bytes_done = live.bytes_total = None
        live.score, live.best_score = _value(course.score), _value(course.best)
        if (step := course.step) is not None:
            live.step, live.steps, live.epoch = step.step, step.total, step.epoch
            live.loss, live.learning_rate = step.loss, step.lr
            live.tokens_s, live.memory_bytes = step.tokens_s, step.memory_bytes
            if self.reckoned_at == 0:
                live.ends_at = step.ends_at
        self.desk.show()


def _is_gone(folder: Path) -> bool:
    """Removed, and not merely unreadable at the moment."""
    try:
        folder.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _value(score: Score | None) -> float | None:
    return score.value if score else None
