"""`god-miner` alone and `god-miner --help`, as they read at 80 columns."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from miner.__main__ import app
from miner.api.status import Overview
from miner.store import database
from tests.miner.cli.pages import JOB
from tests.miner.cli.test_fleet import PAGE
from tests.miner.history import DAY, HOUR, NOW, add_job

EMPTY = """\
GPUs         `god-miner fleet show` looks for them
running      nothing
queued       nothing
ended        nothing yet
alerts       none
next starts  image 10-13 13:00, environment 10-20 09:00, text 10-20 11:00
entry        none is handed out
next         `god-miner doctor` says what is missing; docs/first-entry.md leads
             to a tournament entry
"""
RUNNING = """\
daemon       up for 2 h 00 min as 5GrwvaEF…, docker, policy h100x4
trouble      chain: it does not answer
GPUs         5 H100-SXM: 1 at work, 2 idle, 1 out, 1 reserved
running      1 Qwen2.5-7B-Instruct: train 120/400, loss 1.25, 50 min 00 s left
queued       2 Qwen2.5-7B-Instruct: 1 h 00 min left
ended        4 published +12.3%; 3 crashed
alerts       gpu-hot (gpu:0)
next starts  image 10-13 13:00, environment 10-20 09:00, text 10-20 11:00
entry        text: https://github.com/me/entry aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…
next         `god-miner doctor`: chain: it does not answer
"""
STOPPED = """\
ended        1 published
next         `god-miner tournament check`: no entry is handed out, and only
             tournaments pay
"""


@pytest.fixture(autouse=True)
def on_a_monday_at_noon(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miner.cli.status.time.time", lambda: NOW)
    monkeypatch.setenv("COLUMNS", "80")


def shown(*words: str) -> str:
    lines = CliRunner().invoke(app, list(words), catch_exceptions=False).output.splitlines()
    assert "--json" in words or max(map(len, lines)) <= 80
    return "".join(f"{line.rstrip()}\n" for line in lines)


def overview() -> Overview:
    def job(number: int, **more: Any) -> dict[str, Any]:
        times = {"started_at": NOW, "deadline_at": NOW + HOUR, "end_reason": None, "spark": []}
        return {**JOB, **times, "id": number, **more}

    live = {"job_id": 1, "task_id": "t", "state": "training", "stage": "train", "step": 120, "steps": 400}
    result = {"attempt": 1, "end": "finished", "metric": "loss", "base": 2.0, "best": 1.75, "best_step": 9}
    result |= {"gain": 0.123, "steps": 9, "seconds": 1.0, "tokens_s": None, "memory_bytes": None}
    daemon = {"version": "1", "hotkey": "5GrwvaEF5zXb26Fz", "uptime_seconds": 7200.0, "backend": "docker"}
    daemon |= {"policy": "h100x4", "profile": "h100x4", "open_jobs": 2, "held_offers": 0, "waiting_jobs": 1}
    daemon |= {"chain": {"source": "x", "block": 1, "age": 1.0}, "troubles": ["chain: it does not answer"]}
    alert = {"id": 1, "rule": "gpu-hot", "subject": "gpu:0", "severity": "warning", "text": "", "value": 1}
    alert |= {"raised_at": NOW, "last_at": NOW, "times": 1}
    running = job(1, live=live | {"loss": 1.25}, deadline_at=NOW + 50 * 60)
    over = {"ended_at": NOW, "took_s": 60.0}
    ended = [
        job(4, state="done", end_reason="published", result=result, **over),
        job(3, state="failed", end_reason="crashed", **over),
    ]
    page = {"at": NOW, "daemon": daemon, "kpis": [], "money": None, "fleet": PAGE, "decisions": []}
    return Overview.model_validate(
        page | {"jobs": [running, job(2, state="queued")], "ended": ended, "alerts": [alert]}
    )


def test_a_machine_with_nothing_set_up_is_told_where_to_begin() -> None:
    first, _, rest = shown().partition("\n")
    assert first.startswith("daemon       no daemon runs on ")
    assert rest == EMPTY
    assert json.loads(shown("--json"))["next_step"].startswith("`god-miner doctor`")


def test_a_running_miner_is_ten_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_REPO_TEXT_URL", "https://github.com/me/entry")
    monkeypatch.setenv("TRAINING_REPO_TEXT_COMMIT", "a" * 40)
    monkeypatch.setattr("miner.daemon_client.operator_url", lambda _settings: "")
    monkeypatch.setattr("miner.daemon_client.get", lambda _settings, _path, _type: overview())
    assert shown() == RUNNING


def test_without_a_daemon_the_store_is_read(data_dir: Path) -> None:
    path = database.prepare_store(data_dir)
    with closing(database.connect(path)) as connection:
        add_job(connection, "t1", NOW - DAY)
    assert set(STOPPED.splitlines()) <= set(shown().splitlines())


def test_an_older_store_is_no_new_machine(data_dir: Path) -> None:
    with closing(database.connect(database.prepare_store(data_dir))) as connection:
        connection.execute("PRAGMA user_version = 3")
    step = json.loads(shown("--json"))["next_step"]
    assert step.startswith("`god-miner run`: ")
    assert "has schema 3" in step


def test_help_has_every_command_under_a_heading_and_five_examples() -> None:
    lines = shown("--help").splitlines()
    headings = ["Every day:", "Tournaments:", "Tune:", "Train by hand:", "Set up:"]
    assert [line for line in lines if line in headings] == headings
    named = {line.split()[0] for line in lines if line.startswith("  ") and line[2] not in " -A"}
    assert {name for name, _ in _commands()} <= named
    assert sum(line.startswith("    god-miner") for line in lines) == 5


def _commands() -> list[tuple[str, object]]:
    import typer.main

    return list(typer.main.get_group(app).commands.items())
