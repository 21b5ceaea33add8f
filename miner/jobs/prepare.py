"""From a queued job to an attempt that is ready to launch: inputs, `draft`, `acquire`, `write`.

Inputs come first, so that no GPU waits for a download. The plan is made twice: for the GPUs the job could
get, to know how many to ask for, and for those it was given, in the time that is left then.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable
from dataclasses import replace

from core.domain.decisions import IDLE_HOST, TrainingWorth
from core.domain.errors import ConfigError
from core.domain.job_states import EndReason, JobState, StepFailed
from core.domain.keys import GpuReservation, nodes_of
from core.domain.units import rfc3339, show_seconds
from core.domain.wire import MinerTaskOffer
from core.planning.conditions import LearnedBounds
from core.planning.plan import TrainingPlan
from core.profile.resolve import LoadedProfile
from core.system.files import remove_tree
from miner.fleet.base import FleetSnapshot, GpuGrant
from miner.fleet.placement import FOREVER
from miner.inputs.fetch import FetchedInputs
from miner.jobs import drafts
from miner.jobs.context import JobContext
from miner.jobs.drafts import Draft, DraftFacts, draft, draft_granted, usable_classes
from miner.jobs.history import AttemptHistory, history_of
from miner.jobs.launch import Grant, free_port, run_spec, write_attempt
from miner.jobs.tasks import OPERATOR, task_spec_of
from miner.store import attempts
from miner.store.actions import micro_of_next_attempt

#: The GPUs are kept for this many times what the plan takes: steps may be slower than planned.
_GPU_TIME_MARGIN = 1.1
#: A training ends this long, and the time to save, before others use its GPUs: clusters count coarsely.
_BEFORE_OTHERS_S = 180.0
#: Release the GPUs after this long without input bytes.
_NO_BYTES_S = 120.0
#: Inputs are judged by the bytes of one window, and given up if the rest would take more than this many
#: times the time left. Twice, as lines are shared and may become faster.
_WINDOW_S, _HOPELESS = 300.0, 2.0
#: The window starts over with the first bytes after a stall, and a job ends only after several bad windows in
#: a row: a download that stalled and goes on is not judged by its silence.
_STALLED_S, _BAD_WINDOWS = 60.0, 2
#: Bytes per second, for a dataset of unknown size.
_MIN_BYTES_PER_SECOND = 10_000.0


async def prepare(job: JobContext) -> None:
    """Bring the job to state TRAINING with a new attempt in the store, or raise `StepFailed`."""
    if job.row.state is not JobState.PREPARING:
        await job.move(JobState.PREPARING)
    inputs = await fetch_inputs(job)
    history = await asyncio.to_thread(history_of, await job.attempts(), job.row.counted_from)
    grant = await acquire(job, inputs, history)
    await write(job, inputs, history, grant)


# Inputs


async def fetch_inputs(job: JobContext) -> FetchedInputs:
    """Fetch the missing inputs. Cached ones cost nothing, so a later attempt gets its facts here too."""
    if job.fetched is not None and not await asyncio.to_thread(_still_exist, job.fetched):
        job.fetched = None
    if job.fetched is None:
        job.fetched = await job.run_step("fetch", lambda: _fetch_while_useful(job), job.useful_until)
    return job.fetched


def _still_exist(fetched: FetchedInputs) -> bool:
    """Check that cached inputs still exist."""
    return fetched.model_path.exists() and fetched.data_path.exists()


async def _fetch_while_useful(job: JobContext) -> FetchedInputs:
    """Try once.

    While no bytes arrive the job keeps no GPU from those that have their inputs, and it ends when its inputs
    cannot arrive in time.
    """
    loop, last, arrivals = asyncio.get_running_loop(), dict[str, int](), dict[str, _InputArrival]()
    hopeless: list[str] = []

    def on_silence() -> None:
        if job.services.fleet.yield_gpus(job.key):
            job.note("inputs_late", "its inputs are not arriving; its GPUs are released until they do")

    timer = loop.call_later(_NO_BYTES_S, on_silence)

    def on_progress(what: str, done: int, total: int | None) -> None:
        nonlocal timer
        if done > last.get(what, 0):
            timer.cancel()
            timer = loop.call_later(_NO_BYTES_S, on_silence)
        last[what] = done
        job.set_stage(what, done, total)
        if what == "dataset" or (what == "model" and total is not None):
            arrival = arrivals.setdefault(what, _InputArrival(job.now(), done))
            if reason := _too_late(job, what, done, total, arrival):
                hopeless.append(reason)
                limit.reschedule(0.0)

    try:
        async with asyncio.timeout(None) as limit:
            return await job.services.inputs.fetch(job.task, on_progress)
    except TimeoutError:
        if not hopeless:
            raise
        raise StepFailed(EndReason.DEADLINE, hopeless[0]) from None
    except StepFailed:
        on_silence()
        raise
    finally:
        timer.cancel()


class _InputArrival:
    """Arrival speed of one input, by (time, bytes) at the first report and at the start of the window."""

    def __init__(self, now: float, done: int) -> None:
        self._first = self._window = self._grown = (now, done)
        self._bad = 0

    def hopeless_s(self, now: float, done: int, total: int | None, left: float) -> float | None:
        """Seconds until it has arrived, if that was too long for `left` in the last windows too, or None."""
        needs = self.remaining_s(now, done, total)
        if needs is None:
            return None
        self._bad = self._bad + 1 if needs > _HOPELESS * left else 0
        return needs if self._bad >= _BAD_WINDOWS else None

    def remaining_s(self, now: float, done: int, total: int | None) -> float | None:
        """Seconds until it has arrived, at the speed of this window or, if faster, of all so far.

        Return None before a window has passed, and if nothing arrived at all: that has a limit of its own.
        """
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
            return 0.0 if rate >= _MIN_BYTES_PER_SECOND else math.inf
        return (total - done) / rate


def _too_late(job: JobContext, what: str, done: int, total: int | None, arrival: _InputArrival) -> str | None:
    """Return why this input is not worth waiting for, or None."""
    left = max(job.useful_until() - job.now(), 0.0)
    needs = arrival.hopeless_s(job.now(), done, total, left)
    if needs is None:
        return None
    if total is None:
        return (
            f"the {what} trickles: {done:,} bytes so far, less than {_MIN_BYTES_PER_SECOND:,.0f} per second"
        )
    return (
        f"the {what} is too slow: {done:,} of {total:,} bytes are here, the rest would take "
        f"{show_seconds(needs)}, and {show_seconds(left)} are left for it and the training"
    )


# Plan and GPUs


async def acquire(job: JobContext, inputs: FetchedInputs, history: AttemptHistory) -> Grant:
    """Draft, wait for GPUs, and plan again for those that the job was given."""
    gpus = None
    while gpus is None:
        job.set_stage("plan")
        drafted = await job.run_step(
            "plan", lambda: _draft(job, inputs, history), job.useful_until, history.next_number
        )
        gpus = await _wait_for_gpus(job, history, drafted)
    facts = drafts.with_draft(await _read_facts(job, inputs, history), drafted.plan)
    plan = await asyncio.to_thread(draft_granted, facts, gpus)
    until = keep_gpus(job, plan)
    if until is None:
        return _grant_of(job, history, plan, FOREVER)
    plan, until = await _plan_before_others(job, facts, gpus, plan, until)
    return _grant_of(job, history, plan, until)


async def _draft(job: JobContext, inputs: FetchedInputs, history: AttemptHistory) -> Draft:
    drafted = await asyncio.to_thread(draft, await _read_facts(job, inputs, history))
    if history.ended_by is EndReason.OOM:  # the next plan of this shape need not find that out again
        await keep_lesson(job, drafted.plan, None)
    return drafted


async def _read_facts(job: JobContext, inputs: FetchedInputs, history: AttemptHistory) -> DraftFacts:
    def learned(plan: TrainingPlan) -> LearnedBounds | None:
        known = _known_lesson(job, drafts.lesson_key(job.row.validator, plan))
        micro = job.services.store.read_now(micro_of_next_attempt, job.row.id)
        return known if micro is None else drafts.with_micro_cap(known, micro)

    profile = await _profile_of(job)
    now, fleet = job.now(), job.services.fleet
    others, claim = fleet.snapshot(now, without=job.key), fleet.ledger.claim(job.key)
    return DraftFacts(
        spec=task_spec_of(job.row, job.task, now),
        inputs=inputs,
        history=history,
        profile=profile,
        fleet=others,
        reserved=tuple(claim.gpus) if claim else (),
        task=job.task,
        learned=learned,
        worth=_worth(job, others, now),
    )


async def _profile_of(job: JobContext) -> LoadedProfile:
    """Return the profile in force, or the one that the operator named for this task."""
    named = job.task.profile
    if named is None:
        return job.services.profile()
    try:
        return await asyncio.to_thread(job.services.named_profile, named)
    except ConfigError as error:
        raise StepFailed(EndReason.INFEASIBLE, f"its profile cannot be used: {error}") from None


def _worth(job: JobContext, others: FleetSnapshot, now: float) -> TrainingWorth:
    """Return the worth of the training, and of further GPUs to others; those that it holds cost nothing. An
    operator's task does not predict offers, so its GPUs cost nothing until another task waits."""
    row, task = job.row, job.task
    another_waits = any(hold.starts_at > now or not hold.gpus for hold in others.reservations)
    if row.validator == OPERATOR and not another_waits:
        return IDLE_HOST
    offer = MinerTaskOffer(
        model=task.model, hours_to_complete=row.hours, task_id=row.task_id, task_type=task.task_type
    )
    worth = job.services.worth(offer, task.image_type, others, now)
    claim = job.services.fleet.ledger.claim(job.key)
    held = len(claim.gpus) if claim is not None and (claim.firm or claim.is_running) else 0
    return worth._replace(prices=(*(0.0 for _ in range(held)), *worth.prices[held:]))


