"""`god-miner tournament`: check an entry, prepare one, rehearse it, and see what the field trains with."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from miner.cli.output import echo, echo_json

app = typer.Typer(no_args_is_help=True, help="Tournaments: check, prepare and rehearse an entry.")

AsJson = Annotated[bool, typer.Option("--json", help="For machines: JSON.")]


@app.callback()
def tournament() -> None:
    """Tournaments: check, prepare and rehearse an entry."""


@app.command()
def calendar(as_json: AsJson = False) -> None:
    """Show when tournaments of each kind may begin next, and what an entry costs."""
    from miner.tournament.rules import AS_OF, FEES_TAO, next_start

    now = datetime.now(UTC)
    starts = {kind: next_start(kind, now) for kind in FEES_TAO}
    if as_json:
        echo_json(
            [
                {"kind": str(kind), "starts_at": start.isoformat(), "fee_tao": FEES_TAO[kind]}
                for kind, start in starts.items()
            ]
        )
        return
    for kind, start in starts.items():
        echo(f"{kind:<12} {start:%Y-%m-%d %H:%M} UTC   fee {FEES_TAO[kind]:g} TAO")
    echo(f"As validators had it on {AS_OF}.")
