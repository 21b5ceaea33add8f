"""What the tests with real processes share."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
        child = daemon_process(on, settings)
        started.append(child)
        child.start()
        return child

    yield start
    for child in started:
        child.stop()


@pytest.fixture
def ended(stack: DevStack) -> Callable[..., Ended]:
    """Runs a daemon that is expected to end by itself."""
    return lambda on=stack, **settings: run_to_end(daemon_process(on, settings))


def run_to_end(child: ChildProcess) -> Ended:
    with spawn(child) as process:
        output, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(child.command, process.returncode, output, errors)


@contextmanager
def spawn(child: ChildProcess, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """Its process, without waiting for it to answer; killed at the end."""
    with subprocess.Popen(
        child.command,
        cwd=child.folder,
        env=child.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def assert_ended(done: Ended, code: int, *texts: str) -> None:
    """With this code, and with these texts instead of a traceback."""
    assert done.returncode == code, done.stderr
    for text in texts:
        assert text in done.stderr
    assert "Traceback" not in done.stderr
