"""Find which GPUs a task would get, and when: the links between GPUs, what is taken, the search.

A task's GPUs are in one node, or in several whole ones. Those of a node have positions in a row in which
linked ones are neighbours; the row is cut into blocks of two, four, eight… that a larger job wants whole.
Sets of GPUs are bits of one number, because a decision about an offer tries hundreds of sets in less than a
millisecond. Everything here is pure: a policy can ask it of any snapshot.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from math import comb
from typing import NamedTuple

from core.domain.keys import GpuReservation, NamedLane, Placement, ReservationKind, nodes_of
from miner.fleet.base import FleetSnapshot, Gpu, GpuOption, NodeGpus

#: Up to so many sets of free GPUs, all are tried: any choice of eight, a pair of sixteen.
MAX_SETS_TRIED = 128
#: Up to so many nodes are compared by their links.
MAX_NODES_COMPARED = 8
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
        #: Whether any choice is linked as well as any other.
        self.is_uniform = self._all_linked or self._none_linked
        self._blocks = [block for size in (64, 32, 16, 8, 4, 2) for block in _blocks(size, len(row))]

    def choose(self, free: Iterable[str], count: int, gaps: Mapping[str, float]) -> tuple[str, ...]:
        """The best `count` of the free GPUs, in the row's order. There must be so many."""
        places = tuple(sorted(self._place[name] for name in free))
        if len(places) > count:
            score = self._scorer(places, [gaps.get(name, FOREVER) for name in self._row])
            places = min(self._sets(places, count), key=score)
        return tuple(self._row[place] for place in places)

    def are_all_linked(self, chosen: Sequence[str]) -> bool:
        """Return True if each of these GPUs has a link to every other."""
        return len(chosen) > 1 and self.unlinked_pairs(chosen) == 0

    def unlinked_pairs(self, chosen: Sequence[str]) -> int:
        places = [self._place[name] for name in chosen]
        return self._unlinked(places, _mask_of(places))

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


@lru_cache(maxsize=4096)
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


class _NodeWindow(NamedTuple):
    """A place for a task in one node: less is better."""

    #: GPUs of the node that stay free.
    left_over: int
    #: The node's place among those that were asked about.
    place: int
    start: float
    end: float
    #: The free GPUs, and for how long they stay free afterwards.
    free: Mapping[str, float]


class _Chance(NamedTuple):
    """When a node could have room at the earliest: less is better."""

    #: Before this too few of its GPUs are free, whatever comes later.
    start: float
    #: GPUs that are free then, as far as is known from what has begun.
    free: int
    place: int


class _SearchedNodes:
    """Nodes that are searched again and again, and since when their GPUs are free."""

    def __init__(self, nodes: Sequence[NodeGpus]) -> None:
        self.nodes = nodes
        self.places = {gpu.id: place for place, node in enumerate(nodes) for gpu in node.usable}
        #: Since when one, two, three of the node's GPUs are free.
        self.free_from: list[list[float]] = [[] for _ in nodes]
        self.is_idle = [True for _ in nodes]
        self.changed = set(range(len(nodes)))

    def read(self, taken: Mapping[str, Sequence[TakenWindow]], now: float) -> None:
        """Find out what has changed in the nodes whose windows have changed."""
        while self.changed:
            place = self.changed.pop()
            windows = [taken.get(gpu.id, ()) for gpu in self.nodes[place].usable]
            self.is_idle[place] = not any(windows)
            self.free_from[place] = sorted([_free_from(of_gpu, now) for of_gpu in windows])

    def chances(self, count: int, latest: float) -> list[_Chance]:
        """The nodes that could have room for so many GPUs by then, the best one first."""
        return sorted(
            [
                _Chance(moments[count - 1], bisect_right(moments, moments[count - 1]), place)
                for place, moments in enumerate(self.free_from)
                if len(moments) >= count > 0 and moments[count - 1] <= latest
            ]
        )


def _free_from(taken: Sequence[TakenWindow], now: float) -> float:
    """The end of what is taken without a gap from now on."""
    free = now
    for start, end in sorted(taken) if len(taken) > 1 else taken:
        if start <= free:
            free = max(free, end)
    return free


