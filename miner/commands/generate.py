"""`god-miner policy generate`: offers made up as validators send them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from miner.commands.output import say


def generate(
    days: Annotated[float, typer.Option(min=0.01, max=366, help="How long a stretch.")] = 7,
    per_day: Annotated[float, typer.Option(min=0.01, max=100_000, help="Offers a day, on average.")] = 60,
    seed: Annotated[int, typer.Option(help="The same seed gives the same offers.")] = 1,
    start: Annotated[
        str, typer.Option(help="When the first day begins (UTC), like 2025-10-01.")
    ] = "2025-10-01",
    write: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Into this file instead of the terminal.")
    ] = None,
) -> None:
    """Made-up offers as JSON lines, to try a policy on: types, sizes, hours and rows as validators draw them.
    How often a miner is asked is not known: say it with --per-day."""
    from datetime import UTC, datetime

    from core.errors import ConfigError, Problem
    from miner.offers.offered import to_line
    from miner.offers.stream import stream

    try:
        begins = datetime.fromisoformat(start)
    except ValueError as error:
        raise ConfigError("generate", [Problem("--start", start, str(error))]) from None
    at = (begins if begins.tzinfo else begins.replace(tzinfo=UTC)).timestamp()
    lines = (to_line(one) for one in stream(seed, days=days, per_day=per_day, start=at))
    if write is None:
        for line in lines:
            say(line)
        return
    text = "".join(f"{line}\n" for line in lines)
    write.write_text(text, encoding="utf-8")
    say(f"wrote {write}: {text.count(chr(10))} offers", err=True)
