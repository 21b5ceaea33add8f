"""Results of matches as tables of at most 80 columns, and a group's ranks as the evaluator scores them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.environments.intercode.rehearsal import ShellRehearsal
from trainer.environments.match import Forfeit, MatchResult

WIDTH = 80
_NAME = 15


def rank_quantiles(scores: Mapping[str, float | None]) -> dict[str, float]:
    """The place of each name from the bottom (0) to the top (1) of a group.

    Equal scores share their mean place, and no score is the bottom."""
    count = len(scores)
    if count < 2:
        return dict.fromkeys(scores, 0.5)
    values = {name: -math.inf if score is None else score for name, score in scores.items()}
    places = {}
    for name, value in values.items():
        below = sum(other < value for other in values.values())
        equal = sum(other == value for other in values.values())
        places[name] = 0.0 if scores[name] is None else (below + (equal - 1) / 2) / (count - 1)
    return places


def group_scores(results: Sequence[MatchResult], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """By game and name: the rank quantile of the points that a name made in all its matches."""
    games = list(dict.fromkeys(result.game for result in results))
    return {game: rank_quantiles(_pooled(results, game, names)) for game in games}


def _pooled(results: Sequence[MatchResult], game: str, names: Sequence[str]) -> dict[str, float | None]:
    points, played = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    for result in results:
        if result.game == game:
            for name, wins in zip(result.names, (result.wins, result.losses), strict=True):
                points[name] += wins + result.draws / 2
                played[name] += result.games
    return {name: points[name] / played[name] if played[name] else None for name in names}


def interval(score: float, games: int) -> tuple[float, float]:
    """Wilson's interval of 95 % for a share of points."""
    z = 1.96
    middle = (score + z * z / (2 * games)) / (1 + z * z / games)
    half = z / (1 + z * z / games) * math.sqrt(score * (1 - score) / games + z * z / (4 * games * games))
    return max(0.0, middle - half), min(1.0, middle + half)


def match_table(results: Sequence[MatchResult]) -> list[str]:
    """A line per match, seen from its first side, then the forfeits and what ended it."""
    head = f"{'game':<12}{'model':<{_NAME}} {'against':<{_NAME}} {'games':>5}{'won':>5}{'draw':>5}{'lost':>5}"
    lines = [f"{head}{'score':>6}{'95 %':>8}", "-" * 79]
    for result in results:
        one, other = map(_short, result.names)
        line = f"{result.game:<12}{one:<{_NAME}} {other:<{_NAME}} {result.games:>5}{result.wins:>5}"
        line += f"{result.draws:>5}{result.losses:>5}"
        if result.score is not None:
            low, high = interval(result.score, result.games)
            line += f"{result.score:>6.0%}{100 * low:>5.0f}–{100 * high:.0f}"
        lines.append(line)
    lines.append("")
    for result in results:
        against = _short(result.names[1], 40)
        lines += _wrapped(f"{result.game} against {against}: {result.ended}, {result.seconds:.0f} s")
        for side, name in enumerate(result.names):
            kinds = result.forfeits[side]
            if kinds:
                counted = ", ".join(f"{kinds[kind]} {kind.value}" for kind in Forfeit if kinds[kind])
                lines += _wrapped(f"  {_short(name, 40)} forfeited {kinds.total()}: {counted}")
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ")


def shell_table(played: Sequence[ShellRehearsal]) -> list[str]:
    """A line per model that played shell tasks."""
    head = f"{'intercode':<28}{'tasks':>6}{'submitted':>11}{'unanswered':>12}{'no call':>9}{'reward':>9}"
    lines = [head, "-" * len(head)]
    for one in played:
        line = f"{_short(one.name, 27):<28}{len(one.tasks):>6}{one.submitted:>11}{one.failures:>12}"
        reward = f"{one.mean:.3f}" if one.tasks else "–"
        lines.append(f"{line}{one.without_call:>9}{reward:>9}")
    for one in played:
        if len(one.tasks) < one.asked:
            lines += _wrapped(f"{_short(one.name, 40)}: {one.ended}, {one.asked} tasks were asked for")
    return lines


def group_table(scores: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> list[str]:
    """Rank quantiles: a line per game, a column per model, the means below."""

    def shown(value: float | None) -> str:
        return f"{'–':>13}" if value is None else f"{value:>13.2f}"

    lines = ["rank quantiles", f"{'':<12}" + "".join(f"{_short(name, 12):>13}" for name in names)]
    for game, places in scores.items():
        lines.append(f"{game:<12}" + "".join(shown(places.get(name)) for name in names))
    known = [[places[name] for places in scores.values() if name in places] for name in names]
    means = [sum(values) / len(values) if values else None for values in known]
    return [*lines, f"{'mean':<12}" + "".join(map(shown, means))]


def shell_as_json(played: ShellRehearsal) -> dict[str, Any]:
    """A model's shell tasks for machines."""
    return {
        "name": played.name,
        "reward": played.mean if played.tasks else None,
        "submitted": played.submitted,
        "unanswered": played.failures,
        "turns_without_call": played.without_call,
        "tasks": [{"question": task.question, "reward": task.reward} for task in played.tasks],
        "seconds": round(played.seconds, 3),
        "ended": played.ended,
    }


def as_json(result: MatchResult) -> dict[str, Any]:
    """A match for machines."""
    bounds = interval(result.score, result.games) if result.score is not None else None
    return {
        "game": result.game,
        "names": list(result.names),
        "games": result.games,
        "wins": result.wins,
        "draws": result.draws,
        "losses": result.losses,
        "score": result.score,
        "interval": list(bounds) if bounds else None,
        "forfeits": [{kind.value: side[kind] for kind in Forfeit if side[kind]} for side in result.forfeits],
        "turns": list(result.turns),
        "seconds": round(result.seconds, 3),
        "ended": result.ended,
    }


def _short(name: str, width: int = _NAME) -> str:
    return name if len(name) <= width else "…" + name[1 - width :]
