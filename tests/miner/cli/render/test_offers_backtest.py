from __future__ import annotations

import pytest

from miner.cli.output import show_time
from miner.cli.render.offers import occupancy_bars
from tests.miner.offers.builders import NOON


@pytest.mark.parametrize(
    ("shares", "shown"),
    [((), ""), ((0, 0.001), "  "), ((0.01, 0.5, 0.99, 1.0), "▁▅██"), ((1.2,), "█")],
)
def test_a_bar_is_as_high_as_its_share(shares: tuple[float, ...], shown: str) -> None:
    assert occupancy_bars(shares) == shown


def test_moments_are_utc() -> None:
    assert show_time(NOON, seconds=False, year=True) == "2025-10-01 12:00"
