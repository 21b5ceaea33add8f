from __future__ import annotations

from miner.support.retry_after import retry_after
from tests.doubles.each import each


@each(
    ("header", "seconds"),
    [
        ("2", 2.0),
        (" 1.5 ", 1.0),
        ("99999999999999", 999_999.0),
        ("Sat, 01 Jan 2000 00:00:00 GMT", 0.0),
        *((nothing, None) for nothing in (None, "", "soon", "-1", "²", "Fri, 99 Jan 2100 00:00:00 GMT")),
    ],
)
def test_a_header_is_a_number_or_a_date_or_nothing(header: str | None, seconds: float | None) -> None:
    assert retry_after(header) == seconds


def test_a_date_to_come_is_so_many_seconds_away() -> None:
    assert (retry_after("Fri, 01 Jan 2100 00:00:00 GMT") or 0.0) > 1e8
