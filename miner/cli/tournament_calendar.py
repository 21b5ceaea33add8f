"""`god-miner tournament calendar`: which kinds begin when, and whether entering pays."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from core.domain.errors import ConfigError, Problem
from core.domain.wire import TournamentType
from miner.cli.options import AsJson, load_settings
from miner.cli.output import echo_json

PWin = Annotated[
    list[str] | None, typer.Option("--p-win", help="Your chance to win a kind, such as text=0.2; repeat it.")
]
PrizeTao = Annotated[
    list[str] | None,
    typer.Option("--prize", help="What winning a kind brings in TAO, such as text=12; repeat it."),
]
Wins = Annotated[
    list[str] | None, typer.Option("--wins", help="Tournaments of a kind won before, such as text=2.")
]
Emission = Annotated[
    float | None, typer.Option(min=0, help="Alpha that the subnet's miners get in a day, for the prize.")
]
AlphaPrice = Annotated[float | None, typer.Option(min=0, help="TAO that an alpha costs, for the prize.")]
Offline = Annotated[bool, typer.Option("--offline", help="Ask no site: fees and weights as stored.")]


def calendar(
    p_win: PWin = None,
    prize: PrizeTao = None,
    wins: Wins = None,
    emission: Emission = None,
    alpha_price: AlphaPrice = None,
    offline: Offline = False,
    as_json: AsJson = False,
) -> None:
    """Show when tournaments may begin next, what an entry costs, and what it is worth.

    Prize: what a champion gets in a week. Either --prize, or --alpha-price with --emission or with the
    validators' own projection. An entry pays from P(win) = fee / prize on; with --p-win its expected value is
    P(win) × prize - fee. Fees and weights come from the public API, or else are as stored, with their date.
    """
    from miner.cli.render.calendar import calendar_data, print_calendar
    from miner.tournament.calendar import LiveFigures, Market, Stakes, calendar_of, live_figures
    from miner.tournament.public_api import open_public_api
    from miner.tournament.rules import FEES_TAO

    chances, prizes = _by_kind("--p-win", p_win, most=1.0), _by_kind("--prize", prize)
    won = _by_kind("--wins", wins)
    live = LiveFigures()
    if not offline:
        with open_public_api(load_settings()) as api:
            live = live_figures(api, projections=alpha_price is not None and emission is None)
    stakes = {kind: Stakes(chances.get(kind), prizes.get(kind), int(won.get(kind, 0))) for kind in FEES_TAO}
    market = Market(emission, alpha_price, live.projected)
    found = calendar_of(datetime.now(UTC), live.fees, live.weights, stakes, market)
    if as_json:
        echo_json(calendar_data(found, live.missing))
    else:
        print_calendar(found, live.missing)


def _by_kind(option: str, given: list[str] | None, most: float = 1e9) -> dict[TournamentType, float]:
    """Read KIND=NUMBER."""
    found = {}
    for one in given or ():
        kind, _, value = one.partition("=")
        try:
            number = float(value)
            if not 0 <= number <= most:
                raise ValueError
            found[TournamentType(kind)] = number
        except ValueError:
            kinds = ", ".join(TournamentType)
            rule = f"must be KIND=NUMBER: one of {kinds}, and a number from 0 to {most:g}"
            raise ConfigError("calendar", [Problem(option, one, rule)]) from None
    return found
