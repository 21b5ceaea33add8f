from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner, Result

from core.domain.tasks import OFFERED_TASKS
from miner.__main__ import app
from miner.cli import submission
from tests.core.submission import folders
from tests.core.submission.folders import BASE_ID, validators_hash, write
from tests.doubles.hub import Hub
from tests.doubles.hub_upload import LICENCES as LICENCES  # adds the routes that write


def cli(*args: object, **env: str) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], env=env)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return folders.adapter(tmp_path / "adapter")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return folders.base(tmp_path / "base")


def test_a_good_folder_is_shown_with_what_is_mended_and_left_out(adapter: Path, base: Path) -> None:
    result = cli("submission", "check", adapter, "--model", BASE_ID, "--base", base)
    assert result.exit_code == 0
    for text in ("adapter_model.safetensors", "mended", "left out  debug.log", "model_hash", "good"):
        assert text in result.stdout


def test_a_programs_verdict_has_everything(adapter: Path, base: Path) -> None:
    result = cli("submission", "check", adapter, "--model", BASE_ID, "--base", base, "--json")
    reported: dict[str, Any] = json.loads(result.stdout)
    assert (reported["good"], reported["kind"], len(reported["model_hash"])) == (True, "adapter", 64)
    assert reported["files"]["adapter_model.safetensors"]["size"] > 0
    # As a tournament takes it, strays and local names are faults.
    result = cli("submission", "check", adapter, "--model", BASE_ID, "--as-is", "--json")
    assert result.exit_code == 1
    kinds = {fault["kind"] for fault in json.loads(result.stdout)["faults"]}
    assert kinds == {"stray", "pickle", "wrong_base", "bad_card"}


def test_what_is_wrong_is_shown_with_the_way_out_and_exit_code_1(adapter: Path, tmp_path: Path) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(b"x" * 20)
    result = cli("submission", "check", adapter, "--model", BASE_ID)
    assert result.exit_code == 1
    assert "fault     adapter_model.safetensors: says that its header" in result.stdout
    assert "not good" in result.stdout
    for arguments, why in (((tmp_path / "nothing",), "No such file"),):
        result = cli("submission", "check", *arguments)
        assert result.exit_code == 1
        assert why in str(result.exception)
    assert cli("submission", "check", adapter, "--task-type", "nonsense").exit_code == 2


def test_the_hash_is_the_one_that_validators_take(adapter: Path, tmp_path: Path) -> None:
    assert cli("submission", "hash", adapter).stdout.strip() == validators_hash(adapter)
    assert json.loads(cli("submission", "hash", adapter, "--json").stdout) == {
        "model_hash": validators_hash(adapter)
    }
    empty = write(tmp_path / "empty", {"README.md": "x"})
    result = cli("submission", "hash", empty)
    assert result.exit_code == 1
    assert "nothing that counts" in result.stderr


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as running:
        yield running


def environment(tmp_path: Path, hub: Hub | None = None) -> dict[str, str]:
    found = {"DATA_DIR": str(tmp_path / "data"), "HF_USER": "tester"}
    if hub is not None:
        found |= {"HUB": "huggingface", "HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token}
    return found


@pytest.mark.process
def test_a_person_publishes_to_the_hub_and_keeps_the_card(
    adapter: Path, base: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(adapter, {"README.md": f"---\nbase_model: {BASE_ID}\nlicense: mit\n---\nMine.\n"})
    args = ("publish", adapter, "--repo", "mine", "--model", BASE_ID, "--base", base, "--json")
    result = cli(*args, **environment(tmp_path, hub))
    assert result.exit_code == 0, result.output
    reported = json.loads(result.stdout)
    assert reported["repo"] == "tester/mine"
    files = hub.repo("tester/mine").head.files
    assert b"Mine." in bytes(files["README.md"].content)  # type: ignore[arg-type]
    assert hub.token not in result.output
    assert list((tmp_path / "data" / "publishing").glob("*.json")) == []


@pytest.mark.process
def test_the_embedded_default_is_a_folder(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli("publish", adapter, "--repo", "mine", "--model", BASE_ID, **environment(tmp_path))
    assert result.exit_code == 0, result.output
    assert validators_hash(tmp_path / "data" / "hub" / "tester" / "mine") in result.stdout
    assert "left out: debug.log" in result.stderr


@pytest.mark.parametrize("name", ["a/b", "..", "a--b", "x" * 97, "a b", "m.git"])
def test_a_name_that_no_repository_can_have_is_refused(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli("publish", adapter, "--repo", name, **environment(tmp_path))
    assert "--repo" in str(result.exception)
    assert not os.path.exists(tmp_path / "data" / "hub")


def test_the_choices_of_a_task_type_are_the_offered_ones() -> None:
    assert set(get_args(submission.TaskName)) == {task_type.name.lower() for task_type in OFFERED_TASKS}
