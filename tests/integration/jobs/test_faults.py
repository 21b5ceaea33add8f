"""The table of faults: what breaks in a training, and what must hold, on each backend."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.domain.job_states import EndReason, JobState
from core.planning.plan import TrainingPlan
from core.system import wrapper
from miner.backends.base import AttemptSpec, Backend, RunPhase
from tests.integration.jobs.field import Field

GOOD = {"steps": 6, "save": [3]}


def plan_of(field: Field, job: int, attempt: int) -> TrainingPlan:
    return TrainingPlan.from_json(field.attempt_file(job, attempt, "plan.json").read_text())


async def test_a_training_that_goes_well_is_published_and_leaves_nothing_behind(field: Field) -> None:
    job = await field.start("t1", {"*": GOOD})
    await field.published(job)
    assert await field.ends(job) == [EndReason.TRAINED]
    assert field.launches(job) == 1


@pytest.mark.kept("process-oom", "process-nan")
@pytest.mark.parametrize("fault", ["oom", "nan"])
async def test_what_a_changed_plan_may_mend_is_tried_again(field: Field, fault: str) -> None:
    job = await field.start("t1", {"1": {"at": {"2": fault}}, "*": GOOD})
    await field.published(job)
    assert await field.ends(job) == [EndReason(fault), EndReason.TRAINED]
    first, second = (plan_of(field, job, number) for number in (1, 2))
    assert second.batch.effective == first.batch.effective
    if fault == "oom":
        assert second.batch.micro < first.batch.micro
    else:
        assert second.optimizer.learning_rate < first.optimizer.learning_rate


@pytest.mark.kept("process-crash", "process-bad data")
@pytest.mark.parametrize(
    ("fault", "ends", "reported"),
    [
        ("crash", [EndReason.CRASHED] * 2, "RuntimeError: a bug of the trainer"),
        ("bad_data", [EndReason.BAD_DATA], "no row has an answer"),
    ],
    ids=["crash", "bad data"],
)
async def test_a_crash_is_tried_again_once_and_bad_data_is_not(
    field: Field, fault: str, ends: list[EndReason], reported: str
) -> None:
    job = await field.start("t1", {"*": {"at": {"2": fault}}})
    row = await field.over(job)
    assert (row.state, row.end_reason) == (JobState.FAILED, ends[-1])
    assert await field.ends(job) == ends
    assert reported in row.detail + (field.data_dir / f"jobs/{job}/latest/log").read_text()
    assert await field.orphans() == []


async def test_a_trainer_that_is_killed_goes_on_from_its_checkpoint(field: Field) -> None:
    job = await field.start("t1", {"1": {"checkpoint": [3], "at": {"4": "die"}}, "*": GOOD})
    await field.published(job)
    assert await field.ends(job) == [EndReason.KILLED, EndReason.TRAINED]
    assert field.run(job, 2)["resume_from"].endswith("/attempt_1/work/checkpoint-3")


KILLED_AT_ONCE = """
import os, signal, sys
real, begun = {real!r}, {begun!r}
if not os.path.exists(begun):
    open(begun, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
os.execv(sys.executable, [sys.executable, "-I", "-S", real, *sys.argv[1:]])
"""


@pytest.mark.parametrize("kind", ["process"])
async def test_a_run_killed_before_its_start_record_is_lost_and_tried_again(
    field: Field, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill for lack of memory, for example."""
    script = tmp_path / "wrapper.py"
    script.write_text(KILLED_AT_ONCE.format(real=wrapper.__file__, begun=str(tmp_path / "begun")))
    monkeypatch.setattr(wrapper, "__file__", str(script))
    job = await field.start("t1", {"*": GOOD})
    await field.published(job)
    assert await field.ends(job) == [EndReason.LOST, EndReason.TRAINED]


@pytest.mark.parametrize("step", [1, 5], ids=["before a checkpoint", "after one"])
async def test_killed_at_a_step_it_goes_on_from_its_checkpoint(field: Field, step: int) -> None:
    """By somebody from outside."""
    first = {"steps": 600, "save": [3], "checkpoint": [3], "wait_at": step}
    job = await field.start("t1", {"1": first, "*": GOOD})
    await field.training(job, step)
    await kill(field, job)
    await field.published(job)
    # With a whole process group nobody is left to write the end down.
    how = EndReason.KILLED if field.backend.name == "docker" else EndReason.LOST
    assert await field.ends(job) == [how, EndReason.TRAINED]
    assert (field.run(job, 2)["resume_from"] is not None) == (step > 3)


async def kill(field: Field, job: int) -> None:
    """As an operator would who means something else."""
    row = (await field.attempts(job))[-1]
    if field.backend.name == "docker":
        import docker

        client = docker.DockerClient(base_url=field.settings.docker_host)
        try:
            for container in client.containers.list():
                if container.name.endswith(row.key) or row.key in str(container.labels):
                    container.kill()
        finally:
            client.close()
        return
    pid = int(json.loads((Path(row.folder) / "start.json").read_text())["pid"])
    with suppress(ProcessLookupError):
        os.killpg(os.getpgid(pid), signal.SIGKILL)


@pytest.mark.kept("process")
async def test_a_hang_is_seen_located_and_ended(field: Field) -> None:
    await field.anew(stall_min_s=5.0)
    hangs = {"steps": 30, "checkpoint": [10], "at": {"12": "hang"}}
    # Of five steps it is not known yet how long one takes: a slow disk is not taken for a second hang.
    job = await field.start("t1", {"1": hangs, "*": {"steps": 5, "save": [3]}})
    await field.published(job)
    assert await field.ends(job) == [EndReason.HUNG, EndReason.TRAINED]
    assert "most recent call first" in field.attempt_file(job, 1, "log").read_text()
    assert field.run(job, 2)["resume_from"] is not None
    assert "job_hung" in [kind for kind, _ in field.alerts]


class Tight:
    """A backend whose runs get little memory."""

    def __init__(self, backend: Backend, memory_bytes: int) -> None:
        self._backend, self._memory = backend, memory_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def submit(self, spec: AttemptSpec) -> str:
        return await self._backend.submit(replace(spec, memory_bytes=self._memory))


async def tighten(field: Field) -> None:
    if field.backend.name == "process" and not getattr(field.backend, "_cgroups", None):
        pytest.skip("without cgroups a process's memory is not limited")
    field.backend = Tight(field.backend, 96 << 20)  # type: ignore[assignment]
    await field.anew()


async def test_a_run_that_eats_the_hosts_memory_is_reported_and_resumed(field: Field) -> None:
    await tighten(field)
    first = {"steps": 100, "save": [1, 2], "checkpoint": [1, 2], "at": {"3": "eat"}}
    job = await field.start("t1", {"1": first, "*": GOOD})
    await field.published(job)
    assert await field.ends(job) == [EndReason.HOST_MEMORY, EndReason.TRAINED]
    assert field.run(job, 2)["resume_from"].endswith("/checkpoint-2")


@pytest.mark.kept("process")
async def test_the_deadline_is_kept_whatever_the_training_does(field: Field) -> None:
    """By one that obeys, and by one that is deaf."""
    jobs = {}
    for name, at, seen in (("obeys", {}, 6), ("deaf", {"20": "deaf"}, 20)):
        do = {"*": {"steps": 100_000, "save": [5], "at": at}}
        job = jobs[name] = await field.start(name, do)
        await field.training(job, seen)
    # A second start moves the deadline near: how long the first steps took is not what is tried.
    for name, job in jobs.items():
        assert await field.start(name, {}, seconds=30) == job
    for job in jobs.values():
        row = await field.published(job)
        assert row.submission is not None
        assert dict(field.light_hub.commits)[row.submission.repo] <= row.deadline_at
        assert await field.ends(job) == [EndReason.TRAINED]


async def test_four_jobs_at_once_have_what_is_their_own_and_outlive_a_restart(field: Field) -> None:
    do = {"*": {"steps": 10, "save": [3], "wait_at": 5}}
    jobs = [await field.start(f"t{number}", do) for number in range(4)]
    for job in jobs:
        await field.training(job)
    rows = [(await field.attempts(job))[0] for job in jobs]
    assert sorted(row.gpus for row in rows) == [("0",), ("1",), ("2",), ("3",)]
    assert len({plan_of(field, job, 1).launch.port for job in jobs}) == 4
    statuses = [await field.backend.poll(row.ref or "", Path(row.folder)) for row in rows]
    assert {status.phase for status in statuses} == {RunPhase.RUNNING}
    await field.jobs.stop()
    await field.up()
    for job in jobs:
        await field.training(job)
    for job in jobs:
        field.go(job)
    for job in jobs:
        await field.published(job)
        assert field.launches(job) == 1, "nothing is launched twice"
    assert len(field.light_hub.repos) == 4


async def test_a_cancelled_job_leaves_no_process_behind(field: Field) -> None:
    job = await field.start("t1", {"*": {"steps": 100_000, "at": {"5": "deaf"}}})
    await field.training(job, 5)
    await field.jobs.cancel(job)
    row = await field.over(job)
    assert row.state is JobState.CANCELLED
    assert await field.orphans() == []
