"""An attempt's log, read in pieces. What a training writes is shown, never trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miner.jobs.folder import AttemptFolder
from miner.store.work import AttemptRow, NoSuchJob
from miner.watch import files


@dataclass(frozen=True, slots=True)
class Piece:
    attempt: int
    start: int
    next: int
    text: str
    #: Whether the attempt has ended and nothing will be added.
    ended: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def attempt_of(attempts: Sequence[AttemptRow], number: int | None) -> AttemptRow:
    """The newest one, or the one asked for."""
    if not attempts:
        raise NoSuchJob("the job has not been launched yet: there is no log")
    found = next((one for one in reversed(attempts) if number in (None, one.number)), None)
    if found is None:
        raise NoSuchJob(f"the job has no attempt {number}; its attempts are 1 to {attempts[-1].number}")
    return found


def read_log(attempts: Sequence[AttemptRow], number: int | None, start: int, limit: int) -> Piece:
    row = attempt_of(attempts, number)
    data, _ = files.read_from(AttemptFolder(Path(row.folder)).log, start, limit)
    ended = row.ended_at is not None and len(data) < limit
    return Piece(row.number, start, start + len(data), _printable(data), ended)


def last_lines(attempts: Sequence[AttemptRow], number: int | None, lines: int) -> Piece:
    """The end of a log, by whole lines."""
    row = attempt_of(attempts, number)
    path = AttemptFolder(Path(row.folder)).log
    data = files.tail(path, lines * 500)
    _, size = files.read_from(path, 0, 0)
    kept = data.splitlines(keepends=True)[-lines:]
    return Piece(row.number, size, size, _printable(b"".join(kept)), row.ended_at is not None)


def _printable(data: bytes) -> str:
    """Without what would steer a terminal: a log line may come from reward functions."""
    text = data.decode(errors="replace")
    return "".join(
        one if one in "\n\t\r" or one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text
    )
