"""An attempt's log for people, in pieces. What a training writes is shown, never trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core.facts import printable
from miner.engines.logs import START, Place, log_tail, read_log
from miner.store.work import AttemptRow, NoSuchJob

#: Progress bars write over their line.
_KEEP = "\n\t\r"


@dataclass(frozen=True, slots=True)
class Piece:
    attempt: int
    text: str
    #: Where to go on.
    next: str
    #: Whether the attempt has ended and this was the last of it.
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


def read_piece(row: AttemptRow, start: str, limit: int) -> Piece:
    """From where an earlier piece ended; "" begins at the beginning."""
    data, place = read_log(Path(row.folder), _place(start), limit)
    ended = row.ended_at is not None and len(data) < limit
    return Piece(row.number, printable(data.decode(errors="replace"), _KEEP), _word(place), ended)


def last_lines(row: AttemptRow, lines: int) -> Piece:
    """The end of a log, by whole lines, and where to go on from."""
    folder = Path(row.folder)
    _, place = read_log(folder, START, 0)
    kept = log_tail(folder, max(lines, 1) * 1000).splitlines(keepends=True)[-lines:] if lines else []
    size = _size(folder)
    return Piece(
        row.number, printable("".join(kept), _KEEP), _word(Place(place.inode, size)), row.ended_at is not None
    )


def _size(folder: Path) -> int:
    try:
        return (folder / "log").lstat().st_size
    except OSError:
        return 0


def _word(place: Place) -> str:
    return f"{place.inode}.{place.offset}"


def _place(word: str) -> Place:
    inode, _, offset = word.partition(".")
    return Place(int(inode), int(offset)) if inode.isdecimal() and offset.isdecimal() else START
