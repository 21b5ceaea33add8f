"""Orphans end, stacks are dumped, stop files are seen."""

# Once: it needs nothing of the training stack.

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.session.watchdog import StopFile

pytestmark = pytest.mark.process


ROOT = Path(__file__).parents[3]
WATCHING = """
import subprocess, sys, time
from trainer.session import watchdog
watchdog.RUNNER_S = 0.05
watchdog.exit_with_runner(int(sys.argv[1]))
print("ready", flush=True)
time.sleep(600)
"""
DUMPING = """
import time
from trainer.session.watchdog import dump_stacks_on_request
dump_stacks_on_request()
def a_place_with_a_name():
    print("ready", flush=True)
    time.sleep(600)
a_place_with_a_name()
"""


def started(code: str, *arguments: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def test_a_training_without_its_runner_ends() -> None:
    wrapper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    training = started(WATCHING, str(wrapper.pid))
    wrapper.kill()  # a zombie until it is waited for: gone all the same
    assert training.wait(timeout=120) == 1
    _, errors = training.communicate()
    assert "runner is gone" in errors
    wrapper.wait(timeout=120)


def test_a_hanging_process_dumps_its_stacks_and_goes_on() -> None:
    child = started(DUMPING)
    os.kill(child.pid, signal.SIGUSR1)
    assert child.stderr is not None
    assert any("a_place_with_a_name" in line for line in child.stderr)
    assert child.poll() is None
    child.kill()
    child.communicate(timeout=120)


def test_a_stop_file_is_seen_once_it_is_there(tmp_path: Path) -> None:
    stop = StopFile(tmp_path / "stop", every_s=0.0)
    assert not stop.requested
    (tmp_path / "stop").touch()
    assert stop.requested
    (tmp_path / "stop").unlink()
    assert stop.requested
