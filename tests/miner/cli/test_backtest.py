from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from core.domain.errors import ConfigError
from core.domain.job_states import JobState
from miner.__main__ import app
from miner.offers.backtest.synthetic import synthetic_offers
from miner.offers.past_offers import NoSuchOffer, offer_to_line, read_offer_lines
from miner.store.database import NoStore
from tests.miner.offers.builders import HOUR, NOON, decided, offer, policy
from tests.miner.offers.filled import answer, job, lapse, store

pytestmark = pytest.mark.process


runner = CliRunner()


@pytest.fixture
def stored(data_dir: Path) -> Path:
    """Eight hours apart: one published, one failed, one that never started, one of twelve hours."""
    with store(data_dir) as connection:
        for number, task_id in enumerate(("good", "bad", "never")):
            answer(connection, offer(task_id=task_id), NOON + 8 * number * HOUR)
        lapse(connection, "never")
        job(connection, offer(task_id="good"), NOON, state=JobState.DONE)
        job(connection, offer(task_id="bad"), NOON + 8 * HOUR, state=JobState.FAILED)
        long = offer(task_id="long", hours_to_complete=12.0)
        answer(connection, long, NOON + 24 * HOUR, decided(long, policy("h100x4"), now=NOON + 24 * HOUR))
    return data_dir


@pytest.fixture
def lines(data_dir: Path) -> Path:
    file = data_dir / "offers.jsonl"
    file.write_text(
        "".join(f"{offer_to_line(one)}\n" for one in synthetic_offers(1, days=2, per_day=40, start=NOON))
    )
    return file


def run(*words: str) -> Result:
    return runner.invoke(app, ["policy", "backtest", *words])


def read(*words: str) -> Any:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_what_if_twelve_hours_were_allowed_is_one_command(stored: Path) -> None:
    decided_then, before, after = read("--set", "hours.InstructTextTask=12")
    assert decided_then["policy"] == "as decided"
    assert before["policy"] == "h100x4"
    assert after["policy"] == "h100x4, hours.InstructTextTask=12"
    assert (before["refused"], after["refused"]) == ({"hours": 1}, {})
    assert after["accepted"] == before["accepted"] + 1
    said = run("--set", "hours.InstructTextTask=12").output
    assert "Answered differently by h100x4, hours.InstructTextTask=12: 1" in said
    assert "12 h are over the limit of 8 for instruct" in said
    assert all(words in said for words in ("refused by hours", "GPU-hours held", "per GPU-hour of the fleet"))


def test_what_became_of_offers_is_counted_and_priced(stored: Path) -> None:
    _, found = read()
    assert found["known"] == {"published": 1, "failed": 1, "lapsed": 1}
    assert [one["offers"] for one in read("--since", "2025-10-02")] == [2, 2]
    assert found["realised_points"] < 0  # a failure costs more than one publication is expected to bring
    assert "published in fact" in run().output


def test_one_offer_is_explained_in_every_run(stored: Path) -> None:
    said = run("--set", "hours.instruct=12", "--offer", "4").output
    assert said.count("12 h are over the limit of 8") == 2
    assert "12 h are within 12 for instruct" in said
    found = read("--set", "hours.instruct=12", "--offer", "long")
    assert [one["accepted"] for one in found.values()] == [False, False, True]
    assert isinstance(run("--offer", "nope").exception, NoSuchOffer)


def test_a_file_of_offers_is_played_against_several_policies(lines: Path) -> None:
    found = read("--jsonl", str(lines), "--policy", "h100x4", "--policy", "conservative")
    assert [one["policy"] for one in found] == ["h100x4", "conservative"]
    assert found[0]["accepted"] > found[1]["accepted"] > 0
    for one in found:
        assert one["offers"] == len(lines.read_text().splitlines()) == len(one["answers"])
        assert one["accepted"] + sum(one["refused"].values()) == one["offers"]
        assert 0 < one["occupancy"] <= 1
        assert len(one["occupancy_over_time"]) == 60
        assert one["realised_points"] is None
        assert one["points_per_fleet_gpu_hour"] == pytest.approx(
            one["expected_points"] / one["fleet_gpu_hours"]
        )


