"""One training on several machines: two groups of processes of this one, over gloo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.domain.choices import Engine
from core.domain.tasks import TaskType
from core.runs.progress import StepEvent, parse_events
from core.runs.run_files import RunEnd, RunResult, RunSpec
from core.system.wrapper import descendants
from tests.trainer.forks import ForkServer
from tests.trainer.tasks import ENDLESS, plan_of, planned, task, write_profile
from trainer.runner.machines import Machine
from trainer.runner.processes import StopRequest
from trainer.runner.text_runner import TextRunner

#: For what takes half a minute on an idle machine.
PATIENCE = 600


class TwoMachines:
    """The trainer's command line, as a cluster starts it on each of two nodes."""

    def __init__(self, folder: Path, run: RunSpec) -> None:
        self.run, self.folder = run, folder
        (folder / "run.json").write_text(run.to_json())
        self.trainers = [self._start(rank) for rank in (0, 1)]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        env = {
            **os.environ,
            "GOD_MINER_NODE_RANK": str(rank),
            "GOD_MINER_NODES": "2",
            "GOD_MINER_HEAD": "127.0.0.1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, "-m", "trainer.text", "--run", str(self.folder / "run.json")]
        with (self.folder / f"log-{rank}").open("wb") as log:
            return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)

    def codes(self) -> list[int]:
        try:
            return [trainer.wait(timeout=PATIENCE) for trainer in self.trainers]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.logs) from None

    def wait_for_steps(self, count: int) -> None:
        until = time.time() + PATIENCE
        while len(self.steps) < count:
            assert all(trainer.poll() is None for trainer in self.trainers), self.logs
            assert time.time() < until, self.logs
            time.sleep(0.1)

    @property
    def logs(self) -> str:
        return "\n".join(
            (self.folder / f"log-{rank}").read_text("utf-8", "replace")[-6000:] for rank in (0, 1)
        )

    @property
    def steps(self) -> list[StepEvent]:
        path = Path(self.run.progress_path)
        events = parse_events(path.read_bytes()) if path.exists() else []
        return [line.event for line in events if isinstance(line.event, StepEvent)]

    @property
    def result(self) -> RunResult:
        return RunResult.model_validate_json(Path(self.run.result_path).read_bytes())

    def ranks_of(self, machine: int) -> list[int]:
        return [process.pid for process in descendants(self.trainers[machine].pid)]

    def end(self) -> None:
        for trainer in self.trainers:
            trainer.kill()
            trainer.wait()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[TwoMachines]]:
    started: list[TwoMachines] = []
    yield started
    for each in started:
        each.end()


def _run(folder: Path, engine: Engine, processes: int = 2, **parts: Any) -> RunSpec:
    targets = {"learning_rate": 5e-3, "max_steps": 6, **parts.pop("targets", {}), "engine": engine.value}
    profile = write_profile(folder / "two.yaml", targets=targets, **parts)
    run = planned(task(folder, TaskType.INSTRUCT, 1200), profile, processes=processes, machines=2)
    assert plan_of(run).launch.machines == 2
    return run


@pytest.mark.thorough
@pytest.mark.parametrize(("engine", "processes"), [(Engine.NATIVE, 2), (Engine.AXOLOTL, 2)])
def test_two_machines_train_one_model(
    tmp_path: Path, machines: list[TwoMachines], engine: Engine, processes: int
) -> None:
    two = TwoMachines(tmp_path, _run(tmp_path, engine, processes))
    machines.append(two)
    assert two.codes() == [0, 0], two.logs
    result = two.result
    assert (result.end, result.submission, result.steps) == (RunEnd.FINISHED, True, 6), two.logs
    assert result.best is not None
    assert result.base is not None
    assert result.best.value < result.base.value


@pytest.mark.thorough
def test_a_rank_that_is_killed_on_the_second_machine_ends_both_with_the_reason(
    tmp_path: Path, machines: list[TwoMachines]
) -> None:
    """Its machine alone sees the signal; the others see a lost connection."""
    two = TwoMachines(tmp_path, _run(tmp_path, Engine.NATIVE, **ENDLESS))
    machines.append(two)
    two.wait_for_steps(2)
    launcher, *_, rank = two.ranks_of(1)
    os.kill(rank, signal.SIGKILL)
    assert two.codes()[1] == 0, two.logs
    assert two.result.end is RunEnd.KILLED, two.logs
    assert two.result.detail.startswith("machine 1: "), two.result.detail
    assert not Path(f"/proc/{launcher}").exists()


@pytest.mark.thorough
def test_a_request_to_stop_ends_both_with_a_submission(tmp_path: Path, machines: list[TwoMachines]) -> None:
    two = TwoMachines(tmp_path, _run(tmp_path, Engine.NATIVE, **ENDLESS))
    machines.append(two)
    two.wait_for_steps(2)
    two.trainers[1].terminate()  # a scheduler tells all; one is enough
    assert two.codes() == [0, 0], two.logs
    assert (two.result.end, two.result.submission) == (RunEnd.STOPPED, True), two.logs


def test_a_plan_for_two_machines_is_not_begun_on_one(forks: ForkServer, tmp_path: Path) -> None:
    run = _run(tmp_path, Engine.NATIVE)
    stop = StopRequest(Path(run.stop_path))
    # Not a process of this one's own: the runner ends all of those.
    result = TextRunner(run, stop, retries=False, start=forks.start, machine=Machine()).execute()
    assert result.end is RunEnd.INFEASIBLE
    assert "2 machines; it was started on 1" in result.detail