class GpuCalendar:
    """The windows that are taken from `now` on."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._taken: dict[str, list[TakenWindow]] = {}
        self._searched: dict[int, _SearchedNodes] = {}
        self._topologies: dict[str, GpuTopology] = {}

    @classmethod
    def from_reservations(
        cls, reservations: Iterable[GpuReservation], now: float, gpus: Iterable[Gpu] = ()
    ) -> GpuCalendar:
        """The windows that are taken, by us and by others who use these GPUs."""
        calendar = cls(now)
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
            self._note_change(gpu)

    def add_others(self, gpus: Iterable[Gpu]) -> None:
        """Add when others use them, by what the cluster's scheduler knows."""
        for gpu in gpus:
            for start, end in gpu.busy:
                self.add((gpu.id,), start, end)

    def remove(self, gpus: Iterable[str], start: float, end: float) -> None:
        """Remove a window that was added with the same values."""
        for gpu in gpus:
            self._taken[gpu].remove(TakenWindow(start, end))
            self._note_change(gpu)

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
        nodes: Sequence[NodeGpus],
        count: int,
        *,
        latest: float,
        end_of: Callable[[float], float],
        over: int = 1,
    ) -> FreeWindow | None:
        """The first window of `count` GPUs, from now on or from when something else ends: all in one node, or
        as many in each of `over` nodes. Of the nodes where it begins first, one where the fewest GPUs stay
        free."""
        if over > 1:
            return self._earliest_over(nodes, count, latest, end_of, over)
        if len(nodes) == 1:
            return self._earliest_in(nodes, count, latest, end_of)
        searched, found = self._search(nodes), list[_NodeWindow]()
        seen_idle = set()
        for chance in searched.chances(count, latest):
            node = nodes[chance.place]
            if chance.start > latest or len(found) == MAX_NODES_COMPARED:
                break
            if searched.is_idle[chance.place]:  # like any other idle node of its size
                if len(node.usable) in seen_idle:
                    continue
                seen_idle.add(len(node.usable))
            window = self._first_in(node, chance, count, latest, end_of)
            if window is not None:
                if window.start < latest:
                    found = []
                latest = window.start
                found.append(window)
        return self._best_of(nodes, found, count)

    def _earliest_in(
        self, nodes: Sequence[NodeGpus], count: int, latest: float, end_of: Callable[[float], float]
    ) -> FreeWindow | None:
        """The same in one node, as on every miner without a cluster: nothing has to be compared."""
        node, moments = nodes[0], self._search(nodes).free_from[0]
        if not 0 < count <= len(moments) or moments[count - 1] > latest:
            return None
        window = self._first_in(node, _Chance(moments[count - 1], 0, 0), count, latest, end_of)
        if window is None:
            return None
        chosen = self.topology(node).choose(window.free, count, window.free)
        return FreeWindow(chosen, window.start, window.end)

    def topology(self, node: NodeGpus) -> GpuTopology:
        found = self._topologies.get(node.node)
        if found is None:
            found = self._topologies[node.node] = topology_of(node.every)
        return found

    def _search(self, nodes: Sequence[NodeGpus]) -> _SearchedNodes:
        searched = self._searched.get(id(nodes))
        if searched is None:
            searched = self._searched[id(nodes)] = _SearchedNodes(nodes)
        searched.read(self._taken, self.now)
        return searched

    def _note_change(self, gpu: str) -> None:
        for searched in self._searched.values():
            if (place := searched.places.get(gpu)) is not None:
                searched.changed.add(place)

    def _first_in(
        self,
        node: NodeGpus,
        chance: _Chance,
        count: int,
        latest: float,
        end_of: Callable[[float], float],
    ) -> _NodeWindow | None:
        ends = {self.now}
        for gpu in node.usable:
            for _, end in self._taken.get(gpu.id, ()):
                if self.now < end <= latest:
                    ends.add(end)
        for start in sorted(end for end in ends if end >= chance.start):
            end = end_of(start)
            if start > latest or end <= start:
                break
            free = self.free_gpus(node.usable, start, end)
            if len(free) >= count:
                return _NodeWindow(len(free) - count, chance.place, start, end, free)
        return None

    def _best_of(
        self, nodes: Sequence[NodeGpus], found: Sequence[_NodeWindow], count: int
    ) -> FreeWindow | None:
        """The best linked GPUs; among equals those of the node that is filled most."""
        best, fewest = None, FOREVER
        for window in sorted(found, key=lambda window: window[:2])[:MAX_NODES_COMPARED]:
            topology = self.topology(nodes[window.place])
            chosen = topology.choose(window.free, count, window.free)
            unlinked = topology.unlinked_pairs(chosen)
            if unlinked < fewest:
                best, fewest = FreeWindow(chosen, window.start, window.end), unlinked
            if not fewest or topology.is_uniform:
                break
        return best

    def _earliest_over(
        self,
        nodes: Sequence[NodeGpus],
        count: int,
        latest: float,
        end_of: Callable[[float], float],
        over: int,
    ) -> FreeWindow | None:
        """The first moment at which so many nodes have the GPUs free together."""
        each = count // over
        chances = self._search(nodes).chances(each, latest) if each * over == count else []
        if len(chances) < over:
            return None
        enough = chances[over - 1].start
        starts = {self.now, enough}
        for _, _, place in chances:
            for gpu in nodes[place].usable:
                starts.update(end for _, end in self._taken.get(gpu.id, ()) if self.now < end <= latest)
        for start in sorted(moment for moment in starts if moment >= enough):
            end = end_of(start)
            if end <= start:
                break
            found = []
            for free_from, _, place in chances:
                if free_from > start:
                    break
                free = self.free_gpus(nodes[place].usable, start, end)
                if len(free) >= each:
                    found.append(_NodeWindow(len(free) - each, place, start, end, free))
            if len(found) >= over:
                chosen = sorted(
                    sorted(found, key=lambda window: window[:2])[:over], key=lambda one: one.place
                )
                gpus = (self.topology(nodes[one.place]).choose(one.free, each, one.free) for one in chosen)
                return FreeWindow(tuple(gpu for group in gpus for gpu in group), start, end)
        return None


