"""From a queued job to an attempt that is ready to launch: inputs, plan, GPUs, plan again, directory.

Inputs come first, so that no GPU waits for a download. The plan is made twice: for the GPUs the job could
get, to know how many to ask for, and for those it was given, in the time that is left then.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from core.domain.decisions import IDLE_HOST, TrainingWorth
from core.domain.hardware import Hardware
from core.domain.job_states import EndReason, JobState, StepFailed
from core.domain.keys import GpuReservation, NamedLane, ReservationKind, nodes_of
from core.domain.units import rfc3339, show_seconds
from core.domain.wire import MinerTaskOffer
from core.planning.oom import OutOfMemory
from core.planning.plan import TrainingPlan
from core.planning.time.calibration import LearnedBounds
from core.runs.remedies import can_resume
from core.system.files import remove_tree
from miner.fleet.base import FleetNode, GpuGrant, GpuOption, NodeClass
from miner.fleet.placement import FOREVER
from miner.inputs.fetch import FetchedInputs
from miner.jobs import plans
from miner.jobs.context import JobContext
from miner.jobs.history import AttemptHistory, history_of
from miner.jobs.launch import free_port, run_spec, write_attempt
from miner.jobs.plans import JobPlanRequest, PlanDraft
from miner.jobs.tasks import OPERATOR, task_spec_of
from miner.store import alerts as store_alerts
from miner.store import attempts

#: The GPUs are kept for this many times what the plan takes: steps may be slower than planned.
_GPU_TIME_MARGIN = 1.1
#: A training ends so long, and what it takes to save, before others use its GPUs: clusters count coarsely.
_BEFORE_OTHERS_S = 180.0
#: Inputs of which nothing has come for so long may never come.
_NO_BYTES_S = 120.0
#: Inputs are judged by what came within a window, and given up where the rest would take more than this many
#: times what is left. Twice, as lines are shared and may become faster.
_WINDOW_S, _HOPELESS = 300.0, 2.0
#: The window starts over with the first bytes after so long without any, and only so many bad windows in a
#: row end a job: a download that stalled and goes on is not judged by its silence.
_STALLED_S, _BAD_WINDOWS = 60.0, 2
#: Bytes per second, for a dataset of unknown size.
_MIN_BYTES_PER_SECOND = 10_000.0


async def prepare(job: JobContext) -> None:
    """Bring the job to state TRAINING with a new attempt in the store, or raise `StepFailed`."""
    if job.row.state is not JobState.PREPARING:
        await job.move(JobState.PREPARING)
    fetched = await fetch_inputs(job)
    history = await asyncio.to_thread(history_of, await job.attempts(), job.row.counted_from)
    plan, until = await _plan_and_acquire(job, fetched, history)
    await _write_and_record(job, fetched, history, plan, until)


def useful_until(job: JobContext) -> float:
    """The moment after which no training can lead to a model that is published in time."""
    return job.timeline().end_by


# Inputs


async def fetch_inputs(job: JobContext) -> FetchedInputs:
    """Fetch what is missing. What is there costs nothing, so a later attempt gets its facts here too."""
    if job.fetched is not None and not await asyncio.to_thread(_still_exist, job.fetched):
        job.fetched = None
    if job.fetched is None:
        job.fetched = await job.run_step("fetch", lambda: _fetch_while_useful(job), lambda: useful_until(job))
    return job.fetched


def _still_exist(fetched: FetchedInputs) -> bool:
    """Somebody may have removed what was there before."""
    return fetched.model_path.exists() and fetched.data_path.exists()


async def _fetch_while_useful(job: JobContext) -> FetchedInputs:
    """One try.

    While no bytes come the job keeps no GPU from those that have their inputs, and it ends when its inputs
    cannot come in time.
    """
    loop, last, arrivals = asyncio.get_running_loop(), dict[str, int](), dict[str, _InputArrival]()
    hopeless: list[str] = []

    def on_silence() -> None:
        if job.services.fleet.yield_gpus(job.key):
            job.note("inputs_late", "its inputs do not come: no GPU is kept for it until they are here")

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
    """How fast one input comes, by (time, bytes) at the first report and at the start of the window."""

    def __init__(self, now: float, done: int) -> None:
        self._first = self._window = self._grown = (now, done)
        self._bad = 0

    def hopeless_s(self, now: float, done: int, total: int | None, left: float) -> float | None:
        """Seconds until all of it is here, if that was too long for `left` in the last windows too."""
        needs = self.remaining_s(now, done, total)
        if needs is None:
            return None
        self._bad = self._bad + 1 if needs > _HOPELESS * left else 0
        return needs if self._bad >= _BAD_WINDOWS else None

    def remaining_s(self, now: float, done: int, total: int | None) -> float | None:
        """Seconds until all of it is here, at the speed of this window, or of all so far if that is faster.

        None before a window has passed, and when nothing came at all: that has a limit of its own.
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
    """Why this input is not worth waiting for, or None."""
    left = max(useful_until(job) - job.now(), 0.0)
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


