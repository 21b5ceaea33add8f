"""Rehearsals that are killed: the report that is left, and that everything else can be removed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from miner.tournament.rules import TASKS
from tests.doubles import base_image
from tests.doubles.dockerd import WORK_LIMIT_S, Dockerd
from tests.miner.tournament.rehearsal.test_rehearse import held, model
from tests.miner.tournament.rehearsed_entries import make_entry

__all__ = ["model"]

pytestmark = [
    pytest.mark.docker,
    pytest.mark.usefixtures("unread_replies_collected"),
]

SLOW_BUILD = f"FROM {base_image.NAME}\nENV A=1\nRUN sleep 1000\n"


@pytest.fixture
def environment(docker_host: Dockerd, tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "DOCKER_HOST": docker_host.host, "DATA_DIR": str(tmp_path / "data")}


@contextmanager
def rehearsing(
    environment: dict[str, str], entry: Path, model: Path, until: str, *more: str
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A rehearsal that has said `until`, and what it said."""
    command = [sys.executable, "-m", "miner", "tournament", "rehearse", str(entry), "--task", "flux"]
    command += ["--model", str(model), "--trigger-word", "forever", "--build-network", "none"]
    command += ["--gpu", "none", *more]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if until in line:
                break
        else:
            raise AssertionError("".join(said))
        try:
            yield process, said
        finally:
            process.kill()
            process.stderr.read()


def clean(environment: dict[str, str], *more: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "miner", "tournament", "clean", "--json", *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def wait_until(done: Callable[[], bool]) -> None:
    until = time.monotonic() + WORK_LIMIT_S
    while not done():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_what_a_killed_rehearsal_left_is_removed_and_what_a_running_one_uses_is_not(
    docker_host: Dockerd, environment: dict[str, str], tmp_path: Path, model: Path
) -> None:
    before = held(docker_host)
    entry = make_entry(tmp_path / "entry")
    with rehearsing(environment, entry, model, "stage: train") as (process, _):
        process.send_signal(signal.SIGKILL)
        process.wait()
    (output,) = (tmp_path / "data/rehearsals").iterdir()
    report = json.loads((output / "report.json").read_text())
    assert (report["complete"], report["passed"]) == (False, False)
    assert report["builds"][0]["problem"] is None
    assert report["tasks"][0]["complete"] is False
    left = held(docker_host) - before
    elsewhere = tmp_path / "elsewhere"
    with rehearsing(environment, entry, model, "stage: train", "--output", str(elsewhere)) as (process, said):
        assert any("killed rehearsals left" in line for line in said)
        planned = clean(environment, "--dry-run")
        assert {one["kind"] for one in planned if one["unwanted"]} >= {"container", "directory", "image"}
        assert held(docker_host) >= left
        running = held(docker_host) - left
        found = clean(environment, "--all")
        assert {one["rehearsal"] for one in found} == {"killed", "running"}
        assert {one["rehearsal"] for one in found if one["removed"]} == {"killed"}
        assert held(docker_host) == running
        assert (output / "report.json").exists()
        assert not (output / "checkout").exists()
        assert (elsewhere / "checkout").exists()
        process.send_signal(signal.SIGINT)
        assert process.wait() != 0
    assert held(docker_host) <= before
    assert clean(environment) == []


def test_the_finished_steps_of_a_build_that_was_killed_are_removed(
    docker_host: Dockerd, environment: dict[str, str], tmp_path: Path, model: Path
) -> None:
    before = held(docker_host)
    entry = make_entry(tmp_path / "entry", {f"dockerfiles/{TASKS['flux'].dockerfile}": SLOW_BUILD})
    with rehearsing(environment, entry, model, "Step 3/3") as (process, _):
        process.send_signal(signal.SIGKILL)
        process.wait()

    # Docker removes the step's container itself, once it sees that nobody waits for the build.
    def only_images() -> bool:
        with docker_host.client() as client:
            return not {one["Id"] for one in client.api.containers(all=True)} - before

    wait_until(only_images)
    assert held(docker_host) - before
    clean(environment)
    assert held(docker_host) <= before
