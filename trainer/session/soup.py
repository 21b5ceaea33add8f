"""The best states of a training, and a mean of some of them that scores better than the best alone.

Greedy: from the best on, each next one is taken into the mean if that then scores better.

The same held-out rows judge all candidates. If these were equally good in truth, the luckiest would be taken,
which looks better than it is but is no worse than what it replaces: a wider margin would protect from nothing
and cost true gains. So the least gain is only what arithmetic in bf16 makes of equal weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from core.runs.run_files import HeldOutScore

#: A mean is better by this share of the score at least.
LEAST_GAIN = 1e-4


class StateStore(Protocol):
    """Where states of the weights are put aside. All ranks call every method."""

    def keep(self, number: int) -> bool:
        """Put the weights aside as they are; False where there is no room."""

    def drop(self, number: int) -> None: ...

    def load(self, numbers: Sequence[int]) -> None:
        """Give the weights the mean of these states."""

    def clear(self) -> None:
        """Drop all states, and the folder of their files."""


class ScoredState(NamedTuple):
    number: int
    score: HeldOutScore


@dataclass
class BestStates:
    """The best of the scored states that this process has had, in the order of their scores."""

    store: StateStore
    most: int
    states: list[ScoredState] = field(default_factory=list)
    #: Of the newest; each is another number.
    _number: int = 0

    def offer(self, score: HeldOutScore) -> bool | None:
        """Keep the weights as they are if they are among the best. Whether they are kept; None: there is no
        room for them."""
        place = next(
            (at for at, state in enumerate(self.states) if score.beats(state.score)), len(self.states)
        )
        if place >= self.most:
            return False
        if len(self.states) >= self.most:
            self._drop_worst()
        self._number += 1
        if not self.store.keep(self._number):
            # As many as there is room for: a better one takes the place of the worst.
            if place >= len(self.states):
                return None
            self._drop_worst()
            if not self.store.keep(self._number):
                return None
        self.states.insert(place, ScoredState(self._number, score))
        return True

    def _drop_worst(self) -> None:
        self.store.drop(self.states.pop().number)


class Soup(NamedTuple):
    """The states whose mean it is, and what that scores."""

    numbers: tuple[int, ...]
    score: HeldOutScore


def greedy_soup(
    states: Sequence[ScoredState],
    score: Callable[[tuple[int, ...]], HeldOutScore | None],
    goes_on: Callable[[int], bool],
    on_candidate: Callable[[Soup, bool], None] = lambda candidate, better: None,
) -> Soup:
    """The best mean; of one state where none is better. `score` is of the mean of these states, None if it is
    not finite; `goes_on`: whether there is time for a mean of so many states."""
    first, *others = states
    soup = Soup((first.number,), first.score)
    for state in others:
        numbers = (*soup.numbers, state.number)
        if not goes_on(len(numbers)):
            break
        scored = score(numbers)
        if scored is None:
            continue
        candidate = Soup(numbers, scored)
        better = is_gain(scored, soup.score)
        on_candidate(candidate, better)
        soup = candidate if better else soup
    return soup


def is_gain(score: HeldOutScore, before: HeldOutScore) -> bool:
    """Whether it is better by more than arithmetic makes of equal weights."""
    return score.beats(before) and abs(score.value - before.value) > LEAST_GAIN * abs(before.value)
