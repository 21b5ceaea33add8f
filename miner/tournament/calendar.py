"""When to enter what: starts, fees, and what an entry is worth.

The arithmetic, per kind and week:

- prize = alpha that the champion of the kind gets in `DAYS` days × price of an alpha in TAO. The alpha is the
  subnet's emission to miners × the kind's weight × `CHAMPION_SHARE`, or the validators' own projection.
- An entry breaks even where P(win) = fee / prize. Below that, not entering is worth more.
- expected = P(win) × prize - fee. The cost of the GPUs that tried the entry out is not in it, nor what second
  and third get, nor what a champion gets who stays one for longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from core.domain.wire import TournamentType
from miner.tournament.polite_client import SiteError
from miner.tournament.public_api import PublicApi, Source
from miner.tournament.rules import (
    AS_OF,
    CHAMPION_SHARE,
    EMISSION_WEIGHTS,
    FEES_TAO,
    REGISTERED_FOR,
    next_start,
)

DAYS = 7
#: Until 2025 an earlier entry counted so much towards admission, by stake. No present rule is known to us.
BONUS_PER_WIN, MOST_BONUS = 0.05, 0.25


@dataclass(frozen=True, slots=True)
class Known:
    """A figure and where it is from: a site and a time, or the rules of a date."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Stakes:
    """What the operator says of one kind. None: not said."""

    p_win: float | None = None
    #: TAO; goes before what emission and price would give.
    prize: float | None = None
    #: Tournaments of the kind that were won before.
    wins: int = 0


@dataclass(frozen=True, slots=True)
class Market:
    #: Alpha that the subnet's miners get in a day, and TAO that an alpha costs.
    emission: float | None = None
    alpha_price: float | None = None
    #: Alpha of a champion in `DAYS` days, as validators project it.
    projected: Mapping[TournamentType, float] | None = None


@dataclass(frozen=True, slots=True)
class CalendarEntry:
    kind: TournamentType
    starts_at: datetime
    #: Who registers later is not in it.
    register_by: datetime
    fee: Known
    weight: Known
    bonus: float = 0.0
    prize: float | None = None
    #: P(win) from which on entering pays; above 1: it never does.
    break_even: float | None = None
    p_win: float | None = None
    expected: float | None = None


def calendar_of(
    now: datetime,
    fees: Mapping[TournamentType, Known],
    weights: Mapping[TournamentType, Known],
    stakes: Mapping[TournamentType, Stakes],
    market: Market,
) -> list[CalendarEntry]:
    """One entry per kind, the most valuable first if that is known, else by their start."""
    found = [_entry(kind, now, fees, weights, stakes.get(kind, Stakes()), market) for kind in FEES_TAO]
    return sorted(found, key=lambda one: (one.expected is None, -(one.expected or 0.0), one.starts_at))


def _entry(
    kind: TournamentType,
    now: datetime,
    fees: Mapping[TournamentType, Known],
    weights: Mapping[TournamentType, Known],
    stakes: Stakes,
    market: Market,
) -> CalendarEntry:
    starts = next_start(kind, now)
    rules = f"the rules of {AS_OF}"
    fee = fees.get(kind) or Known(FEES_TAO[kind], rules)
    weight = weights.get(kind) or Known(EMISSION_WEIGHTS[kind], rules)
    prize = stakes.prize if stakes.prize is not None else prize_of(kind, weight.value, market)
    expected = None
    if prize is not None and stakes.p_win is not None:
        expected = stakes.p_win * prize - fee.value
    return CalendarEntry(
        kind,
        starts,
        starts - REGISTERED_FOR,
        fee,
        weight,
        min(BONUS_PER_WIN * stakes.wins, MOST_BONUS),
        prize,
        fee.value / prize if prize else None,
        stakes.p_win,
        expected,
    )


def prize_of(kind: TournamentType, weight: float, market: Market) -> float | None:
    """TAO of a champion in `DAYS` days; None without a price, or without emission and projection."""
    if market.alpha_price is None:
        return None
    if market.emission is not None:
        return market.emission * DAYS * weight * CHAMPION_SHARE * market.alpha_price
    projected = (market.projected or {}).get(kind)
    return None if projected is None else projected * market.alpha_price


@dataclass(slots=True)
class LiveFigures:
    """What the public API says today, as far as it answers."""

    fees: dict[TournamentType, Known] = field(default_factory=dict)
    weights: dict[TournamentType, Known] = field(default_factory=dict)
    projected: dict[TournamentType, float] = field(default_factory=dict)
    #: What it did not say, and why.
    missing: list[str] = field(default_factory=list)


def live_figures(api: PublicApi, *, projections: bool) -> LiveFigures:
    found = LiveFigures()
    try:
        fees, source = api.fees()
        found.fees = {kind: Known(fee, _said(source)) for kind, fee in fees.items()}
        weights, source = api.weights()
        found.weights = {kind: Known(weight, _said(source)) for kind, weight in weights.items()}
        if projections:
            prizes, _ = api.prizes()
            for kind, of_kind in prizes.items():
                week = [prize.alpha for prize in of_kind if prize.days == DAYS]
                found.projected.update({kind: week[0]} if week else {})
            if not found.projected:
                found.missing.append(f"no projection of {DAYS} days: give --emission or --prize")
    except SiteError as error:
        found.missing.append(str(error))
    return found


def _said(source: Source) -> str:
    at = datetime.fromtimestamp(source.at, UTC)
    return f"{source.url}, {at:%Y-%m-%d %H:%M} UTC"