def test_another_fleet_and_another_profile_may_be_asked_about(lines: Path) -> None:
    few, many = (read("--jsonl", str(lines), "--fleet", gpus)[0] for gpus in ("1xH100", "8xH100"))
    assert few["accepted"] < many["accepted"]
    assert many["fleet_gpu_hours"] == pytest.approx(8 * few["fleet_gpu_hours"])
    whole = read("--jsonl", str(lines), "--profile", "h100x4", "--fleet", "4xH100")[0]
    split = read("--jsonl", str(lines), "--profile", "h100x4-strategy", "--fleet", "4xH100")[0]
    assert whole["accepted"] < split["accepted"]


def test_the_profile_is_named_and_one_for_other_machinery_is_refused(
    lines: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--jsonl", str(lines), "--policy", "h100x4", "--policy", "conservative")
    assert {one["profile"] for one in read(*asked)} == {"h100x4"}
    said = run(*asked, "--profile", "steady").output
    assert "planned by profile steady: --profile; policy h100x4 names h100x4" in said
    (data_dir / ".env").write_text("PROFILE=h100x4-strategy\n")
    said = run(*asked).output
    assert "planned by profile h100x4-strategy: PROFILE=h100x4-strategy in .env; policy h100x4 names" in said
    (data_dir / ".env").write_text("PROFILE=cpu-demo\n")
    refused = run(*asked).exception
    assert isinstance(refused, ConfigError)
    assert "is made for cpu, and h100x4 is played on 4xH100" in str(refused)


def test_settings_hold_for_the_policy_in_force_alone_and_ones_own_is_found_in_its_folder(
    lines: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_JOBS", "0")
    assert read("--jsonl", str(lines))[0]["accepted"] == 0
    assert read("--jsonl", str(lines), "--policy", "h100x4")[0]["accepted"] > 0
    (data_dir / "policies").mkdir()
    (data_dir / "policies" / "mine.yaml").write_text("extends: h100x4\nrules: {max_jobs: 0}\n")
    assert read("--jsonl", str(lines), "--policy", "mine")[0]["refused"]["jobs"] > 0


def test_what_is_wrong_is_reported(data_dir: Path, lines: Path) -> None:
    assert isinstance(run().exception, NoStore)
    assert isinstance(run("--jsonl", str(lines), "--set", "hourz=3").exception, ConfigError)
    lines.write_text("{}\n")
    assert isinstance(run("--jsonl", str(lines)).exception, ConfigError)
    lines.write_text("")
    assert run("--jsonl", str(lines)).exit_code == 0


def test_the_policy_in_force_is_played_on_this_hosts_gpus(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the daemon here chooses it: of eight GPUs four would be forgotten."""
    monkeypatch.setenv("GPUS", "8xH100")
    named = [one["policy"] for one in read()]
    assert "h100x8" in named
    assert "h100x4" in [one["policy"] for one in read("--policy", "h100x4")]
    monkeypatch.setenv("GPUS", "cpu")
    assert "everything-feasible" in [one["policy"] for one in read()]


def test_generated_offers_are_lines_that_can_be_read_again(tmp_path: Path) -> None:
    words = ["policy", "generate", "--days", "1", "--per-day", "20", "--seed", "5"]
    words += ["--start", "2025-10-01T12:00"]
    printed = runner.invoke(app, words)
    assert printed.exit_code == 0
    expected = list(synthetic_offers(5, days=1, per_day=20, start=NOON))
    assert read_offer_lines(printed.stdout.splitlines(), "x") == expected
    file = tmp_path / "o.jsonl"
    written = runner.invoke(app, [*words, "--write", str(file)])
    assert (written.stdout, file.read_text()) == ("", printed.stdout)
    assert f"{len(expected)} offers" in written.stderr
    assert isinstance(runner.invoke(app, [*words, "--start", "tomorrow"]).exception, ConfigError)
