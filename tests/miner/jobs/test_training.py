"""The deadline, in every stage: what there is, is published in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from core.domain.job_states import EndReason, JobState, StepFailed
from core.domain.keys import ReservationKind
from core.runs.progress import EvalEvent, NoteEvent, StepEvent, SubmissionEvent
from core.runs.run_files import HeldOutScore, RunEnd
from miner.backends.base import AttemptSpec, BackendDiskFull, BackendUnreachable, RunPhase, RunStatus
from miner.store import attempts
from tests.miner.jobs.harness import CAP_S, FAST, JobsHarness, Trainer, good, open_harness, waits

#: What a job that is running gets to its deadline: enough for a slow disk between its end and the submission.
SECONDS = 12.0
TIMINGS = replace(FAST, margin_s=0.5, grace_s=0.75)


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[JobsHarness]:
    async with open_harness(tmp_path / "data", TIMINGS) as harness:
        yield harness


async def started(harness: JobsHarness, seconds: float) -> int:
    """Running, with so much time from now on: how long a launch takes is not what these tests are about."""
    await harness.launched()
    return await harness.start(seconds=seconds)


async def ends_in_time(harness: JobsHarness, job: int) -> None:
    row = await harness.done(job)
    repo, at = harness.hub.commits[-1]
    assert repo == "me/repo-1"
    assert at <= row.deadline_at


async def a_training_that_is_asked_to_end_saves_and_is_published(harness: JobsHarness) -> None:
    """Also one whose second start has less time: an hour was left."""

    async def saves_when_asked(trainer: Trainer) -> None:
        trainer.step(1)
        await trainer.wait_for_stop()
        trainer.save(0.5)
        trainer.end(RunEnd.CLOCK)

    harness.backend.scripts = [saves_when_asked]
    job = await started(harness, SECONDS)
    await ends_in_time(harness, job)
    assert [force for _, force in harness.backend.stops] == [False]


async def a_training_that_ignores_its_time_is_killed_and_its_best_is_published(
    harness: JobsHarness,
) -> None:
    async def ignores(trainer: Trainer) -> None:
        trainer.save(0.5)
        while True:
            await asyncio.sleep(0.01)
            trainer.say(StepEvent(t=time.time(), step=1))

    harness.backend.scripts = [ignores]
    job = await started(harness, SECONDS)
    await ends_in_time(harness, job)
    assert [force for _, force in harness.backend.stops] == [False, True]


async def what_a_backend_that_is_gone_runs_is_published_all_the_same(harness: JobsHarness) -> None:
    async def saves_and_is_deaf(trainer: Trainer) -> None:
        trainer.save(0.5)
        harness.backend.gone = True
        await asyncio.sleep(60)

    harness.backend.scripts = [saves_and_is_deaf]
    job = await started(harness, SECONDS)
    row = await harness.in_state(job, JobState.DONE)
    assert harness.hub.commits[-1][1] <= row.deadline_at
    assert (await harness.attempts(job))[0].ended_at is None
    assert [hold.kind for hold in harness.fleet.ledger.reservations] == [ReservationKind.JOB]
    harness.backend.gone = False
    await harness.over_within(job)  # and once it answers, what still runs is ended
    assert (await harness.attempts(job))[0].ended_at is not None
    assert not harness.fleet.ledger.reservations


async def test_why_an_attempt_waits_in_its_backend_is_shown_until_it_begins(harness: JobsHarness) -> None:
    why, begins = "Slurm job 5: PENDING (Priority)", asyncio.Event()

    async def waits_first(trainer: Trainer) -> None:
        await begins.wait()
        await good(trainer)

    harness.backend.scripts = [waits_first]
    job = await harness.start()
    await harness.until(lambda: bool(harness.backend.runs))
    (run,), live = harness.backend.runs.values(), harness.jobs.live(job)
    assert live is not None
    run.status = RunStatus(RunPhase.QUEUED, detail=why)
    await harness.until(lambda: live.trouble == why)
    run.status = RunStatus(RunPhase.RUNNING)
    await harness.until(lambda: not live.trouble)
    begins.set()
    await harness.in_state(job, JobState.DONE)


async def test_a_full_disk_of_the_backend_is_reported_as_one_and_waited_for(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, refused = harness.backend.submit, []

    async def full(spec: AttemptSpec) -> str:
        if len(refused) < 2:
            refused.append(spec.key)
            raise BackendDiskFull("Docker's disk is full")
        return await submit(spec)

    monkeypatch.setattr(harness.backend, "submit", full)
    job = await harness.start()
    await harness.done(job)
    steps = await harness.store.read(attempts.steps_of, job)
    launches = [step.detail for step in steps if step.name == "launch"]
    assert len(launches) == 3
    assert all("disk is full" in (detail or "") for detail in launches[:2])


async def test_a_launch_whose_answer_never_came_is_ended_when_the_backend_is_back(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = harness.backend.submit

    async def silent(spec: AttemptSpec) -> str:
        harness.backend.gone = False
        await submit(spec)
        harness.backend.gone = True
        raise BackendUnreachable("no answer")

    monkeypatch.setattr(harness.backend, "submit", silent)
    harness.backend.default = waits
    job = await started(harness, 2.0)
    assert (await harness.in_state(job, JobState.FAILED)).end_reason is EndReason.DEADLINE
    assert harness.backend.runs
    harness.backend.gone = False
    await harness.over_within(job)
    assert not harness.backend.runs
    assert len(harness.backend.submitted) == 1


async def a_training_between_two_attempts_has_the_first_ones_model_published(harness: JobsHarness) -> None:
    near = asyncio.Event()

    async def saves_and_hangs_the_fleet(trainer: Trainer) -> None:
        await near.wait()
        trainer.save(0.5)
        harness.inputs.troubles = [60.0]
        trainer.end(RunEnd.NAN)

    harness.backend.default = saves_and_hangs_the_fleet
    job = await started(harness, SECONDS)
    near.set()
    await ends_in_time(harness, job)


async def test_a_hub_that_is_down_until_the_deadline_costs_the_job_unless_a_model_is_there(
    harness: JobsHarness,
) -> None:
    harness.hub.troubles = [StepFailed(EndReason.NETWORK, "503 from the hub")] * 10_000
    await harness.start()
    await harness.until(lambda: len(harness.hub.troubles) < 10_000 - 3)
    row = await harness.failed(await harness.start(seconds=2.0), EndReason.DEADLINE)
    assert "503 from the hub" in row.detail


async def test_an_early_model_stands_when_the_last_upload_does_not_make_it(harness: JobsHarness) -> None:
    async def saves_twice(trainer: Trainer) -> None:
        trainer.save(0.9, 1)
        while not harness.hub.commits:
            await asyncio.sleep(0.005)
        harness.hub.troubles = [StepFailed(EndReason.NETWORK, "gone")] * 10_000
        trainer.save(0.5, 2)
        trainer.end()

    harness.backend.scripts = [saves_twice]
    await harness.start()
    await harness.until(lambda: bool(harness.hub.troubles))
    job = await harness.start(seconds=2.0)
    assert "published early" in (await harness.done(job)).detail
    assert len(harness.hub.commits) == 1


async def test_after_fifty_steps_the_job_says_when_it_will_end(harness: JobsHarness) -> None:
    async def steps(trainer: Trainer) -> None:
        for number in range(1, 70):
            trainer.step(number, 100)
            await asyncio.sleep(0.005)
        await trainer.wait_for_stop()

    harness.backend.scripts = [steps]
    job = await harness.start()
    live = harness.jobs.live(job)
    await harness.until(lambda: live.ends_at is not None)
    assert live.ends_at is not None
    assert time.time() - CAP_S < live.ends_at < time.time() + 3600


async def test_a_training_may_say_anything(harness: JobsHarness) -> None:
    async def raves(trainer: Trainer) -> None:
        for number in range(400):
            trainer.say(NoteEvent(t=time.time(), kind="x", text=f"{number} " * 50))
        for t, number in ((1e300, 1), (-1e300, 10**300), (0.0, 10**300 + 1), (1e-300, 10**300 + 60)):
            trainer.say(StepEvent(t=t, step=number, loss=1e308, ends_at=-1e308, tokens_s=-5))
            await asyncio.sleep(0.02)
        at = time.time()
        for number in range(1, 80):
            trainer.say(StepEvent(t=at + number, step=2 * 10**300 + number))
        trainer.say(EvalEvent(t=at, score=HeldOutScore(value=1e308, step=1), seconds=1e308))
        for number in range(80, 200):
            trainer.say(StepEvent(t=at + number, step=2 * 10**300 + number))
            await asyncio.sleep(0.001)
        (Path(trainer.run.work_dir) / "real").mkdir()
        Path(trainer.run.submission_dir).symlink_to("/etc")
        trainer.say(SubmissionEvent(t=0, step=1))
        await asyncio.sleep(0.05)
        Path(trainer.run.submission_dir).unlink()
        trainer.save(0.5)
        trainer.end()

    harness.backend.scripts = [raves]
    await harness.done(await harness.start())
    assert len(harness.backend.submitted) == 1


async def a_launch_that_outlives_its_deadline_is_waited_for_once_the_deadline_moves(
    harness: JobsHarness,
) -> None:
    """And not made a second time beside the first, which the backend goes on with."""
    submit, let_go, calls = harness.backend.submit, asyncio.Event(), 0

    async def slow(spec: AttemptSpec) -> str:
        nonlocal calls
        calls += 1
        await let_go.wait()
        return await submit(spec)

    harness.backend.submit = slow  # type: ignore[method-assign]
    job = await harness.start(seconds=SECONDS)
    await harness.until(lambda: calls == 1)
    live = harness.jobs._contexts[job]
    first = live.row.deadline_at
    await harness.start(seconds=600.0)
    # Beyond the first deadline, when the step's time was up and it was gone on with.
    await asyncio.sleep(max(first - time.time(), 0.0) + 0.3)
    let_go.set()
    await harness.done(job)
    assert calls == 1
    assert len(harness.backend.submitted) == 1


async def test_at_the_deadline(tmp_path: Path) -> None:
    """Each in a harness of its own, all at once: most of it is waiting."""

    async def tried(case: Callable[[JobsHarness], Awaitable[None]]) -> None:
        async with open_harness(tmp_path / case.__name__, TIMINGS) as harness:
            await case(harness)

    async with asyncio.TaskGroup() as group:
        for case in (
            a_training_that_is_asked_to_end_saves_and_is_published,
            a_training_that_ignores_its_time_is_killed_and_its_best_is_published,
            what_a_backend_that_is_gone_runs_is_published_all_the_same,
            a_training_between_two_attempts_has_the_first_ones_model_published,
            a_launch_that_outlives_its_deadline_is_waited_for_once_the_deadline_moves,
        ):
            group.create_task(tried(case), name=case.__name__)
