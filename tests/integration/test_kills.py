"""Kills of real containers: the native trainer and Axolotl on tiny models, run as validators run them.

What is there after each kill is uploaded by the uploader's rules and scored by the trainer's own scorer.
A start takes a minute on two cores, so these are few: `tests/trainer/session/test_submission_kills.py` does
it a hundred times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from core.domain.evaluation import Era
from miner.tournament.rehearsal.upload import as_published, what_is_uploaded
from tests.doubles.dockerd import Dockerd
from tests.doubles.kills import Kill, run_kills
from tests.integration import test_trainer_image as image_tests
from tests.integration.jobs.field import INSTANTS, SEED
from tests.integration.test_trainer_image import DATASET, REPO, ROOT, TASK, cache, engine, image, training

__all__ = ["cache", "engine", "image", "training"]

pytestmark = pytest.mark.campaign
#: From the first submission on, seconds in which kills come.
SPAN_S = 8.0
#: Better each time, and scored every tenth of few steps: many saves.
PROFILE = """
extends: cpu-demo
targets:
  engine: {engine}
  num_epochs: 500
  max_steps: 400
  warmup_steps: 0
  eval_steps: null
  save_steps: null
  val_rows_max: 4
  early_stopping_patience: null
limits: {{max_steps: null, max_epochs: 1000}}
"""


@dataclass
class Container:
    """One run of the image, killed by the signal itself: Docker's own way takes longer than a save."""

    docker: Any
    place: Path

    def is_running(self) -> bool:
        self.docker.reload()
        return bool(self.docker.attrs["State"]["Running"])

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            if pid := self.docker.attrs["State"]["Pid"]:
                os.kill(pid, SIGKILL)
        self.docker.wait(timeout=60)
        self.log = self.docker.logs(tail=20).decode("utf-8", "replace")
        self.docker.remove(force=True)


@pytest.fixture(scope="module")
def score(cache: Path, training: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """What is wrong with a submission: by the uploader's rules, and by loading and scoring it."""
    folder = tmp_path_factory.mktemp("scores")
    task = folder / "task.json"
    rows = str(cache / f"datasets/{TASK}_train_data.json")
    asked_for = {"dataset_type": DATASET, "data": rows, "era": Era.TOURNAMENTS}
    task.write_text(json.dumps(asked_for), encoding="utf-8")
    command = [training, "-m", "tests.miner.tournament.score_server", task, cache / "models/org--tiny"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    log = folder / "log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            bufsize=1,
        ) as server,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        asked = 0

        def check(place: Path) -> str | None:
            nonlocal asked
            asked += 1
            upload = what_is_uploaded(place, "org/tiny")
            if upload.problems:
                return "; ".join(upload.problems)
            repository = as_published(upload, folder / str(asked))
            server.stdin.write(f"{repository}\n")  # type: ignore[union-attr]
            said = server.stdout.readline().strip()  # type: ignore[union-attr]
            return None if said.startswith("good") else said or log.read_text("utf-8")[-2000:]

        yield check
        server.stdin.close()


def container(client: Any, image: str, cache: Path, profile: str, checkpoints: Path) -> Container:
    from docker.types import Mount

    (cache / "profiles").mkdir(exist_ok=True)
    (cache / f"profiles/{profile}.yaml").write_text(PROFILE.format(engine=profile), encoding="utf-8")
    checkpoints.mkdir()
    arguments = image_tests.arguments(TASK)
    arguments[-1] = "1.0"
    made = client.containers.create(
        image,
        arguments,
        network_mode="none",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        shm_size="1g",
        environment={"WANDB_MODE": "offline", "GOD_MINER_PROFILE": f"/cache/profiles/{profile}.yaml"},
        mounts=[
            Mount("/app/checkpoints", str(checkpoints), type="bind"),
            Mount("/cache", str(cache), type="bind", read_only=True),
        ],
    )
    made.start()
    return Container(made, checkpoints / TASK / REPO)


@pytest.mark.parametrize("profile", ["native", "axolotl"])
def test_killed_at_any_instant_a_container_leaves_what_scores(
    engine: Dockerd, image: str, cache: Path, score: Any, tmp_path: Path, profile: str
) -> None:
    started = []

    def show(kill: Kill) -> None:
        sys.stderr.write(f"{profile} {kill}\n")
        if kill.problem:
            sys.stderr.write(started[-1].log)

    with engine.client() as client:

        def start() -> Container:
            started.append(container(client, image, cache, profile, tmp_path / f"run-{len(started)}"))
            return started[-1]

        count = max(INSTANTS // 5, 1)
        report = run_kills(start, count, SEED, score, span_s=SPAN_S, first_limit_s=600, on_kill=show)
    sys.stderr.write(f"{profile}: {report.summary()}\n")
    assert report.problem is None, report.summary()
