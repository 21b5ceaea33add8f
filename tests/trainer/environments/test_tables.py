"""Tables fit 80 columns, and a group is ranked as the evaluator ranks it."""

from __future__ import annotations

from collections import Counter

import pytest

from core.domain.tasks import PVP_GAMES
from tests.doubles.each import each
from trainer.environments.intercode.rehearsal import PlayedTask, ShellRehearsal
from trainer.environments.match import Forfeit, MatchResult
from trainer.environments.tables import (
    as_json,
    group_scores,
    group_table,
    interval,
    match_table,
    rank_quantiles,
    shell_table,
)


@each(
    "scores, places",
    [
        ({"a": 0.7, "b": 0.2, "c": 0.5}, {"a": 1.0, "b": 0.0, "c": 0.5}),
        ({"a": 0.7, "b": 0.7, "c": 0.5}, {"a": 0.75, "b": 0.75, "c": 0.0}),
        ({"a": 0.5, "b": 0.5}, {"a": 0.5, "b": 0.5}),
        ({"a": 0.0, "b": None, "c": 1.0}, {"a": 0.5, "b": 0.0, "c": 1.0}),
        ({"a": None, "b": None, "c": 1.0}, {"a": 0.0, "b": 0.0, "c": 1.0}),
        ({"a": 0.1}, {"a": 0.5}),
    ],
)
def test_places_in_a_group(scores: dict[str, float | None], places: dict[str, float]) -> None:
    assert rank_quantiles(scores) == places


def match(one: str, other: str, wins: int, draws: int, losses: int, game: str = "othello") -> MatchResult:
    return MatchResult(game, (one, other), wins, draws, losses, ended="time is over")


def test_points_are_pooled_over_all_matches_of_a_game() -> None:
    # A pools 9 of 14, B 9 of 14 in fewer wins, C 2 of 8.
    results = [match("a", "b", 4, 2, 4), match("a", "c", 4, 0, 0), match("b", "c", 2, 0, 2)]
    assert group_scores(results, ["a", "b", "c"]) == {"othello": {"a": 1.0, "b": 0.5, "c": 0.0}}


def test_the_interval_is_wilsons() -> None:
    assert interval(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert interval(0.0, 10)[0] == 0.0


def test_no_line_is_longer_than_80_columns() -> None:
    long = "a-model-with-a-name-that-is-much-too-long-for-any-table"
    results = [match(long, f"http://{long}", 1234, 1234, 1234, game) for game in PVP_GAMES]
    results[0].forfeits[0].update(dict.fromkeys(Forfeit, 1000))
    lines = match_table(results)
    names = [f"{place}{long}" for place in range(5)]
    lines += group_table({game: dict.fromkeys(names, 0.25) for game in PVP_GAMES}, names)
    task = PlayedTask("How many?", 0.5, (), 3, submitted=True)
    lines += shell_table([ShellRehearsal(long, (task,) * 1234, 1234)])
    assert max(map(len, lines)) <= 80
    assert "forfeited 5000: 1000 no_call, 1000 cut_off" in " ".join(line.strip() for line in lines)


def test_a_match_for_machines() -> None:
    result = match("a", "b", 1, 0, 1)
    result.forfeits[1].update({Forfeit.TIMEOUT: 1})
    facts = as_json(result)
    assert (facts["score"], facts["forfeits"]) == (0.5, [{}, {"timeout": 1}])
    assert as_json(match("a", "b", 0, 0, 0))["score"] is None
    assert Counter(facts["names"]) == {"a": 1, "b": 1}


def test_who_has_no_place_in_a_game_is_left_out_of_its_mean() -> None:
    table = group_table({"othello": {"a": 1.0, "b": 0.0}, "intercode": {"a": 0.5}}, ["a", "b"])
    assert table[-2].split() == ["intercode", "0.50", "–"]
    assert table[-1].split() == ["mean", "0.75", "0.00"]
