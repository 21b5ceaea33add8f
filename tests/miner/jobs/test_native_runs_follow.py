"""A training, told while it goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.runs.progress import ProgressEvent
from miner.jobs import native_runs
from tests.miner.jobs.test_native_runs import make_run, wishes

pytestmark = pytest.mark.process


#: Stands in for the training environment's python: says a little and ends as it is asked.
FAKE = """#!{python}
import signal, sys, time
from pathlib import Path
run = Path(sys.argv[-1]).parent
progress = run / "progress.jsonl"
def say(line):
    with progress.open("a") as file: file.write(line + "\\n")
def asked(*_):
    say('{{"t": 2, "event": "note", "kind": "stop", "text": "saved"}}')
    sys.exit(0)
signal.signal(signal.SIGTERM, asked)
say('{{"t": 1, "event": "stage", "stage": "load", "text": "the model"}}')
print("a line for the log")
if {waits}: time.sleep(600)
sys.exit(34)
"""


def python(folder: Path, *, waits: bool = False) -> Path:
    path = folder / "python"
    path.write_text(FAKE.format(python=sys.executable, waits=waits))
    path.chmod(0o755)
    return path


def test_every_event_is_reported_and_the_rest_is_in_the_log(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", wishes(tmp_path))
    Path(run.progress_path).write_text('{"t": 0, "event": "stage", "stage": "of an earlier try"}\n')
    reported: list[ProgressEvent] = []
    assert native_runs.run_training(python(tmp_path), tmp_path / "run", run, reported.append) == 34
    assert [event.event for event in reported] == ["stage"]
    assert (tmp_path / "run/log").read_text() == "a line for the log\n"
    assert native_runs.load_result(run) is None


@pytest.fixture
def unread_stderr(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As behind `2>&1 | tee`, which an interrupt ends as well."""
    reader, writer = os.pipe()
    os.close(reader)
    before = os.dup(2)
    os.dup2(writer, 2)
    os.close(writer)
    monkeypatch.setattr(sys, "stderr", os.fdopen(2, "wb", buffering=0, closefd=False))
    yield
    os.dup2(before, 2)
    os.close(before)


@pytest.mark.usefixtures("unread_stderr")
def test_an_interruption_asks_the_training_to_save_and_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", wishes(tmp_path))
    reported: list[ProgressEvent] = []

    def interrupt() -> None:
        until = time.monotonic() + 120
        while not reported and time.monotonic() < until:
            time.sleep(0.02)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert native_runs.run_training(python(tmp_path, waits=True), tmp_path / "run", run, reported.append) == 0
    assert [event.event for event in reported] == ["stage", "note"]


def test_a_training_that_nobody_reads_any_more_is_saved(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", wishes(tmp_path))

    def tell(_event: ProgressEvent) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        native_runs.run_training(python(tmp_path, waits=True), tmp_path / "run", run, tell)
    assert "saved" in Path(run.progress_path).read_text()


def test_an_interrupt_that_is_ignored_stays_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", wishes(tmp_path))
    found: list[object] = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        native_runs.run_training(
            python(tmp_path), tmp_path / "run", run, lambda _: found.append(signal.getsignal(signal.SIGINT))
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == [signal.SIG_IGN]


def test_the_child_gets_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    made = native_runs.child_environment(Path("/p.yaml"))
    assert "HF_TOKEN" not in made
    assert made["GOD_MINER_PROFILE"] == "/p.yaml"
    assert (Path(made["PYTHONPATH"]) / "trainer").is_dir()


def test_a_program_that_fails_ends_us_with_its_code(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\necho one\nexit 3\n")
    path.chmod(0o755)
    found = native_runs.program_lines(path, ["x"])
    assert next(found) == "one\n"
    with pytest.raises(SystemExit) as ended:
        next(found)
    assert ended.value.code == 3
    assert subprocess.run([path], capture_output=True).returncode == 3
