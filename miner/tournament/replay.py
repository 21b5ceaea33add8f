"""Rank an adapter among the entries of a task that is over, on the pictures that were hidden from them.

Which pictures a validator kept for the test is drawn at random and not published, but each entry's loss on
them is, and the measure has no chance in it: of the entries' losses picture by picture, scored here, only the
mean over the hidden ones is the published number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from core.domain.errors import GodMinerError
from core.runs.picture_run import AdapterScore, PictureScores
from miner.tournament.public_api import Entry, TournamentTaskResult
from miner.tournament.rules import hidden_pictures

#: Another machine computes the same loss to a ten-thousandth; the next best set of pictures must be so many
#: times worse.
CLOSE, MARGIN = 3e-4, 20.0
#: Sets of pictures that are compared, at most: 5 of 50 are two millions.
MOST_SETS = 3_000_000


class CannotReplay(GodMinerError):
    """Scores that say nothing of this task."""

    code = "cannot_replay"


@dataclass(frozen=True)
class HiddenPictures:
    names: tuple[str, ...]
    #: The largest relative distance of an entry's mean from its published loss; that of the next best set.
    off: float
    next_off: float
    #: Hotkeys of the entries that it rests on.
    entries: tuple[str, ...]

    @property
    def found(self) -> bool:
        return self.off <= CLOSE and self.next_off > MARGIN * self.off


@dataclass(frozen=True)
class Replay:
    task: TournamentTaskResult
    hidden: HiddenPictures
    #: On the hidden pictures.
    ours: float
    #: Entries with a loss, best first.
    ranked: tuple[Entry, ...]

    @property
    def place(self) -> int:
        return 1 + sum(entry.loss < self.ours for entry in self.ranked if entry.loss is not None)


def replay(task: TournamentTaskResult, scores: PictureScores, ours: str | None = None) -> Replay:
    """`ours` is a path in the scores, by default the last. Entries are recognised by the first eight letters
    of their hotkey in their file's path."""
    scored = {row.path: picture_losses(row) for row in scores.adapters if row.score is not None}
    if not scores.pictures:
        raise CannotReplay("the scores name no picture: score adapters on all pictures of the task")
    for path, losses in scored.items():
        if len(losses) != len(scores.pictures):
            raise CannotReplay(f"{path} has {len(losses)} losses of {len(scores.pictures)} pictures")
    ranked = tuple(sorted((one for one in task.entries if one.loss is not None and one.loss > 0), key=_loss))
    mine = ours if ours is not None else next(reversed(scored), "")
    if mine not in scored or not mine:
        raise CannotReplay(f"{mine or 'no adapter'} has no losses among the scores: score it on all pictures")
    known = [
        (entry, scored[path])
        for entry in ranked
        for path in scored
        if path != mine and len(entry.hotkey) >= 8 and entry.hotkey[:8] in path
    ]
    if not known:
        raise CannotReplay("no entry of the task is among the scores: its file's path must hold its hotkey")
    hidden = find_hidden(scores.pictures, known)
    at = [scores.pictures.index(name) for name in hidden.names]
    return Replay(task, hidden, math.fsum(scored[mine][one] for one in at) / len(at), ranked)


def _loss(entry: Entry) -> float:
    return entry.loss if entry.loss is not None else math.inf


def picture_losses(row: AdapterScore) -> list[float]:
    """Half with the caption, half without."""
    pairs = zip(row.text_losses, row.no_text_losses, strict=False)
    return [(text + no_text) / 2 for text, no_text in pairs]


def find_hidden(names: Sequence[str], known: Sequence[tuple[Entry, Sequence[float]]]) -> HiddenPictures:
    """Find the set of pictures whose mean losses lie nearest to what was published."""
    count = hidden_pictures(len(names))
    if math.comb(len(names), count) > MOST_SETS:
        raise CannotReplay(f"{len(names)} pictures are more than tasks have: score those of one task")
    best: tuple[float, tuple[int, ...]] = (math.inf, ())
    second = math.inf
    for off, chosen in _distances(len(names), count, known):
        if off < best[0]:
            best, second = (off, chosen), best[0]
        elif off < second:
            second = off
    hotkeys = tuple(entry.hotkey for entry, _ in known)
    return HiddenPictures(tuple(names[at] for at in best[1]), best[0], second, hotkeys)


def _distances(
    pictures: int, count: int, known: Sequence[tuple[Entry, Sequence[float]]]
) -> Iterator[tuple[float, tuple[int, ...]]]:
    published = [(_loss(entry), losses) for entry, losses in known]
    for chosen in combinations(range(pictures), count):
        yield (
            max(abs(sum(losses[at] for at in chosen) / count / loss - 1) for loss, losses in published),
            chosen,
        )
