"""Moments as one types them: `2d` ago, `12h` ago, or a date."""

from __future__ import annotations

from datetime import UTC, datetime

from core.errors import ConfigError, Problem
from core.units import parse_seconds


def moment(text: str, now: float) -> float:
    """Seconds since the epoch; a date without a zone is UTC."""
    try:
        return now - parse_seconds(text)
    except ValueError:
        pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        rule = "a length like 2d or 12h, or a date like 2025-10-01, is needed"
        raise ConfigError("time", [Problem("--since", text, rule)]) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
