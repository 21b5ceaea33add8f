"""Find which GPUs a task would get, and when: the links between GPUs, what is taken, the search.

GPUs have positions in a row in which linked ones are neighbours; the row is cut into blocks of two, four,
eight… that a larger job wants whole. Sets of GPUs are bits of one number, because a decision about an
offer tries hundreds of sets in less than a millisecond. Everything here is pure: a policy can ask it of
any snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from math import comb
from typing import NamedTuple

from core.domain.keys import GpuReservation, NamedLane, Placement, ReservationKind
from miner.fleet.base import FleetSnapshot, Gpu

#: Up to so many sets of free GPUs, all are tried: any choice of eight, a pair of sixteen.
MAX_SETS_TRIED = 128
FOREVER = float("inf")

Positions = tuple[int, ...]


class PlacementScore(NamedTuple):
    """Less is better, and the first field counts most."""

    #: Pairs among them that have no link.
    unlinked: int
    #: Blocks that would no longer be whole, the larger ones weighing more than all smaller ones together.
    broken: int
    #: Blocks that they lie in: between GPUs far apart the way is longer, linked or not.
    spread: int
    #: How long the GPUs stay free afterwards, all together: long gaps are left to long jobs.
    gaps: float
    places: Positions


class GpuTopology:
    def __init__(self, gpus: Sequence[tuple[str, int, frozenset[str]]]) -> None:
        groups = sorted(_linked_groups(gpus), key=lambda group: (-len(group), group[0][0]))
        row = [name for group in groups for _, name in group]
        self._row = row
        self._place = {name: place for place, name in enumerate(row)}
        self._links = [0] * len(row)
        for name, _, links in gpus:
            for other in links & self._place.keys():  # both ways: a failed GPU may not report its links
                self._links[self._place[name]] |= 1 << self._place[other]
                self._links[self._place[other]] |= 1 << self._place[name]
        every = (1 << len(row)) - 1
        self._all_linked = all(links | 1 << place == every for place, links in enumerate(self._links))
        self._none_linked = not any(self._links)
        self._blocks = [block for size in (64, 32, 16, 8, 4, 2) for block in _blocks(size, len(row))]

    def choose(self, free: Iterable[str], count: int, gaps: Mapping[str, float]) -> tuple[str, ...]:
        """The best `count` of the free GPUs, in the row's order. There must be so many."""
        places = tuple(sorted(self._place[name] for name in free))
        if len(places) > count:
            score = self._scorer(places, [gaps.get(name, FOREVER) for name in self._row])
            places = min(self._sets(places, count), key=score)
        return tuple(self._row[place] for place in places)

    def are_all_linked(self, chosen: Sequence[str]) -> bool:
        """Whether each of them has a link to every other."""
        places = [self._place[name] for name in chosen]
        return len(places) > 1 and self._unlinked(places, _mask_of(places)) == 0

    def _sets(self, free: Sequence[int], count: int) -> Iterable[Positions]:
        """The sets to try: every one, or on a large host the first GPUs of each block."""
        if comb(len(free), count) <= MAX_SETS_TRIED:
            return combinations(free, count)
        blocks = [block for block, _ in self._blocks if (block & _mask_of(free)).bit_count() >= count]
        within = [[place for place in free if block >> place & 1] for block in blocks]
        return [tuple(places[:count]) for places in (*within, free)]

    def _scorer(self, free: Sequence[int], gaps: Sequence[float]) -> Callable[[Positions], PlacementScore]:
        whole = _mask_of(free)
        blocks = [(block, weight, block & whole == block) for block, weight in self._blocks]

        def score(chosen: Positions) -> PlacementScore:
            mask = _mask_of(chosen)
            broken = spread = 0
            for block, weight, is_whole in blocks:
                taken = mask & block
                if taken:
                    spread += weight
                    if is_whole and taken != block:
                        broken += weight
            gap = sum([gaps[place] for place in chosen])
            return PlacementScore(self._unlinked(chosen, mask), broken, spread, gap, chosen)

        return score

    def _unlinked(self, places: Sequence[int], mask: int) -> int:
        pairs = len(places) * (len(places) - 1) // 2
        if self._all_linked:
            return 0
        if self._none_linked:
            return pairs
        return pairs - sum((self._links[place] & mask).bit_count() for place in places) // 2


def topology_of(gpus: Iterable[Gpu]) -> GpuTopology:
    return _topology(tuple((gpu.id, gpu.index, gpu.linked) for gpu in gpus))


@lru_cache(maxsize=16)
def _topology(gpus: tuple[tuple[str, int, frozenset[str]], ...]) -> GpuTopology:
    return GpuTopology(gpus)


def _blocks(size: int, count: int) -> Iterator[tuple[int, int]]:
    """Blocks of a size, each with a weight that no number of smaller blocks reaches."""
    for start in range(0, count - size + 1, size):
        yield ((1 << size) - 1) << start, size**8


def _linked_groups(gpus: Sequence[tuple[str, int, frozenset[str]]]) -> Iterator[list[tuple[int, str]]]:
    left = {name: (index, links) for name, index, links in gpus}
    for first, _, _ in gpus:
        group, edge = [], [first]
        while edge:
            name = edge.pop()
            if name in left:
                index, links = left.pop(name)
                group.append((index, name))
                edge += links
        if group:
            yield sorted(group)


