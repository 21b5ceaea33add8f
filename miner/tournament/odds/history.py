"""The field by past tournaments: how many enter, how often the champion falls, how equal the others are.

A handful of weeks is a small sample, and the rules change. So each figure is a mean of what was counted and
of an assumption, which weighs as much as `ASSUMED_WEEKS` tournaments.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from core.domain.tournament_rules import EMISSION, TournamentRules, emission_shares
from core.domain.wire import TournamentType
from miner.tournament.odds.bracket import Chances, Opponents, simulate
from miner.tournament.public_api import GroupTask, Tournament

#: Guesses: nobody publishes these figures. `odds` shows what others would change.
ASSUMED_ENTRANTS, ASSUMED_CHALLENGER_WINS, ASSUMED_FALLS, ASSUMED_AGREEMENT = 8, 0.35, 0.25, 0.5
ASSUMED_WEEKS = 4
#: Fewer entries in a group say nothing of how alike its tasks rank them.
_LEAST_RANKED = 4
#: Their results are ranked from above.
_HIGHER_IS_BETTER = ("GrpoTask", "EnvTask", "EnvironmentTask")


@dataclass(frozen=True, slots=True)
class History:
    """Counts of one kind's tournaments that are over."""

    tournaments: int = 0
    dethroned: int = 0
    #: Entries besides the champion, oldest first.
    entrants: tuple[int, ...] = ()
    boss_tasks: int = 0
    boss_tasks_won: int = 0
    #: Mean rank correlation of two tasks of round 1, and the pairs of tasks that it is of.
    agreement: float | None = None
    pairs: int = 0


@dataclass(frozen=True, slots=True)
class FieldFacts:
    """The figures that the odds are computed from; any of them may be the operator's own."""

    #: Others that enter, without us and the champion.
    entrants: int
    #: The share of the boss round's tasks that challengers win.
    challenger_wins: float
    #: The chance that the champion loses the title in a week.
    falls: float
    #: How alike two tasks rank the same entries: 0 by chance, 1 equally.
    agreement: float

    @property
    def opponents(self) -> Opponents:
        likeness = min(max(self.agreement, 0.0), 0.95)
        spread = math.sqrt(likeness / (1 - likeness))
        return Opponents.by_their_best(self.entrants, self.challenger_wins, spread)


def by_date(tournaments: Sequence[Tournament], kind: TournamentType) -> list[Tournament]:
    """Return those of a kind that are over, oldest first: ids end with their day."""
    over = [one for one in tournaments if one.kind is kind and one.dethroned is not None]
    return sorted(over, key=lambda one: (one.tournament_id.rpartition("_")[2], one.tournament_id))


def history_of(tournaments: Sequence[Tournament]) -> History:
    """Count; all are of one kind."""
    tasks = [task for one in tournaments for task in one.boss_tasks]
    alike = [found for one in tournaments for found in _agreements(one.first_round)]
    return History(
        tournaments=len(tournaments),
        dethroned=sum(one.dethroned is True for one in tournaments),
        entrants=tuple(len(one.entrants) for one in tournaments if one.entrants),
        boss_tasks=len(tasks),
        boss_tasks_won=sum(task.won for task in tasks),
        agreement=fmean(alike) if alike else None,
        pairs=len(alike),
    )


def field_facts(history: History, boss_tasks: int) -> FieldFacts:
    """Return the figures after this history. `boss_tasks`: tasks of a boss round."""
    weeks, tasks = ASSUMED_WEEKS, ASSUMED_WEEKS * boss_tasks
    won = history.boss_tasks_won + tasks * ASSUMED_CHALLENGER_WINS
    agreement = ASSUMED_AGREEMENT
    if history.agreement is not None:
        agreement = (history.pairs * history.agreement + weeks * agreement) / (history.pairs + weeks)
    return FieldFacts(
        entrants=round(median(history.entrants)) if history.entrants else ASSUMED_ENTRANTS,
        challenger_wins=won / (history.boss_tasks + tasks),
        falls=(history.dethroned + weeks * ASSUMED_FALLS) / (history.tournaments + weeks),
        agreement=agreement,
    )


def _agreements(tasks: Sequence[GroupTask]) -> list[float]:
    """Return Spearman's correlation of each two tasks of a group, by the entries that both have scored."""
    groups: dict[str, list[GroupTask]] = defaultdict(list)
    for task in tasks:
        groups[task.group or ""].append(task)
    found = []
    for group in groups.values():
        for at, one in enumerate(group):
            for other in group[at + 1 :]:
                both = [hotkey for hotkey in one.scores if hotkey in other.scores]
                if len(both) >= _LEAST_RANKED:
                    found.append(_spearman(_places(one, both), _places(other, both)))
    return found


