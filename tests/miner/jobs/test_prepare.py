"""The final plan: as long as there is time, and no longer than the GPUs are its own."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from core.domain.job_states import EndReason, JobState, ProgressCallback, StepFailed
from core.domain.keys import Placement, TaskKey
from core.domain.units import rfc3339
from core.runs.progress import StepEvent
from core.runs.run_files import RunEnd
from miner.inputs.fetch import FetchedInputs, JobTask
from miner.jobs import prepare
from miner.jobs.context import JobContext
from miner.jobs.folder import AttemptFolder
from miner.jobs.history import read_plan
from miner.jobs.timeline import JobTimings
from miner.store.actions import ActionOutcome, NewAction, add_action
from tests.doubles.each import each
from tests.miner.jobs.harness import (
    CAP_S,
    ROWS,
    VALIDATOR,
    JobsHarness,
    Trainer,
    ending,
    open_harness,
    waits,
)

HOUR = 3600.0
JOB, OTHER = TaskKey(VALIDATOR, "t1"), TaskKey(VALIDATOR, "t2")


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[JobsHarness]:
    async with open_harness(
        tmp_path / "data", JobTimings(poll_s=0.01), "1xH100", "h100x4-strategy"
    ) as harness:
        yield harness


def reserve(harness: JobsHarness, key: TaskKey, start: float, end: float) -> None:
    """As for an accepted offer, in hours from now."""
    now = time.time()
    where = Placement(("0",), now + start * HOUR, now + end * HOUR)
    assert harness.fleet.reserve(key, where)


async def launched(harness: JobsHarness, monkeypatch: pytest.MonkeyPatch, hours: float, rows: int) -> float:
    """Hours from now in which the training of so much data had to be over."""
    fetch = harness.inputs.fetch

    async def fetched(task: JobTask, on_progress: ProgressCallback) -> FetchedInputs:
        return replace(await fetch(task, on_progress), data=ROWS.model_copy(update={"rows": rows}))

    monkeypatch.setattr(harness.inputs, "fetch", fetched)
    harness.backend.default = waits
    if JOB in {hold.key for hold in harness.fleet.ledger.reservations}:
        harness.fleet.start(JOB, until=time.time() + hours * HOUR)
    await harness.start(seconds=hours * HOUR)
    await harness.until(lambda: bool(harness.backend.runs))
    (run,) = harness.backend.runs.values()
    return (run.trainer.run.end_by - time.time()) / HOUR


def window(harness: JobsHarness, key: TaskKey) -> tuple[float, float]:
    (hold,) = [hold for hold in harness.fleet.ledger.reservations if hold.key == key]
    return (hold.starts_at - time.time()) / HOUR, (hold.ends_at - time.time()) / HOUR


async def test_a_dataset_larger_than_thought_is_trained_on_longer_while_nobody_waits(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve(harness, JOB, 0, 1)
    assert await launched(harness, monkeypatch, 4, 20_000_000) > 3.5
    assert window(harness, JOB)[1] > 3.5


async def test_a_dataset_larger_than_thought_does_not_take_the_time_that_is_reserved_for_others(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve(harness, JOB, 0, 1)
    reserve(harness, OTHER, 1.2, 3)
    assert await launched(harness, monkeypatch, 4, 20_000_000) == pytest.approx(1.2, abs=0.02)
    assert window(harness, JOB)[1] == pytest.approx(1.2, abs=0.02)
    assert window(harness, OTHER)[0] == pytest.approx(1.2, abs=0.02)


async def test_a_job_that_could_not_train_at_all_before_others_takes_its_time(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve(harness, JOB, 0, 0.02)
    reserve(harness, OTHER, 0.02, 1)
    assert await launched(harness, monkeypatch, 4, 20_000_000) > 3.5


async def test_after_memory_ran_out_a_job_that_others_wait_for_keeps_its_time(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ladder's next step is planned for the deadline, as the steps before it were."""
    reserve(harness, JOB, 0, 0.02)
    reserve(harness, OTHER, 0.02, 1)
    harness.backend.scripts = [ending(RunEnd.OOM, moment="train")]
    await launched(harness, monkeypatch, 4, 20_000_000)
    await harness.until(lambda: len(harness.backend.submitted) == 2)
    plan = read_plan(AttemptFolder(harness.backend.submitted[1].run_dir))
    assert plan.oom_steps
    (row,) = [row for row in await harness.attempts(1) if row.number == 2]
    assert row.end_by is not None
    assert (row.end_by - time.time()) / HOUR > 3.5


