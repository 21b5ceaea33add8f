from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from core.domain.errors import ConfigError
from miner.__main__ import app
from miner.offers.backtest.synthetic import synthetic_offers
from miner.offers.past_offers import read_offer_lines
from tests.miner.offers.builders import NOON

runner = CliRunner()


def run(*words: str) -> Result:
    return runner.invoke(app, ["policy", "generate", *words])


def test_offers_are_written_as_lines_that_can_be_read_again(tmp_path: Path) -> None:
    words = ("--days", "1", "--per-day", "20", "--seed", "5", "--start", "2025-10-01T12:00")
    printed = run(*words)
    assert printed.exit_code == 0
    expected = list(synthetic_offers(5, days=1, per_day=20, start=NOON))
    assert read_offer_lines(printed.stdout.splitlines(), "x") == expected
    file = tmp_path / "o.jsonl"
    written = run(
        "--days", "1", "--per-day", "20", "--seed", "5", "--start", "2025-10-01T12:00", "--write", str(file)
    )
    assert written.stdout == ""
    assert file.read_text() == printed.stdout
    assert f"{len(expected)} offers" in written.stderr


def test_a_start_that_is_no_date_is_told() -> None:
    assert isinstance(run("--start", "tomorrow").exception, ConfigError)
