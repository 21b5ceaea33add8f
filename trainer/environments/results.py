"""Results of matches as tables of at most 80 columns and as JSON, and games as transcripts."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.domain.records import printable, without_terminal_codes
from trainer.environments.intercode.rehearsal import PlayedTask, ShellRehearsal
from trainer.environments.match import Forfeit, GameRecord, MatchResult, Turn
from trainer.environments.tool_calls import ToolCall

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


# — transcripts


def transcript(record: GameRecord) -> str:
    """Everything that was shown, answered and played in a game."""
    lines = [f"{record.game}, seed {record.seed}, variant {record.variant}, {record.seconds:.1f} s"]
    for seat, name in enumerate(record.names):
        lines.append(
            f"player {seat}: {name}, {record.outcomes[seat].value} (return {record.returns[seat]:g})"
        )
    if record.forfeit:
        seat, kind = record.forfeit
        lines.append(f"{record.names[seat]} forfeits: {kind.value}")
    for number, turn in enumerate(record.turns, 1):
        lines += ["", *_turn_lines(number, turn, record.names[turn.seat])]
    for seat, calls in enumerate(record.reflections):
        if calls:
            lines += ["", f"== afterwards, player {seat}, {record.names[seat]}", *map(_call_line, calls)]
    return "\n".join(lines) + "\n"


def _turn_lines(number: int, turn: Turn, name: str) -> list[str]:
    lines = [f"== turn {number}, player {turn.seat}, {name}, {turn.seconds:.2f} s"]
    if turn.notes:
        lines += [turn.notes, ""]
    if turn.shown:
        lines += [turn.shown, ""]
    if turn.answer is not None:
        lines += [f"| {line}" for line in (turn.answer.text or "").splitlines()]
        lines += map(_call_line, turn.answer.calls)
    lines.append(f"no move: {turn.forfeit.value}" if turn.forfeit else f"move {turn.action}: {turn.move}")
    return lines


def _call_line(call: ToolCall) -> str:
    return f"> {call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})"


def safe_to_print(text: str) -> str:
    """Remove what a terminal would obey: a server's or a model's words may hold control sequences."""
    return printable(without_terminal_codes(text))


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(safe_to_print(text), "utf-8", errors="replace")
    return path


def write_transcript(folder: Path, number: int, record: GameRecord) -> Path:
    """Write a game's transcript into the folder of its match."""
    ends = record.forfeit[1].value if record.forfeit else record.outcomes[0].value
    return _write(folder / f"{number:04d}-seed-{record.seed}-{ends}.txt", transcript(record))


def write_task(folder: Path, number: int, task: PlayedTask) -> Path:
    """Write the transcript of a shell task into the folder of its model."""
    return _write(folder / f"{number:04d}-reward-{task.reward:.2f}.txt", task.transcript())


def match_folder(folder: Path, game: str, names: tuple[str, str]) -> Path:
    """Return the folder of the transcripts of a match."""
    return folder / game / "-against-".join(map(_file_name, names))


def shell_folder(folder: Path, name: str) -> Path:
    """Return the folder of the transcripts of a model's shell tasks."""
    return folder / "intercode" / _file_name(name)


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-")[-60:]