async def _plan_and_acquire(
    job: JobContext, fetched: FetchedInputs, history: AttemptHistory
) -> tuple[TrainingPlan, float]:
    """Return the plan for the GPUs that the job holds now, and when others need them."""
    history = _without_lost_machine(job, history)

    async def draft() -> _FleetDraft:
        return await _draft_for_fleet(job, fetched, history)

    grant = None
    while grant is None:
        job.set_stage("plan")
        drafted = await job.run_step("plan", draft, lambda: useful_until(job), history.next_number)
        grant = await _acquire(job, history, drafted)
    node = job.services.fleet.inventory.node_with(grant.ids)
    if node is None:
        raise StepFailed(EndReason.GPU_LOST, f"the machine of {', '.join(grant.ids)} is not there any more")
    granted = _granted_hardware(job, node, grant)
    if history.ended_by is EndReason.OOM and history.plan is not None:
        # The ladder's step decides everything but the number of steps, and the clock decides that.
        keep_gpus(job, drafted.plan)
        return plans.on_host(drafted.plan, _plan_request(job, fetched, history, granted)), FOREVER
    plan = (await _draft_plan(job, fetched, history, granted)).plan
    until = keep_gpus(job, plan)
    if until is None:
        return plan, FOREVER
    request = _plan_request(job, fetched, history, granted)
    return await _plan_before_others(job, request, plan, until)


def _granted_hardware(job: JobContext, node: FleetNode, grant: GpuGrant) -> Hardware:
    """The host with the job's GPUs, and their places among the host's."""
    ours = [gpu.id for gpu in job.services.fleet.inventory.gpus if gpu.node == node.name]
    return node.installed.model_copy(
        update={
            "gpus": grant.gpus,
            "host_gpus": (node.hardware or node.installed).gpus.count,
            "gpu_places": tuple(place for place, gpu in enumerate(ours) if gpu in grant.ids),
        }
    )


class _FleetDraft(NamedTuple):
    """What to request the fleet for, and the plan for what is wanted most."""

    plan: TrainingPlan
    options: tuple[GpuOption, ...]
    lane: NamedLane | None
    #: All that could be used then.
    nodes: frozenset[str]


async def _draft_for_fleet(job: JobContext, fetched: FetchedInputs, history: AttemptHistory) -> _FleetDraft:
    """Plan for each class of nodes whose engine can train it. What is reserved for the job comes first, then
    what trains most."""
    classes = _possible_classes(job, history)
    if not classes:
        raise StepFailed(EndReason.NO_GPU, "no GPU of this fleet can be used")
    every = _names_of(classes)
    if history.ended_by is EndReason.OOM and history.plan is not None:
        classes = [nodes for nodes in classes if _has_gpus_of(history.plan, nodes)]
        plan = (await _draft_plan(job, fetched, history, classes[0].hardware)).plan
        option = GpuOption(plan.gpus.count, _names_of(classes), plan.gpus.nodes)
        return _FleetDraft(plan, (option,), None, every)
    spec = task_spec_of(job.row, job.task, job.now())
    most_nodes = plans.most_nodes(job.services.profile(), spec, fetched)
    drafts, refused = list[tuple[NodeClass, PlanDraft]](), None
    for nodes in classes:
        try:
            draft = await _draft_plan(job, fetched, history, nodes.of_nodes(most_nodes))
        except StepFailed as error:
            refused = refused or error
            continue
        drafts.append((nodes, draft))
    abilities = job.services.fleet.abilities
    able = [
        (nodes, draft)
        for nodes, draft in drafts
        if nodes.engine not in abilities or draft.plan.engine not in abilities[nodes.engine].missing
    ]
    drafts = able or drafts
    if not drafts:
        assert refused is not None
        if history.bad_nodes:  # rather there than nowhere
            return await _draft_for_fleet(job, fetched, replace(history, bad_nodes=frozenset()))
        await _wait_for_others(job, fetched, history, classes)
        raise refused
    claim = job.services.fleet.ledger.claim(job.key)
    reserved = set(nodes_of(claim.gpus)) if claim else set[str]()
    drafts.sort(key=lambda one: (one[0].names.isdisjoint(reserved), -one[1].plan.steps.epochs))
    first = [nodes.option(draft.counts[0]) for nodes, draft in drafts]
    fewer = [nodes.option(count) for nodes, draft in drafts for count in draft.counts[1:]]
    return _FleetDraft(drafts[0][1].plan, (*first, *fewer), drafts[0][1].lane, every)