def _places(task: GroupTask, hotkeys: Sequence[str]) -> list[float]:
    sign = -1.0 if task.task_type in _HIGHER_IS_BETTER else 1.0
    values = [sign * task.scores[hotkey] for hotkey in hotkeys]
    return [sum(other < one for other in values) + (values.count(one) - 1) / 2 for one in values]


def _spearman(ones: Sequence[float], others: Sequence[float]) -> float:
    middle = (len(ones) - 1) / 2
    both = sum((one - middle) * (other - middle) for one, other in zip(ones, others, strict=True))
    scale = math.sqrt(sum((one - middle) ** 2 for one in ones) * sum((one - middle) ** 2 for one in others))
    return both / scale if scale else 0.0


def kind_share(tournaments: Sequence[Tournament], kind: TournamentType) -> float:
    """Return the kind's share of the emission after these tournaments. A kind with many entries loses to the
    others; those of the last tournament do not count yet."""
    means: dict[TournamentType, float | None] = {}
    for one in TournamentType:
        counts = [len(past.entrants) for past in by_date(tournaments, one)[:-1]][-EMISSION.window :]
        counted = [count for count in counts if count >= EMISSION.least_entrants]
        means[one] = fmean(counted) if counted else None
    return emission_shares(means)[kind]


# — the backtest

#: Correlations that are compared with each other, and brackets of each.
CORRELATIONS, _BRACKETS = (0.0, 0.25, 0.5), 10_000


@dataclass(frozen=True, slots=True)
class Forecast:
    """A tournament as it would have been forecast, and its result."""

    tournament_id: str
    #: The chance of another champion, by correlation.
    chances: tuple[float, ...]
    dethroned: bool
    challenger_wins: float
    tasks: int
    tasks_won: int


@dataclass(frozen=True, slots=True)
class OddsBacktest:
    forecasts: tuple[Forecast, ...]
    #: Mean squared errors of the chance of a new champion by correlation, and that of the plain rate of the
    #: tournaments before. Less is better; always saying one half has 0.25.
    brier: tuple[float, ...]
    brier_of_rate: float
    #: Of the boss round's single tasks; None if no tournament names them.
    brier_of_tasks: float | None


def backtest(tournaments: Sequence[Tournament], rules: TournamentRules) -> OddsBacktest | None:
    """Forecast each tournament from those before it, by today's rules; None without two that are over."""
    past = by_date(tournaments, rules.kind)
    boss = rules.round("boss")
    count = sum(one.count for one in boss.tasks) if boss is not None else 0
    forecasts, rates = [], []
    for at in range(1, len(past)):
        facts = field_facts(history_of(past[:at]), count)
        forecasts.append(_forecast(past[at], facts, rules))
        rates.append(facts.falls)
    if not forecasts:
        return None
    happened = [one.dethroned for one in forecasts]
    brier = tuple(
        fmean((one.chances[at] - one.dethroned) ** 2 for one in forecasts) for at in range(len(CORRELATIONS))
    )
    tasks = sum(one.tasks for one in forecasts)
    errors = sum(
        one.tasks_won * (1 - one.challenger_wins) ** 2 + (one.tasks - one.tasks_won) * one.challenger_wins**2
        for one in forecasts
    )
    rate = fmean((rate - outcome) ** 2 for rate, outcome in zip(rates, happened, strict=True))
    return OddsBacktest(tuple(forecasts), brier, rate, errors / tasks if tasks else None)


def _forecast(one: Tournament, facts: FieldFacts, rules: TournamentRules) -> Forecast:
    """Forecast one tournament. Its challenger is the best of the others: only the boss round is played."""
    alone = replace(facts.opponents, entries=0)
    chances = []
    for correlation in CORRELATIONS:
        challenger = Chances({}, facts.challenger_wins, correlation=correlation)
        placings = simulate(rules, challenger, alone, brackets=_BRACKETS)
        chances.append(placings.share(placings.won))
    return Forecast(
        one.tournament_id,
        tuple(chances),
        one.dethroned is True,
        facts.challenger_wins,
        len(one.boss_tasks),
        sum(task.won for task in one.boss_tasks),
    )
