"""`god-miner run --task` and `god-miner jobs`, with a daemon and without."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from miner.backends.base import EXIT_FILE
from miner.dev.stack import ChildProcess, DevStack
from tests.core.submission import folders
from tests.integration.jobs.field import DAEMON, DATASET, base_model, rows

Ended = subprocess.CompletedProcess[str]


@pytest.fixture
def begin(child: ChildProcess) -> Callable[..., subprocess.Popen[str]]:
    """A command of god-miner's, in the daemon's environment."""
    return lambda *words: subprocess.Popen(
        [sys.executable, str(DAEMON), *words],
        cwd=child.folder,
        env=child.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str], limit_s: float = 240) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=limit_s)
    return process.returncode, out, err


def until_step(process: Any, step: int) -> None:
    """Read what it prints until its training has done so many steps."""
    for line in process.stdout:
        if (json.loads(line).get("step") or 0) >= step:
            return


def task(folder: Path, do: dict[str, Any]) -> str:
    model = base_model(folder / "base")
    (folder / "data.json").write_bytes(rows(do))
    details = {
        "model": folders.BASE_ID,
        "model_folder": str(model),
        "task_id": "mine",
        "hours_to_complete": 1,
        "dataset": str(folder / "data.json"),
        "dataset_type": DATASET,
    }
    (folder / "task.json").write_text(json.dumps(details))
    return str(folder / "task.json")


def test_a_task_is_done_by_this_process_where_no_daemon_runs(begin: Any, tmp_path: Path) -> None:
    code, out, err = end(begin("run", "--task", task(tmp_path, {"*": {"steps": 5}}), "--json"))
    assert code == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    states = list(dict.fromkeys(event["state"] for event in events if event["event"] == "job"))
    assert states == ["queued", "preparing", "training", "publishing", "done"]
    assert events[-1]["submission"]["repo"] == "tester/task-mine"


def test_a_task_that_fails_says_why_and_exits_with_one(begin: Any, tmp_path: Path) -> None:
    code, out, _ = end(begin("run", "--task", task(tmp_path, {"*": {"at": {"1": "bad_data"}}})))
    assert code == 1
    assert "no row has an answer" in out


def test_ctrl_c_cancels_the_task_and_leaves_no_process(begin: Any, tmp_path: Path, stack: DevStack) -> None:
    process = begin("run", "--task", task(tmp_path, {"*": {"steps": 100_000}}), "--json")
    until_step(process, 1)
    process.send_signal(signal.SIGINT)
    code, out, err = end(process)
    assert code == 1, err
    assert json.loads(out.splitlines()[-1])["state"] == "cancelled"
    assert (stack.data_dir / "jobs/1/attempt_1" / EXIT_FILE).exists()


def test_a_daemon_that_runs_does_the_task_and_its_jobs_can_be_looked_at_and_cancelled(
    begin: Any, child: ChildProcess, tmp_path: Path, stack: DevStack
) -> None:
    child.start()
    watching = begin("run", "--task", task(tmp_path, {"*": {"steps": 100_000, "save": [2]}}), "--json")
    until_step(watching, 3)
    following = begin("jobs", "logs", "mine", "-f")
    code, out, _ = end(begin("jobs", "list", "--json"))
    (listed,) = json.loads(out)
    assert (code, listed["state"], listed["live"]["stage"]) == (0, "training", "train")
    code, out, _ = end(begin("jobs", "cancel", "mine"))
    assert (code, out) == (0, "job 1 (mine) is cancelled\n")
    code, out, err = end(watching)
    assert code == 1, err
    assert json.loads(out.splitlines()[-1])["end_reason"] == "cancelled"
    code, out, _ = end(following)
    assert code == 0
    assert "attempt 1 resumes from None" in out
    code, out, _ = end(begin("jobs", "retry", "1", "--json"))
    assert (code, json.loads(out)["state"]) == (0, "queued")
    headers = stack.operator_headers()
    # Or it would outlive the daemon, as it should; and what is over can be cancelled no more.
    for status in (200, 409):
        done = httpx.post(f"{stack.operator_url}/jobs/1/cancel", headers=headers, timeout=120)
        assert done.status_code == status, done.text


def test_an_open_stream_does_not_hold_the_daemons_end_up(
    begin: Any, child: ChildProcess, tmp_path: Path, stack: DevStack
) -> None:
    child.environment["SHUTDOWN_GRACE_SECONDS"] = "240"
    child.start()
    watching = begin("run", "--task", task(tmp_path, {"*": {"steps": 100_000}}), "--json")
    until_step(watching, 1)
    assert child.stop(120) == 0  # long before the grace is over
    code, out, _ = end(watching)
    assert code == 1
    assert "goes on when it is started again" in json.loads(out.splitlines()[-1])["error"]["message"]
    # The training outlives the daemon, as it should; here it ends with the test.
    attempt = stack.data_dir / "jobs/1/attempt_1"
    Path(json.loads((attempt / "run.json").read_text())["stop_path"]).touch()
    ends = time.monotonic() + 240
    while not (attempt / EXIT_FILE).exists():
        assert time.monotonic() < ends
        time.sleep(0.02)