def _names_of(classes: Sequence[NodeClass]) -> frozenset[str]:
    return frozenset[str]().union(*(nodes.names for nodes in classes))


async def _wait_for_others(
    job: JobContext, fetched: FetchedInputs, history: AttemptHistory, tried: Sequence[NodeClass]
) -> None:
    """Raise that a GPU is missing, which is waited for, if a node that cannot be used now could train it."""
    names = _names_of(tried)
    others = {
        node.installed.gpus: node for node in job.services.fleet.inventory.nodes if node.name not in names
    }
    for node in others.values():
        with contextlib.suppress(StepFailed):
            await _draft_plan(job, fetched, history, node.installed)
            break
    else:
        return
    raise StepFailed(EndReason.NO_GPU, f"only nodes like {node.name} can train it, and none can be used now")


def _without_lost_machine(job: JobContext, history: AttemptHistory) -> AttemptHistory:
    """After memory ran out the next plan is made from the last one, for as many GPUs of its kind. Where no
    machine has them any more, it is made anew."""
    plan = history.plan
    if plan is None or any(_has_gpus_of(plan, nodes) for nodes in _possible_classes(job, history)):
        return history
    return replace(history, plan=None)


def _has_gpus_of(plan: TrainingPlan, nodes: NodeClass) -> bool:
    gpus, wanted = nodes.hardware.gpus, plan.gpus
    if gpus.kind.name != wanted.kind.name or len(nodes.names) < wanted.nodes:
        return False
    return gpus.count == wanted.per_node if wanted.nodes > 1 else gpus.count >= wanted.count


def _possible_classes(job: JobContext, history: AttemptHistory) -> list[NodeClass]:
    """Nodes that can be used, without those where an attempt could not run; all, where no other is left."""
    fleet = job.services.fleet
    classes = list(fleet.inventory.classes)
    able = []
    for nodes in classes:
        ability = fleet.abilities.get(nodes.engine)
        if ability and (ability.problem or (job.task.is_hostile and ability.no_sandbox)):
            continue
        able.append(nodes)
    able = able or classes
    others = [nodes._replace(names=nodes.names - history.bad_nodes) for nodes in able]
    return [nodes for nodes in others if nodes.names] or able


def _busy_s(plan: TrainingPlan) -> float:
    """How long its GPUs have work."""
    return plan.time.total_s - plan.time["publish"]


def keep_gpus(job: JobContext, plan: TrainingPlan) -> float | None:
    """Keep the GPUs for as long as the plan takes; return None if that is possible.

    Otherwise return until when: an offer that was accepted meanwhile has one of them from then on.
    """
    now = job.now()
    busy = _busy_s(plan)
    until = job.services.fleet.extend(job.key, min(now + busy * _GPU_TIME_MARGIN, job.row.deadline_at))
    return None if until >= min(now + busy, useful_until(job)) else until


async def _plan_before_others(
    job: JobContext, request: JobPlanRequest, plan: TrainingPlan, until: float
) -> tuple[TrainingPlan, float]:
    """The dataset is larger than its offer suggested. What is reserved for others stands, as long as
    anything at all can be trained before."""
    end = until + plan.time.reserve_s + plan.time["publish"]
    hours = max(min(end, job.row.deadline_at) - job.now(), 0.0) / 3600
    request = replace(request, spec=request.spec.model_copy(update={"hours": hours}))
    shorter = await asyncio.to_thread(plans.plan_in_time, request)
    if shorter is None or shorter.gpus.count != plan.gpus.count:
        job.note("late", "its GPUs are reserved for others before anything can be trained; it takes its time")
        return plan, FOREVER
    left = show_seconds(until - job.now())
    job.note("shorter", f"its GPUs are reserved for others in {left}: planned for that")
    return shorter, until


async def _draft_plan(
    job: JobContext, fetched: FetchedInputs, history: AttemptHistory, hardware: Hardware
) -> PlanDraft:
    """In a thread, as it takes tens of milliseconds."""
    if history.ended_by is EndReason.OOM and history.plan is not None:
        failure = _oom_failure(job, history, history.plan, hardware)
        plan = await asyncio.to_thread(plans.plan_after_oom, history.plan, failure)
        await keep_lesson(job, plan, None)  # the next plan of this shape need not find that out again
        return PlanDraft(plan, (plan.gpus.count,))
    return await asyncio.to_thread(plans.draft_plan, _plan_request(job, fetched, history, hardware))