def _gap(taken: Iterable[TakenWindow], start: float, end: float) -> float | None:
    """Return how long a GPU stays free after `end`, or None if it is not free until then."""
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
        self._nodes, self._now = NodeFilter(snapshot.inventory.gpus_by_node), now
        self._calendar = GpuCalendar.from_reservations(snapshot.reservations, now, snapshot.gpus)

    def options(
        self, option: GpuOption, *, duration_s: float, latest_start: float, lane: NamedLane | None = None
    ) -> Iterator[Placement]:
        """Windows of so many GPUs that begin by `latest_start`: the earliest in each pool that the task may
        use. The preferred pool comes first, which is not always the one that is free first: a lane's task
        gets the lane's GPUs, and others only where its lane overflows."""
        for prefix, nodes in self._nodes.candidates(option.nodes, lane):
            window = self._calendar.earliest(
                nodes,
                option.gpus,
                latest=latest_start,
                end_of=lambda start: start + duration_s,
                over=option.over,
            )
            if window is not None:
                why = self._reason(window.gpus, window.start - self._now)
                yield Placement(*window, f"{prefix}{why}")

    def _reason(self, gpus: Sequence[str], wait_s: float) -> str:
        names = nodes_of(gpus)
        if len(gpus) == 1:
            text = "one GPU"
        elif len(names) == 1:
            node = next(node for node in self._nodes.all if node.node == names[0])
            linked = self._calendar.topology(node).are_all_linked(gpus)
            text = f"{len(gpus)} {'linked ' if linked else ''}GPUs"
        else:
            text = f"{len(gpus)} GPUs of {len(names)} nodes"
        return text if wait_s <= 0 else f"{text} in {wait_s / 3600:.1f} h"


class NodeFilter:
    """The usable GPUs by node, less those that a task may not use."""

    def __init__(self, nodes: Sequence[NodeGpus]) -> None:
        self.all = nodes
        self._found: dict[tuple[object, ...], Sequence[NodeGpus]] = {}

    def candidates(
        self,
        names: frozenset[str] | None,
        lane: NamedLane | None,
        without: frozenset[str] = frozenset(),
    ) -> Iterator[tuple[str, Sequence[NodeGpus]]]:
        """The GPUs that a task may use, the preferred ones first, each with a prefix for the reason. `names`:
        of its nodes; `without`: but not these GPUs."""
        if lane is None:
            yield "", self._choose(names, None, without)
            return
        name, terms = lane
        yield f"lane {name}: ", self._choose(names, terms.gpus, without)
        if terms.overflow:
            yield f"beyond lane {name}: ", self._choose(names, None, without)

    def _choose(
        self, names: frozenset[str] | None, indices: Collection[int] | None, without: frozenset[str]
    ) -> Sequence[NodeGpus]:
        """Each choice is made once: it is asked for again and again."""
        key = (names, None if indices is None else tuple(indices), without)
        if key not in self._found:
            nodes = [node for node in self.all if names is None or node.node in names]
            self._found[key] = [_reduced(node, indices, without) for node in nodes]
        return self._found[key]


def _reduced(node: NodeGpus, indices: Collection[int] | None, without: frozenset[str]) -> NodeGpus:
    if indices is None and without.isdisjoint([gpu.id for gpu in node.usable]):
        return node
    left = (gpu for gpu in node.usable if indices is None or gpu.index in indices)
    return node._replace(usable=tuple([gpu for gpu in left if gpu.id not in without]))
