"""`kill -9` of the daemon: jobs go on, are adopted within seconds, published once."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx
import pytest

from miner.backends.base import EXIT_FILE
from miner.dev.stack import ChildProcess, DevStack
from tests.core.submission import folders
from tests.integration.jobs.field import DATASET, SEED, Files, base_model, rows

LIVES = 22


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
        assert attempt["engine"] == child.environment["BACKEND"]
    assert child.stop() == 0
    assert {path.name for path in stack.data_dir.glob("jobs/*/attempt_*")} == {"attempt_1"}


@pytest.mark.campaign
@pytest.mark.parametrize("child", ["process", "slurm"], indirect=True)
def test_jobs_outlive_the_daemon_and_each_is_launched_and_published_once(
    stack: DevStack, child: ChildProcess, files: Files, tmp_path: Path
) -> None:
    random = Random(SEED)
    operator = Operator(stack, files, base_model(tmp_path / "base"))
    starts, adoptions = [], []
    for life in range(LIVES):
        starts.append(child.start())
        began = time.monotonic()
        operator.until(operator.adopted)
        adoptions.append(time.monotonic() - began)
        if life < LIVES - 4:
            do = {"steps": random.randint(5, 30), "step_s": 0.05, "save": [2, 4, 8, 16]}
            operator.start(f"t{life}", {"*": do})
        time.sleep(random.uniform(0.0, 1.5))
        kill(child)
    child.start()
    operator.until(lambda: all(job["state"] == "done" for job in operator.jobs()), 240)
    wholes = [start + adoption for start, adoption in zip(starts, adoptions, strict=True)]
    # For whoever reads it: `benchmarks/jobs.py` measures it where nothing else runs.
    print(f"from the process's start to all adopted: {median(wholes):.2f} s in the middle,")
    print(f"{max(wholes):.2f} s at most, {LIVES} times; from its first answer {max(adoptions):.2f} s at most")
    jobs = operator.jobs()
    assert len(jobs) == LIVES - 4
    for job in jobs:
        whole(stack, job)
    assert child.stop() == 0
    left = [path for path in stack.data_dir.glob("jobs/*/attempt_*") if path.name != "attempt_1"]
    assert left == [], "nothing was tried twice"


def whole(stack: DevStack, job: dict[str, Any]) -> None:
    """Launched once, and the model of the hub is the one that was trained."""
    folder = stack.data_dir / f"jobs/{job['id']}"
    assert (folder / "attempt_1/launches").read_text() == "x", job
    assert job["submission"]["repo"] == f"tester/repo-{job['task_id']}"
    place = stack.data_dir / "hub" / job["submission"]["repo"]
    trained = (folder / "attempt_1/submission/adapter_model.safetensors").read_bytes()
    assert (place / "adapter_model.safetensors").read_bytes() == trained
    details = json.loads((folder / "published.json").read_text())
    assert details["repo"] == job["submission"]["repo"]
