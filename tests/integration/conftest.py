"""What the tests with real processes share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miner.dev import stack as dev_stack
from miner.dev.stack import ChildProcess, DevStack, daemon_process, prepare_stack
from tests.integration.traffic import Validator

Ended = subprocess.CompletedProcess[str]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a start is quick is the matter of one test: the others wait for it."""
    monkeypatch.setattr(dev_stack, "START_LIMIT_S", 180.0)


@pytest.fixture
def stack(tmp_path: Path) -> DevStack:
    return prepare_stack(tmp_path / "miner")


@pytest.fixture
def validator(stack: DevStack) -> Validator:
    return Validator(stack)


@pytest.fixture
def running(stack: DevStack) -> Iterator[Callable[..., ChildProcess]]:
    """Starts daemons on the stack's folder, with other settings if need be; none outlives the test."""
    started: list[ChildProcess] = []

    def start(on: DevStack = stack, **settings: str) -> ChildProcess:
        made = daemon_process(on, settings)
        started.append(made)
        made.start()
        return made

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def ended(stack: DevStack) -> Callable[..., Ended]:
    """Runs a daemon that is expected to end by itself."""

    def run(on: DevStack = stack, **settings: str) -> Ended:
        child = daemon_process(on, settings)
        return subprocess.run(
            child.command,
            cwd=child.folder,
            env=child.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run
