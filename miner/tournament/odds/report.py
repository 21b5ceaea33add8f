"""The odds of one tournament as data and as text of 80 columns, with what other assumptions would change."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from core.domain.tournament_rules import AS_OF, EMISSION, TournamentRules, place_shares
from miner.tournament.odds.bracket import BRACKETS, Chances, Opponents, Placings, simulate
from miner.tournament.odds.history import (
    ASSUMED_WEEKS,
    CORRELATIONS,
    FieldFacts,
    History,
    OddsBacktest,
)
from miner.tournament.odds.value import HIGH, LOW, WEEKS, Stakes, Worth, worth

_WIDTH = 80
_DAYS = 7
#: What is varied, and by how much.
_MOVED, _STRONGER, _UNSURE = 0.1, 0.15, 0.3


@dataclass(frozen=True, slots=True)
class EntryPrices:
    """The operator's prices."""

    fee: float
    gpu_hours: float = 0.0
    gpu_usd: float = 0.0
    tao_usd: float | None = None
    #: TAO for one alpha, or None if it is not known.
    alpha_price: float | None = None
    weeks: int = WEEKS

    @property
    def gpus(self) -> float:
        """TAO for the GPUs of the preparation."""
        usd = self.gpu_hours * self.gpu_usd
        return usd / self.tao_usd if usd and self.tao_usd else 0.0

    @property
    def cost(self) -> float:
        return self.fee + self.gpus


@dataclass(frozen=True, slots=True)
class Variant:
    """The odds if one thing were otherwise."""

    what: str
    p_win: float
    expected: float | None


@dataclass(frozen=True, slots=True)
class Odds:
    rules: TournamentRules
    chances: Chances
    history: History
    facts: FieldFacts
    money: EntryPrices
    #: The kind's share of the emission.
    share: float
    placings: Placings
    #: Alpha that a champion is paid in a week.
    weekly_alpha: float
    #: An entry pays from this price of alpha on, in TAO, or at none.
    pays_from: float | None
    #: In TAO; None without a price of alpha.
    worth: Worth | None
    variants: tuple[Variant, ...]
    #: The first simulation took so long.
    seconds: float

    @property
    def p_win(self) -> float:
        return self.placings.share(self.placings.won)

    @property
    def enter(self) -> bool | None:
        """True if an entry is worth more than it costs, on average; None without a price of alpha."""
        return None if self.worth is None else self.worth.expected > 0

    def as_dict(self) -> dict[str, object]:
        shown = {name: value for name, value in asdict(self).items() if name != "rules"}
        return {
            "kind": str(self.rules.kind),
            "rules_as_of": AS_OF,
            **shown,
            "cost": self.money.cost,
            "p_win": self.p_win,
            "enter": self.enter,
        }


