"""What the tests with real processes share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miner.dev import stack as dev_stack
from miner.dev.stack import ChildProcess, Stack, daemon, prepare
from tests.integration.traffic import Validator

Ended = subprocess.CompletedProcess[str]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a start is quick is the matter of one test: the others wait for it."""
    monkeypatch.setattr(dev_stack, "START_LIMIT_S", 180.0)


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    return prepare(tmp_path / "miner")


@pytest.fixture
def validator(stack: Stack) -> Validator:
    return Validator(stack)


@pytest.fixture
def running(stack: Stack) -> Iterator[Callable[..., ChildProcess]]:
    """Starts daemons on the stack's folder, with other settings if need be; none outlives the test."""
    started: list[ChildProcess] = []

    def start(on: Stack = stack, **settings: str) -> ChildProcess:
        made = daemon(on, settings)
        started.append(made)
        made.start()
        return made

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def ended(stack: Stack) -> Callable[..., Ended]:
    """Runs a daemon that is expected to end by itself."""

    def run(on: Stack = stack, **settings: str) -> Ended:
        child = daemon(on, settings)
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
