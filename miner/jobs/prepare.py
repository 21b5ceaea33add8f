"""From a queued job to an attempt that is ready to launch: inputs, plan, GPUs, plan again, folder.

Inputs come first, so that no GPU waits for a download. The plan is made twice: for what the job could be
given, to know how many GPUs to ask for, and for what it was given, in the time that is left then.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from core.files import remove_tree
from core.hardware import Hardware
from core.plan import TrainingPlan
from core.plan_parts import TaskSpec
from core.planning.learned import Learned
from core.planning.oom import OutOfMemory
from core.units import show_seconds
from miner.fleet.base import Grant, Hold, HoldKind
from miner.fleet.layout import FOREVER
from miner.jobs import plans
from miner.jobs.desk import Desk
from miner.jobs.folder import AttemptFolder
from miner.jobs.launch import run_spec, write_attempt
from miner.jobs.loopback import free_port
from miner.jobs.past import Past, read_past
from miner.jobs.plans import Draft
from miner.jobs.ports import Fetched, StepFailed, Wanted
from miner.jobs.states import EndReason, JobState
from miner.jobs.tasks import Task, spec_of, task_of, wanted_of
from miner.store import work

#: Of the time that a plan takes its GPUs are kept for it: steps may be slower than thought.
_SPARE = 1.1
#: Inputs of which nothing has come for so long may never come.
_NO_BYTES_S = 120.0
#: Inputs are judged by what came in so long, and given up where the rest would take more than this many times
#: what is left. Twice, as lines are shared and may become faster.
_WINDOW_S, _HOPELESS = 300.0, 2.0
#: The window begins anew with the first bytes after so long without any, and only so many bad windows in a
#: row end a job: a download that stalled and goes on is not judged by its silence.
_STALLED_S, _BAD_WINDOWS = 60.0, 2
#: Bytes per second, for a dataset whose size nobody says.
_LEAST_RATE = 10_000.0


class Placed(NamedTuple):
    plan: TrainingPlan
    grant: Grant
    #: The training ends by then because of others.
    until: float = FOREVER


async def prepare(desk: Desk) -> None:
    """Ends in state TRAINING with a new attempt in the books. `StepFailed` when there is none to be had."""
    if desk.row.state is not JobState.PREPARING:
        await desk.move(JobState.PREPARING)
    task = task_of(desk.row)
    fetched = await fetch(desk, task)
    past = await read_past(desk)
    await _set_up(desk, task, fetched, past, await _place(desk, task, fetched, past))


def useful_until(desk: Desk) -> float:
    """After this moment no training can come to anything that is published in time."""
    return desk.times().end_by


async def fetch(desk: Desk, task: Task) -> Fetched:
    """What is there already costs nothing: so this is also how a later attempt gets its facts. Somebody may
    have removed what was there before."""
    known = desk.fetched
    if known is not None and not await asyncio.to_thread(_is_there, known):
        desk.fetched = None
    if desk.fetched is None:
        wanted = wanted_of(desk.row, task, desk.folder)
        desk.fetched = await desk.persist(
            "fetch", lambda: _arriving(desk, wanted), lambda: useful_until(desk)
        )
    return desk.fetched


class _Arrival:
    """How fast one input comes, by (when, bytes) at the first look and at the start of the present window."""

    def __init__(self, now: float, done: int) -> None:
        self._first = self._window = self._grown = (now, done)
        self._bad = 0

    def hopeless_s(self, now: float, done: int, total: int | None, left: float) -> float | None:
        """Seconds until all of it is here, where that was too long for `left` in the last windows too."""
        needs = self.remaining_s(now, done, total)
        if needs is None:
            return None
        self._bad = self._bad + 1 if needs > _HOPELESS * left else 0
        return needs if self._bad >= _BAD_WINDOWS else None

    def remaining_s(self, now: float, done: int, total: int | None) -> float | None:
        """Seconds until all of it is here, at the pace of this window, or of all so far where that is faster;
        None before a window has passed, and where nothing came at all: that has a limit of its own."""
        grown_at, grown = self._grown
        if done > grown:
            self._grown = (now, done)
            if now - grown_at > _STALLED_S:
                self._window = (now, done)
        began, before = self._window
        if now - began < _WINDOW_S or done <= before:
            return None
        since, first = self._first
        rate = max((done - before) / (now - began), (done - first) / (now - since))
        self._window = (now, done)
        if total is None:
            return 0.0 if rate >= _LEAST_RATE else math.inf
        return (total - done) / rate


async def _arriving(desk: Desk, wanted: Wanted) -> Fetched:
    """One try. A job whose inputs do not come keeps no GPU from those that have theirs, and one whose inputs
    cannot come in time ends."""
    loop, known, arrivals = asyncio.get_running_loop(), dict[str, int](), dict[str, _Arrival]()
    hopeless: list[str] = []

    def late() -> None:
        if desk.parts.fleet.step_aside(desk.key):
            desk.note("inputs_late", "its inputs do not come: no GPU is kept for it until they are here")

    timer = loop.call_later(_NO_BYTES_S, late)

    def told(what: str, done: int, total: int | None) -> None:
        nonlocal timer
        if done > known.get(what, 0):
            timer.cancel()
            timer = loop.call_later(_NO_BYTES_S, late)
        known[what] = done
        desk.told(what, done, total)
        if what == "dataset" or (what == "model" and total is not None):
            arrival = arrivals.setdefault(what, _Arrival(desk.now(), done))
            if too_late := _too_late(desk, what, done, total, arrival):
                hopeless.append(too_late)
                limit.reschedule(0.0)

    try:
        async with asyncio.timeout(None) as limit:
            return await desk.parts.inputs.fetch(wanted, told)
    except TimeoutError:
        if not hopeless:
            raise
        raise StepFailed(EndReason.DEADLINE, hopeless[0]) from None
    except StepFailed:
        late()
        raise
    finally:
        timer.cancel()


def _too_late(desk: Desk, what: str, done: int, total: int | None, arrival: _Arrival) -> str | None:
    """Why this input is not worth waiting for."""
    left = max(useful_until(desk) - desk.now(), 0.0)
    needs = arrival.hopeless_s(desk.now(), done, total, left)
    if needs is None:
        return None
    if total is None:
        return f"the {what} trickles: {done:,} bytes so far, less than {_LEAST_RATE:,.0f} per second"
    return (
        f"the {what} is too slow: {done:,} of {total:,} bytes are here, the rest would take "
        f"{show_seconds(needs)}, and {show_seconds(left)} are left for it and the training"
    )


def _is_there(fetched: Fetched) -> bool:
    return fetched.model_path.exists() and fetched.data_path.exists()


async def _place(desk: Desk, task: Task, fetched: Fetched, past: Past) -> Placed:
    async def drafted() -> tuple[Hardware, Draft]:
        could = desk.parts.fleet.could_have(desk.key)
        if could is None:
            raise StepFailed(EndReason.NO_GPU, "no GPU of this host can be used")
        return could, await _draft(desk, task, fetched, past, could)

    desk.doing("plan")
    could, draft = await desk.persist("plan", drafted, lambda: useful_until(desk), past.next_number)
    grant = await _acquire(desk, draft)
    given = could.model_copy(update={"gpus": grant.gpus, "host_gpus": could.gpus.count})
    if past.ended_by is EndReason.OOM:
        # The rung decides everything but the steps, and the clock decides those.
        keep(desk, draft.plan)
        return Placed(draft.plan, grant)
    plan = (await _draft(desk, task, fetched, past, given)).plan
    until = keep(desk, plan)
    if until is None:
        return Placed(plan, grant)
    return await _before_others(
        desk, plans.Ask(_spec(desk, task), fetched, given, past.history), plan, grant, until
    )


def keep(desk: Desk, plan: TrainingPlan) -> float | None:
    """Keep the GPUs for as long as the plan takes; None where that is possible. Otherwise until when: an
    offer that was accepted since has one of them from then on."""
    now = desk.now()
    busy = plan.time.total_s - plan.time["publish"]
    until = desk.parts.fleet.extend(desk.key, min(now + busy * _SPARE, desk.row.deadline_at))
    return None if until >= min(now + busy, useful_until(desk)) else until


async def _before_others(
    desk: Desk, ask: plans.Ask, plan: TrainingPlan, grant: Grant, until: float
) -> Placed:
    """The dataset is larger than its offer let expect. What was promised to others stands, as long as
    anything at all can be trained before."""
    parts, time = desk.parts, plan.time
    end = until + time.reserve_s + time["publish"]
    spec = ask.spec.model_copy(update={"hours": max(min(end, desk.row.deadline_at) - desk.now(), 0.0) / 3600})
    shorter = await asyncio.to_thread(
        plans.plan_in_time, replace(ask, spec=spec), parts.profile(), _lessons(desk)
    )
    if shorter is None or shorter.gpus.count != plan.gpus.count:
        desk.note("late", "its GPUs are promised to others before anything can be trained; it takes its time")
        return Placed(plan, grant)
    desk.note(
        "shorter", f"its GPUs are promised to others in {show_seconds(until - desk.now())}: planned for that"
    )
    return Placed(shorter, grant, until)


def _spec(desk: Desk, task: Task) -> TaskSpec:
    return spec_of(desk.row, task, desk.now())


async def _draft(desk: Desk, task: Task, fetched: Fetched, past: Past, hardware: Hardware) -> Draft:
    """Tens of milliseconds, so not on the event loop."""
    parts = desk.parts
    if past.ended_by is EndReason.OOM and past.plan is not None:
        failure = _failure(desk, past, hardware)
        plan = await asyncio.to_thread(plans.plan_after_oom, past.plan, failure)
        await _learn(desk, plan)
        return Draft(plan, (plan.gpus.count,))
    ask = plans.Ask(_spec(desk, task), fetched, hardware, past.history)
    return await asyncio.to_thread(plans.draft, ask, parts.profile(), _lessons(desk))


def _lessons(desk: Desk) -> plans.Lessons:
    """For a thread."""

    def lessons(plan: TrainingPlan) -> Learned | None:
        key = plans.lesson_key(desk.row.validator, plan)
        text = desk.parts.book.read_now(lambda db: work.lesson(db, key))
        return Learned.model_validate_json(text) if text else None

    return lessons


def _failure(desk: Desk, past: Past, hardware: Hardware) -> OutOfMemory:
    assert past.plan is not None
    holds = desk.parts.fleet.snapshot(desk.now()).holds
    mine = set(past.gpus)
    others = [one for one in holds if one.key != desk.key and one.kind is HoldKind.JOB]
    planned_at = desk.row.deadline_at - past.plan.time.deadline_s
    return OutOfMemory(
        moment=past.oom_moment,
        elapsed_s=max(desk.now() - planned_at, 0.0),
        neighbours=any(mine & set(one.gpus) for one in others),
        available=max(hardware.gpus.count, past.plan.gpus.count),
    )


async def _learn(desk: Desk, plan: TrainingPlan) -> None:
    """The larger plan did not fit: the next one of this shape need not find that out again."""
    await keep_lesson(desk, plan, None)


async def keep_lesson(desk: Desk, plan: TrainingPlan, measured_step_s: float | None) -> None:
    """A run with a stranger's code on board teaches nothing: what it says may be that code's word."""
    if task_of(desk.row).is_hostile:
        return
    key = plans.lesson_key(desk.row.validator, plan)
    lesson = plans.lesson_of(plan, await desk.parts.book.learned(key), measured_step_s)
    if lesson is not None:
        await desk.parts.book.keep_lesson(key, lesson)


async def _acquire(desk: Desk, draft: Draft) -> Grant:
    """The GPUs of the attempt before, where they still do; else a place in the queue."""
    held, exclusive = desk.grant, draft.plan.launch.exclusive
    if held is not None and len(held.ids) in draft.counts and desk.gpu_lost is None and not exclusive:
        return held
    desk.grant, desk.gpu_lost = None, None
    desk.doing("gpus")

    async def wait() -> Grant:
        naming = asyncio.create_task(_name_those_before(desk))
        try:
            return await desk.parts.fleet.acquire(
                desk.key,
                draft.counts,
                until=desk.row.deadline_at,
                priority=_priority(desk),
                exclusive=exclusive,
                lane=draft.lane,
            )
        finally:
            naming.cancel()
            desk.live.trouble = ""

    desk.grant = await desk.persist("gpus", wait, lambda: useful_until(desk))
    desk.show()
    return desk.grant


async def _name_those_before(desk: Desk) -> None:
    """Say, for as long as the job waits, who has the GPUs that it waits for."""
    while True:
        holds = desk.parts.fleet.in_the_way(desk.key)
        desk.live.trouble = "waits for " + ("; ".join(_named(desk, one) for one in holds) or "free GPUs")
        desk.show()
        await asyncio.sleep(desk.parts.pace.poll_s)


def _named(desk: Desk, hold: Hold) -> str:
    number = desk.parts.numbers.get(hold.key)
    what = f"job {number}" if number is not None else "an accepted offer"
    return f"{what} (task {hold.key.task_id}, GPU {', '.join(hold.gpus)})"


def _priority(desk: Desk) -> float:
    """What its offer was worth, as the fleet has it."""
    holds = desk.parts.fleet.snapshot(desk.now()).holds
    return next((one.priority for one in holds if one.key == desk.key), 0.0)


async def _set_up(desk: Desk, task: Task, fetched: Fetched, past: Past, placed: Placed) -> None:
    """The folder, then the row: an attempt in the books can always be launched from its files."""
    parts, now, number, plan = desk.parts, desk.now(), past.next_number, placed.plan
    times = desk.times(reserve_s=plan.time.reserve_s, publish_s=plan.time["publish"])
    times = replace(times, end_by=min(times.end_by, placed.until))
    if times.end_by <= now:
        raise StepFailed(EndReason.DEADLINE, "no time is left for another attempt")
    taken = {port for job, port in parts.ports.items() if job != desk.row.id}
    port = parts.ports[desk.row.id] = free_port(taken, parts.random)
    plan = plan.model_copy(update={"launch": plan.launch.model_copy(update={"port": port})})
    folder = desk.folder.attempt(number)
    resume = resumable(past, plan)
    run = run_spec(desk.row, task, fetched, folder, plan, times, now, resume)

    def written() -> None:
        remove_tree(folder.path)  # of a life that ended before the attempt was in the books
        tidy(desk, number, resume)
        write_attempt(folder, run, plan)
        desk.folder.point_latest(number)

    await desk.persist("write", lambda: _on_disk(written), lambda: times.end_by)
    await _enter(desk, folder, number, placed.grant, times.end_by)


async def _on_disk(action: Callable[[], None]) -> None:
    try:
        await asyncio.to_thread(action)
    except OSError as error:
        raise StepFailed(EndReason.DISK_FULL, f"the attempt's folder can't be written: {error}") from error


async def _enter(desk: Desk, folder: AttemptFolder, number: int, grant: Grant, end_by: float) -> None:
    key = f"{desk.row.id}-{number}-{secrets.token_hex(4)}"
    desk.row = await desk.parts.book.begin_attempt(
        desk.row,
        number,
        engine=desk.parts.engine.name,
        key=key,
        folder=str(folder.path),
        gpus=grant.ids,
        end_by=end_by,
    )
    desk.live.attempt = number
    desk.show()


def resumable(past: Past, plan: TrainingPlan) -> Path | None:
    """The last checkpoint, where the next plan can go on from it."""
    before = past.plan
    if past.checkpoint is None or before is None or past.ended_by is EndReason.NAN:
        return None  # after NaN: what is saved may be poisoned already
    same = (
        before.engine is plan.engine
        and before.method is plan.method
        and before.adapter == plan.adapter
        and before.parallelism is plan.parallelism
        and before.optimizer.name is plan.optimizer.name
        and (plan.fsdp is None or before.batch.world_size == plan.batch.world_size)
    )
    return past.checkpoint if same else None


def tidy(desk: Desk, number: int, keep: Path | None) -> None:
    """The scratch of earlier attempts, but for what is resumed from: it would fill the disk."""
    for earlier in range(1, number):
        place = desk.folder.attempt(earlier).work
        if keep is None or not keep.is_relative_to(place):
            remove_tree(place)