def _busy_s(plan: TrainingPlan) -> float:
    """Seconds for which its GPUs have work."""
    return plan.time.total_s - plan.time["publish"]


def keep_gpus(job: JobContext, plan: TrainingPlan) -> float | None:
    """Keep the GPUs for as long as the plan takes; return None if that is possible.

    Otherwise return until when: an offer that was accepted meanwhile has one of them from then on.
    """
    now = job.now()
    busy = _busy_s(plan)
    until = job.services.fleet.extend(job.key, min(now + busy * _GPU_TIME_MARGIN, job.row.deadline_at))
    return None if until >= min(now + busy, job.useful_until()) else until


async def _plan_before_others(
    job: JobContext, facts: DraftFacts, gpus: GpuGrant, plan: TrainingPlan, until: float
) -> tuple[TrainingPlan, float]:
    """Plan a shorter training, as the dataset is larger than its offer suggested. GPUs reserved for others
    stay theirs, as long as anything at all can be trained before."""
    end = until + plan.time.reserve_s + plan.time["publish"]
    hours = max(min(end, job.row.deadline_at) - job.now(), 0.0) / 3600
    request = facts.request(drafts.granted_hardware(facts.fleet, gpus))
    shorter = await asyncio.to_thread(drafts.plan_in_time, request, hours)
    if shorter is None or shorter.gpus.count != plan.gpus.count:
        job.note("late", "its GPUs are reserved for another job before it could train; it keeps them")
        return plan, FOREVER
    left = show_seconds(until - job.now())
    job.note("shorter", f"its GPUs are reserved for others in {left}: planned for that")
    return shorter, until


