from __future__ import annotations

import pytest

from core.domain.errors import ConfigError
from miner.cli.options import parse_time
from tests.doubles.each import each
from tests.miner.offers.builders import NOON


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