def odds_of(
    rules: TournamentRules,
    chances: Chances,
    history: History,
    facts: FieldFacts,
    money: EntryPrices,
    share: float,
    *,
    brackets: int = BRACKETS,
    seed: int = 0,
) -> Odds:
    """Simulate, and simulate again with what may be otherwise, a tenth as often."""
    began = time.monotonic()
    placings = simulate(rules, chances, facts.opponents, brackets=brackets, seed=seed)
    seconds = time.monotonic() - began
    kind_alpha = EMISSION.daily_alpha * _DAYS * share
    unit = worth(
        placings, _stakes(replace(money, fee=0.0, gpu_hours=0.0, alpha_price=1.0), facts, kind_alpha)
    )
    found = None
    if money.alpha_price is not None:
        found = worth(placings, _stakes(money, facts, kind_alpha))

    def variant(
        what: str,
        other: Chances = chances,
        opponents: Opponents = facts.opponents,
        falls: float = facts.falls,
    ) -> Variant:
        played = placings
        if other is not chances or opponents != facts.opponents:
            played = simulate(rules, other, opponents, brackets=max(brackets // 10, 1), seed=seed)
        value = None
        if money.alpha_price is not None:
            value = worth(played, _stakes(money, replace(facts, falls=falls), kind_alpha)).expected
        return Variant(what, played.share(played.won), value)

    stronger = min(facts.challenger_wins + _STRONGER, 0.95)
    unsure = 0.0 if chances.correlation else _UNSURE
    variants = (
        variant(f"each of our chances is {_MOVED:.0%} lower", chances.moved(-_MOVED)),
        variant(f"each of our chances is {_MOVED:.0%} higher", chances.moved(_MOVED)),
        variant(
            f"our tasks go together, by {unsure:g}" if unsure else "our tasks have nothing in common",
            chances.moved(0.0, unsure),
        ),
        variant(
            f"challengers win {stronger:.0%} of the boss's tasks",
            opponents=replace(facts, challenger_wins=stronger).opponents,
        ),
        variant("twice as many enter", opponents=replace(facts.opponents, entries=2 * facts.entrants)),
        variant("champions fall twice as often", falls=min(2 * facts.falls, 1.0)),
    )
    pays_from = money.cost / unit.expected if unit.expected > 0 else None
    champions = kind_alpha * place_shares()[0]
    return Odds(
        rules, chances, history, facts, money, share, placings, champions, pays_from, found, variants, seconds
    )


def _stakes(money: EntryPrices, facts: FieldFacts, kind_alpha: float) -> Stakes:
    return Stakes(
        money.cost, kind_alpha * (money.alpha_price or 0.0), place_shares(), facts.falls, money.weeks
    )


# — for people


def odds_lines(odds: Odds) -> Iterator[str]:
    kind, placings, facts = odds.rules.kind, odds.placings, odds.facts
    yield from _wrapped(
        f"{kind} tournament by the rules of {AS_OF}: {placings.brackets:,} brackets in {odds.seconds:.1f} s"
    )
    yield from _wrapped(_history_text(odds.history))
    yield ""
    yield from _fact("P(win a task)", _chances_text(odds.chances))
    yield from _fact(
        "others",
        f"{facts.entrants} enter; the best of them wins {facts.challenger_wins:.0%} of the boss's tasks; two "
        f"tasks rank them alike by {facts.agreement:.2f}"
        if facts.entrants
        else "nobody else enters",
    )
    reached = ", ".join(
        f"{name} {placings.share(count):.1%}" for name, count in placings.reached.items() if name != "round1"
    )
    yield from _fact("we reach", reached or "nothing")
    yield from _fact("P(win)", _places_text(odds))
    yield ""
    yield from _money_lines(odds)
    yield ""
    yield from _variant_lines(odds)
    yield ""
    yield from _wrapped(_verdict(odds))


def _history_text(history: History) -> str:
    if not history.tournaments:
        return (
            "no history: the field is assumed. `god-miner tournament field pull --past 12` fetches some, if "
            "the API gives it"
        )
    entrants = ""
    if history.entrants:
        least, most = min(history.entrants), max(history.entrants)
        entrants = f", {least} to {most} entries" if least < most else f", {most} entries"
    return (
        f"history: {history.tournaments} tournaments, {history.dethroned} new champions{entrants}, "
        f"{history.boss_tasks_won} of {history.boss_tasks} boss tasks won; our assumptions weigh as much as "
        f"{ASSUMED_WEEKS} tournaments"
    )


def _chances_text(chances: Chances) -> str:
    given = [f"{name} {chance:.0%}" for name, chance in chances.win.items()]
    given += [f"all others {chances.usual:.0%}"] if chances.usual is not None else []
    given += [f"{name} drawn {share:.0%}" for name, share in chances.draw.items()]
    given += [f"correlation {chances.correlation:g}"] if chances.correlation else []
    return ", ".join(given)


def _places_text(odds: Odds) -> str:
    placings = odds.placings
    second, third = placings.share(placings.second), placings.share(placings.third)
    return f"{odds.p_win:.1%}; second {second:.1%}, third {third:.1%}"


def _money_lines(odds: Odds) -> Iterator[str]:
    money = odds.money
    gpus = ""
    if money.gpus:
        gpus = f", GPUs {money.gpus:.2f} TAO ({money.gpu_hours:g} h at {money.gpu_usd:g} USD)"
    yield from _fact("cost", f"{money.cost:.2f} TAO: fee {money.fee:.2f}{gpus}")
    weekly = f"{odds.weekly_alpha:,.0f} alpha"
    if money.alpha_price is not None:
        weekly += f" ({odds.weekly_alpha * money.alpha_price:,.2f} TAO)"
    reign = Stakes(0.0, 0.0, (), odds.facts.falls, money.weeks).reign
    yield from _fact(
        "a win",
        f"{weekly} a week for {reign:.1f} weeks on average: the champion falls with {odds.facts.falls:.0%} "
        f"in each, and {money.weeks} are counted at most; the kind has {odds.share:.0%} of the emission",
    )
    if (found := odds.worth) is not None:
        yield from _fact(
            "expected",
            f"{found.expected:+.2f} TAO; {LOW:.0%} {found.low:+.2f}, median {found.median:+.2f}, "
            f"{HIGH:.0%} {found.high:+.2f}; {found.pays:.0%} not to lose money",
        )
        if found.breaks_even <= 1:
            text = f"P(win) {found.breaks_even:.1%}, at as many second and third places"
        else:
            text = "at no P(win): a whole reign brings less than the entry costs"
        yield from _fact("breaks even at", text)


def _variant_lines(odds: Odds) -> Iterator[str]:
    head = "P(win)" if odds.worth is None else "P(win)   expected"
    yield f"{'if …':<48}{head}"
    for one in odds.variants:
        value = "" if one.expected is None else f"{one.expected:+9.2f} TAO"
        yield f"  {one.what:<44}{one.p_win:>8.1%}{value}"


def _verdict(odds: Odds) -> str:
    if odds.worth is None:
        if odds.pays_from is None:
            return "Enter? No: no place is won at these chances."
        return (
            f"Enter? Yes, if an alpha is worth more than {odds.pays_from:.5f} TAO: name its price by "
            "--alpha-price."
        )
    worst = min(odds.variants, key=lambda one: one.expected or 0.0)
    if not odds.enter:
        return f"Enter? No: on average it loses {abs(odds.worth.expected):.2f} TAO."
    sure = "" if (worst.expected or 0.0) > 0 else f", but not if {worst.what}"
    return f"Enter? Yes: on average it brings {odds.worth.expected:.2f} TAO{sure}."


def backtest_lines(found: OddsBacktest, rules: TournamentRules) -> Iterator[str]:
    yield from _wrapped(
        f"{rules.kind} tournaments, each forecast from those before it, by today's rules: the chance of a "
        "new champion, by the correlation of a challenger's tasks"
    )
    yield ""
    heads = "".join(f"{f'corr. {one:g}':>12}" for one in CORRELATIONS)
    yield f"{'':<32}{heads}  champion"
    for one in found.forecasts:
        chances = "".join(f"{chance:>12.1%}" for chance in one.chances)
        yield f"{one.tournament_id[-30:]:<32}{chances}  {'new' if one.dethroned else 'stayed'}"
    yield f"{'Brier score':<32}" + "".join(f"{one:>12.3f}" for one in found.brier)
    yield ""
    yield from _wrapped(
        f"The plain rate of the tournaments before has {found.brier_of_rate:.3f}, one half always 0.250; "
        "less is better."
    )
    if found.brier_of_tasks is not None:
        yield from _wrapped(f"Single tasks of the boss round: {found.brier_of_tasks:.3f}.")


def _fact(name: str, text: str) -> list[str]:
    return textwrap.wrap(f"{name:<16}{text}", _WIDTH, subsequent_indent=" " * 16, break_on_hyphens=False)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_on_hyphens=False)