def _grant_of(job: JobContext, history: AttemptHistory, plan: TrainingPlan, until: float) -> Grant:
    """Say when the attempt has to be over: `until` others need its GPUs."""
    assert job.grant is not None
    times = job.timeline(reserve_s=plan.time.reserve_s, publish_s=plan.time["publish"])
    end_by = min(times.end_by, until, _end_before_others(job, job.grant, plan))
    if end_by <= job.now():
        raise StepFailed(EndReason.DEADLINE, "no time is left for another attempt")
    return Grant(plan, job.grant.ids, end_by, history.resumable(plan))


def _end_before_others(job: JobContext, grant: GpuGrant, plan: TrainingPlan) -> float:
    """The latest end for which a cluster's scheduler begins it before others use its GPUs; FOREVER if the
    plan takes longer: then only another machine will do."""
    end = job.services.fleet.free_until(grant.ids) - job.services.timings.grace_s - _BEFORE_OTHERS_S
    return end if end >= job.now() + _busy_s(plan) else FOREVER


async def keep_lesson(job: JobContext, plan: TrainingPlan, measured_step_s: float | None) -> None:
    """Store what this run teaches later plans; nothing if foreign code ran in it, which may have lied."""
    if job.task.is_hostile:
        return
    key = drafts.lesson_key(job.row.validator, plan)
    known = await asyncio.to_thread(_known_lesson, job, key)
    lesson = drafts.lesson_of(plan, known, measured_step_s)
    if lesson is not None:
        await job.services.store.write(attempts.save_lesson, key, lesson.model_dump_json(), job.now())


def _known_lesson(job: JobContext, key: str) -> LearnedBounds | None:
    """Read the lesson from the store: call it off the event loop."""
    text = job.services.store.read_now(attempts.get_lesson, key)
    return LearnedBounds.model_validate_json(text) if text else None


