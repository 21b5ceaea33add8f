from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from core.domain.errors import ConfigError
from core.domain.hardware import parse_gpus
from miner.cli.policy import app as policy_app
from miner.cli.profile import app
from miner.doctor.checks import training
from miner.doctor.examine import CheckContext
from miner.fleet.sources import FixedGpuSource
from miner.settings import load_settings

runner = CliRunner()


def run(*words: str) -> Result:
    return runner.invoke(app, list(words), env={"COLUMNS": "200", "GPUS": "4xH100"})


def read(*words: str) -> Any:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text("extends: h100x4\ndescription: Mine\ntargets: {lora_r: 256}\n")
    (tmp_path / "broken.yaml").write_text("targets:\n  lora_rr: 3\n")
    return tmp_path


def test_list_names_an_operators_own_profiles_first_and_the_shipped_ones(mine: Path) -> None:
    rows = read("list", "--dir", str(mine))
    assert [row["name"] for row in rows[:2]] == ["broken", "mine"]
    assert "lora_rr" in rows[0]["description"]
    by_name = {row["name"]: row for row in rows}
    assert {"h100x4", "h100x4-strategy", "h100x8", "h100-fast", "steady", "cpu-demo"} <= set(by_name)
    assert by_name["h100x8"]["hardware"] == "8xH100"
    assert [name for name, row in by_name.items() if row["in_force"]] == ["h100x4"]
    assert "h100x4-strategy" in run("list").output


@pytest.mark.parametrize(("command", "name"), [(app, "cpu-demo"), (policy_app, "everything-feasible")])
def test_what_is_in_force_without_a_gpu_is_what_doctor_says(
    command: typer.Typer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = FixedGpuSource(parse_gpus("cpu"), "no NVIDIA driver")
    monkeypatch.setattr("miner.backends.build_fleet.build_gpu_source", lambda _gpus, _nvml: look)
    listed = runner.invoke(command, ["list"]).output
    findings = {
        one.what: one.detail for one in training.check_tuning(CheckContext(load_settings(env_file=None)))
    }
    word = "profile" if command is app else "policy"
    why = f"because {word.upper()} is auto and there is no GPU"
    assert f"in force: {name}, {why}" in listed
    assert findings[word].startswith(f"{name} (")
    assert findings[word].endswith(why)
    rows = json.loads(runner.invoke(command, ["list", "--json"]).stdout)
    assert [row["name"] for row in rows if row["in_force"]] == [name]


def test_show_gives_every_value_with_its_line_and_with_defaults_what_nobody_wrote() -> None:
    found = read("show", "h100x8", "--task", "grpo", "--model", "Qwen/Qwen2.5-7B")
    settings = {each["path"]: each for each in found["settings"]}
    assert found["sections"] == ["grpo", "medium-models"]
    assert settings["targets.lora_r"]["value"] == 816
    assert settings["targets.lora_r"]["unscaled"] == 512
    assert "816 (scaled from 512)" in run("show", "h100x8", "--task", "grpo").output
    assert read("show", "h100x4", "--model", "flux")["for"] == "image flux"
    assert read("show", "h100x4", "--task", "image")["for"] == "image sdxl"
    assert "targets.rslora" not in run("show", "steady").output
    assert "targets.rslora" in run("show", "steady", "--defaults").output


def test_one_edited_number_is_seen_with_one_command(mine: Path) -> None:
    found = read("diff", "h100x4", "mine", "--dir", str(mine))
    assert [(each["path"], each["left"], each["right"]) for each in found] == [("targets.lora_r", 512, 256)]
    assert "1 values differ" in run("diff", "h100x4", "mine", "--dir", str(mine)).output


def test_check_is_content_with_all_shipped_profiles() -> None:
    result = run("check")
    assert result.exit_code == 0
    assert "8 checked in" in result.output


def test_check_shows_file_and_line_and_fails(mine: Path) -> None:
    result = run("check", "broken", "--dir", str(mine))
    assert result.exit_code == 1
    assert "broken.yaml:2: targets.lora_rr: no such key; nearest is lora_r" in result.output
    result = run("check", "mine", "broken", "--dir", str(mine), "--json")
    assert result.exit_code == 1
    assert json.loads(result.output)["broken"][0]["level"] == "error"
    assert run("check", str(mine / "mine.yaml")).exit_code == 0
    missing = run("check", str(mine / "missing.yaml"))
    assert missing.exit_code == 1
    assert "no such profile" in missing.output
    assert "chooses it" not in missing.output


def test_schema_is_a_json_schema_and_the_page() -> None:
    assert json.loads(run("schema").output)["properties"]["targets"]
    assert run("schema", "--markdown").output.startswith("# Tuning profiles")


def test_explain_says_what_becomes_of_each_value_and_what_was_left_out() -> None:
    output = run("explain", "h100x4").output
    assert "limits.gpu_memory = 75.0 GB (h100x4.yaml:" in output
    assert "renamed: kept as the planner's budget" in output
    assert "not set: base.yml's max_steps: 10" in output
    found = read("explain", "h100x4", "--model", "flux")
    assert found["files"] == ["base.yaml", "h100x4.yaml"]
    assert {subject for each in found["remarks"] for subject in each["subjects"]} == {"image flux"}


def test_sections_for_some_pictures_are_shown_compared_and_explained() -> None:
    few = ("--model", "krea2", "--pictures", "18")
    assert read("show", "steady", *few)["sections"] == ["image", "krea2", "pictures"]
    assert (
        "steady for image krea2, 18 pictures; sections: image, krea2, pictures"
        in run("show", "steady", *few).output
    )
    unknown = run("show", "steady", "--model", "krea2").output
    assert "steady for image krea2, 30 pictures assumed; sections: image, krea2, pictures" in unknown
    steps = {each["path"]: each["left"] for each in read("diff", "steady", "base", *few)}
    assert steps["targets.max_steps"] == 1000
    (remark,) = {each["subjects"][0] for each in read("explain", "steady", *few)["remarks"]}
    assert remark == "image krea2, 18 pictures"
    refused = run("show", "steady", "--pictures", "18")
    assert isinstance(refused.exception, ConfigError)
    assert "add --task image" in str(refused.exception)


def test_a_wrong_word_is_shown_with_the_right_ones() -> None:
    result = run("show", "steady", "--task", "sing")
    assert isinstance(result.exception, ConfigError)
    assert "instruct, chat, dpo, grpo, image" in str(result.exception)
    assert isinstance(run("show", "nope").exception, ConfigError)
