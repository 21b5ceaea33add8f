"""Our chances by kind of task, out of the reports of `spar`, `rehearse --against`, `eval` and `replay`.

A comparison row by row has a chance of its own. A verdict without one, as of pictures and GRPO, is a single
match: after a win the next one is won with 2 in 3, after a loss with 1 in 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from core.domain.tasks import task_type_named
from core.domain.tournament_rules import LEAST_GAIN
from miner.tournament.odds.bracket import NoChance
from miner.tournament.public_api import mapping, number, sequence, text
from miner.tournament.rules import TASKS, task_kind

_AFTER_A_WIN, _AFTER_A_LOSS = 2 / 3, 1 / 3


class Found(NamedTuple):
    """One comparison with another submission."""

    task: str
    chance: float
    #: Nothing separated the two.
    drawn: bool = False
    #: Trained from a tiny model or on made-up data, which does not show how a real task ends.
    stand_in: bool = False


def chances_in(file: Path, report: Mapping[str, Any]) -> list[Found]:
    """Every comparison of a report; `NoChance` if it has none."""
    found = [*_rehearsed(report), *_evaluated(report), *_replayed(report)]
    if not found:
        raise NoChance(
            f"{file} compares with nobody: wanted is a report of spar, rehearse --against, eval or replay"
        )
    return found


def mean_chances(found: list[Found]) -> tuple[dict[str, float], dict[str, float]]:
    """The mean chance by kind of task, and the share of draws."""
    kinds = dict.fromkeys(one.task for one in found)
    of = {kind: [one for one in found if one.task == kind] for kind in kinds}
    chances = {kind: fmean(one.chance for one in rows) for kind, rows in of.items()}
    draws = {kind: fmean(one.drawn for one in rows) for kind, rows in of.items()}
    return chances, {kind: share for kind, share in draws.items() if share}


def _verdict(task: str, won: object) -> Iterator[Found]:
    if isinstance(won, bool):
        yield Found(task, _AFTER_A_WIN if won else _AFTER_A_LOSS)


def _compared(task: str, comparison: Mapping[str, Any]) -> Iterator[Found]:
    chance = number(comparison.get("p_win"), least=0.0)
    if chance is None:
        yield from _verdict(task, comparison.get("won"))
    else:
        drawn = comparison.get("wins") == 0 and comparison.get("losses") == 0
        yield Found(task, min(chance, 1.0), drawn)


def _rehearsed(report: Mapping[str, Any]) -> Iterator[Found]:
    for row in sequence(report.get("tasks")):
        task, score = text(mapping(row).get("task")), mapping(mapping(row).get("score"))
        if task is None:
            continue
        kind, over = task_kind(task), mapping(score.get("over_against"))
        said = [text(one) or "" for one in sequence(mapping(row).get("deviations"))]
        stand_in = any("stand-in" in one or "made up" in one for one in said)
        for found in _compared(kind, over) if over else _verdict(kind, score.get("wins")):
            yield found._replace(stand_in=stand_in)


def _evaluated(report: Mapping[str, Any]) -> Iterator[Found]:
    kind = task_type_named(text(report.get("task_type")) or "")
    names = [name for name, task in TASKS.items() if kind and task_type_named(task.task_type or "") is kind]
    for row in sequence(report.get("models")):
        over = mapping(mapping(row).get("over_first"))
        if names and over:
            yield from _compared(names[0], over)


def _replayed(report: Mapping[str, Any]) -> Iterator[Found]:
    """The best entry of a task that is over stands for the champion."""
    family = text(mapping(report.get("task")).get("family"))
    ours = number(report.get("ours"))
    others = [number(mapping(one).get("loss")) for one in sequence(report.get("ranked"))]
    losses = [loss for loss in others if loss is not None]
    if family is not None and ours is not None and losses:
        yield from _verdict(family, min(losses) - ours >= LEAST_GAIN * abs(min(losses)))
