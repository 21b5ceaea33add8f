"""How the cards of a host lie to each other, and which of those that are free a job should get.

Cards have places in a row in which linked ones are neighbours. The row is cut into blocks of two, four,
eight…: what a larger job wants whole. Sets of cards are bits of one number here, because a decision about an
offer tries hundreds of sets in less than a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from math import comb
from typing import NamedTuple

from miner.fleet.base import Gpu

#: Up to so many sets of free cards, all are looked at: any choice of eight, a pair of sixteen.
MOST_SETS = 128
FOREVER = float("inf")

Places = tuple[int, ...]


class Score(NamedTuple):
    """Less is better, and what stands first counts most."""

    #: Pairs among them that have no link.
    unlinked: int
    #: Blocks that would no longer be whole, the larger ones weighing more than all smaller ones together.
    broken: int
    #: Blocks that they lie in: cards far apart are joined by a longer way, linked or not.
    spread: int
    #: How long the cards stay free afterwards, all together: long gaps are left to long jobs.
    gaps: float
    places: Places


class Layout:
    def __init__(self, cards: Sequence[tuple[str, int, frozenset[str]]]) -> None:
        groups = sorted(_linked_groups(cards), key=lambda group: (-len(group), group[0][0]))
        row = [name for group in groups for _, name in group]
        self._row = row
        self._place = {name: place for place, name in enumerate(row)}
        self._links = [0] * len(row)
        for name, _, links in cards:
            for other in (
                links & self._place.keys()
            ):  # each way: a card that is out may not know of the others
                self._links[self._place[name]] |= 1 << self._place[other]
                self._links[self._place[other]] |= 1 << self._place[name]
        every = (1 << len(row)) - 1
        self._all_linked = all(links | 1 << place == every for place, links in enumerate(self._links))
        self._none_linked = not any(self._links)
        self._blocks = [block for size in (64, 32, 16, 8, 4, 2) for block in _blocks(size, len(row))]

    def choose(self, free: Iterable[str], count: int, gaps: Mapping[str, float]) -> tuple[str, ...]:
        """The best `count` of the free cards, in the row's order. There must be so many."""
        places = tuple(sorted(self._place[name] for name in free))
        if len(places) > count:
            score = self._scorer(places, [gaps.get(name, FOREVER) for name in self._row])
            places = min(self._sets(places, count), key=score)
        return tuple(self._row[place] for place in places)

    def joined(self, chosen: Sequence[str]) -> bool:
        """Whether each of them has a link to every other."""
        places = [self._place[name] for name in chosen]
        return len(places) > 1 and self._unlinked(places, _mask_of(places)) == 0

    def _sets(self, free: Sequence[int], count: int) -> Iterable[Places]:
        """The sets worth a look: every one, or on a large host the first cards of each block."""
        if comb(len(free), count) <= MOST_SETS:
            return combinations(free, count)
        blocks = [block for block, _ in self._blocks if (block & _mask_of(free)).bit_count() >= count]
        within = [[place for place in free if block >> place & 1] for block in blocks]
        return [tuple(places[:count]) for places in (*within, free)]

    def _scorer(self, free: Sequence[int], gaps: Sequence[float]) -> Callable[[Places], Score]:
        whole = _mask_of(free)
        blocks = [(block, weight, block & whole == block) for block, weight in self._blocks]

        def score(chosen: Places) -> Score:
            mask = _mask_of(chosen)
            broken = spread = 0
            for block, weight, is_whole in blocks:
                taken = mask & block
                if taken:
                    spread += weight
                    if is_whole and taken != block:
                        broken += weight
            gap = sum([gaps[place] for place in chosen])
            return Score(self._unlinked(chosen, mask), broken, spread, gap, chosen)

        return score

    def _unlinked(self, places: Sequence[int], mask: int) -> int:
        pairs = len(places) * (len(places) - 1) // 2
        if self._all_linked:
            return 0
        if self._none_linked:
            return pairs
        return pairs - sum((self._links[place] & mask).bit_count() for place in places) // 2


def layout_of(gpus: Iterable[Gpu]) -> Layout:
    return _layout(tuple((gpu.id, gpu.index, gpu.linked) for gpu in gpus))


@lru_cache(maxsize=16)
def _layout(cards: tuple[tuple[str, int, frozenset[str]], ...]) -> Layout:
    return Layout(cards)


def _blocks(size: int, count: int) -> Iterator[tuple[int, int]]:
    """Blocks of a size, each with a weight that no number of smaller blocks reaches."""
    for start in range(0, count - size + 1, size):
        yield ((1 << size) - 1) << start, size**8


def _linked_groups(cards: Sequence[tuple[str, int, frozenset[str]]]) -> Iterator[list[tuple[int, str]]]:
    left = {name: (index, links) for name, index, links in cards}
    for first, _, _ in cards:
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
