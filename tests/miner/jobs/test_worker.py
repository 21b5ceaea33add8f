"""A job from its start to its end, with and without trouble on the way."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from core.domain.job_states import EndReason, JobState, ProgressCallback, StepFailed
from core.domain.keys import Placement, TaskKey
from core.domain.wire import MinerSubmission
from core.planning.plan import TrainingPlan
from core.runs.progress import CheckpointEvent, OomEvent
from core.runs.remedies import NAN_RATE_FACTOR
from core.runs.run_files import RunEnd, RunSpec
from miner.engines.base import EndCause
from miner.publish.publisher import PublishRequest
from miner.store import attempts
from tests.miner.jobs.harness import FAST, VALIDATOR, EndedBy, JobsHarness, Trainer, good, open_harness


def plan_of(harness: JobsHarness, job: int, attempt: int) -> TrainingPlan:
    return TrainingPlan.from_json(
        (harness.services.data_dir / f"jobs/{job}/attempt_{attempt}/plan.json").read_text()
    )


def run_of(harness: JobsHarness, job: int, attempt: int) -> RunSpec:
    return RunSpec.from_json(
        (harness.services.data_dir / f"jobs/{job}/attempt_{attempt}/run.json").read_text()
    )


async def ends(harness: JobsHarness, job: int) -> list[EndReason | None]:
    return [one.end_reason for one in await harness.attempts(job)]


def ending(end: RunEnd, detail: str = "", moment: str | None = None) -> Callable[[Trainer], Awaitable[None]]:
    async def script(trainer: Trainer) -> None:
        trainer.step(1)
        trainer.end(end, detail, moment)

    return script


async def test_a_started_job_is_trained_and_published_under_the_expected_name(harness: JobsHarness) -> None:
    job = await harness.start()
    row = await harness.over_within(job)
    assert (row.state, row.end_reason) == (JobState.DONE, EndReason.PUBLISHED)
    assert row.submission is not None
    assert row.submission.repo == "me/repo-1"
    (attempt,) = await harness.attempts(job)
    assert attempt.end_reason is EndReason.TRAINED
    assert harness.engine.removed == [attempt.key]
    assert harness.inputs.released == [job]
    assert harness.hub.forgotten == [job]
    assert not harness.fleet.ledger.reservations
    await harness.until(lambda: [key.task_id for key in harness.over] == ["t1"])


async def test_every_step_is_in_the_store_with_its_beginning_and_its_end(harness: JobsHarness) -> None:
    job = await harness.start()
    await harness.over_within(job)
    steps = await harness.store.read(attempts.steps_of, job)
    assert [one.name for one in steps] == ["fetch", "plan", "gpus", "write", "launch", "publish"]
    assert all(one.outcome == "ok" and one.ended_at and one.ended_at >= one.began_at for one in steps)


async def test_the_attempt_folder_tells_what_was_run_and_holds_nothing_secret(harness: JobsHarness) -> None:
    job = await harness.start()
    await harness.over_within(job)
    folder = harness.services.data_dir / f"jobs/{job}"
    assert (folder / "latest").readlink() == Path("attempt_1")
    names = {one.name for one in (folder / "latest").iterdir()}
    assert names >= {"run.json", "plan.json", "config", "command.txt", "environment.txt", "progress.jsonl"}
    assert (folder / "latest/config/config.yml").read_text().startswith("# profile h100x4")
    everything = b"".join(one.read_bytes() for one in (folder / "attempt_1").rglob("*") if one.is_file())
    assert b"X-Amz-Signature" not in everything
    spec = harness.engine.submitted[0]
    assert spec.argv[:3] == ("python", "-m", "trainer.text")
    assert len(spec.gpus) == 4
    assert {mount.read_only for mount in spec.mounts} == {True}


async def test_out_of_memory_goes_down_the_ladder_and_is_remembered_for_the_next_job(
    harness: JobsHarness,
) -> None:
    async def oom(trainer: Trainer) -> None:
        trainer.say(OomEvent(t=0, moment="train", text="tried to allocate 2 GiB"))
        trainer.end(RunEnd.OOM, "CUDA out of memory", "train")

    harness.engine.scripts = [oom, oom]
    job = await harness.start()
    assert (await harness.over_within(job)).state is JobState.DONE
    assert await ends(harness, job) == [EndReason.OOM, EndReason.OOM, EndReason.TRAINED]
    micros = [plan_of(harness, job, number).batch for number in (1, 2, 3)]
    assert [one.micro for one in micros] == [micros[0].micro, micros[0].micro // 2, micros[0].micro // 4]
    assert len({one.effective for one in micros}) == 1
    second = await harness.start(task_id="t2", name="repo-2")
    await harness.over_within(second)
    assert plan_of(harness, second, 1).batch.micro == micros[2].micro


async def test_a_run_with_a_strangers_code_teaches_nothing_and_validators_learn_apart(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.engine.scripts = [ending(RunEnd.OOM, moment="train")] * 2
    monkeypatch.setattr("miner.inputs.fetch.JobTask.is_hostile", property(lambda self: True))
    job = await harness.start()
    await harness.over_within(job)
    lessons = await harness.store.read(lambda db: db.execute("SELECT shape FROM lessons").fetchall())
    assert lessons == []
    monkeypatch.undo()
    harness.engine.scripts = [ending(RunEnd.OOM, moment="train")]
    await harness.over_within(await harness.start(task_id="t2", name="repo-2"))
    lessons = await harness.store.read(lambda db: db.execute("SELECT shape FROM lessons").fetchall())
    assert [row[0].partition("/")[0] for row in lessons] == [VALIDATOR]


async def test_a_ladder_without_a_rung_left_is_the_end(harness: JobsHarness) -> None:
    harness.engine.default = ending(RunEnd.OOM, moment="train")
    job = await harness.start()
    row = await harness.over_within(job)
    assert (row.state, row.end_reason) == (JobState.FAILED, EndReason.OOM)
    assert "no smaller plan" in row.detail


async def test_a_loss_of_nan_is_tried_once_more_at_a_lower_rate(harness: JobsHarness) -> None:
    harness.engine.default = ending(RunEnd.NAN)
    job = await harness.start()
    row = await harness.over_within(job)
    assert (row.state, row.end_reason) == (JobState.FAILED, EndReason.NAN)
    first, second = (plan_of(harness, job, number).optimizer.learning_rate for number in (1, 2))
    assert second == pytest.approx(first * NAN_RATE_FACTOR)
    assert len(harness.engine.submitted) == 2


@pytest.mark.parametrize("end", [RunEnd.BAD_DATA, RunEnd.BAD_MODEL, RunEnd.BAD_REWARD, RunEnd.INFEASIBLE])
async def test_what_another_try_cannot_mend_is_not_tried_again(harness: JobsHarness, end: RunEnd) -> None:
    harness.engine.default = ending(end, "column 'instruct' is missing")
    job = await harness.start()
    row = await harness.over_within(job)
    assert (row.state, row.end_reason) == (JobState.FAILED, EndReason(end.value))
    assert row.detail == "column 'instruct' is missing"
    assert len(harness.engine.submitted) == 1
    assert [kind for kind, _ in harness.alerts] == ["job_failed"]


async def test_a_crash_nobody_foresaw_gets_one_more_try(harness: JobsHarness) -> None:
    async def crash(trainer: Trainer) -> None:
        raise EndedBy(EndCause.FAILED, 1)

    harness.engine.default = crash
    job = await harness.start()
    row = await harness.over_within(job)
    assert (row.state, row.end_reason) == (JobState.FAILED, EndReason.CRASHED)
    assert await ends(harness, job) == [EndReason.CRASHED, EndReason.CRASHED]


async def test_a_killed_training_goes_on_from_its_last_checkpoint(harness: JobsHarness) -> None:
    saved: list[Path] = []

    async def killed(trainer: Trainer) -> None:
        trainer.step(10)
        saved.append(trainer.checkpoint(10))
        raise EndedBy(EndCause.KILLED, 137)

    harness.engine.scripts = [killed]
    job = await harness.start()
    assert (await harness.over_within(job)).state is JobState.DONE
    assert await ends(harness, job) == [EndReason.KILLED, EndReason.TRAINED]
    assert run_of(harness, job, 2).resume_from == str(saved[0])
    assert saved[0] in [mount.path for mount in harness.engine.submitted[1].mounts]


async def test_a_checkpoint_outside_of_the_attempt_is_not_resumed_from(harness: JobsHarness) -> None:
    async def lies(trainer: Trainer) -> None:
        (Path(trainer.run.work_dir) / "link").symlink_to("/etc")
        trainer.say(CheckpointEvent(t=0, step=1, path=f"{trainer.run.work_dir}/link"))
        raise EndedBy(EndCause.KILLED, 137)

    harness.engine.scripts = [lies]
    job = await harness.start()
    await harness.over_within(job)
    assert run_of(harness, job, 2).resume_from is None


@pytest.mark.parametrize(("poll_s", "stall_min_s"), [(FAST.poll_s, 2.0), (0.3, 0.5)])
async def test_a_training_that_stands_still_is_looked_into_ended_and_resumed_once(
    tmp_path: Path, poll_s: float, stall_min_s: float
) -> None:
    timings = replace(FAST, poll_s=poll_s, stall_min_s=stall_min_s)

    async def hangs(trainer: Trainer) -> None:
        for number in range(1, 12):
            trainer.step(number)
            await asyncio.sleep(0.005)
        trainer.checkpoint(11)
        await asyncio.sleep(60)

    async with open_harness(tmp_path / "data", timings) as harness:
        harness.engine.scripts = [hangs]
        job = await harness.start()
        assert (await harness.over_within(job)).state is JobState.DONE
        assert await ends(harness, job) == [EndReason.HUNG, EndReason.TRAINED]
        first = (await harness.attempts(job))[0]
        assert "no step for" in first.detail
        assert harness.engine.dumped == [first.key]
        assert run_of(harness, job, 2).resume_from is not None
        assert ("job_hung", f"job {job}: {first.detail}") in harness.alerts


async def test_time_in_which_nobody_looked_is_no_silence(harness: JobsHarness) -> None:
    """A host that was suspended in the middle of a training: neither of the two had any time."""
    trained, go_on = asyncio.Event(), asyncio.Event()

    async def suspended(trainer: Trainer) -> None:
        for number in range(1, 12):
            trainer.step(number)
            await asyncio.sleep(0.005)
        trained.set()
        await go_on.wait()
        trainer.save(0.5, 12)
        trainer.end()

    harness.engine.scripts = [suspended]
    job = await harness.start()
    await trained.wait()
    await asyncio.sleep(20 * FAST.poll_s)
    object.__setattr__(harness.services, "clock", lambda: time.time() + 10 * FAST.stall_min_s)
    await asyncio.sleep(20 * FAST.poll_s)
    go_on.set()
    await harness.over_within(job)
    assert await ends(harness, job) == [EndReason.TRAINED]


async def test_a_lost_gpu_moves_the_job_to_others(harness: JobsHarness) -> None:
    began = asyncio.Event()

    async def long(trainer: Trainer) -> None:
        trainer.step(1)
        began.set()
        await trainer.wait_for_stop()
        trainer.end(RunEnd.STOPPED)

    harness.engine.scripts = [long]
    now = time.time()
    where = Placement(("0", "1", "2", "3"), now, now + 600)
    assert harness.fleet.reserve(TaskKey(VALIDATOR, "t1"), where, until=where.ends_at, priority=5.0)
    job = await harness.start()
    await began.wait()
    held = harness.engine.submitted[0].gpus
    stock = harness.fleet.inventory
    cards = tuple(
        replace(one, unusable_reason="fell off the bus") if one.id == held[0] else one for one in stock.gpus
    )
    assert stock.hardware is not None
    less = stock.hardware.model_copy(update={"gpus": stock.hardware.gpus.take(3)})
    harness.fleet.update(replace(stock, gpus=cards, hardware=less, failed={held[0]: "fell off the bus"}))
    priorities = set()

    async def watches(trainer: Trainer) -> None:
        priorities.update(claim.priority for claim in harness.fleet.ledger.claims if claim.firm)
        await good(trainer)

    harness.engine.default = watches
    assert (await harness.over_within(job)).state is JobState.DONE
    assert await ends(harness, job) == [EndReason.GPU_LOST, EndReason.TRAINED]
    assert priorities == {5.0}, "what was promised to it stands"
    assert held[0] not in harness.engine.submitted[1].gpus


async def test_a_model_that_is_there_is_published_when_no_time_is_left_for_another_try(
    harness: JobsHarness,
) -> None:
    async def saves_and_crashes(trainer: Trainer) -> None:
        trainer.save(0.5)
        raise EndedBy(EndCause.FAILED, 1)

    harness.engine.default = saves_and_crashes
    job = await harness.start(seconds=20)
    row = await harness.over_within(job)
    assert (row.state, row.end_reason) == (JobState.DONE, EndReason.PUBLISHED)
    assert await ends(harness, job) == [EndReason.CRASHED]


async def test_a_later_attempt_never_replaces_a_better_model(harness: JobsHarness) -> None:
    published = harness.services.data_dir / "jobs/1/published.json"

    async def saves_and_dies(trainer: Trainer) -> None:
        trainer.save(0.5)
        await harness.until(published.exists)
        raise EndedBy(EndCause.KILLED, 137)

    async def worse(trainer: Trainer) -> None:
        trainer.save(0.9)
        await asyncio.sleep(0.05)
        trainer.end()

    harness.engine.scripts = [saves_and_dies, worse]
    job = await harness.start()
    assert (await harness.over_within(job)).state is JobState.DONE
    assert len(harness.engine.submitted) == 2
    assert harness.hub.repos["me/repo-1"]["adapter_model.safetensors"] == b"t1 0.5 1"
    assert len(harness.hub.commits) == 1


async def test_a_first_model_is_published_while_the_training_goes_on_and_a_better_one_replaces_it(
    harness: JobsHarness,
) -> None:
    async def two(trainer: Trainer) -> None:
        trainer.step(1)
        trainer.save(0.9, 1)
        while not harness.hub.commits:
            await asyncio.sleep(0.005)
        trainer.save(0.5, 2)
        trainer.end()

    harness.engine.scripts = [two]
    job = await harness.start()
    row = await harness.over_within(job)
    assert row.state is JobState.DONE
    assert len(harness.hub.commits) == 2
    assert harness.hub.repos["me/repo-1"]["adapter_model.safetensors"] == b"t1 0.5 2"


async def test_while_a_model_is_replaced_no_hash_is_promised(harness: JobsHarness) -> None:
    """The deadline comes after the commit and before its reply: validators must not find another hash."""
    promised: list[str | None] = []
    publish = harness.hub.publish

    async def cut_after_the_commit(request: PublishRequest, on_progress: ProgressCallback) -> MinerSubmission:
        assert request.earlier is None or request.earlier.model_hash is None
        made = await publish(request, on_progress)
        if len(harness.hub.commits) == 2:
            row = await harness.row(request.job_id)
            assert row.submission is not None
            promised.append(row.submission.model_hash)
            raise StepFailed(EndReason.DEADLINE, "the upload was ended at its deadline")
        return made

    async def two(trainer: Trainer) -> None:
        trainer.save(0.9, 1)
        while not harness.hub.commits:
            await asyncio.sleep(0.005)
        trainer.save(0.5, 2)
        trainer.end()

    harness.hub.publish = cut_after_the_commit  # type: ignore[method-assign]
    harness.engine.scripts = [two]
    row = await harness.over_within(await harness.start())
    assert row.state is JobState.DONE
    assert row.submission == MinerSubmission(repo="me/repo-1", model_hash=None)
    assert set(promised) == {None}


async def test_a_hub_that_fails_early_does_not_disturb_the_training(harness: JobsHarness) -> None:
    harness.hub.troubles = [StepFailed(EndReason.NETWORK, "cut"), StepFailed(EndReason.BAD_SUBMISSION, "bad")]

    async def saves(trainer: Trainer) -> None:
        for number in (1, 2, 3):
            trainer.save(1.0 / number, number)
            await asyncio.sleep(0.1)
        trainer.end()

    harness.engine.scripts = [saves]
    job = await harness.start()
    assert (await harness.over_within(job)).state is JobState.DONE
    assert await ends(harness, job) == [EndReason.TRAINED]


async def test_a_network_that_comes_back_costs_a_pause_and_nothing_else(harness: JobsHarness) -> None:
    cut = StepFailed(EndReason.NETWORK, "connection reset")
    harness.inputs.troubles = [cut, cut]
    harness.hub.troubles = [cut, StepFailed(EndReason.RATE_LIMITED, "429", retry_after=0.02)]
    job = await harness.start()
    assert (await harness.over_within(job)).state is JobState.DONE
    assert len(harness.engine.submitted) == 1


async def test_inputs_that_nobody_can_have_end_the_job_at_once(harness: JobsHarness) -> None:
    harness.inputs.troubles = [StepFailed(EndReason.MODEL_GATED, "tiny/llama is gated")]
    job = await harness.start()
    row = await harness.over_within(job)
    assert (row.state, row.end_reason) == (JobState.FAILED, EndReason.MODEL_GATED)
    assert harness.engine.submitted == []


async def test_a_model_that_its_check_refuses_is_trained_once_more(tmp_path: Path) -> None:
    async with open_harness(tmp_path / "data", replace(FAST, publish_early=False)) as harness:
        await refused_once(harness)


async def refused_once(harness: JobsHarness) -> None:
    harness.hub.troubles = [StepFailed(EndReason.BAD_SUBMISSION, "weights are NaN")]

    async def saves_last(trainer: Trainer) -> None:
        trainer.save(0.5)
        trainer.end()
        await asyncio.sleep(0)

    harness.engine.default = saves_last
    job = await harness.start()
    row = await harness.over_within(job)
    assert row.state is JobState.DONE
    assert await ends(harness, job) == [EndReason.BAD_SUBMISSION, EndReason.TRAINED]
    assert (harness.services.data_dir / f"jobs/{job}/attempt_1/submission.refused").is_dir()


async def test_an_engine_that_does_not_answer_changes_nothing(harness: JobsHarness) -> None:
    began = asyncio.Event()
    go_on = asyncio.Event()

    async def waits(trainer: Trainer) -> None:
        began.set()
        await go_on.wait()
        trainer.save(0.5)
        trainer.end()

    harness.engine.scripts = [waits]
    job = await harness.start()
    await began.wait()
    harness.engine.gone = True
    live = harness.jobs.live(job)
    assert live is not None
    await harness.until(lambda: "does not answer" in live.trouble)
    go_on.set()
    await asyncio.sleep(0.05)
    assert (await harness.row(job)).state is JobState.TRAINING
    harness.engine.gone = False
    assert (await harness.over_within(job)).state is JobState.DONE
    assert len(harness.engine.submitted) == 1


async def test_an_engine_that_is_gone_at_the_start_is_waited_for(harness: JobsHarness) -> None:
    harness.engine.gone = True
    job = await harness.start()
    await asyncio.sleep(0.1)
    harness.engine.gone = False
    assert (await harness.over_within(job)).state is JobState.DONE
    assert len(harness.engine.submitted) == 1


async def test_our_own_mistake_is_tried_twice_and_then_ends_the_job(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(harness.inputs, "fetch", fails)
    job = await harness.start()
    row = await harness.over_within(job)
    assert (row.state, row.end_reason) == (JobState.FAILED, EndReason.BUG)
    assert "ZeroDivisionError" in caplog.text


async def test_jobs_at_once_have_their_own_gpus_ports_and_folders(harness: JobsHarness) -> None:
    release = asyncio.Event()

    async def waits(trainer: Trainer) -> None:
        await release.wait()
        trainer.save(0.5)
        trainer.end()

    harness.engine.default = waits
    jobs = [await harness.start(task_id=f"t{number}", name=f"r{number}") for number in range(4)]
    await harness.until(lambda: bool(harness.engine.submitted))
    release.set()
    for job in jobs:
        assert (await harness.over_within(job)).state is JobState.DONE
    ports = [plan_of(harness, job, 1).launch.port for job in jobs]
    assert all(port is not None for port in ports)
    folders = {spec.run_dir for spec in harness.engine.submitted}
    assert len(folders) == 4
    assert {f"me/r{number}" for number in range(4)} == set(harness.hub.repos)
    assert json.loads((harness.services.data_dir / "jobs/1/published.json").read_text())["repo"] == "me/r0"
