"""`god-miner config` shows what is in force, and never a secret."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from core.domain.errors import ConfigError
from miner.cli.config import app
from miner.settings import Settings
from miner.settings.reference import env_example

SECRET = "hush-hush-0123456789"


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)


def test_show_gives_value_source_and_meaning_of_every_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPERATOR_TOKEN", SECRET)
    Path(".env").write_text("NETUID=5\nMAX_HOUR=3\n")
    said = CliRunner().invoke(app, ["show"]).output
    for name in Settings.model_fields:
        assert f"{name.upper()} = " in said
    assert "NETUID = 5  (.env)" in said
    assert "OPERATOR_TOKEN = ***  (env)" in said
    assert "PUBLIC_IP = not set  (default)" in said
    assert "warning: MAX_HOUR is not a setting; did you mean MAX_HOURS?" in said
    assert SECRET not in said


def test_show_json_holds_the_same_for_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WALLET_PASSWORD", SECRET)
    monkeypatch.setenv("TASK_TYPES", "chat")
    done = CliRunner().invoke(app, ["show", "--json"])
    found = json.loads(done.output)["settings"]
    assert set(found) == {name.upper() for name in Settings.model_fields}
    assert found["TASK_TYPES"]["value"] == ["ChatTask"]
    assert found["TASK_TYPES"]["source"] == "env"
    assert found["NETUID"] == {"value": 56, "source": "default", "description": "The subnet."}
    assert found["WALLET_PASSWORD"]["value"] == "***"
    assert SECRET not in done.output


def test_every_wrong_setting_is_named_and_no_secret_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETUID", "x")
    monkeypatch.setenv("OPERATOR_TOKEN", "hush")
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, ["show"], catch_exceptions=False)
    assert [problem.where for problem in caught.value.problems] == ["NETUID", "OPERATOR_TOKEN"]
    assert "hush" not in str(caught.value.as_dict())


def test_the_example_is_printed_as_it_is_kept() -> None:
    assert CliRunner().invoke(app, ["env"]).output == env_example()
