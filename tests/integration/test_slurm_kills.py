"""`kill -9` of the daemon, slurmctld, slurmd and a job's supervisors, at each step of a submit and of a run.

Each step is a gate: a stand-in for one of Slurm's commands that waits, or a file that the run writes. The
work runs once, nothing is left, and the reason is right.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from miner.backends.base import AttemptSpec, BackendUnreachable, EndCause, RunPhase, RunStatus
from miner.backends.slurm import backend
from tests.doubles.backend_bench import WAIT_S, BackendBench, Run, slurm_bench
from tests.doubles.base_image import PYTHON
from tests.doubles.slurm import CONTROLLER, MUNGE, OwnSlurm, own_slurm

ROOT = Path(__file__).parents[2]
T = TypeVar("T")
#: Counts itself, and goes on when it may.
WAITS = """
import os, time
with open('ran', 'a') as file:
    file.write('x')
while not os.path.exists('go'):
    time.sleep(0.01)
"""
#: Saves when it is asked to end, once it may.
SAVES = """
import os, signal, sys, time
def end(*_):
    with open('saving', 'w') as file:
        file.write('x')
    while not os.path.exists('go'):
        time.sleep(0.01)
    with open('saved', 'w') as file:
        file.write('x')
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
with open('ran', 'a') as file:
    file.write('x')
time.sleep(1000)
"""


@pytest.fixture
def mortal() -> Iterator[OwnSlurm]:
    """Forgets an ended job after two seconds, and a node that does not answer is down after five."""
    # MessageTimeout: for how long commands look for a controller that is gone.
    with own_slurm(settings={"MinJobAge": "2", "SlurmdTimeout": "5", "MessageTimeout": "4"}) as slurm:
        yield slurm


@pytest_asyncio.fixture
async def bench(mortal: OwnSlurm, tmp_path: Path) -> AsyncIterator[BackendBench]:
    bench = slurm_bench(tmp_path / "data", mortal.bin)
    yield bench
    mortal.start()
    await bench.clear()


@contextmanager
def daemon(bench: BackendBench, spec: AttemptSpec) -> Iterator[int]:
    """One that submits this; its process."""
    command = [sys.executable, "-m", "tests.doubles.submitter", "slurm", str(bench.data_dir)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen([*command, str(bench.settings.slurm_bin_dir)], cwd=ROOT, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        order = {"key": spec.key, "run_dir": str(spec.run_dir), "argv": spec.argv, "dies": 0}
        process.stdin.write(json.dumps(order) + "\n")
        yield int(process.stdout.readline())


async def at(gate: Any) -> int:
    return int(await asyncio.to_thread(gate.wait))


async def once(bench: BackendBench, mortal: OwnSlurm, run: Run) -> RunStatus:
    """It ran once, and Slurm has no other job of it."""
    (run.dir / "go").touch()
    status = await bench.end_of(run)
    assert run.file("ran") in ("", "x")
    await nothing_left(mortal)
    return status


async def nothing_left(mortal: OwnSlurm) -> None:
    async with asyncio.timeout(WAIT_S):
        while any(job["JobState"] in ("PENDING", "RUNNING", "COMPLETING") for job in mortal.jobs().values()):
            await asyncio.sleep(0.05)


async def at_last(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again while Slurm is in trouble, as the pipeline does."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with suppress(BackendUnreachable):
                return await ask()
            await asyncio.sleep(0.05)


async def end_at_last(bench: BackendBench, run: Run) -> RunStatus:
    async with asyncio.timeout(WAIT_S):
        while (status := await at_last(lambda: bench.status(run))).phase in (
            RunPhase.RUNNING,
            RunPhase.QUEUED,
        ):
            await asyncio.sleep(0.05)
        return status


# the daemon, while it submits


async def test_killed_before_sbatch_the_run_is_submitted_by_the_next_daemon(
    bench: BackendBench, mortal: OwnSlurm
) -> None:
    spec, gate = bench.code(WAITS), mortal.gate("sbatch")
    with daemon(bench, spec) as pid:
        command = await at(gate)
        os.kill(pid, signal.SIGKILL)
        os.kill(command, signal.SIGKILL)
    gate.lift()
    assert await bench.backend.find(spec.key) is None
    run = await bench.submit(spec)
    assert (await once(bench, mortal, run)).why is EndCause.OK
    assert len(mortal.jobs()) == 1


async def test_an_sbatch_that_outlives_its_daemon_and_comes_second_starts_nothing(
    bench: BackendBench, mortal: OwnSlurm
) -> None:
    spec, gate = bench.code(WAITS), mortal.gate("sbatch")
    with daemon(bench, spec) as pid:
        await at(gate)
        os.kill(pid, signal.SIGKILL)
    run = await bench.submit(spec)
    await bench.said(run, "ran")
    gate.lift()
    async with asyncio.timeout(WAIT_S):
        while len(mortal.jobs()) < 2:
            await asyncio.sleep(0.02)
    # The second ends while the first still runs, and its end is not the run's.
    async with asyncio.timeout(WAIT_S):
        while sum(job["JobState"] == "RUNNING" for job in mortal.jobs().values()) != 1:
            await asyncio.sleep(0.02)
    assert (await bench.status(run)).phase is RunPhase.RUNNING
    assert await bench.again().submit(spec) == run.ref
    assert (await once(bench, mortal, run)).why is EndCause.OK


@pytest.mark.kept("running")
@pytest.mark.parametrize("begun", [False, True], ids=["waiting", "running"])
async def test_killed_before_the_answer_is_recorded_the_run_is_found(
    bench: BackendBench, mortal: OwnSlurm, begun: bool
) -> None:
    spec, gate = bench.code(WAITS), mortal.gate("sbatch", "after")
    with daemon(bench, spec) as pid:
        await at(gate)
        (job,) = mortal.jobs()
        if begun:
            async with asyncio.timeout(WAIT_S):
                while not (spec.run_dir / "ran").exists():
                    await asyncio.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
    gate.lift()
    found = await bench.backend.find(spec.key)
    run = await bench.submit(spec)
    assert found == run.ref
    assert job in run.ref
    assert (await once(bench, mortal, run)).why is EndCause.OK
    assert len(mortal.jobs()) <= 1


# Slurm's daemons, while it is submitted


@pytest.mark.thorough
async def test_a_controller_that_is_gone_gets_the_run_when_it_is_back(
    bench: BackendBench, mortal: OwnSlurm
) -> None:
    spec, gate = bench.code(WAITS), mortal.gate("sbatch")
    submit = asyncio.ensure_future(bench.backend.submit(spec))
    await at(gate)
    mortal.kill(CONTROLLER)
    gate.lift()
    with pytest.raises(BackendUnreachable):
        await submit
    mortal.start(until_nodes_answer=False)
    run = await at_last(lambda: bench.submit(spec))
    assert (await once(bench, mortal, run)).why is EndCause.OK


async def test_a_run_that_the_controller_has_taken_and_lost_never_ran(
    bench: BackendBench, mortal: OwnSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is written seconds after sbatch was answered."""
    monkeypatch.setattr(backend, "SETTLE_S", 0.5)
    for node in mortal.nodes:
        mortal.drain(node)
    mortal.save()
    run = await bench.submit(bench.code(WAITS))
    assert len(mortal.jobs()) == 1
    mortal.kill(CONTROLLER)
    mortal.start(until_nodes_answer=False)
    assert mortal.jobs() == {}
    status = await end_at_last(bench, run)
    assert (status.phase, status.why) == (RunPhase.LOST, EndCause.LOST)
    assert run.file("ran") == ""


