from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from core.domain.decisions import Decision
from miner.cli.output import show_time
from miner.cli.render.offers import decision_pages, occupancy_bars, offer_heading
from miner.offers.views import decision_details
from tests.doubles.each import each
from tests.miner.offers.builders import NOON, decided, fleet, hold, offer, picture_offer, policy


@pytest.mark.parametrize(
    ("shares", "shown"),
    [((), ""), ((0, 0.001), "  "), ((0.01, 0.5, 0.99, 1.0), "▁▅██"), ((1.2,), "█")],
)
def test_a_bar_is_as_high_as_its_share(shares: tuple[float, ...], shown: str) -> None:
    assert occupancy_bars(shares) == shown


def test_moments_are_utc() -> None:
    assert show_time(NOON, seconds=False, year=True) == "2025-10-01 12:00"


def page(asked: Any, found: Decision) -> str:
    console = Console(file=StringIO(), width=200, markup=False, highlight=False)
    for one in decision_pages(asked, found):
        console.print(one)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@each("gpus", ["4xH100", "1xL4"])
@each("asked", [offer(), picture_offer(), offer(hours_to_complete=0.0)])
def test_whatever_was_decided_can_be_shown(gpus: str, asked: Any) -> None:
    found = decided(asked, policy("conservative"), fleet(gpus))
    said = page(asked, found)
    for reason in found.reasons:
        assert reason.text in said
    for reason in found.failed:
        assert f"{reason.rule}: {reason.way}" in said
    assert decision_details(asked, found).accepted is found.accepted


def test_a_decision_without_details_is_shown_as_far_as_it_goes() -> None:
    bare = Decision(False, "Not taken", "old", "h")
    assert "refused by policy old" in page(offer(), bare)
    assert decision_details(offer(), bare).placement is None


def test_the_command_to_try_sets_what_the_reasons_ask_for() -> None:
    strict = policy("h100x4", rules__max_hours=1, rules__max_jobs=0, score__threshold=0.99)
    said = page(offer(), decided(by=strict))
    assert "--set rules.max_hours=3" in said
    assert "--set rules.max_jobs=1" in said
    assert "--set score.threshold=0." in said
    assert "--offer task-1" in said
    full = decided(on=fleet("4xH100", hold("a", "0123", end=2)))
    assert "--set fitting.max_wait=120m" in page(offer(), full)


def test_what_it_says_can_be_tried_lets_the_offer_pass() -> None:
    strict = policy("h100x4", rules__max_hours=1, rules__max_jobs=0, score__threshold=0.99)
    words = page(offer(), decided(by=strict)).split("Try: ")[1].split()
    pairs = (word.split("=") for word in words if "=" in word)
    kind = strict.with_overrides({key: float(value) for key, value in pairs if key != "rules.max_jobs"})
    assert decided(by=kind.with_overrides({"rules.max_jobs": 1})).accepted


def test_the_heading_is_what_was_offered() -> None:
    assert offer_heading(offer()) == "InstructTextTask, meta-llama/Llama-3.1-8B, 8.03B parameters, 3 h"
    assert "no parameter count" in offer_heading(picture_offer())
