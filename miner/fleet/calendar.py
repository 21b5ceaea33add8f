"""When each card is taken, and when so many are free together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from miner.fleet.base import Gpu, Hold, HoldKind
from miner.fleet.layout import FOREVER, Layout

#: A job that should be over holds its cards until it says so: they are not counted on for this long.
OVERDUE_SECONDS = 120.0


class Window(NamedTuple):
    start: float
    end: float


class Found(NamedTuple):
    gpus: tuple[str, ...]
    start: float
    end: float


class Calendar:
    def __init__(self) -> None:
        self._taken: dict[str, list[Window]] = {}

    @classmethod
    def of(cls, holds: Iterable[Hold], now: float) -> Calendar:
        """What is taken from now on."""
        made = cls()
        for hold in holds:
            end = hold.ends_at
            if hold.kind is HoldKind.JOB:
                end = max(end, now + OVERDUE_SECONDS)
            if end > now:
                made.add(hold.gpus, hold.starts_at, end)
        return made

    def add(self, gpus: Iterable[str], start: float, end: float) -> None:
        for gpu in gpus:
            self._taken.setdefault(gpu, []).append(Window(start, end))

    def remove(self, gpus: Iterable[str], start: float, end: float) -> None:
        """What was added just so."""
        for gpu in gpus:
            self._taken[gpu].remove(Window(start, end))

    def is_free(self, gpu: str, start: float, end: float) -> bool:
        return _gap(self._taken.get(gpu, ()), start, end) is not None

    def free(self, pool: Sequence[Gpu], start: float, end: float) -> dict[str, float]:
        """The cards that are free all that time, and for how long afterwards."""
        found = {}
        for gpu in pool:
            taken = self._taken.get(gpu.id)
            gap = _gap(taken, start, end) if taken else FOREVER
            if gap is not None:
                found[gpu.id] = gap
        return found

    def earliest(
        self,
        pool: Sequence[Gpu],
        count: int,
        layout: Layout,
        *,
        first: float,
        latest: float,
        end_of: Callable[[float], float],
    ) -> Found | None:
        """So many cards from `first` on, or from when something else has ended."""
        if not 0 < count <= len(pool):
            return None
        ends, free_from = {first}, []
        for gpu in pool:
            soonest = first
            for start, end in self._taken.get(gpu.id, ()):
                if first < end <= latest:
                    ends.add(end)
                if start <= first:
                    soonest = max(soonest, end)
            free_from.append(soonest)
        enough = sorted(free_from)[count - 1]  # before this, fewer are free whatever comes later
        for start in sorted(one for one in ends if one >= enough):
            end = end_of(start)
            if start > latest or end <= start:
                break
            free = self.free(pool, start, end)
            if len(free) >= count:
                return Found(layout.choose(free, count, free), start, end)
        return None


def _gap(taken: Iterable[Window], start: float, end: float) -> float | None:
    """How long a card stays free after `end`; None: it is not free until then."""
    following = FOREVER
    for first, last in taken:
        if last <= start:
            continue
        if first < end:
            return None
        following = min(following, first - end)
    return following