def _mask_of(places: Iterable[int]) -> int:
    return sum(1 << place for place in places)


#: A job that should be over has its GPUs until it releases them: they are not counted on for this long.
OVERDUE_SECONDS = 120.0


class TakenWindow(NamedTuple):
    start: float
    end: float


class FreeWindow(NamedTuple):
    gpus: tuple[str, ...]
    start: float
    end: float


class GpuCalendar:
    def __init__(self) -> None:
        self._taken: dict[str, list[TakenWindow]] = {}

    @classmethod
    def from_reservations(
        cls, reservations: Iterable[GpuReservation], now: float, gpus: Iterable[Gpu] = ()
    ) -> GpuCalendar:
        """The windows that are taken from now on, by us and by others who use these GPUs."""
        calendar = cls()
        calendar.add_others(gpus)
        for reservation in reservations:
            end = reservation.ends_at
            if reservation.kind is ReservationKind.JOB:
                end = max(end, now + OVERDUE_SECONDS)
            if end > now:
                calendar.add(reservation.gpus, reservation.starts_at, end)
        return calendar

    def add(self, gpus: Iterable[str], start: float, end: float) -> None:
        for gpu in gpus:
            self._taken.setdefault(gpu, []).append(TakenWindow(start, end))

    def add_others(self, gpus: Iterable[Gpu]) -> None:
        """Add when others use them, by what the cluster's scheduler knows."""
        for gpu in gpus:
            for start, end in gpu.busy:
                self.add((gpu.id,), start, end)

    def remove(self, gpus: Iterable[str], start: float, end: float) -> None:
        """Remove a window that was added with the same values."""
        for gpu in gpus:
            self._taken[gpu].remove(TakenWindow(start, end))

    def is_free(self, gpu: str, start: float, end: float) -> bool:
        return _gap(self._taken.get(gpu, ()), start, end) is not None

    def free_gpus(self, pool: Sequence[Gpu], start: float, end: float) -> dict[str, float]:
        """The GPUs that are free all that time, and for how long afterwards."""
        gaps = {}
        for gpu in pool:
            taken = self._taken.get(gpu.id)
            gap = _gap(taken, start, end) if taken else FOREVER
            if gap is not None:
                gaps[gpu.id] = gap
        return gaps

    def earliest(
        self,
        pool: Sequence[Gpu],
        count: int,
        topology: GpuTopology,
        *,
        first: float,
        latest: float,
        end_of: Callable[[float], float],
    ) -> FreeWindow | None:
        """The first window of `count` GPUs, from `first` on or from when something else ends."""
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
        for start in sorted(end for end in ends if end >= enough):
            end = end_of(start)
            if start > latest or end <= start:
                break
            free = self.free_gpus(pool, start, end)
            if len(free) >= count:
                return FreeWindow(topology.choose(free, count, free), start, end)
        return None


def _gap(taken: Iterable[TakenWindow], start: float, end: float) -> float | None:
    """How long a GPU stays free after `end`; None: it is not free until then."""
    following = FOREVER
    for first, last in taken:
        if last <= start:
            continue
        if first < end:
            return None
        following = min(following, first - end)
    return following


class PlacementSearch:
    """Search one snapshot at one moment. What a task itself has reserved blocks it: use
    `snapshot(now, without=key)`."""

    def __init__(self, snapshot: FleetSnapshot, now: float) -> None:
        self._usable, self._now = snapshot.usable, now
        self._calendar, self._topology = (
            GpuCalendar.from_reservations(snapshot.reservations, now, snapshot.gpus),
            topology_of(snapshot.gpus),
        )

    def options(
        self, count: int, *, duration_s: float, latest_start: float, lane: NamedLane | None = None
    ) -> Iterator[Placement]:
        """Windows of `count` GPUs that begin by `latest_start`: the earliest in each pool that the task may
        use. The preferred pool comes first, which is not always the one that is free first: a lane's task
        gets the lane's GPUs, and others only where its lane overflows."""
        for prefix, pool in candidate_pools(self._usable, lane):
            window = self._calendar.earliest(
                pool,
                count,
                self._topology,
                first=self._now,
                latest=latest_start,
                end_of=lambda start: start + duration_s,
            )
            if window is not None:
                why = _placement_reason(self._topology, window.gpus, window.start - self._now)
                yield Placement(*window, f"{prefix}{why}")


def candidate_pools(usable: Sequence[Gpu], lane: NamedLane | None) -> Iterator[tuple[str, Sequence[Gpu]]]:
    """The GPUs that a task may use, the preferred ones first, each with a prefix for the reason."""
    if lane is None:
        yield "", usable
        return
    name, terms = lane
    yield f"lane {name}: ", [gpu for gpu in usable if gpu.index in terms.gpus]
    if terms.overflow:
        yield f"beyond lane {name}: ", usable


def _placement_reason(topology: GpuTopology, gpus: Sequence[str], wait_s: float) -> str:
    if len(gpus) == 1:
        text = "one GPU"
    else:
        text = f"{len(gpus)} {'linked ' if topology.are_all_linked(gpus) else ''}GPUs"
    return text if wait_s <= 0 else f"{text} in {wait_s / 3600:.1f} h"
