from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from core.domain.job_states import JobState
from miner.__main__ import app
from miner.offers.past_offers import NoSuchOffer
from miner.store.database import NoStore
from tests.miner.offers.builders import HOUR, NOON, decided, fleet, hold, offer, policy
from tests.miner.offers.filled import answer, job, store

runner = CliRunner()


@pytest.fixture
def filled(data_dir: Path) -> Path:
    with store(data_dir) as connection:
        answer(connection, offer(task_id="yes"))
        job(connection, offer(task_id="yes"), state=JobState.DONE)
        long = offer(task_id="long", hours_to_complete=12.0)
        answer(connection, long, NOON + HOUR, decided(long, policy("h100x4"), now=NOON + HOUR))
    return data_dir


def run(*words: str) -> Result:
    return runner.invoke(app, ["offers", *words])


def read(*words: str) -> Any:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_list_shows_every_offer_with_its_answer(filled: Path) -> None:
    rows = read("list")
    assert [(row["id"], row["accepted"], row["became"]) for row in rows] == [
        (1, True, "published"),
        (2, False, "refused"),
    ]
    said = run("list").output
    assert "12 h are over the limit of 8 for instruct" in said
    assert "10-01 12:00" in said
    assert read("list")[0]["received_at"] == "2025-10-01T12:00:00.000Z"
    assert [row["id"] for row in read("list", "--refused")] == [2]
    assert [row["id"] for row in read("list", "--since", "2025-10-01T12:30")] == [2]
    assert [row["id"] for row in read("list", "--limit", "1")] == [2]


def test_a_narrow_terminal_has_a_line_for_each_offer(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = "an-owner-with-a-long-name/" + "A-Model-" * 8 + "7B"
    with store(data_dir) as connection:
        for number in range(1200, 1203):
            long = offer(task_id=f"task-{number}", model=model, hours_to_complete=12.5)
            answer(connection, long, NOON, decided(long, policy("h100x4"), now=NOON))
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("list").output.splitlines()
    assert len(lines) == 1 + 3
    assert max(map(len, lines)) <= 80
    for line in lines[1:]:
        for words in ("10-01 12:00", "Instruct", "an-owner", "12.5", "refused", "hours"):
            assert words in line, line


def test_show_is_the_offer_and_what_became_of_it(filled: Path) -> None:
    found = read("show", "yes")
    assert (found["became"], found["accepted"]) == ("published", True)
    assert found["model"] == "meta-llama/Llama-3.1-8B"
    assert "validator" in run("show", "1").output


def test_explain_has_every_rule_factor_and_number_and_ends_in_a_command_to_try(filled: Path) -> None:
    found = read("explain", "long")
    assert [one["rule"] for one in found["reasons"] if not one["passed"]] == ["hours"]
    assert found["threshold"] == 0.35
    assert found["score"] == pytest.approx(sum(one["contribution"] for one in found["factors"].values()))
    assert set(found["value"]) >= {"work", "success", "win", "points", "gpu_hours", "per_gpu_hour"}
    assert found["placement"]["gpus"]
    said = run("explain", "2").output
    for words in (
        *("weight", "success", "hardware", "points: work", "GPU-hours"),
        "refused by policy h100x4",
        "Not taken: the task is too long for this miner",
        "needed: more than 0.35",
        "hours: rules.hours.instruct of 12",
        "policy backtest --set rules.hours.instruct=12 --offer long",
    ):
        assert words in said
    accepted = run("explain", "1").output
    assert "accepted by policy everything-feasible" in accepted
    assert "published" in accepted
    assert "Try:" not in accepted


def test_a_start_that_nobody_offered_is_explained_too(filled: Path) -> None:
    asked = offer(task_id="uninvited")
    busy = fleet("4xH100", hold("a", "0123", end=9))
    with store(filled) as connection:
        job(connection, asked, state=JobState.FAILED, decision=decided(asked, on=busy))
    said = run("explain", "uninvited").output
    assert "start without an accepted offer" in said
    assert "4 of 4 held" in said


def test_an_offer_or_a_store_that_is_not_there_is_an_error(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(run("explain", "nope").exception, NoSuchOffer)
    monkeypatch.setenv("DATA_DIR", str(filled / "elsewhere"))
    assert isinstance(run("list").exception, NoStore)
