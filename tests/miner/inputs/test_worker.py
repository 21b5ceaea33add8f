"""The worker as a process: what it says, and when it ends."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import pytest

from core.domain.job_states import EndReason
from core.domain.tasks import InstructDataset
from miner.inputs.messages import PROTOCOL, DatasetOrder, FetchEvent, FetchFailed, FetchOrder, ModelOrder
from miner.support.child_main import line_of
from miner.support.subprocess import worker_environment

pytestmark = pytest.mark.process


COMMAND = PROTOCOL.command
DATASET = InstructDataset(field_instruction="q", field_output="a")


def ask(order: FetchOrder) -> list[FetchEvent]:
    """What it says; its input stays open while it works, as the daemon leaves it."""
    with subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=worker_environment()
    ) as worker:
        assert worker.stdout is not None
        worker.stdin.write(line_of(order))
        worker.stdin.flush()
        return [event for line in worker.stdout if (event := PROTOCOL.event_in(line)) is not None]


def test_it_shows_how_far_it_is_and_then_the_answer(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text(json.dumps([{"q": "x", "a": "y"}]))
    events = ask(DatasetOrder(folder=tmp_path / "inputs", file=own, dataset=DATASET, max_bytes=10**6))
    assert [event.event for event in events] == ["progress", "dataset"]


def test_a_failure_is_an_answer_with_its_reason(tmp_path: Path) -> None:
    order = ModelOrder(
        model="a/b", endpoint="http://127.0.0.1:9", cache=tmp_path, quota=10**9, own=tmp_path / "nothing"
    )
    (failed,) = ask(order)
    assert isinstance(failed, FetchFailed)
    assert failed.reason is EndReason.BAD_MODEL


def test_a_mistake_of_ours_is_an_answer_too(tmp_path: Path) -> None:
    own = tmp_path / "a folder"
    own.mkdir()
    (failed,) = ask(DatasetOrder(folder=tmp_path / "inputs", file=own, dataset=DATASET, max_bytes=10**6))
    assert isinstance(failed, FetchFailed)
    assert failed.reason is EndReason.BUG
    assert "IsADirectoryError" in failed.text


def test_an_order_that_is_none_is_no_answer() -> None:
    made = subprocess.run(
        COMMAND, input=b"{}\n", capture_output=True, timeout=60, env=worker_environment(), check=False
    )
    assert made.stdout == b""
    assert made.returncode != 0
    assert b"ValidationError" in made.stderr


def test_it_ends_when_its_input_closes(tmp_path: Path) -> None:
    """As when the daemon is gone. It waits for a hub that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        order = ModelOrder(model="a/b", endpoint=endpoint, cache=tmp_path, quota=10**9)
        with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, env=worker_environment()) as worker:
            worker.stdin.write(line_of(order))
            worker.stdin.flush()
            with silent.accept()[0]:  # it is at work
                worker.stdin.close()
                assert worker.wait(120) is not None