def _plan_request(
    job: JobContext, fetched: FetchedInputs, history: AttemptHistory, hardware: Hardware
) -> JobPlanRequest:
    def learned(plan: TrainingPlan) -> LearnedBounds | None:
        known = _known_lesson(job, plans.lesson_key(job.row.validator, plan))
        micro = job.services.store.read_now(store_alerts.micro_of_next_attempt, job.row.id)
        return known if micro is None else plans.with_micro_cap(known, micro)

    spec = task_spec_of(job.row, job.task, job.now())
    profile = job.services.profile()
    return JobPlanRequest(spec, fetched, hardware, profile, learned, history.failures, _worth(job))


def _worth(job: JobContext) -> TrainingWorth:
    """Return the worth of the training, and of further GPUs to others; those that it holds cost nothing. An
    operator's task does not predict offers, so its GPUs cost nothing until another task waits."""
    now, fleet, row, task = job.now(), job.services.fleet, job.row, job.task
    others = fleet.snapshot(now, without=job.key)
    another_waits = any(hold.starts_at > now or not hold.gpus for hold in others.reservations)
    if row.validator == OPERATOR and not another_waits:
        return IDLE_HOST
    offer = MinerTaskOffer(
        model=task.model, hours_to_complete=row.hours, task_id=row.task_id, task_type=task.task_type
    )
    worth = job.services.worth(offer, task.image_type, others, now)
    claim = fleet.ledger.claim(job.key)
    held = len(claim.gpus) if claim is not None and (claim.firm or claim.is_running) else 0
    return worth._replace(prices=(*(0.0 for _ in range(held)), *worth.prices[held:]))


def _oom_failure(
    job: JobContext, history: AttemptHistory, plan: TrainingPlan, hardware: Hardware
) -> OutOfMemory:
    ours = set(history.gpus)
    reservations = job.services.fleet.snapshot(job.now()).reservations
    planned_at = job.row.deadline_at - plan.time.deadline_s
    return OutOfMemory(
        moment=history.oom_moment,
        grown_micro=history.grown_micro,
        elapsed_s=max(job.now() - planned_at, 0.0),
        shared_gpus=any(
            ours & set(reservation.gpus)
            for reservation in reservations
            if reservation.key != job.key and reservation.kind is ReservationKind.JOB
        ),
        available=max(hardware.gpus.count, plan.gpus.count),
    )


async def keep_lesson(job: JobContext, plan: TrainingPlan, measured_step_s: float | None) -> None:
    """Store what this run teaches later plans; nothing if foreign code ran in it, which may have lied."""
    if job.task.is_hostile:
        return
    key = plans.lesson_key(job.row.validator, plan)
    known = await asyncio.to_thread(_known_lesson, job, key)
    lesson = plans.lesson_of(plan, known, measured_step_s)
    if lesson is not None:
        await job.services.store.write(attempts.save_lesson, key, lesson.model_dump_json(), job.now())


def _known_lesson(job: JobContext, key: str) -> LearnedBounds | None:
    """Reads the store: call it off the event loop."""
    text = job.services.store.read_now(attempts.get_lesson, key)
    return LearnedBounds.model_validate_json(text) if text else None


async def _acquire(job: JobContext, history: AttemptHistory, draft: _FleetDraft) -> GpuGrant | None:
    """Keep the GPUs of the attempt before if they still fit; otherwise wait in the queue. None: nodes can be
    used by now that the draft does not know."""
    held, exclusive = job.grant, draft.plan.launch.exclusive
    still_fits = held is not None and any(option.is_met(held.ids) for option in draft.options)
    if held is not None and still_fits and job.gpu_lost is None and not exclusive:
        return held
    job.grant, job.gpu_lost = None, None
    job.set_stage("gpus")
    waited_for = ""

    async def wait() -> GpuGrant | None:
        nonlocal waited_for

        def check_nodes() -> None:
            if not _names_of(_possible_classes(job, history)) <= draft.nodes:
                limit.reschedule(0.0)

        showing = asyncio.create_task(_show_who_waits_for_whom(job, check_nodes))
        try:
            async with asyncio.timeout(None) as limit:
                return await job.services.fleet.acquire(
                    job.key,
                    draft.options,
                    until=job.row.deadline_at,
                    exclusive=exclusive,
                    lane=draft.lane,
                    needs=_busy_s(draft.plan) * _GPU_TIME_MARGIN,
                )
        except TimeoutError:
            if not limit.expired():
                raise
            return None
        finally:
            showing.cancel()
            waited_for, job.live.trouble = job.live.trouble, ""

    try:
        job.grant = await job.run_step("gpus", wait, lambda: useful_until(job))
    except StepFailed as failed:
        raise StepFailed(failed.reason, f"{failed}; {waited_for}" if waited_for else str(failed)) from None
    job.show_state()
    return job.grant


