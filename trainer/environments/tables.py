"""Results of matches as tables of at most 80 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from trainer.environments.intercode.rehearsal import ShellRehearsal
from trainer.environments.match import Forfeit, MatchResult

WIDTH = 80
_NAME = 15


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
