"""Simulated tournaments against formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from statistics import NormalDist

import pytest

from core.domain.tournament_rules import TOURNAMENTS, TournamentRules
from core.domain.wire import TournamentType
from miner.tournament.odds.bracket import Chances, NoChance, Opponents, Placings, simulate
from miner.tournament.odds.value import Stakes, worth

TEXT, IMAGE = TOURNAMENTS[TournamentType.TEXT], TOURNAMENTS[TournamentType.IMAGE]
NOBODY = Opponents(0, 0.0, 0.0)
#: Five standard errors of so many brackets.
BRACKETS, OFF = 6_000, 0.033


def played(rules: TournamentRules, chances: Chances, opponents: Opponents = NOBODY) -> Placings:
    return simulate(rules, chances, opponents, brackets=BRACKETS)


def boss_round(rules: TournamentRules, win: Mapping[str, float], draw: Mapping[str, float]) -> float:
    """The chance of the crown, summed over every result of the boss round and of its deciders."""
    boss = rules.round("boss")
    assert boss is not None
    names = [one.task for one in boss.tasks for _ in range(one.count)]

    def results(tasks: list[str]) -> Iterator[tuple[tuple[str, ...], float]]:
        for marks in itertools.product("wdl", repeat=len(tasks)):
            share = 1.0
            for mark, task in zip(marks, tasks, strict=True):
                share *= {"w": win[task], "d": draw[task], "l": 1 - win[task] - draw[task]}[mark]
            if share:
                yield marks, share

    total = 0.0
    for marks, share in results(names):
        if any(mark == "l" and name in rules.not_lost for mark, name in zip(marks, names, strict=True)):
            continue
        again = [
            "instruct-kl" if name in rules.not_lost else name
            for mark, name in zip(marks, names, strict=True)
            if mark == "d"
        ]
        for more, part in results(again):
            counts = [*marks, *more]
            won, decided = counts.count("w"), counts.count("w") + counts.count("l")
            total += share * part * (won >= max(min(max(len(names), decided) - rules.may_lose, decided), 1))
    return total


@pytest.mark.parametrize("chance", [0.35, 0.6, 0.9])
def test_a_boss_round_of_pictures_may_lose_one_of_six(chance: float) -> None:
    found = played(IMAGE, Chances({}, chance))
    assert found.share(found.won) == pytest.approx(chance**6 + 6 * chance**5 * (1 - chance), abs=OFF)
    assert found.won + found.second == BRACKETS


@pytest.mark.parametrize(
    ("others", "continuous", "draw"), [(0.7, 0.5, 0.0), (0.6, 0.8, 0.3), (0.2, 0.3, 0.7)]
)
def test_a_boss_round_of_texts_adds_one_task_for_each_that_is_drawn(
    others: float, continuous: float, draw: float
) -> None:
    win = {
        "instruct-kl": others,
        "instruct-large": others,
        "dpo": others,
        "grpo": others,
        "continuous": continuous,
    }
    draws = {name: draw * (1 - one) for name, one in win.items()}
    found = played(TEXT, Chances(win, 0.5, draws))
    assert found.share(found.won) == pytest.approx(boss_round(TEXT, win, draws), abs=OFF)
    if not draw:
        other = others**5 + 5 * others**4 * (1 - others)
        assert found.share(found.won) == pytest.approx(continuous * other, abs=OFF)


@pytest.mark.parametrize("rules", [TEXT, IMAGE], ids=["text", "image"])
@pytest.mark.parametrize("entries", [3, 9])
def test_among_equals_everybody_gets_as_far(rules: TournamentRules, entries: int) -> None:
    found = played(rules, Chances({}, 0.4), Opponents.by_their_best(entries, 0.4, 0.0))
    assert found.share(found.reached["knockout"]) == pytest.approx(2 / (entries + 1), abs=OFF)
    assert found.share(found.reached["boss"]) == pytest.approx(1 / (entries + 1), abs=OFF)
    assert found.share(found.third) == pytest.approx(1 / (entries + 1), abs=OFF)


def test_a_knockout_is_won_by_the_difference_of_strengths() -> None:
    found = played(IMAGE, Chances({}, 0.7), Opponents.by_their_best(1, 0.4, 0.0))
    normal = NormalDist()
    ahead = normal.inv_cdf(0.7) - normal.inv_cdf(0.4)
    assert found.share(found.reached["boss"]) == pytest.approx(normal.cdf(ahead), abs=OFF)


def test_environments_lose_none_and_beat_the_champion_in_its_group() -> None:
    rules = TOURNAMENTS[TournamentType.ENVIRONMENT]
    alone = played(rules, Chances({}, 0.8))
    assert alone.share(alone.won) == pytest.approx(0.8**3, abs=OFF)
    # Three equals, one of them the champion, in one group: the first of all goes on.
    two = played(rules, Chances({}, 0.5), Opponents.by_their_best(1, 0.5, 0.0))
    assert two.share(two.reached["boss"]) == pytest.approx(1 / 3, abs=OFF)


def test_doubt_keeps_each_chance_and_ties_tasks_together() -> None:
    sure, unsure = (played(IMAGE, Chances({}, 0.5, correlation=one)) for one in (0.0, 0.9))
    assert unsure.won > 2 * sure.won
    # With everything shared, the round is one single coin.
    assert unsure.share(unsure.won) < 0.5


def test_a_kind_without_a_chance_is_named() -> None:
    with pytest.raises(NoChance, match=r"to win grpo: add --p grpo=0\.5"):
        played(TEXT, Chances({"instruct": 0.5, "dpo": 0.5, "continuous": 0.5}))


def test_the_worth_of_an_entry_is_exact() -> None:
    places = Placings(10, won=1, second=2, third=3)
    found = worth(places, Stakes(cost=2.0, weekly=10.0, places=(0.7, 0.2, 0.1), falls=0.5, weeks=2))
    # A reign of one week or of two, each with one half; then 2 and 1 for the other places.
    assert found.expected == pytest.approx(0.05 * 5 + 0.05 * 12 + 0.2 * 0 + 0.3 * -1 + 0.4 * -2)
    assert (found.low, found.median, found.high) == (-2.0, -1.0, 5.0)
    assert found.pays == pytest.approx(0.3)
    assert found.breaks_even == pytest.approx((2 - 0.2 * 2 - 0.3 * 1) / (1.5 * 7))
    assert math.isclose(Stakes(1, 1, (1,), falls=0.0, weeks=30).reign, 30)
