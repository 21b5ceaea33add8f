"""The header `Retry-After`, by which a server says how long to wait."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime


def retry_after(header: str | None) -> float | None:
    """Return the seconds of a header, which is a number or a date; None where it says neither."""
    value = (header or "").strip()
    number = value.partition(".")[0]
    if number.isdecimal():
        return float(number[:6])
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):
        return None
