"""Tables fit 80 columns."""

from __future__ import annotations

from collections import Counter

import pytest

from core.domain.tasks import PVP_GAMES
from trainer.environments.intercode.rehearsal import PlayedTask, ShellRehearsal
from trainer.environments.match import Forfeit, MatchResult
from trainer.environments.results import as_json, interval, match_table, shell_table


def match(one: str, other: str, wins: int, draws: int, losses: int, game: str = "othello") -> MatchResult:
    return MatchResult(game, (one, other), wins, draws, losses, ended="time is over")


def test_the_interval_is_wilsons() -> None:
    assert interval(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert interval(0.0, 10)[0] == 0.0


def test_no_line_is_longer_than_80_columns() -> None:
    long = "a-model-with-a-name-that-is-much-too-long-for-any-table"
    results = [match(long, f"http://{long}", 1234, 1234, 1234, game) for game in PVP_GAMES]
    results[0].forfeits[0].update(dict.fromkeys(Forfeit, 1000))
    lines = match_table(results)
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