async def test_a_start_that_the_controller_forgot_is_no_second_one(
    bench: BackendBench, mortal: OwnSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the job to be waiting, ends what runs, and starts the same job again."""
    monkeypatch.setattr(backend, "SETTLE_S", 0.5)
    mortal.save()
    run = await bench.submit(bench.code(WAITS))
    await bench.said(run, "ran")
    mortal.kill(CONTROLLER)
    mortal.start()
    async with asyncio.timeout(WAIT_S):
        while "PENDING" in [job["JobState"] for job in mortal.jobs().values()]:
            await asyncio.sleep(0.05)
    (run.dir / "go").touch()
    status = await end_at_last(bench, run)
    assert run.file("ran") == "x"
    assert status.why in (EndCause.OK, EndCause.CANCELLED, EndCause.KILLED, EndCause.LOST)


async def test_nodes_whose_daemon_is_gone_run_it_once_when_it_is_back(
    bench: BackendBench, mortal: OwnSlurm
) -> None:
    for node in mortal.nodes:
        mortal.kill(node)
    run = await bench.submit(bench.code(WAITS))
    mortal.start()
    status = await once(bench, mortal, run)
    assert status.why in (EndCause.OK, EndCause.NOT_STARTED, EndCause.NODE_FAIL)
    assert run.file("ran") == ("x" if status.why is EndCause.OK else "")


@pytest.mark.kept("node's daemon", "node")
@pytest.mark.parametrize("victim", ["controller", "node's daemon", "node"])
async def test_killed_between_the_claim_and_the_wrapper_it_runs_once_at_most(
    victim: str, mortal: OwnSlurm, tmp_path: Path
) -> None:
    """The script finds programs beside the interpreter first: a stand-in for srun, with its gate."""
    python = mortal.bin / "python"
    python.symlink_to(PYTHON)
    bench, gate = slurm_bench(tmp_path / "data", mortal.bin, trainer_python=python), mortal.gate("srun")
    run = await bench.submit(bench.code(WAITS))
    await at(gate)
    mortal.save()
    (job,) = mortal.jobs().values()
    if victim == "node":
        mortal.kill_node(job["NodeList"])
        mortal.fail(job["NodeList"])
    else:
        mortal.kill(CONTROLLER if victim == "controller" else job["NodeList"])
        mortal.start(until_nodes_answer=False)
    gate.lift()
    status = await once(bench, mortal, run)
    assert status.why is (EndCause.NODE_FAIL if victim == "node" else EndCause.OK)
    assert run.file("ran") == ("" if victim == "node" else "x")
    await bench.clear()


# Slurm's daemons, while it runs


@pytest.mark.kept("controller", "node's daemon")
@pytest.mark.parametrize("victim", ["controller", "node's daemon", "munge"])
async def test_a_training_outlives_slurms_daemons(victim: str, bench: BackendBench, mortal: OwnSlurm) -> None:
    run = await bench.submit(bench.code(WAITS))
    await bench.said(run, "ran")
    mortal.save()
    (job,) = mortal.jobs().values()
    mortal.kill({"controller": CONTROLLER, "munge": MUNGE}.get(victim, job["NodeList"]))
    if victim == "controller":
        with pytest.raises(BackendUnreachable):
            await bench.backend.stop(run.ref)
    mortal.start(until_nodes_answer=False)
    assert (await at_last(lambda: bench.status(run))).phase is RunPhase.RUNNING
    assert await bench.again().submit(run.spec) == run.ref
    assert (await once(bench, mortal, run)).why is EndCause.OK


async def test_a_node_that_is_gone_is_the_reason(bench: BackendBench, mortal: OwnSlurm) -> None:
    run = await bench.submit(bench.code(WAITS))
    await bench.said(run, "ran")
    (job,) = mortal.jobs().values()
    mortal.kill_node(job["NodeList"])
    mortal.fail(job["NodeList"])
    status = await bench.end_of(run)
    assert (status.phase, status.why) == (RunPhase.ENDED, EndCause.NODE_FAIL)
    assert run.file("ran") == "x"
    await nothing_left(mortal)


@pytest.mark.thorough
@pytest.mark.parametrize("step", ["batch", "0"])
async def test_a_job_without_its_supervisor_goes_on_and_its_end_is_known(
    step: str, bench: BackendBench, mortal: OwnSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmstepd of the script, or of the step that the training is."""
    monkeypatch.setattr(backend, "LINGER_S", 0.5)
    run = await bench.submit(bench.code(WAITS))
    await bench.said(run, "ran")
    (job,) = mortal.jobs()
    os.kill(mortal.supervisors(job)[step], signal.SIGKILL)
    (run.dir / "go").touch()
    status = await end_at_last(bench, run)
    assert status.why in (EndCause.OK, EndCause.KILLED, EndCause.NODE_FAIL)
    assert run.file("ran") == "x"


@pytest.mark.kept("node's daemon")
@pytest.mark.parametrize("victim", ["controller", "node's daemon"])
async def test_what_saves_while_daemons_die_was_stopped(
    victim: str, bench: BackendBench, mortal: OwnSlurm
) -> None:
    run = await bench.submit(bench.code(SAVES))
    await bench.said(run, "ran")
    mortal.save()
    await bench.backend.stop(run.ref)
    await bench.said(run, "saving")
    (job,) = mortal.jobs().values()
    mortal.kill(CONTROLLER if victim == "controller" else job["NodeList"])
    mortal.start(until_nodes_answer=False)
    (run.dir / "go").touch()
    status = await end_at_last(bench, run)
    assert (status.why, run.file("saved"), run.file("ran")) == (EndCause.STOPPED, "x", "x")
    await nothing_left(mortal)


async def test_an_end_that_nobody_saw_is_known_after_slurm_forgot_the_job(
    bench: BackendBench, mortal: OwnSlurm
) -> None:
    ends = {"pass": EndCause.OK, "raise SystemExit(3)": EndCause.FAILED}
    runs = {text: await bench.submit(bench.code(text)) for text in ends}
    for run in runs.values():
        await bench.said(run, "exit.json")
    async with asyncio.timeout(WAIT_S):
        while mortal.jobs():
            await asyncio.sleep(0.2)
    bench.again()
    for text, why in ends.items():
        assert (await bench.status(runs[text])).why is why
        assert await bench.backend.find(runs[text].spec.key) == runs[text].ref
        assert await bench.backend.submit(runs[text].spec) == runs[text].ref
    assert mortal.jobs() == {}