async def test_a_training_that_proves_slower_keeps_its_gpus_for_longer(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve(harness, JOB, 0, 1)
    await launched(harness, monkeypatch, 4, 10_000)
    end = window(harness, JOB)[1]
    (run,) = harness.backend.runs.values()
    begun = time.time()
    for number in range(60):
        step = StepEvent(t=begun + 60 * number, step=number + 1, total=600, loss=1.0, tokens_s=100.0)
        run.trainer.say(step)
    async with asyncio.timeout(CAP_S):
        while window(harness, JOB)[1] <= end:
            await asyncio.sleep(0.01)
    assert (await harness.row(1)).state is JobState.TRAINING


@pytest.mark.parametrize("reserved", [True, False])
@pytest.mark.parametrize("silent", [True, False])
async def test_a_job_whose_inputs_do_not_come_keeps_no_gpu_from_one_that_has_its_own(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch, silent: bool, reserved: bool
) -> None:
    fetch, come = harness.inputs.fetch, asyncio.Event()

    async def fetched(task: JobTask, on_progress: ProgressCallback) -> FetchedInputs:
        if task.folder.parent.name == str(first) and not come.is_set():
            if not silent:
                raise StepFailed(EndReason.NETWORK, "no such host")
            await come.wait()
        return await fetch(task, on_progress)

    monkeypatch.setattr(harness.inputs, "fetch", fetched)
    monkeypatch.setattr(prepare, "_NO_BYTES_S", 0.01)
    if reserved:
        reserve(harness, JOB, 0, 1)
    for key in (JOB, OTHER):
        harness.fleet.start(key, until=time.time() + HOUR)
    first = 1
    assert await harness.start(task_id="t1") == first
    second = await harness.start(task_id="t2")
    await harness.done(second)
    come.set()
    await harness.done(first)


@each("total", [10**12, None])
async def test_a_job_whose_dataset_trickles_gives_up_its_place(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch, total: int | None
) -> None:
    async def trickling(_task: JobTask, on_progress: ProgressCallback) -> FetchedInputs:
        for done in itertools.count():
            on_progress("dataset", done, total)
            await asyncio.sleep(0.01)
        raise AssertionError

    monkeypatch.setattr(harness.inputs, "fetch", trickling)
    monkeypatch.setattr(prepare, "_WINDOW_S", 0.05)
    row = await harness.failed(await harness.start(task_id=f"of-{total}"), EndReason.DEADLINE)
    assert ("the dataset is too slow: " if total else "the dataset trickles: ") in row.detail


def test_inputs_are_judged_by_a_window_and_by_all_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a slow window after fast ones nor a silence, which has a limit of its own, decides."""
    with monkeypatch.context() as patched:
        patched.setattr(prepare, "_STALLED_S", math.inf)
        arrival = prepare._InputArrival(0.0, 500)
        assert arrival.remaining_s(299.0, 600, 1000) is None
        assert arrival.remaining_s(310.0, 810, 1010) == pytest.approx(200.0)
        assert arrival.remaining_s(500.0, 820, 1010) is None
        assert arrival.remaining_s(620.0, 820, 1440) == pytest.approx(620 / (320 / 620))
        assert prepare._InputArrival(0.0, 0).remaining_s(300.0, 2_999_999, None) == math.inf
        assert prepare._InputArrival(0.0, 0).remaining_s(300.0, 3_000_000, None) == 0.0
    assert prepare._InputArrival(0.0, 500).remaining_s(300.0, 500, 1000) is None


@each("total", [10**9, None])
def test_a_download_that_stalled_and_goes_on_is_not_given_up_and_one_that_trickles_is(
    total: int | None,
) -> None:
    def hopeless(*services: tuple[int, int]) -> int | None:
        """After how many seconds, of services of (seconds, bytes per second)."""
        arrival, now, done = prepare._InputArrival(0.0, 0), 0, 0
        for seconds, rate in services:
            for _ in range(seconds):
                now, done = now + 1, done + rate
                if arrival.hopeless_s(float(now), done, total, 3600.0) is not None:
                    return now
        return None

    assert hopeless((300, 0), (900, 900_000)) is None
    assert hopeless((30, 20_000), (400, 0), (10, 1_000), (900, 900_000)) is None
    assert hopeless((310, 100), (900, 900_000)) is None
    assert hopeless((900, 100)) == 600
    assert hopeless((400, 0), (900, 100)) == 400 + 1 + 600


async def test_a_job_that_waits_for_a_gpu_names_the_job_that_has_it(harness: JobsHarness) -> None:
    harness.backend.scripts.append(waits)
    first = await harness.launched(task_id="t1")
    second = await harness.start(task_id="t2")

    def trouble() -> str:
        live = harness.jobs.live(second)
        return live.trouble if live else ""

    await harness.until(lambda: trouble().startswith(f"waits for job {first} (task t1, GPU 0, until 20"))
    await harness.jobs.cancel(first)
    await harness.done(second)
    assert not trouble()


async def test_a_job_whose_time_is_over_while_it_waits_says_which_offer_had_the_gpu_and_until_when(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve(harness, OTHER, 0, 9)
    (held,) = harness.fleet.ledger.reservations
    usually, ends = JobContext.useful_until, list[float]()

    def soon(job: JobContext) -> float:
        if job.live.stage != "gpus":
            return usually(job)
        ends.append(time.time() + 0.2)
        return ends[0]

    monkeypatch.setattr(JobContext, "useful_until", soon)
    row = await harness.failed(await harness.start(), EndReason.DEADLINE)
    holder = f"an accepted offer (task t2, GPU 0, until {rfc3339(held.ends_at)})"
    assert row.detail == f"gpus was not over in time; waits for {holder}"


async def test_the_next_attempt_has_the_smaller_passes_that_a_rule_wanted_of_the_last_one(
    harness: JobsHarness,
) -> None:
    harness.backend.default = waits
    job = await harness.start()
    await harness.until(lambda: bool(harness.backend.runs))
    first = read_plan(AttemptFolder((await harness.attempts(job))[0].folder))
    assert first.batch.micro > 1
    await harness.store.write(
        add_action,
        NewAction(
            "gpu-memory",
            job,
            1,
            "batch",
            {"micro": first.batch.micro},
            {"micro": 1},
            ActionOutcome.NEXT_ATTEMPT,
        ),
        time.time(),
    )
    await harness.jobs.cancel(job)
    await harness.jobs.retry(job)
    while len(await harness.attempts(job)) < 2:
        await asyncio.sleep(0.01)
    second = read_plan(AttemptFolder((await harness.attempts(job))[1].folder))
    assert second.batch.micro == 1


@pytest.fixture
async def one_gpu_each(tmp_path: Path) -> AsyncIterator[JobsHarness]:
    """Four GPUs on two sockets, and jobs of one GPU."""
    profile = tmp_path / "one.yaml"
    profile.write_text("extends: h100x4\nlimits: {max_gpus: 1}\n")
    async with open_harness(tmp_path / "data", JobTimings(poll_s=0.01), "4xH100", str(profile)) as harness:
        (node,) = harness.fleet.inventory.nodes
        host = node.installed.model_copy(
            update={
                "cores": tuple((number, number + 8) for number in range(8)),
                "near_cores": ("4-7,12-15", "4-7,12-15", "0-3,8-11", "0-3,8-11"),
            }
        )
        node = replace(node, installed=host, hardware=host)
        harness.fleet.update(replace(harness.fleet.inventory, nodes=(node,)))
        yield harness


NEAR = {"0": "4-5,12-13", "1": "6-7,14-15", "2": "0-1,8-9", "3": "2-3,10-11"}


async def test_jobs_that_run_together_have_the_cores_of_their_gpus(one_gpu_each: JobsHarness) -> None:
    harness = one_gpu_each
    harness.backend.default = waits
    for number in range(4):
        await harness.start(task_id=f"t{number}", name=f"repo-{number}")
    await harness.until(lambda: len(harness.backend.submitted) == 4)
    cores = {gpu: spec.cpus for spec in harness.backend.submitted for gpu in spec.gpus}
    assert cores == NEAR
    assert {spec.env["OMP_NUM_THREADS"] for spec in harness.backend.submitted} == {"4"}


async def test_after_memory_ran_out_a_job_has_the_cores_of_its_new_gpu(
    one_gpu_each: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = one_gpu_each
    gpus = harness.fleet.inventory.gpus

    async def oom_on_a_gpu_that_fails(trainer: Trainer) -> None:
        (used,) = harness.backend.submitted[0].gpus
        left = tuple(
            replace(gpu, unusable_reason="it fell off the bus") if gpu.id == used else gpu for gpu in gpus
        )
        monkeypatch.setattr(harness.fleet, "_listeners", [])  # the run ends before the failure is noticed
        harness.fleet.update(replace(harness.fleet.inventory, gpus=left, failed={used: "it fell off"}))
        for context in harness.jobs._contexts.values():
            context.grant = None
        trainer.end(RunEnd.OOM, "CUDA out of memory", "train")

    harness.backend.scripts = [oom_on_a_gpu_that_fails]
    job = await harness.start()
    await harness.done(job)
    first, second = harness.backend.submitted
    assert first.gpus != second.gpus
    assert [spec.cpus for spec in (first, second)] == [NEAR[spec.gpus[0]] for spec in (first, second)]
    plan = read_plan(AttemptFolder(second.run_dir))
    assert plan.oom_steps
    assert [one.got for one in plan.concessions if one.field == "container.cpus"] == [second.cpus]
