"""`god-miner report`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from core.domain.errors import ConfigError
from core.domain.job_states import JobState
from miner.__main__ import app
from tests.miner.offers.builders import NOON, decided, offer, policy
from tests.miner.offers.filled import answer, job, store

runner = CliRunner()


@pytest.fixture
def filled(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POLICY", "h100x4")
    monkeypatch.setenv("GPUS", "4xH100")
    with store(data_dir) as connection:
        answer(connection, offer(task_id="yes"))
        job(connection, offer(task_id="yes"), state=JobState.DONE)
        long = offer(task_id="long", hours_to_complete=12.0)
        answer(connection, long, NOON + 60, decided(long, policy("h100x4"), now=NOON + 60))
    return data_dir


def run(*words: str) -> Result:
    return runner.invoke(app, ["report", *words])


def test_a_report_is_printed_as_text_markdown_html_and_json(filled: Path) -> None:
    at = ("--at", "2025-10-01")
    text = run("daily", *at).output
    assert text.startswith("Daily report, 2025-10-01 00:00 to 2025-10-02 00:00 UTC\n")
    assert "| Published models | 1 |" in run("daily", *at, "--markdown").output
    assert run("weekly", *at, "--html").output.startswith("<!doctype html>")
    report = json.loads(run("monthly", *at, "--json").output)
    assert (report["begins_at"], report["ends_at"]) == (
        "2025-10-01T00:00:00.000Z",
        "2025-11-01T00:00:00.000Z",
    )
    assert report["backtest"] is None


def test_a_backtest_shows_what_other_policies_would_have_done(filled: Path) -> None:
    report = json.loads(run("daily", "--at", "2025-10-01", "--backtest", "--json").output)
    found = {row["name"]: (row["accepted"], row["offers"]) for row in report["backtest"]}
    assert found["as decided"] == (1, 2)
    assert found["h100x4"] == (1, 2)
    assert found["everything-feasible"] == (2, 2)


def test_an_empty_store_has_a_report_too(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLICY", "h100x4")
    with store(data_dir):
        pass
    result = run("daily")
    assert result.exit_code == 0
    assert "No job ended." in result.output


def test_a_date_that_is_none_is_refused(filled: Path) -> None:
    error = run("daily", "--at", "soon").exception
    assert isinstance(error, ConfigError)
    assert "2026-11-23" in str(error)
