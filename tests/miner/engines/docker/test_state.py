"""What Docker says of a container."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miner.engines.base import START_FILE, Phase, Why
from miner.engines.docker.state import moment, never_started, status_of, was_cut_off
from tests.doubles.each import each

NEVER = "0001-01-01T00:00:00Z"
AT = "2026-01-02T03:04:05.123456789Z"


def said(status: str, **state: Any) -> dict[str, Any]:
    return {
        "State": {"Status": status, "StartedAt": AT, "FinishedAt": NEVER, "ExitCode": 0, "Error": "", **state}
    }


@pytest.mark.parametrize(
    ("name", "detail"),
    [("running", ""), ("paused", "docker unpause"), ("restarting", "starts the container")],
)
def test_what_goes_on_runs(name: str, detail: str, tmp_path: Path) -> None:
    status = status_of(said(name), tmp_path)
    assert status.phase is Phase.RUNNING
    assert status.started_at == pytest.approx(1767323045.123456)
    assert detail in status.detail
    assert bool(status.detail) is (name != "running")


@pytest.mark.parametrize("name", ["exited", "dead", "removing"])
def test_what_is_over_has_ended(name: str, tmp_path: Path) -> None:
    status = status_of(said(name, ExitCode=7, FinishedAt=AT), tmp_path)
    assert (status.phase, status.why, status.code) == (Phase.ENDED, Why.FAILED, 7)
    assert status.ended_at == pytest.approx(1767323045.123456)


def test_memory_as_the_reason(tmp_path: Path) -> None:
    assert status_of(said("exited", ExitCode=137, OOMKilled=True), tmp_path).why is Why.OOM_KILLED
    # A part of it was killed, and it came to a good end all the same.
    assert status_of(said("exited", ExitCode=0, OOMKilled=True), tmp_path).why is Why.OK


def test_what_was_made_and_not_started_waits(tmp_path: Path) -> None:
    made = said("created", StartedAt=NEVER)
    assert never_started(made)
    assert status_of(made, tmp_path).phase is Phase.QUEUED


def test_what_could_not_be_started_says_why(tmp_path: Path) -> None:
    status = status_of(said("created", StartedAt=NEVER, ExitCode=128, Error="no such device"), tmp_path)
    assert (status.phase, status.why, status.code) == (Phase.ENDED, Why.FAILED, 128)
    assert "no such device" in status.detail


def test_what_started_without_docker_s_knowledge_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / START_FILE).write_text(json.dumps({"at": 1.0}))
    made = said("created", StartedAt=NEVER)
    assert was_cut_off(made, tmp_path)
    status = status_of(made, tmp_path)
    assert status.phase is Phase.LOST
    assert "Docker died" in status.detail


def test_an_answer_that_lacks_everything_is_no_trouble(tmp_path: Path) -> None:
    assert status_of({}, tmp_path).phase is Phase.ENDED


@each(
    ("text", "seconds"),
    [
        (AT, 1767323045.123456),
        ("2026-01-02T03:04:05Z", 1767323045.0),
        ("2026-01-02T04:04:05.1+01:00", 1767323045.1),
        (NEVER, None),
        ("", None),
        ("soon", None),
        (None, None),
    ],
)
def test_moments(text: object, seconds: float | None) -> None:
    assert moment(text) == (None if seconds is None else pytest.approx(seconds))