async def _wait_for_gpus(job: JobContext, history: AttemptHistory, drafted: Draft) -> GpuGrant | None:
    """Keep the GPUs of the last attempt if they still fit, otherwise wait in the queue; return None once
    nodes can be used that the draft does not know."""
    held, exclusive = job.grant, drafted.plan.launch.exclusive
    still_fits = held is not None and any(option.is_met(held.ids) for option in drafted.options)
    if held is not None and still_fits and job.gpu_lost is None and not exclusive:
        return held
    job.grant, job.gpu_lost = None, None
    job.set_stage("gpus")
    waited_for = ""

    async def wait() -> GpuGrant | None:
        nonlocal waited_for

        def check_nodes() -> None:
            fleet = job.services.fleet.snapshot(job.now())
            if not drafts.names_of(usable_classes(fleet, history, job.task)) <= drafted.nodes:
                limit.reschedule(0.0)

        showing = asyncio.create_task(_show_blocking_jobs(job, check_nodes))
        try:
            async with asyncio.timeout(None) as limit:
                return await job.services.fleet.acquire(
                    job.key,
                    drafted.options,
                    until=job.row.deadline_at,
                    exclusive=exclusive,
                    lane=drafted.lane,
                    needs=_busy_s(drafted.plan) * _GPU_TIME_MARGIN,
                )
        except TimeoutError:
            if not limit.expired():
                raise
            return None
        finally:
            showing.cancel()
            waited_for, job.live.trouble = job.live.trouble, ""

    try:
        job.grant = await job.run_step("gpus", wait, job.useful_until)
    except StepFailed as failed:
        raise StepFailed(failed.reason, f"{failed}; {waited_for}" if waited_for else str(failed)) from None
    job.show_state()
    return job.grant


async def _show_blocking_jobs(job: JobContext, check_nodes: Callable[[], None]) -> None:
    """While the job waits, show which jobs hold its GPUs."""
    while True:
        check_nodes()
        holders = [
            _describe_reservation(job, reservation)
            for reservation in job.services.fleet.blocking_reservations(job.key)
        ]
        job.live.trouble = f"waits for {'; '.join(holders) or 'free GPUs'}"
        job.show_state()
        await asyncio.sleep(job.services.timings.poll_s)


def _describe_reservation(job: JobContext, reservation: GpuReservation) -> str:
    job_id = job.services.job_ids.get(reservation.key)
    holder = f"job {job_id}" if job_id is not None else "an accepted offer"
    end = f", until {rfc3339(reservation.ends_at)}" if reservation.ends_at < FOREVER else ""
    return f"{holder} (task {reservation.key.task_id}, GPU {', '.join(reservation.gpus)}{end})"


# Directory and record


async def write(job: JobContext, inputs: FetchedInputs, history: AttemptHistory, grant: Grant) -> None:
    """Write the directory first, then the record: an attempt in the store can always be launched from its
    files."""
    services, number = job.services, history.next_number
    taken = {port for job_id, port in services.ports.items() if job_id != job.row.id}
    is_local = nodes_of(grant.gpus) == ("",)
    port = services.ports[job.row.id] = free_port(taken, services.random, is_local=is_local)
    plan = grant.plan.model_copy(update={"launch": grant.plan.launch.model_copy(update={"port": port})})
    folder = job.folder.attempt(number)
    run = run_spec(job.row, job.task, inputs, folder, replace(grant, plan=plan), job.now())

    def write_files() -> None:
        remove_tree(folder.path)  # of a daemon that ended before the attempt was in the store
        job.folder.remove_earlier_work(number, grant.resume_from)
        write_attempt(folder, run, plan)
        job.folder.point_latest(number)

    async def write_or_disk_full() -> None:
        try:
            await asyncio.to_thread(write_files)
        except OSError as error:
            text = f"the attempt's directory cannot be written: {error}"
            raise StepFailed(EndReason.DISK_FULL, text) from error

    await job.run_step("write", write_or_disk_full, lambda: grant.end_by)
    job.row = await services.store.write(
        attempts.begin_attempt,
        job.row.id,
        job.row.lock_token,
        job.now(),
        attempts.NewAttempt(
            number,
            services.backend_for(grant.gpus).name,
            f"{job.row.id}-{number}-{secrets.token_hex(4)}",
            str(folder.path),
            grant.gpus,
            grant.end_by,
        ),
    )
    job.live.attempt = number
    job.show_state()
