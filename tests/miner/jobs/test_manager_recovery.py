"""The daemon dies and comes back: nothing is lost and nothing is done twice."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from core.domain.job_states import EndReason, JobState
from miner.backends.base import AttemptSpec
from miner.jobs.build import UnavailableBackend
from miner.jobs.folder import JobFolder
from miner.jobs.manager import sweep_orphans
from tests.miner.jobs.harness import CAP_S, Gate, JobsHarness, Trainer, deaf, waits


async def known_to_the_backend(harness: JobsHarness) -> int:
    """Start a job; return once the store knows that the backend has its run."""
    job = await harness.start()
    async with asyncio.timeout(CAP_S):
        while not (attempts := await harness.attempts(job)) or attempts[0].ref is None:
            await asyncio.sleep(0.005)
    return job


async def test_what_runs_is_adopted_with_its_gpus(harness: JobsHarness) -> None:
    gate = harness.backend.default = Gate()
    job = await known_to_the_backend(harness)
    await harness.restart()
    assert harness.inputs.kept == {job}
    assert [hold.gpus for hold in harness.fleet.ledger.reservations] == [harness.backend.submitted[0].gpus]
    gate.opened.set()
    await harness.done(job)
    assert len(harness.backend.submitted) == 1


async def test_a_daemon_that_dies_at_each_turn_launches_once_and_publishes_the_best(
    harness: JobsHarness,
) -> None:
    """As the run begins, and between its models."""
    turn, go_on = asyncio.Event(), asyncio.Event()

    async def by_turns(trainer: Trainer) -> None:
        for step, score in ((3, 0.3), (6, 0.2), (10, 0.05)):
            trainer.step(step, 10)
            turn.set()
            await go_on.wait()
            go_on.clear()
            trainer.save(score, step)
        trainer.end()

    harness.backend.default = by_turns
    job = await harness.start()
    for _ in range(3):
        await turn.wait()
        turn.clear()
        await harness.restart()
        go_on.set()
    await harness.done(job)
    assert len(harness.backend.submitted) == 1
    assert harness.model == b"t1 0.05 10"
    assert len(harness.hub.commits) <= 3, "each model once at most"


async def test_what_ended_while_the_daemon_was_away_is_published(harness: JobsHarness) -> None:
    job = await harness.launched()
    await harness.jobs.stop()
    await harness.until(lambda: all(run.task.done() for run in harness.backend.runs.values()))
    await harness.restart()
    await harness.done(job)
    assert len(harness.backend.submitted) == 1


async def test_what_vanished_is_launched_anew(harness: JobsHarness) -> None:
    harness.backend.scripts = [waits]
    job = await known_to_the_backend(harness)
    await harness.jobs.stop()
    for run in harness.backend.runs.values():
        run.task.cancel()
    harness.backend.runs.clear()
    for leftover in harness.folder.glob("jobs/*/attempt_1/exit.json"):
        leftover.unlink()
    await harness.restart()
    await harness.done(job)
    assert await harness.ends(job) == [EndReason.LOST, EndReason.TRAINED]


async def test_an_attempt_in_the_store_that_the_backend_does_not_know_is_launched_from_its_files(
    harness: JobsHarness,
) -> None:
    harness.backend.gone = True
    job = await harness.start()
    await harness.in_state(job, JobState.TRAINING)
    await harness.jobs.stop()
    harness.backend.gone = False
    await harness.restart()
    await harness.done(job)
    assert await harness.ends(job) == [EndReason.TRAINED]
    assert len(harness.backend.submitted) == 1


async def test_a_submit_whose_answer_was_lost_is_not_submitted_twice(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = harness.backend.submit

    async def never_answers(spec: AttemptSpec) -> str:
        await submit(spec)
        await asyncio.sleep(60)
        return ""

    monkeypatch.setattr(harness.backend, "submit", never_answers)
    job = await harness.launched()
    await harness.jobs.stop()
    monkeypatch.setattr(harness.backend, "submit", submit)
    await harness.restart()
    await harness.done(job)
    assert len(harness.backend.submitted) == 1


async def test_runs_of_nobody_are_ended_and_removed_and_others_left_alone(
    harness: JobsHarness, tmp_path: Path
) -> None:
    harness.backend.default = deaf
    await harness.launched()
    mine = harness.backend.submitted[0]
    stranger = AttemptSpec(key="99-1-abcdef01", argv=("python",), run_dir=tmp_path / "stranger")
    stranger.run_dir.mkdir()
    (stranger.run_dir / "run.json").write_bytes((mine.run_dir / "run.json").read_bytes())
    await harness.backend.submit(stranger)
    await harness.restart()
    await harness.until(lambda: stranger.key in harness.backend.removed)
    assert mine.key in harness.backend.runs
    assert (stranger.key, True) in harness.backend.stops


async def test_a_backend_that_is_away_keeps_no_run_of_nobody_alive_on_another(
    harness: JobsHarness, tmp_path: Path
) -> None:
    harness.backend.default = deaf
    stranger = AttemptSpec(key="99-1-abcdef01", argv=("python",), run_dir=tmp_path / "stranger")
    stranger.run_dir.mkdir()
    mine = await harness.launched()
    (stranger.run_dir / "run.json").write_bytes(
        (harness.backend.submitted[0].run_dir / "run.json").read_bytes()
    )
    await harness.backend.submit(stranger)
    away = UnavailableBackend("docker", "it does not answer")
    services = replace(harness.jobs.services, backends={"docker": away, **harness.jobs.services.backends})
    sweep = asyncio.create_task(sweep_orphans(services))
    await harness.until(lambda: stranger.key in harness.backend.removed)
    assert not sweep.done()
    sweep.cancel()
    await harness.jobs.cancel(mine)


async def test_a_running_trial_is_no_run_of_nobody(harness: JobsHarness, tmp_path: Path) -> None:
    harness.backend.default = deaf
    await harness.launched()
    services, mine = harness.jobs.services, harness.backend.submitted[0]
    for key in ("trial-1", "trial-2"):
        spec = AttemptSpec(key=key, argv=("python",), run_dir=tmp_path / key)
        spec.run_dir.mkdir()
        (spec.run_dir / "run.json").write_bytes((mine.run_dir / "run.json").read_bytes())
        await harness.backend.submit(spec)
    services.trials[""].running_key = "trial-2"
    await sweep_orphans(services)
    assert "trial-1" in harness.backend.removed
    assert "trial-2" in harness.backend.runs


async def test_a_backend_that_is_gone_at_the_start_holds_nobody_up(harness: JobsHarness) -> None:
    gate = harness.backend.default = Gate()
    job = await harness.launched()
    harness.backend.gone = True
    await harness.restart()
    gate.opened.set()
    await harness.until(lambda: all(run.task.done() for run in harness.backend.runs.values()))
    harness.backend.gone = False
    await harness.done(job)
    assert len(harness.backend.submitted) == 1


async def test_a_job_that_was_cancelled_while_its_run_could_not_be_ended_is_ended_later(
    harness: JobsHarness,
) -> None:
    harness.backend.default = waits
    job = await known_to_the_backend(harness)
    harness.backend.gone = True
    await harness.jobs.cancel(job)
    await harness.restart()
    assert harness.backend.runs
    harness.backend.gone = False
    assert (await harness.over_within(job)).state is JobState.CANCELLED
    assert not harness.backend.runs


async def test_a_name_that_changed_while_the_daemon_was_away_is_made_good(harness: JobsHarness) -> None:
    job = await harness.start()
    await harness.done(job)
    await harness.jobs.stop()
    await harness.start(name="repo-2")
    await harness.restart()
    async with asyncio.timeout(CAP_S):
        while (await harness.row(job)).misnamed:
            await asyncio.sleep(0.01)
    assert set(harness.hub.repos) == {"me/repo-2"}
    assert len(harness.backend.submitted) == 1


# What finished jobs have left


async def test_files_of_a_finished_job_go_after_a_while_or_when_room_is_needed(harness: JobsHarness) -> None:
    job = await harness.start()
    await harness.done(job)
    folder, cleaner = harness.folder / f"jobs/{job}", harness.services.cleaner
    assert await cleaner.remove_expired() == 0
    assert (folder / "submission").is_dir()
    assert await cleaner.remove_all_finished() > 0
    assert not (folder / "submission").exists()
    assert not (folder / "inputs").exists()
    assert (folder / "attempt_1/plan.json").exists()
    (folder / "inputs").mkdir()
    (folder / "inputs/again").write_text("xxx")
    assert await cleaner.remove_all_finished() == 0
    cleaner.revived(job)
    assert await cleaner.remove_all_finished() == 3, "a job that was started again is tidied again"


async def test_a_job_that_begins_another_life_while_room_is_made_keeps_everything(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [await harness.start(task_id=f"t{number}", name=f"r{number}") for number in range(2)]
    for job in jobs:
        await harness.done(job)
    strip, cleaner = JobFolder.strip, harness.services.cleaner

    def slow(folder: JobFolder) -> int:
        cleaner.revived(jobs[1])
        return strip(folder)

    monkeypatch.setattr(JobFolder, "strip", slow)
    assert await cleaner.remove_all_finished() > 0
    left = [(harness.folder / f"jobs/{job}/submission").exists() for job in jobs]
    assert left == [False, True]


async def test_what_cannot_be_removed_keeps_nobody_from_going_on(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.done(await harness.start())

    def fails(_folder: JobFolder) -> int:
        raise PermissionError(13, "not yours")

    monkeypatch.setattr(JobFolder, "strip", fails)
    assert await harness.services.cleaner.remove_all_finished() == 0


async def test_jobs_that_go_on_keep_everything(harness: JobsHarness) -> None:
    harness.inputs.troubles = [60.0]
    inputs = harness.folder / f"jobs/{await harness.start()}/inputs"
    inputs.mkdir(parents=True)
    (inputs / "half").write_text("x")
    assert await harness.services.cleaner.remove_all_finished() == 0
    assert (inputs / "half").exists()


def age_plans(harness: JobsHarness) -> None:
    """Turn the daemon's plans into those of the version before."""
    for path in harness.folder.glob("jobs/*/orders/*.plan.json"):
        plan = json.loads(path.read_bytes())
        del plan["targets"]
        path.write_text(json.dumps({**plan, "version": 1, "seed": 42}))


async def test_a_model_is_published_though_its_plan_is_of_an_older_version(harness: JobsHarness) -> None:
    harness.hub.troubles = [60.0]
    job = await harness.start()
    await harness.in_state(job, JobState.PUBLISHING)
    await harness.until(lambda: not harness.hub.troubles)
    await harness.jobs.stop()
    age_plans(harness)
    await harness.restart()
    await harness.done(job)
    assert await harness.ends(job) == [EndReason.TRAINED]
    assert len(harness.hub.commits) == 1


async def test_a_run_whose_plan_is_of_an_older_version_is_ended_and_another_follows(
    harness: JobsHarness,
) -> None:
    harness.backend.scripts = [waits]
    job = await known_to_the_backend(harness)
    await harness.jobs.stop()
    age_plans(harness)
    await harness.restart()
    await harness.done(job)
    assert await harness.ends(job) == [EndReason.LOST, EndReason.TRAINED]
    lost = (await harness.attempts(job))[0]
    assert "plan of version 1" in lost.detail
