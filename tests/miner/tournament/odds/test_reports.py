"""Chances out of the reports of other commands."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from miner.tournament.odds.bracket import NoChance
from miner.tournament.odds.reports import Found, chances_in, mean_chances
from miner.tournament.public_api import Entry, TournamentTaskResult
from miner.tournament.replay import HiddenPictures, Replay

COMPARED = {"won": True, "wins": 8, "losses": 2, "p_win": 0.7}
DRAWN = {"won": False, "wins": 0, "losses": 0, "p_win": 0.0}


def replayed(ours: float) -> dict[str, Any]:
    task = TournamentTaskResult("one", "ImageTask", family="krea2")
    hidden = HiddenPictures(("1.png",), 0.0, 1.0, ("5One",))
    entries = (Entry("5One", rank=1, loss=0.5), Entry("5Two", rank=2, loss=0.6))
    return {**asdict(Replay(task, hidden, ours, entries)), "place": 1, "found": True}


def rehearsed(task: str, **score: Any) -> dict[str, Any]:
    return {"tasks": [{"task": task, "score": score}, {"task": "chat", "score": None}]}


@pytest.mark.parametrize(
    ("report", "found"),
    [
        (rehearsed("dpo", over_against=COMPARED, wins=True), [Found("dpo", 0.7)]),
        (rehearsed("instruct-kl-2", over_against=DRAWN), [Found("instruct-kl", 0.0, drawn=True)]),
        (rehearsed("grpo", over_against=None, wins=True), [Found("grpo", 2 / 3)]),
        (rehearsed("z-image", over_against={"won": False}, wins=False), [Found("z-image", 1 / 3)]),
        (
            {"task_type": "DpoTask", "models": [{"over_first": None}, {"over_first": COMPARED}]},
            [Found("dpo", 0.7)],
        ),
        (replayed(0.4949), [Found("krea2", 2 / 3)]),
        (replayed(0.4951), [Found("krea2", 1 / 3)]),
    ],
)
def test_each_report_has_its_comparisons(report: dict[str, Any], found: list[Found]) -> None:
    assert chances_in(Path("report.json"), json.loads(json.dumps(report))) == found


@pytest.mark.parametrize(
    "report", [{}, {"tasks": "none"}, rehearsed("dpo", wins=None), {"models": [1]}, {"task": 1, "ours": "x"}]
)
def test_what_compares_with_nobody_is_refused(report: dict[str, Any]) -> None:
    with pytest.raises(NoChance, match="compares with nobody"):
        chances_in(Path("report.json"), report)


def test_several_comparisons_of_a_kind_are_averaged() -> None:
    chances, draws = mean_chances([Found("dpo", 0.2), Found("dpo", 0.6, drawn=True), Found("grpo", 1 / 3)])
    assert chances == {"dpo": pytest.approx(0.4), "grpo": pytest.approx(1 / 3)}
    assert draws == {"dpo": 0.5}
