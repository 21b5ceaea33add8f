"""Kills and requests to stop at any instant of a training in a process of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.runs.picture_run import PictureRun
from tests.doubles import kills
from tests.trainer.forks import ROOT, Fork, ForkServer
from tests.trainer.pictures.little import events, picture_run, problem_of

assert torch
SEED = int(os.environ.get("GOD_MINER_SEED", "20261129"))


class KilledTraining:
    def __init__(self, fork: Fork, run: PictureRun) -> None:
        self._fork, self.place = fork, Path(run.submission_dir)

    def is_running(self) -> bool:
        return self._fork.ended() is None

    def kill(self) -> None:
        self._fork.close()


def start(forks: ForkServer, run: PictureRun, folder: Path) -> Fork:
    (folder / "run.json").write_text(run.model_dump_json())
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return forks.start(["-m", "trainer.pictures.train", str(folder / "run.json")], environment, folder)


def killed(forks: ForkServer, folder: Path, count: int, span_s: float) -> kills.KillReport:
    runs: list[PictureRun] = []

    def begin() -> KilledTraining:
        own = folder / str(len(runs))
        # A score, and often a submission, every few steps.
        runs.append(picture_run(own, pictures=4, max_steps=None, rate=0.003))
        return KilledTraining(start(forks, runs[-1], own), runs[-1])

    return kills.run_kills(begin, count, SEED, lambda place: problem_of(runs[-1]), span_s=span_s)


def test_kills_leave_what_the_loader_takes(forks: ForkServer, tmp_path: Path) -> None:
    report = killed(forks, tmp_path, 3, 4.0)
    assert report.problem is None, report.summary()


@pytest.mark.campaign
def test_fifty_kills_leave_what_the_loader_takes(forks: ForkServer, tmp_path: Path) -> None:
    report = killed(forks, tmp_path, 50, 20.0)
    assert report.problem is None, report.summary()


def touched(fork: Fork, run: PictureRun) -> None:
    Path(run.stop_path).touch()


def signalled(fork: Fork, run: PictureRun) -> None:
    os.kill(fork.pid, signal.SIGTERM)


@pytest.mark.parametrize("ask", [touched, signalled])
def test_asked_to_stop_it_ends_with_the_best(
    forks: ForkServer, tmp_path: Path, ask: Callable[[Fork, PictureRun], None]
) -> None:
    run = picture_run(tmp_path, max_steps=None, seconds=6000.0)
    fork = start(forks, run, tmp_path)
    while not Path(run.progress_path).exists() or not any(event.event == "step" for event in events(run)):
        assert fork.ended() is None, fork.tail
        time.sleep(0.05)
    ask(fork, run)
    while fork.ended() is None:
        time.sleep(0.05)
    assert fork.ended() == 0, fork.tail
    assert '"stopped"' in Path(run.outcome_path).read_text()
    assert problem_of(run) is None
