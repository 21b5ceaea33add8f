"""What the TAB key offers, asked as a shell asks."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from core.domain.errors import ConfigError
from miner.__main__ import app
from miner.cli.options import parse_time
from tests.doubles.each import each
from tests.miner.offers.builders import NOON, offer
from tests.miner.offers.filled import job, store


def offered(line: str) -> list[str]:
    """For the last word of the line."""
    words = line.split(" ")
    env = {
        "_GOD_MINER_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    return CliRunner().invoke(app, [], prog_name="god-miner", env=env).output.split()


def test_names_types_and_jobs_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "h100-mine.yaml").write_text("extends: h100x4\n")
    assert offered("god-miner jobs show ") == []
    with store(tmp_path) as connection:
        job(connection, offer(task_id="task-one"), NOON)
    expected = {
        "god-miner profile show h100-": ["h100-mine", "h100-fast"],
        "god-miner plan --profile stea": ["steady"],
        "god-miner plan --task-type d": ["dpo"],
        "god-miner policy show cons": ["conservative"],
        "god-miner policy backtest --policy every": ["everything-feasible"],
        "god-miner jobs show ": ["1"],
        "god-miner jobs cancel task-": ["task-one"],
    }
    assert {line: offered(line) for line in expected} == expected
    (tmp_path / ".env").write_text("PUBLIC_PORT=no\n")
    assert offered("god-miner profile show h100-") == []


@each(
    ("text", "expected"),
    [
        ("2d", NOON - 2 * 86_400),
        ("1h30m", NOON - 5400),
        ("2025-10-01T12:00", NOON),
        ("2025-10-01", NOON - 12 * 3600),
        ("2025-10-01T14:00+02:00", NOON),
    ],
)
def test_a_moment_is_a_length_back_or_a_date(text: str, expected: float) -> None:
    assert parse_time(text, NOON) == expected


@pytest.mark.parametrize("text", ["", "2", "yesterday", "2025-13-01"])
def test_anything_else_is_reported(text: str) -> None:
    with pytest.raises(ConfigError, match="2d or 12h"):
        parse_time(text, NOON)
