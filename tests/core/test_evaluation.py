"""The evaluation's lengths."""

from __future__ import annotations

import pytest

from core.evaluation import Era, rules_of, sequence_limit
from tests.doubles.each import each


@each(
    ("window", "limit"),
    [(None, 4096), (131_072, 4096), (8192, 4096), (8191, 4096), (4096, 2048), (513, 257), (1, 1)],
)
def test_instruct_rows_may_be_half_a_small_window_long(window: int | None, limit: int) -> None:
    assert sequence_limit(window) == limit


@pytest.mark.parametrize(
    ("era", "window", "limit"),
    [
        (Era.OFFERS, None, 1024),
        (Era.OFFERS, 32_768, 1024),
        (Era.TOURNAMENTS, 32_768, 32_768),
        (Era.TOURNAMENTS, None, 8192),
    ],
)
def test_pairs_may_be_as_long_as_their_evaluation_takes_them(
    era: Era, window: int | None, limit: int
) -> None:
    assert rules_of(era).dpo_limit(window) == limit
