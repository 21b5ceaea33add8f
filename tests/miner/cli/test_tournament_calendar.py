"""`god-miner tournament calendar`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from miner.__main__ import app
from miner.tournament.polite_client import PoliteClient
from tests.doubles.public_api import PublicApiSite

pytestmark = pytest.mark.process


runner = CliRunner()


@pytest.fixture
def site(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PublicApiSite]:
    monkeypatch.setattr("miner.tournament.public_api.PoliteClient", partial(PoliteClient, pause_s=0.0))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with PublicApiSite() as opened:
        monkeypatch.setenv("PUBLIC_API_URL", opened.url)
        yield opened


def run(*words: str) -> Result:
    return runner.invoke(app, ["tournament", "calendar", *words])


def kinds(*words: str) -> dict[str, dict[str, object]]:
    return {one["kind"]: one for one in json.loads(run("--json", *words).stdout)["kinds"]}


def test_live_fees_and_weights_with_their_source(site: PublicApiSite) -> None:
    text = kinds()["text"]
    assert (text["fee_tao"], text["emission_weight"]) == (0.71, 0.41)
    assert str(text["fee_source"]).startswith(f"{site.url}/tournament/fees, ")
    assert len(site.requests) == 2


def test_a_prize_by_the_validators_projection(site: PublicApiSite) -> None:
    rows = [{"days": 7, "weight": 0.2, "total_alpha": 355.0}]
    site.pages["/v1/performance/weight-projection-static"] = {
        "projections": [{"percentage_improvement": 1, "text_projection": {"projections": rows}}]
    }
    text = kinds("--alpha-price", "0.02", "--p-win", "text=0.3")["text"]
    assert text["prize_tao"] == pytest.approx(7.1)
    assert text["break_even_p_win"] == pytest.approx(0.1)
    assert text["expected_tao"] == pytest.approx(0.3 * 7.1 - 0.71)


def test_without_an_answer_stored_figures_are_shown_and_it_is_said(
    site: PublicApiSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    site.fail("", status=500, times=None)
    done = run()
    assert done.exit_code == 0
    assert "fees: the rules of 2026-" in done.stdout
    assert "stored figures are shown: " in done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_offline_asks_nobody(site: PublicApiSite) -> None:
    done = run("--offline", "--prize", "text=14", "--p-win", "text=0.1", "--wins", "text=6")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("text ")]
    assert line.split()[-5:] == ["14", "5", "%", "0.1:", "+0.70"]
    assert "earlier wins counted 25 % more" in done.stdout
    assert site.requests == []


@pytest.mark.parametrize("given", ["text", "text=2", "song=0.1", "text=nan", "text=-1"])
def test_a_chance_that_is_none_is_refused(data_dir: Path, given: str) -> None:
    done = run("--offline", "--p-win", given)
    assert "must be KIND=NUMBER" in str(done.exception)
