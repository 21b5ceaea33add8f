"""The whole thing as it is started: our command line, `accelerate launch`, Axolotl, one process and two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from core.domain.choices import Method
from core.domain.tasks import TaskType
from core.runs.progress import NoteEvent, StageEvent, SubmissionEvent
from core.runs.run_files import RunEnd, RunResult, RunSpec
from core.system.wrapper import descendant_pids
from tests.trainer import tiny
from tests.trainer.runner.test_text_runner import events, rescored, submitted_model
from tests.trainer.tasks import DATASETS, ENDLESS, ROWS, planned, task, write_profile

ROOT = Path(__file__).parents[3]
#: A launch takes half a minute on an idle machine, and ten times that on one that tests everything at once.
PATIENCE = 1200


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HOME": "/nonexistent", **(more or {})}


def started(run: RunSpec, more: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    path = Path(run.work_dir).parent / "run.json"
    path.write_text(run.to_json(), encoding="utf-8")
    with (path.parent / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "trainer.text", "--run", str(path)],
            env=environment(more),
            cwd=path.parent,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )


def result_of(run: RunSpec) -> RunResult:
    return RunResult.model_validate_json(Path(run.result_path).read_bytes())


def log_of(run: RunSpec) -> str:
    return (Path(run.work_dir).parent / "log").read_text("utf-8", "replace")[-4000:]


def until_submitted(run: RunSpec, child: subprocess.Popen[str]) -> None:
    until = time.time() + PATIENCE
    while not any(isinstance(event, SubmissionEvent) for event in _seen(run)):
        assert child.poll() is None, log_of(run)
        assert time.time() < until, log_of(run)
        time.sleep(0.1)


def _seen(run: RunSpec) -> list[object]:
    return list(events(run)) if Path(run.progress_path).exists() else []


@pytest.mark.thorough
def test_two_processes_train_a_full_model_on_preferences(tmp_path: Path) -> None:
    """Told only `--num_processes 2`, accelerate would silently start one. Rates are tried out by both."""
    profile = write_profile(tmp_path / "profile.yaml", targets={"lr_search_share": 0.04})
    run = planned(task(tmp_path, TaskType.DPO, 1500), profile, processes=2, method=Method.FULL)
    child = started(run)
    assert child.wait(timeout=PATIENCE) == 0, log_of(run)
    result = result_of(run)
    assert (result.end, result.steps) == (RunEnd.FINISHED, 20)
    stages = [event.text for event in events(run) if isinstance(event, StageEvent)]
    assert any("on 2 processes" in text for text in stages)
    assert any(isinstance(event, NoteEvent) and event.kind == "lr-search" for event in events(run))
    base, ours = rescored(run)
    assert ours < base
    assert result.best is not None
    assert ours == pytest.approx(result.best.value, abs=1e-3)


@pytest.mark.thorough
def test_asked_to_stop_two_processes_save_and_end_and_leave_no_process_behind(tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "profile.yaml", **ENDLESS)
    run = planned(task(tmp_path, TaskType.CHAT, 900), profile, processes=2)
    child = started(run)
    until_submitted(run, child)
    family = descendant_pids(child.pid)
    assert len(family) >= 3  # the launcher and its two workers
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=PATIENCE) == 0, log_of(run)
    result = result_of(run)
    assert (result.end, result.submission) == (RunEnd.STOPPED, True)
    assert result.detail.startswith("asked to stop at step")  # its own word: nobody had to end it
    assert [pid for pid in family if _alive(pid)] == []
    submitted_model(run)


def test_when_one_of_two_processes_is_killed_the_run_ends_at_once_with_what_it_has(tmp_path: Path) -> None:
    """The other one would wait for it for half an hour. The kernel counted no kill for memory here."""
    profile = write_profile(tmp_path / "profile.yaml", **ENDLESS)
    run = planned(task(tmp_path, TaskType.INSTRUCT, 900), profile, processes=2)
    child = started(run)
    until_submitted(run, child)
    family = descendant_pids(child.pid)
    workers = [
        pid for pid in family if b"-m\0axolotl.cli.train" in _said(pid) and b"accelerate" not in _said(pid)
    ]
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    assert child.wait(timeout=PATIENCE) == 0, log_of(run)
    result = result_of(run)
    assert (result.end, result.submission) == (RunEnd.KILLED, True), result.detail
    assert [pid for pid in family if _alive(pid)] == []


def _said(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.thorough
def test_killed_with_its_runner_no_worker_goes_on_training(tmp_path: Path) -> None:
    """Rewards, one process. Launchers put workers into sessions of their own, which no group kill reaches."""
    profile = write_profile(tmp_path / "profile.yaml", **ENDLESS)
    run = planned(task(tmp_path, TaskType.GRPO, 900, rows=60), profile)
    child = started(run)
    until_submitted(run, child)
    family = descendant_pids(child.pid)
    child.kill()
    child.wait(timeout=120)
    until = time.time() + 120
    while [pid for pid in family if _alive(pid)] and time.time() < until:
        time.sleep(0.1)
    assert [pid for pid in family if _alive(pid)] == []
    submitted_model(run)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


DRIVER = """
import sys
from pathlib import Path
from trainer import text
from trainer.runner import command_line

command_line.CACHE, command_line.CHECKPOINTS = Path(sys.argv[1]), Path(sys.argv[2])
raise SystemExit(text.main(sys.argv[3:]))
"""


def test_the_validators_own_command_line_trains_and_exits_with_zero(tmp_path: Path) -> None:
    """As any user, with no home, a read-only cache and hours that were cut down to nothing: it plans for
    itself, and what was learned lies where it is uploaded from. The rehearsal does so with Axolotl."""
    cache, checkpoints = tmp_path / "cache", tmp_path / "checkpoints"
    tiny.save(cache / "models" / "org--tiny")
    (cache / "datasets").mkdir()
    rows = ROWS[TaskType.INSTRUCT](100)
    (cache / "datasets" / "task_train_data.json").write_text(json.dumps(rows), encoding="utf-8")
    dataset = DATASETS[TaskType.INSTRUCT].model_dump_json()
    said = [
        *("--task-id", "task", "--model", "org/tiny", "--dataset", "https://example.com/rows.json"),
        *("--dataset-type", dataset, "--task-type", "InstructTextTask", "--file-format", "s3"),
        *("--expected-repo-name", "repo", "--hours-to-complete", "0", "--invented-later", "yes"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(cache), str(checkpoints), *said],
        env=environment({"GOD_MINER_WORK": str(tmp_path / "scratch"), "GOD_MINER_PROFILE": "cpu-native"}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    submission = checkpoints / "task" / "repo"
    names = sorted(path.name for path in submission.iterdir())
    assert names == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    result = RunResult.model_validate_json((tmp_path / "scratch/task/result.json").read_bytes())
    assert result.end is RunEnd.FINISHED
    assert result.base is not None
    assert result.best is not None
    assert result.best.beats(result.base)
