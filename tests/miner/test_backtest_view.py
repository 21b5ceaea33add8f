from __future__ import annotations

import pytest

from miner.backtest_view import bars, when
from tests.miner.offers.builders import NOON


@pytest.mark.parametrize(
    ("shares", "shown"),
    [((), ""), ((0, 0.001), "  "), ((0.01, 0.5, 0.99, 1.0), "▁▅██"), ((1.2,), "█")],
)
def test_a_bar_is_as_high_as_its_share(shares: tuple[float, ...], shown: str) -> None:
    assert bars(shares) == shown


def test_moments_are_utc() -> None:
    assert when(NOON) == "2025-10-01 12:00"
