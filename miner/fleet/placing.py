"""Which GPUs a task would get, and when: pure, so that a policy can ask it of any snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from miner.fleet.base import FleetSnapshot, Gpu, NamedLane, Placement
from miner.fleet.calendar import Calendar
from miner.fleet.layout import Layout, layout_of


class Placing:
    """Questions about one snapshot at one moment. What a task itself holds already is in its way: ask of
    `snapshot.without(key)`."""

    def __init__(self, snapshot: FleetSnapshot, now: float) -> None:
        self._usable, self._now = snapshot.usable, now
        self._calendar, self._layout = Calendar.of(snapshot.holds, now), layout_of(snapshot.gpus)

    def options(
        self, count: int, *, duration_s: float, latest_start: float, lane: NamedLane | None = None
    ) -> Iterator[Placement]:
        """Windows of so many cards that begin by `latest_start`: the earliest in each pool that the task may
        have. What it should rather have comes first, which is not always what begins first: a lane's task
        gets the lane's cards, and those of others only where its lane overflows."""
        for words, pool in pools(self._usable, lane):
            found = self._calendar.earliest(
                pool,
                count,
                self._layout,
                first=self._now,
                latest=latest_start,
                end_of=lambda start: start + duration_s,
            )
            if found is not None:
                why = _why(self._layout, found.gpus, found.start - self._now)
                yield Placement(*found, f"{words}{why}")


def pools(usable: Sequence[Gpu], lane: NamedLane | None) -> Iterator[tuple[str, Sequence[Gpu]]]:
    """The cards that a task may have, what it should try first coming first, with words for it."""
    if lane is None:
        yield "", usable
        return
    name, terms = lane
    yield f"lane {name}: ", [gpu for gpu in usable if gpu.index in terms.gpus]
    if terms.overflow:
        yield f"beyond lane {name}: ", usable


def _why(layout: Layout, cards: Sequence[str], wait_s: float) -> str:
    if len(cards) == 1:
        words = "one card"
    else:
        words = f"{len(cards)} {'linked ' if layout.joined(cards) else ''}cards"
    return words if wait_s <= 0 else f"{words} in {wait_s / 3600:.1f} h"
