"""The page of alerts is what the declarations say."""

from __future__ import annotations

from pathlib import Path

from miner.alerts.docs import markdown

PAGE = Path(__file__).parents[3] / "docs" / "alerts.md"


def test_the_page_is_what_the_declarations_say() -> None:
    assert PAGE.read_text() == markdown(), "run: python -m miner.alerts.docs docs/alerts.md"