async def _show_who_waits_for_whom(job: JobContext, check_nodes: Callable[[], None]) -> None:
    """For as long as the job waits, show who has the GPUs that it waits for."""
    while True:
        check_nodes()
        reservations = [
            _describe_reservation(job, reservation)
            for reservation in job.services.fleet.blocking_reservations(job.key)
        ]
        job.live.trouble = f"waits for {'; '.join(reservations) or 'free GPUs'}"
        job.show_state()
        await asyncio.sleep(job.services.timings.poll_s)


def _describe_reservation(job: JobContext, reservation: GpuReservation) -> str:
    job_id = job.services.job_ids.get(reservation.key)
    holder = f"job {job_id}" if job_id is not None else "an accepted offer"
    end = f", until {rfc3339(reservation.ends_at)}" if reservation.ends_at < FOREVER else ""
    return f"{holder} (task {reservation.key.task_id}, GPU {', '.join(reservation.gpus)}{end})"


# Directory and record


async def _write_and_record(
    job: JobContext, fetched: FetchedInputs, history: AttemptHistory, plan: TrainingPlan, until: float
) -> None:
    """The directory first, then the record: an attempt in the store can always be launched from its files."""
    services, now, number = job.services, job.now(), history.next_number
    times = job.timeline(reserve_s=plan.time.reserve_s, publish_s=plan.time["publish"])
    times = replace(times, end_by=min(times.end_by, until, _end_before_others(job, plan)))
    if times.end_by <= now:
        raise StepFailed(EndReason.DEADLINE, "no time is left for another attempt")
    taken = {port for job_id, port in services.ports.items() if job_id != job.row.id}
    assert job.grant is not None
    is_local = nodes_of(job.grant.ids) == ("",)
    port = services.ports[job.row.id] = free_port(taken, services.random, is_local=is_local)
    plan = plan.model_copy(update={"launch": plan.launch.model_copy(update={"port": port})})
    folder = job.folder.attempt(number)
    resume_from = resumable_checkpoint(history, plan)
    run = run_spec(job.row, job.task, fetched, folder, plan, times, now, resume_from)

    def write() -> None:
        remove_tree(folder.path)  # of a daemon that ended before the attempt was in the store
        remove_earlier_work(job, number, resume_from)
        write_attempt(folder, run, plan)
        job.folder.point_latest(number)

    await job.run_step("write", lambda: _write_or_disk_full(write), lambda: times.end_by)
    job.row = await services.store.write(
        attempts.begin_attempt,
        job.row.id,
        job.row.lock_token,
        job.now(),
        number=number,
        engine=services.engine_for(job.grant.ids).name,
        key=f"{job.row.id}-{number}-{secrets.token_hex(4)}",
        folder=str(folder.path),
        gpus=job.grant.ids,
        end_by=times.end_by,
    )
    job.live.attempt = number
    job.show_state()


def _end_before_others(job: JobContext, plan: TrainingPlan) -> float:
    """When to end at the latest so that a cluster's scheduler begins it before others use its GPUs. FOREVER
    where the plan takes longer: then only another machine will do."""
    assert job.grant is not None
    end = job.services.fleet.free_until(job.grant.ids) - job.services.timings.grace_s - _BEFORE_OTHERS_S
    return end if end >= job.now() + _busy_s(plan) else FOREVER


async def _write_or_disk_full(action: Callable[[], None]) -> None:
    try:
        await asyncio.to_thread(action)
    except OSError as error:
        text = f"the attempt's directory cannot be written: {error}"
        raise StepFailed(EndReason.DISK_FULL, text) from error


def resumable_checkpoint(history: AttemptHistory, plan: TrainingPlan) -> Path | None:
    """The last checkpoint, if the next plan can go on from it."""
    if history.checkpoint is None or history.plan is None or history.ended_by is None:
        return None
    return history.checkpoint if can_resume(history.plan, plan, history.ended_by) else None


def remove_earlier_work(job: JobContext, number: int, keep: Path | None) -> None:
    """Remove the scratch of earlier attempts, which would fill the disk, but not the checkpoint `keep`."""
    for earlier in range(1, number):
        work = job.folder.attempt(earlier).work
        if keep is None or not keep.is_relative_to(work):
            remove_tree(work)
