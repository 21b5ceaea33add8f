"""`kill -9` of the daemon: jobs go on, are adopted within seconds, published once."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from miner.backends.base import EXIT_FILE, START_FILE
from miner.dev.stack import ChildProcess, DevStack
from tests.core.submission import folders
from tests.integration.jobs.field import DATASET, SEED, Files, base_model, rows

#: Of the daemon, in a campaign.
LIVES = int(os.environ.get("GOD_MINER_INSTANTS", "22"))


class Operator:
    """The operator's port, which may be gone at any moment."""

    def __init__(self, stack: DevStack, files: Files, model: Path) -> None:
        self.stack, self.files, self.model = stack, files, model

    def ask(self, method: str, path: str, **more: Any) -> Any:
        with httpx.Client(
            base_url=self.stack.operator_url, timeout=120, headers=self.stack.operator_headers()
        ) as client:
            return client.request(method, path, **more).raise_for_status().json()

    def start(self, name: str, do: dict[str, Any]) -> None:
        """Until it is acknowledged: what was not may be sent again."""
        self.files.datasets[name] = rows(do)
        task = {
            "model": folders.BASE_ID,
            "model_folder": str(self.model),
            "task_id": name,
            "hours_to_complete": 1,
            "expected_repo_name": f"repo-{name}",
            "dataset": f"{self.files.url}/{name}",
            "dataset_type": DATASET,
        }
        self.until(lambda: self.ask("POST", "/jobs", json=task))

    def until(self, ask: Any, limit_s: float = 120.0) -> Any:
        ends = time.monotonic() + limit_s
        while True:
            try:
                if answer := ask():
                    return answer
            except httpx.HTTPError:
                if time.monotonic() > ends:
                    raise
            assert time.monotonic() < ends, "not in time"
            time.sleep(0.02)

    def jobs(self) -> list[dict[str, Any]]:
        jobs: list[dict[str, Any]] = self.ask("GET", "/jobs", params={"limit": 1000})["jobs"]
        return jobs

    def adopted(self) -> bool:
        """Whether all that is in training is looked after."""
        return all(job["live"] and job["live"]["stage"] for job in self.jobs() if job["state"] == "training")


def kill(child: ChildProcess) -> None:
    assert child.process is not None
    os.kill(child.pid, signal.SIGKILL)
    child.process.wait()


@pytest.mark.parametrize("child", ["process", "slurm"], indirect=True)
def test_killed_in_every_stage_each_job_is_launched_and_published_once(
    stack: DevStack, child: ChildProcess, files: Files, tmp_path: Path
) -> None:
    """Just asked for, while its rows come, in training, and where it ends while nobody is there."""
    operator = Operator(stack, files, base_model(tmp_path / "base"))
    waits = {"*": {"steps": 6, "save": [2, 4], "wait_at": 3}}

    def training(name: str) -> bool:
        job = next(job for job in operator.jobs() if job["task_id"] == name)
        return job["state"] == "training" and bool(job["live"]) and (job["live"]["step"] or 0) >= 3

    child.start()
    operator.start("asked", waits)
    kill(child)

    child.start()
    files.fail("/rows", rate=300)
    operator.start("rows", waits)
    operator.until(lambda: files.bytes_sent("/rows") > 0)
    kill(child)

    child.start()
    operator.start("trained", waits)
    operator.until(lambda: all(training(name) for name in ("asked", "rows", "trained")))
    kill(child)
    for number in (1, 2, 3):
        attempt = stack.data_dir / f"jobs/{number}/attempt_1"
        (attempt / "go").touch()
        operator.until((attempt / EXIT_FILE).exists)

    child.start()
    operator.until(operator.adopted)
    operator.until(lambda: all(job["state"] == "done" for job in operator.jobs()), 240)
    for job in operator.jobs():
        whole(stack, job)
        (attempt,) = operator.ask("GET", f"/jobs/{job['id']}")["attempts"]
        assert attempt["backend"] == child.environment["BACKEND"]
    assert child.stop() == 0
    assert {path.name for path in stack.data_dir.glob("jobs/*/attempt_*")} == {"attempt_1"}


@pytest.mark.campaign
@pytest.mark.parametrize("child", ["process", "slurm"], indirect=True)
def test_whatever_is_killed_at_whatever_instant_each_job_is_published_once(
    stack: DevStack, child: ChildProcess, files: Files, tmp_path: Path
) -> None:
    """The campaign of kills: of the daemon in every life, and of a training before every third."""
    random = Random(SEED)
    operator = Operator(stack, files, base_model(tmp_path / "base"))
    killed: set[int] = set()
    for life in range(LIVES):
        child.start()
        operator.until(operator.adopted)
        if life < LIVES - 4:
            do = {"steps": random.randint(5, 30), "step_s": 0.05, "save": [2, 4, 8, 16], "checkpoint": [2, 8]}
            operator.start(f"t{life}", {"*": do})
        time.sleep(random.uniform(0.0, 1.5))
        if life % 3 == 0:
            killed |= kill_a_training(stack, random, killed)
        kill(child)
    child.start()
    operator.until(lambda: all(job["state"] == "done" for job in operator.jobs()), 240)
    jobs = operator.jobs()
    assert len(jobs) == LIVES - 4
    for job in jobs:
        whole(stack, job)
    assert child.stop() == 0
    again = {int(path.parent.name) for path in stack.data_dir.glob("jobs/*/attempt_2")}
    assert again <= killed, "nothing was tried twice that was not killed"
    assert not list(stack.data_dir.glob("jobs/*/attempt_3"))


def kill_a_training(stack: DevStack, random: Random, spared: set[int]) -> set[int]:
    """Kill one that runs, with all its processes, and return its job's number."""
    folders = sorted(stack.data_dir.glob("jobs/*/attempt_1"))
    running = [
        folder
        for folder in folders
        if (folder / START_FILE).exists()
        and not (folder / EXIT_FILE).exists()
        and int(folder.parent.name) not in spared
    ]
    if not running:
        return set()
    folder = random.choice(running)
    with suppress(ProcessLookupError):
        os.killpg(os.getpgid(int(json.loads((folder / START_FILE).read_text())["pid"])), signal.SIGKILL)
    return {int(folder.parent.name)}


def whole(stack: DevStack, job: dict[str, Any]) -> None:
    """Each attempt was launched once, and the hub has the model that the last one trained."""
    folder = stack.data_dir / f"jobs/{job['id']}"
    attempts = sorted(folder.glob("attempt_*"))
    launches = [attempt / "launches" for attempt in attempts]
    assert {path.read_text() for path in launches if path.exists()} == {"x"}, job
    assert job["submission"]["repo"] == f"tester/repo-{job['task_id']}"
    place = stack.data_dir / "hub" / job["submission"]["repo"]
    trained = [(attempt / "submission/adapter_model.safetensors") for attempt in attempts]
    models = [path.read_bytes() for path in trained if path.exists()]
    assert (place / "adapter_model.safetensors").read_bytes() in models
    details = json.loads((folder / "published.json").read_text())
    assert details["repo"] == job["submission"]["repo"]
