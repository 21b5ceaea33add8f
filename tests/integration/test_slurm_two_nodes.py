"""One training on two nodes of a real Slurm: the backend's job, ranks over gloo, one submission."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from core.domain.choices import Engine
from core.runs.progress import StepEvent, parse_events
from core.runs.run_files import RunEnd, RunResult
from core.system.wrapper import processes
from miner.backends.base import EndCause, RunPhase
from tests.doubles.backend_bench import BackendBench, Run, slurm_bench
from tests.doubles.slurm import ROOT, OwnSlurm, own_slurm

#: For what takes half a minute on an idle machine.
PATIENCE = 600.0

#: A model of random weights, rows, a plan for two nodes, and the run in the folder that is named.
MAKE = """
import sys
from pathlib import Path
from core.domain.tasks import TaskType
from tests.trainer.tasks import ENDLESS, planned, task, write_profile

folder, engine, endless = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "endless"
parts = {**ENDLESS} if endless else {}
targets = {"learning_rate": 5e-3, "max_steps": 6, **parts.pop("targets", {}), "engine": engine}
profile = write_profile(folder / "two.yaml", targets=targets, **parts)
run = planned(task(folder, TaskType.INSTRUCT, 1200), profile, processes=2, machines=2)
(folder / "run.json").write_text(run.to_json())
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[OwnSlurm]:
    with own_slurm() as slurm:
        yield slurm


@pytest.fixture
async def bench(slurm: OwnSlurm, training_python: str, tmp_path: Path) -> AsyncIterator[BackendBench]:
    # Ranks have threads, which count.
    bench = slurm_bench(tmp_path / "data", slurm.bin, trainer_python=training_python, processes=4096)
    yield bench
    await bench.clear()


async def started(bench: BackendBench, training_python: str, engine: Engine, how: str) -> Run:
    spec = bench.spec(
        "python", "-m", "trainer.text", "--run", "run.json", nodes=("n1", "n2"), timeout_s=PATIENCE
    )
    command = [training_python, "-c", MAKE, str(spec.run_dir), engine.value, how]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    await asyncio.to_thread(subprocess.run, command, check=True, env=environment)
    argv = (*spec.argv[:-1], str(spec.run_dir / "run.json"))
    return await bench.submit(replace(spec, argv=argv))


def steps(run: Run) -> int:
    lines = parse_events(run.file("progress.jsonl").encode())
    return sum(isinstance(line.event, StepEvent) for line in lines)


async def trains(bench: BackendBench, run: Run) -> None:
    ends = time.monotonic() + PATIENCE
    while steps(run) < 2:
        assert (await bench.status(run)).phase in (RunPhase.QUEUED, RunPhase.RUNNING), logs(run)
        assert time.monotonic() < ends, logs(run)
        await asyncio.sleep(0.1)


def logs(run: Run) -> str:
    return "\n".join(run.file(name)[-4000:] for name in ("log", "node_1/log", "slurm.out"))


def processes_of(run: Run, *words: str) -> dict[int, str]:
    """Those whose command line names the run's directory and these words."""
    found = {}
    for process in processes():
        with suppress(OSError):
            command = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            if any(str(run.dir) in word for word in command) and set(words) <= {*command}:
                found[process.pid] = " ".join(command)
    return found


async def nothing_left(run: Run) -> None:
    ends = time.monotonic() + PATIENCE
    while left := processes_of(run):
        assert time.monotonic() < ends, left
        await asyncio.sleep(0.1)


@pytest.mark.thorough_rows("axolotl")
@pytest.mark.parametrize("engine", [Engine.NATIVE, Engine.AXOLOTL])
async def test_two_nodes_train_one_model(bench: BackendBench, training_python: str, engine: Engine) -> None:
    run = await started(bench, training_python, engine, "short")
    status = await bench.end_of(run, PATIENCE)
    assert status.why is EndCause.OK, logs(run)
    result = RunResult.model_validate_json(run.file("result.json"))
    assert (result.end, result.submission, result.steps) == (RunEnd.FINISHED, True, 6), logs(run)
    assert result.best is not None
    assert result.base is not None
    assert result.best.value < result.base.value
    assert '"code": 0' in run.file("node_1/exit.json")
    await nothing_left(run)


@pytest.mark.parametrize("node", ["", "node_1"])
async def test_a_node_whose_wrapper_is_killed_ends_the_job_on_both(bench: BackendBench, node: str) -> None:
    code = "import time; print('up', flush=True); time.sleep(600)"
    run = await bench.submit(bench.code(code, nodes=("n1", "n2")))
    for log in ("log", "node_1/log"):
        await bench.said(run, log, PATIENCE)
    (wrapper,) = processes_of(run, "--dir", str(run.dir / node), "-c")
    os.kill(wrapper, signal.SIGKILL)
    status = await bench.end_of(run, PATIENCE)
    assert status.why in (EndCause.FAILED, EndCause.KILLED, EndCause.LOST), (status, logs(run))
    await nothing_left(run)


@pytest.mark.thorough
@pytest.mark.parametrize("node", ["", "node_1"])
async def test_a_node_whose_trainer_is_killed_ends_the_job_on_both(
    bench: BackendBench, training_python: str, node: str
) -> None:
    run = await started(bench, training_python, Engine.NATIVE, "endless")
    await trains(bench, run)
    (wrapper,) = processes_of(run, "--dir", str(run.dir / node), "trainer.text")
    os.kill(wrapper, signal.SIGKILL)
    status = await bench.end_of(run, PATIENCE)
    assert status.why in (EndCause.FAILED, EndCause.KILLED, EndCause.LOST), (status, logs(run))
    await nothing_left(run)
