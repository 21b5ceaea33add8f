"""Games as texts that one can read."""

from __future__ import annotations

import json
import re
from pathlib import Path

from core.domain.records import printable, without_terminal_codes
from trainer.environments.intercode.rehearsal import PlayedTask
from trainer.environments.match import GameRecord, Turn
from trainer.environments.tool_calls import ToolCall


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
    """Where the transcripts of a match are kept."""
    return folder / game / "-against-".join(map(_file_name, names))


def shell_folder(folder: Path, name: str) -> Path:
    """Where the transcripts of a model's shell tasks are kept."""
    return folder / "intercode" / _file_name(name)


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-")[-60:]
