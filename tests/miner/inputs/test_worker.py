"""The worker as a process: what it says, and when it ends."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core.domain.job_states import EndReason
from core.domain.tasks import InstructDataset
from miner.inputs.messages import PROTOCOL, DatasetOrder, FetchEvent, FetchFailed, FetchOrder, ModelOrder
from miner.support.child_main import line_of
from miner.support.subprocess import worker_environment

COMMAND = PROTOCOL.command
DATASET = InstructDataset(field_instruction="q", field_output="a")


def ask(order: FetchOrder) -> list[FetchEvent]:
    """What it says; its input stays open while it works, as the daemon leaves it."""
    with subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=worker_environment()
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(line_of(order))
        worker.stdin.flush()
        return [event for line in worker.stdout if (event := PROTOCOL.event_in(line)) is not None]


def test_it_tells_how_far_it_is_and_then_the_answer(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_it_ends_when_the_daemon_does(tmp_path: Path, how: str) -> None:
    """It waits for a hub that never answers; then whoever started it is gone."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        order = ModelOrder(
            model="a/b",
            endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}",
            cache=tmp_path,
            quota=10**9,
        )
        starter = (
            "import subprocess, sys\n"
            f"child = subprocess.Popen({COMMAND!r}, stdin=subprocess.PIPE)\n"
            "child.stdin.write(sys.stdin.buffer.readline()); child.stdin.flush()\n"
            "print(child.pid, flush=True); sys.stdin.read()\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", starter],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=worker_environment(),
        ) as parent:
            assert parent.stdin is not None
            assert parent.stdout is not None
            parent.stdin.write(line_of(order))
            parent.stdin.flush()
            worker = int(parent.stdout.readline())
            silent.accept()[0].close()  # it is at work
            if how == "killed":
                parent.kill()
            else:
                parent.stdin.close()
                parent.kill()
        until = time.monotonic() + 120
        while _runs(worker) and time.monotonic() < until:
            time.sleep(0.02)
        assert not _runs(worker)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
