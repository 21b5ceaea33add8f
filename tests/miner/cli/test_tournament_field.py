"""`god-miner tournament field`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from miner.__main__ import app
from miner.tournament.polite_client import PoliteClient
from tests.doubles.field import adapter, ai_toolkit_config, image_task
from tests.doubles.hub import Hub
from tests.doubles.public_api import HOTKEYS, PublicApiSite

pytestmark = pytest.mark.process


runner = CliRunner()
TASK = "11111111-2222-4333-8444-555555555555"


@pytest.fixture
def pulled(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PublicApiSite, Hub]]:
    """Two sites with one tournament, which was pulled."""
    monkeypatch.setattr("miner.tournament.public_api.PoliteClient", partial(PoliteClient, pause_s=0.0))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with PublicApiSite() as site, Hub() as hub:
        monkeypatch.setenv("PUBLIC_API_URL", site.url)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        entries = [{"hotkey": HOTKEYS[0], "repo": "invented/one", "rank": 1, "test_loss": 0.05}]
        site.add_tournament("image", "tourn_1_20261116", [image_task(TASK, hotkey_details=entries)])
        files = {"checkpoints/config.yaml": ai_toolkit_config(), "checkpoints/last.safetensors": adapter()}
        hub.add("invented/one", files)
        yield site, hub


def test_what_was_pulled_is_shown_beside_our_plan(
    pulled: tuple[PublicApiSite, Hub], data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = runner.invoke(app, ["tournament", "field", "pull", "--kind", "image"])
    assert done.exit_code == 0, done.output
    assert "1 tasks of tourn_1_20261116" in done.stdout
    assert "task 1 of 1" in done.stderr
    monkeypatch.setenv("COLUMNS", "80")
    shown = runner.invoke(app, ["tournament", "field", "show"]).stdout
    lines = shown.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[0] == "krea2  ImageTask  11111111  0.75 h  n 18 training pictures"
    assert lines[2].split() == (f"{HOTKEYS[0][:8]} 1 700 1×2 0.0003 cosine 24/12 0.15 mae 0.97 0.12".split())
    assert lines[3].startswith("our plan")
    assert "our sum of rates is" in lines[4]


def test_the_same_for_programs(pulled: tuple[PublicApiSite, Hub], data_dir: Path) -> None:
    to = data_dir / "elsewhere"
    done = runner.invoke(app, ["tournament", "field", "pull", "--to", str(to), "--json"])
    assert json.loads(done.stdout)["entries"] == 1
    shown = json.loads(
        runner.invoke(
            app, ["tournament", "field", "show", "--from", str(to), "--hotkey", HOTKEYS[0], "--json"]
        ).stdout
    )
    (task,) = shown["tasks"]
    assert task["entries"][0]["recipe"]["steps"] == 700
    assert task["our_plan"]["lora_rank"]
    assert (shown["own_results"]["first"], shown["own_results"]["won"]) == (1, 1)


def test_without_a_network_the_error_names_the_site(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    done = runner.invoke(app, ["tournament", "field", "pull", "--api", "http://127.0.0.1:9"])
    assert done.exit_code
    assert "127.0.0.1:9 cannot be reached" in str(done.exception)


def test_nothing_pulled_and_nothing_of_that_family(pulled: object, data_dir: Path) -> None:
    assert "field pull" in str(runner.invoke(app, ["tournament", "field", "show"]).exception)
    runner.invoke(app, ["tournament", "field", "pull", "--kind", "image"])
    done = runner.invoke(app, ["tournament", "field", "show", "--family", "flux"])
    assert "no task of flux" in str(done.exception)
