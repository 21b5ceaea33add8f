"""Which GPUs a task would get, and when: pure, so that a policy can ask it of any snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from core.profile import Lane
from miner.fleet.base import FleetSnapshot, Gpu, Hold, HoldKind, Placement
from miner.fleet.layout import FOREVER, Layout, layout_of

#: A job that should be over holds its cards until it says so: they are not counted on for this long.
OVERDUE_SECONDS = 120.0

#: A lane and its name in the profile, as `core.planning.gpus.lane_for` finds them.
NamedLane = tuple[str, Lane]


class _Window(NamedTuple):
    start: float
    end: float


_Busy = Mapping[str, Sequence[_Window]]


def place(
    snapshot: FleetSnapshot,
    counts: Sequence[int],
    *,
    now: float,
    duration_s: float,
    latest_start: float,
    lane: NamedLane | None = None,
) -> Placement | None:
    """Cards for the first of `counts` that can begin by `latest_start`, as early as it can; None: none can.

    A lane's task gets the lane's cards, and those of others only where its lane overflows. What the task
    itself holds already is in its way: ask of `snapshot.without(key)`.
    """
    busy, layout = _busy(snapshot.holds, now), layout_of(snapshot.gpus)
    for count in counts:
        for words, pool in pools(snapshot.usable, lane):
            found = _earliest(pool, count, busy, layout, _Window(now, latest_start), duration_s)
            if found is not None:
                cards, start = found
                return Placement(cards, start, start + duration_s, words + _why(layout, cards, start - now))
    return None


def pools(usable: Sequence[Gpu], lane: NamedLane | None) -> Iterator[tuple[str, Sequence[Gpu]]]:
    """The cards that a task may have, what it should try first coming first, with words for it."""
    if lane is None:
        yield "", usable
        return
    name, terms = lane
    yield f"lane {name}: ", [gpu for gpu in usable if gpu.index in terms.gpus]
    if terms.overflow:
        yield f"beyond lane {name}: ", usable


def _busy(holds: Iterable[Hold], now: float) -> _Busy:
    """When each card is taken, from now on."""
    found: dict[str, list[_Window]] = {}
    for hold in holds:
        end = hold.ends_at
        if hold.kind is HoldKind.JOB:
            end = max(end, now + OVERDUE_SECONDS)
        if end > now:
            for gpu in hold.gpus:
                found.setdefault(gpu, []).append(_Window(hold.starts_at, end))
    return found


def _earliest(
    pool: Sequence[Gpu], count: int, busy: _Busy, layout: Layout, starts: _Window, duration_s: float
) -> tuple[tuple[str, ...], float] | None:
    """Cards have room for something now, or from when something else has ended."""
    if not 0 < count <= len(pool) or starts.end < starts.start:
        return None
    ends = {one.end for gpu in pool for one in busy.get(gpu.id, ()) if starts.start < one.end <= starts.end}
    for start in (starts.start, *sorted(ends)):
        gaps = {gpu.id: _gap(busy.get(gpu.id, ()), start, start + duration_s) for gpu in pool}
        free = {name: gap for name, gap in gaps.items() if gap is not None}
        if len(free) >= count:
            return layout.choose(free, count, free), start
    return None


def _gap(taken: Iterable[_Window], start: float, end: float) -> float | None:
    """How long a card stays free after `end`; None: it is not free until then."""
    following = FOREVER
    for one in taken:
        if one.end <= start:
            continue
        if one.start < end:
            return None
        following = min(following, one.start - end)
    return following


def _why(layout: Layout, cards: Sequence[str], wait_s: float) -> str:
    if len(cards) == 1:
        words = "one card"
    else:
        words = f"{len(cards)} {'linked ' if layout.joined(cards) else ''}cards"
    return words if wait_s <= 0 else f"{words} in {wait_s / 3600:.1f} h"
