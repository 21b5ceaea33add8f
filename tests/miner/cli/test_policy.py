from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from core.domain.errors import ConfigError
from miner.cli.policy import app

runner = CliRunner()


def run(*words: str) -> Result:
    return runner.invoke(app, list(words), env={"COLUMNS": "200", "GPUS": "4xH100"})


def read(*words: str) -> Any:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    text = "extends: h100x4\ndescription: Mine\nnotes: [nothing]\nrules: {hours: {dpo: 12}}\n"
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "broken.yaml").write_text("rules:\n  max_jobz: 3\n")
    (tmp_path / "odd.yaml").write_text("score: {threshold: 2, weights: {task: 0, family: 0.6}}\n")
    return tmp_path


def test_list_names_the_shipped_policies_and_the_operator_s_first(mine: Path) -> None:
    rows = read("list", "--dir", str(mine))
    assert [row["name"] for row in rows[:3]] == ["broken", "mine", "odd"]
    assert "max_jobz" in rows[0]["description"]
    by_name = {row["name"]: row for row in rows}
    assert (by_name["h100x8"]["hardware"], by_name["h100x8"]["profile"]) == ("8xH100", "h100x8")
    assert "everything-feasible" in run("list").output


def test_show_gives_every_value_with_its_line(mine: Path) -> None:
    found = read("show", str(mine / "mine.yaml"), "--set", "max_jobs=3")
    settings = {one["path"]: one for one in found["settings"]}
    assert settings["rules.hours.dpo"] == {"path": "rules.hours.dpo", "value": 12, "origin": "mine.yaml:4"}
    assert settings["rules.max_jobs"]["origin"] == "set"
    assert settings["rules.hours.chat"]["origin"].startswith("h100x4.yaml:")
    assert found["notes"] == ["nothing"]
    said = run("show", str(mine / "mine.yaml")).output
    assert "not set: nothing" in said
    assert "mine.yaml:4" in said


def test_check_passes_what_is_shipped_and_counts_what_it_takes() -> None:
    result = run("check")
    assert result.exit_code == 0
    assert "h100x8: fine" in result.output
    assert "dpo 0/9 (task)" in result.output


def test_check_shows_what_is_wrong_and_fails(mine: Path) -> None:
    result = run("check", str(mine / "broken.yaml"), str(mine / "odd.yaml"), str(mine / "mine.yaml"))
    assert result.exit_code == 1
    assert "broken.yaml:2: rules.max_jobz: no such key; nearest is max_jobs" in result.output
    assert "score.threshold: 2 cannot be reached" in result.output
    assert "mine.yaml: fine" in result.output
    found = json.loads(run("check", str(mine / "odd.yaml"), "--json").output)
    (one,) = found.values()
    assert [finding["level"] for finding in one["findings"]] == ["error"]
    assert {tally["task"] for tally in one["accepts"]} == {"instruct", "chat", "dpo", "grpo", "image"}


def test_check_can_be_asked_for_another_host() -> None:
    few = json.loads(run("check", "everything-feasible", "--fleet", "1xL4", "--json").output)
    many = json.loads(run("check", "everything-feasible", "--fleet", "8xH100", "--json").output)

    def accepted(found: Any) -> int:
        return sum(one["accepted"] for one in found["everything-feasible"]["accepts"])

    assert accepted(few) < accepted(many)


def test_diff_shows_both_values_and_where_they_stand(mine: Path) -> None:
    rows = read("diff", "h100x4", str(mine / "mine.yaml"))
    assert [(row["key"], row["left"]["value"], row["right"]["value"]) for row in rows] == [
        ("rules.hours.dpo", 10, 12)
    ]
    said = run("diff", "h100x4", "h100x8").output
    assert "h100x4 and h100x8:" in said
    assert "| default" in said
    assert "0 values differ" in run("diff", "h100x4", "h100x4").output


def test_schema_is_json_schema_or_the_page() -> None:
    assert json.loads(run("schema").output)["title"] == "Policy"
    assert run("schema", "--markdown").output.startswith("# Acceptance policies")


def test_a_policy_that_is_not_there_is_reported() -> None:
    result = run("show", "nope")
    assert isinstance(result.exception, ConfigError)
    assert "known by name" in str(result.exception)
