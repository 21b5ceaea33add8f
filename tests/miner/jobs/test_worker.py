"""A job from its start to its end, with and without trouble on the way."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from core.domain.job_states import EndReason, JobState, ProgressCallback, StepFailed
from core.domain.keys import Placement, TaskKey
from core.domain.wire import MinerSubmission
from core.planning.plan import TrainingPlan
from core.runs.progress import CheckpointEvent, ControlEvent, OomEvent
from core.runs.remedies import NAN_RATE_FACTOR
from core.runs.run_files import RunEnd, RunSpec
from miner.backends.base import EndCause
from miner.publish.publisher import PublishRequest
from miner.store import attempts
from tests.miner.jobs.harness import (
    FAST,
    VALIDATOR,
    EndedBy,
    Gate,
    JobsHarness,
    Script,
    Trainer,
    ending,
    good,
    obeys,
    open_harness,
)


def plan_of(harness: JobsHarness, job: int, attempt: int) -> TrainingPlan:
    return TrainingPlan.from_json((harness.folder / f"jobs/{job}/attempt_{attempt}/plan.json").read_text())


def run_of(harness: JobsHarness, job: int, attempt: int) -> RunSpec:
    return RunSpec.from_json((harness.folder / f"jobs/{job}/attempt_{attempt}/run.json").read_text())


def lessons(harness: JobsHarness) -> list[str]:
    """The validators that something was learned from."""
    rows = harness.store.read_now(lambda db: db.execute("SELECT shape FROM lessons").fetchall())
    return [row[0].partition("/")[0] for row in rows]


async def test_a_started_job_is_trained_and_published_under_the_expected_name(harness: JobsHarness) -> None:
    job = await harness.start()
    row = await harness.done(job)
    assert row.submission.repo == "me/repo-1"
    (attempt,) = await harness.attempts(job)
    assert attempt.end_reason is EndReason.TRAINED
    assert harness.backend.removed == [attempt.key]
    assert harness.inputs.released == [job]
    assert harness.hub.forgotten == [job]
    assert not harness.fleet.ledger.reservations
    await harness.until(lambda: [key.task_id for key in harness.over] == ["t1"])
    steps = harness.store.read_now(attempts.steps_of, job)
    assert [step.name for step in steps] == ["fetch", "plan", "gpus", "write", "launch", "publish"]
    assert all(step.outcome == "ok" and step.ended_at for step in steps)


async def test_the_attempt_folder_shows_what_was_run_and_holds_nothing_secret(harness: JobsHarness) -> None:
    job = await harness.start()
    await harness.done(job)
    folder = harness.folder / f"jobs/{job}"
    assert (folder / "latest").readlink() == Path("attempt_1")
    names = {file.name for file in (folder / "latest").iterdir()}
    assert names >= {"run.json", "plan.json", "config", "command.txt", "environment.txt", "progress.jsonl"}
    assert (folder / "latest/config/config.yml").read_text().startswith("# profile h100x4")
    everything = b"".join(file.read_bytes() for file in (folder / "attempt_1").rglob("*") if file.is_file())
    assert b"X-Amz-Signature" not in everything
    spec = harness.backend.submitted[0]
    assert spec.argv[:3] == ("python", "-m", "trainer.text")
    assert len(spec.gpus) == 4
    assert {mount.read_only for mount in spec.mounts} == {True}


async def test_out_of_memory_goes_down_the_ladder_and_is_remembered_for_the_next_job(
    harness: JobsHarness,
) -> None:
    async def oom(trainer: Trainer) -> None:
        trainer.say(OomEvent(t=0, moment="train", text="tried to allocate 2 GiB"))
        trainer.end(RunEnd.OOM, "CUDA out of memory", "train")

    harness.backend.scripts = [oom, oom]
    job = await harness.start()
    await harness.done(job)
    assert await harness.ends(job) == [EndReason.OOM, EndReason.OOM, EndReason.TRAINED]
    batches = [plan_of(harness, job, number).batch for number in (1, 2, 3)]
    first = batches[0].micro
    assert [batch.micro for batch in batches] == [first, first // 2, first // 4]
    assert len({batch.effective for batch in batches}) == 1
    second = await harness.start(task_id="t2", name="repo-2")
    await harness.done(second)
    assert plan_of(harness, second, 1).batch.micro == first // 4


async def test_memory_that_ran_out_in_passes_that_a_rule_enlarged_is_no_fault_of_the_plan(
    harness: JobsHarness,
) -> None:
    async def oom(trainer: Trainer) -> None:
        trainer.say(ControlEvent(t=0, number=1, applied=True, micro=64))
        trainer.end(RunEnd.OOM, "CUDA out of memory", "train")

    harness.backend.scripts = [oom]
    job = await harness.start()
    await harness.done(job)
    first, second = (plan_of(harness, job, number) for number in (1, 2))
    assert second.batch == first.batch
    assert second.oom_steps == (f"micro_batch_size 64 → {first.batch.micro}",)


async def test_a_run_with_a_strangers_code_teaches_nothing_and_validators_learn_apart(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.backend.scripts = [ending(RunEnd.OOM, moment="train")] * 2
    monkeypatch.setattr("miner.inputs.fetch.JobTask.is_hostile", property(lambda self: True))
    await harness.done(await harness.start())
    assert lessons(harness) == []
    monkeypatch.undo()
    harness.backend.scripts = [ending(RunEnd.OOM, moment="train")]
    await harness.done(await harness.start(task_id="t2", name="repo-2"))
    assert lessons(harness) == [VALIDATOR]


async def test_a_ladder_without_a_rung_left_is_the_end(harness: JobsHarness) -> None:
    harness.backend.default = ending(RunEnd.OOM, moment="train")
    row = await harness.failed(await harness.start(), EndReason.OOM)
    assert "no smaller plan" in row.detail


async def test_a_loss_of_nan_is_tried_once_more_at_a_lower_rate(harness: JobsHarness) -> None:
    harness.backend.default = ending(RunEnd.NAN)
    job = await harness.start()
    await harness.failed(job, EndReason.NAN)
    first, second = (plan_of(harness, job, number).optimizer.learning_rate for number in (1, 2))
    assert second == pytest.approx(first * NAN_RATE_FACTOR)
    assert len(harness.backend.submitted) == 2


async def test_what_another_try_cannot_mend_is_not_tried_again(harness: JobsHarness) -> None:
    harness.backend.default = ending(RunEnd.BAD_DATA, "column 'instruct' is missing")
    row = await harness.failed(await harness.start(), EndReason.BAD_DATA)
    assert row.detail == "column 'instruct' is missing"
    assert len(harness.backend.submitted) == 1
    assert [kind for kind, _ in harness.alerts] == ["job_failed"]


async def test_a_killed_training_goes_on_from_its_last_checkpoint(harness: JobsHarness) -> None:
    saved: list[Path] = []

    async def killed(trainer: Trainer) -> None:
        trainer.step(10)
        saved.append(trainer.checkpoint(10))
        raise EndedBy(EndCause.KILLED, 137)

    harness.backend.scripts = [killed]
    job = await harness.start()
    await harness.done(job)
    assert await harness.ends(job) == [EndReason.KILLED, EndReason.TRAINED]
    assert run_of(harness, job, 2).resume_from == str(saved[0])
    assert saved[0] in [mount.path for mount in harness.backend.submitted[1].mounts]


async def test_a_checkpoint_outside_of_the_attempt_is_not_resumed_from(harness: JobsHarness) -> None:
    async def lies(trainer: Trainer) -> None:
        (Path(trainer.run.work_dir) / "link").symlink_to("/etc")
        trainer.say(CheckpointEvent(t=0, step=1, path=f"{trainer.run.work_dir}/link"))
        raise EndedBy(EndCause.KILLED, 137)

    harness.backend.scripts = [lies]
    job = await harness.start()
    await harness.over_within(job)
    assert run_of(harness, job, 2).resume_from is None


@pytest.mark.parametrize(("poll_s", "stall_min_s"), [(FAST.poll_s, 2.0), (1.2, 2.0)])
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
        harness.backend.scripts = [hangs]
        job = await harness.start()
        await harness.done(job)
        assert await harness.ends(job) == [EndReason.HUNG, EndReason.TRAINED]
        first = (await harness.attempts(job))[0]
        assert "no step for" in first.detail
        assert harness.backend.dumped == [first.key]
        assert run_of(harness, job, 2).resume_from is not None
        assert ("job_hung", f"job {job}: {first.detail}") in harness.alerts


async def test_time_in_which_nobody_looked_is_no_silence(harness: JobsHarness) -> None:
    """A host that was suspended in the middle of a training: neither of the two had any time."""
    gate = Gate()

    async def suspended(trainer: Trainer) -> None:
        for number in range(1, 12):
            trainer.step(number)
            await asyncio.sleep(0.005)
        await gate(trainer)

    harness.backend.scripts = [suspended]
    job = await harness.start()
    await gate.reached.wait()
    await asyncio.sleep(20 * FAST.poll_s)
    object.__setattr__(harness.services, "clock", lambda: time.time() + 10 * FAST.stall_min_s)
    await asyncio.sleep(20 * FAST.poll_s)
    gate.opened.set()
    await harness.over_within(job)
    assert await harness.ends(job) == [EndReason.TRAINED]


async def test_a_lost_gpu_moves_the_job_to_others(harness: JobsHarness) -> None:
    priorities: set[float] = set()

    async def looks_at_claims(trainer: Trainer) -> None:
        priorities.update(claim.priority for claim in harness.fleet.ledger.claims if claim.firm)
        await good(trainer)

    harness.backend.scripts, harness.backend.default = [obeys], looks_at_claims
    now = time.time()
    where = Placement(("0", "1", "2", "3"), now, now + 600)
    assert harness.fleet.reserve(TaskKey(VALIDATOR, "t1"), where, priority=5.0)
    job = await harness.launched()
    lost = harness.backend.submitted[0].gpus[0]
    inventory = harness.fleet.inventory
    gpus = tuple(
        replace(gpu, unusable_reason="fell off the bus") if gpu.id == lost else gpu for gpu in inventory.gpus
    )
    (node,) = inventory.nodes
    less = replace(node, hardware=node.installed.model_copy(update={"gpus": node.installed.gpus.take(3)}))
    harness.fleet.update(replace(inventory, gpus=gpus, nodes=(less,), failed={lost: "fell off the bus"}))
    await harness.done(job)
    assert await harness.ends(job) == [EndReason.GPU_LOST, EndReason.TRAINED]
    assert priorities == {5.0}, "what is reserved for it stands"
    assert lost not in harness.backend.submitted[1].gpus


async def test_a_model_that_is_there_is_published_when_no_time_is_left_for_another_try(
    harness: JobsHarness,
) -> None:
    async def saves_and_crashes(trainer: Trainer) -> None:
        trainer.save(0.5)
        raise EndedBy(EndCause.FAILED, 1)

    harness.backend.default = saves_and_crashes
    job = await harness.start(seconds=20)
    await harness.done(job)
    assert await harness.ends(job) == [EndReason.CRASHED]


async def test_a_later_attempt_never_replaces_a_better_model(harness: JobsHarness) -> None:
    published = harness.folder / "jobs/1/published.json"

    async def saves_and_dies(trainer: Trainer) -> None:
        trainer.save(0.5)
        await harness.until(published.exists)
        raise EndedBy(EndCause.KILLED, 137)

    async def worse(trainer: Trainer) -> None:
        trainer.save(0.9)
        await asyncio.sleep(0.05)
        trainer.end()

    harness.backend.scripts = [saves_and_dies, worse]
    job = await harness.start()
    await harness.done(job)
    assert len(harness.backend.submitted) == 2
    assert harness.model == b"t1 0.5 1"
    assert len(harness.hub.commits) == 1


def two_models(harness: JobsHarness) -> Script:
    """The second, which is better, once the first is published."""

    async def script(trainer: Trainer) -> None:
        trainer.save(0.9, 1)
        await harness.until(lambda: bool(harness.hub.commits))
        trainer.save(0.5, 2)
        trainer.end()

    return script


async def test_a_first_model_is_published_while_the_training_goes_on_and_a_better_one_replaces_it(
    harness: JobsHarness,
) -> None:
    harness.backend.scripts = [two_models(harness)]
    job = await harness.start()
    await harness.done(job)
    assert len(harness.hub.commits) == 2
    assert harness.model == b"t1 0.5 2"


async def test_while_a_model_is_replaced_no_hash_is_announced(harness: JobsHarness) -> None:
    """The deadline comes after the commit and before its reply: validators must not find another hash."""
    announced: list[str | None] = []
    publish = harness.hub.publish

    async def cut_after_the_commit(request: PublishRequest, on_progress: ProgressCallback) -> MinerSubmission:
        assert request.earlier is None or request.earlier.model_hash is None
        submission = await publish(request, on_progress)
        if len(harness.hub.commits) == 2:
            row = await harness.row(request.job_id)
            announced.append(row.submission.model_hash)
            raise StepFailed(EndReason.DEADLINE, "the upload was ended at its deadline")
        return submission

    harness.hub.publish = cut_after_the_commit  # type: ignore[method-assign]
    harness.backend.scripts = [two_models(harness)]
    row = await harness.done(await harness.start())
    assert row.submission == MinerSubmission(repo="me/repo-1", model_hash=None)
    assert set(announced) == {None}


async def test_a_hub_that_fails_early_does_not_disturb_the_training(harness: JobsHarness) -> None:
    harness.hub.troubles = [StepFailed(EndReason.NETWORK, "cut"), StepFailed(EndReason.BAD_SUBMISSION, "bad")]

    async def saves(trainer: Trainer) -> None:
        for number in (1, 2, 3):
            trainer.save(1.0 / number, number)
            await asyncio.sleep(0.1)
        trainer.end()

    harness.backend.scripts = [saves]
    job = await harness.start()
    await harness.done(job)
    assert await harness.ends(job) == [EndReason.TRAINED]


async def test_a_network_that_comes_back_costs_a_pause_and_nothing_else(harness: JobsHarness) -> None:
    cut = StepFailed(EndReason.NETWORK, "connection reset")
    harness.inputs.troubles = [cut, cut]
    harness.hub.troubles = [cut, StepFailed(EndReason.RATE_LIMITED, "429", retry_after=0.02)]
    job = await harness.start()
    await harness.done(job)
    assert len(harness.backend.submitted) == 1


async def test_inputs_that_nobody_can_have_end_the_job_at_once(harness: JobsHarness) -> None:
    harness.inputs.troubles = [StepFailed(EndReason.MODEL_GATED, "tiny/llama is gated")]
    await harness.failed(await harness.start(), EndReason.MODEL_GATED)
    assert harness.backend.submitted == []


async def test_a_model_that_its_check_refuses_is_trained_once_more(tmp_path: Path) -> None:
    async with open_harness(tmp_path / "data", replace(FAST, publish_early=False)) as harness:
        harness.hub.troubles = [StepFailed(EndReason.BAD_SUBMISSION, "weights are NaN")]
        job = await harness.start()
        await harness.done(job)
        assert await harness.ends(job) == [EndReason.BAD_SUBMISSION, EndReason.TRAINED]
        assert (harness.folder / f"jobs/{job}/attempt_1/submission.refused").is_dir()


async def test_a_backend_that_does_not_answer_changes_nothing(harness: JobsHarness) -> None:
    gate = harness.backend.default = Gate()
    job = await harness.start()
    await gate.reached.wait()
    harness.backend.gone = True
    live = harness.jobs.live(job)
    assert live is not None
    await harness.until(lambda: "does not answer" in live.trouble)
    gate.opened.set()
    await asyncio.sleep(0.05)
    assert (await harness.row(job)).state is JobState.TRAINING
    harness.backend.gone = False
    await harness.done(job)
    assert len(harness.backend.submitted) == 1


async def test_our_own_mistake_is_tried_twice_and_then_ends_the_job(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(harness.inputs, "fetch", fails)
    job = await harness.start()
    await harness.failed(job, EndReason.BUG)
    assert "ZeroDivisionError" in caplog.text


async def test_jobs_at_once_have_their_own_gpus_ports_and_folders(harness: JobsHarness) -> None:
    gate = harness.backend.default = Gate()
    jobs = [await harness.start(task_id=f"t{number}", name=f"r{number}") for number in range(4)]
    await gate.reached.wait()
    gate.opened.set()
    for job in jobs:
        await harness.done(job)
    ports = [plan_of(harness, job, 1).launch.port for job in jobs]
    assert all(port is not None for port in ports)
    folders = {spec.run_dir for spec in harness.backend.submitted}
    assert len(folders) == 4
    assert {f"me/r{number}" for number in range(4)} == set(harness.hub.repos)
    assert json.loads((harness.folder / "jobs/1/published.json").read_text())["repo"] == "me/r0"
