"""Which rows are trained in which step, on which rank: a pure function of seed, epoch and shape.

Nothing is remembered but the number of steps done, so a run resumes at the exact sample, and every rank gets
the same number of batches, which is what keeps several of them from waiting for each other for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np
from numpy.typing import NDArray

from trainer.native.packing import pack

#: Rows packed, or sorted by length, together: enough to fill windows well, few enough to stay mixed.
_WINDOW_ROWS = 20_000
_SORTED_BATCHES = 32

#: One sequence: the rows that share it. One micro-batch: its sequences.
Sequence_ = tuple[int, ...]
Micro = tuple[Sequence_, ...]


@dataclass(frozen=True)
class Order:
    """The shape of a run's data."""

    lengths: NDArray[np.int64]
    #: Tokens of a sequence at most; longer rows are left out, as the evaluator does.
    capacity: int
    micro: int
    accumulation: int
    world: int
    seed: int = 42
    packing: bool = False
    group_by_length: bool = False
    #: Steps in which the batch grows to its full size.
    ramp: int = 0

    @property
    def per_step(self) -> int:
        """Sequences of one optimizer step, all ranks together, once the batch is full."""
        return self.micro * self.accumulation * self.world

    def batches_of(self, step: int) -> tuple[int, int]:
        """Micro-batches of each rank in this step, and sequences of each. While the batch grows there are
        fewer micro-batches, or where there is one anyway a smaller one."""
        if step >= self.ramp:
            return self.accumulation, self.micro
        grown = (step + 1) / (self.ramp + 1)
        if self.accumulation == 1:
            return 1, max(round(self.micro * grown), 1)
        return max(round(self.accumulation * grown), 1), self.micro

    @cached_property
    def usable(self) -> NDArray[np.int64]:
        return np.flatnonzero((self.lengths > 0) & (self.lengths <= self.capacity))

    @cached_property
    def steps_per_epoch(self) -> int:
        """Of the first epoch, with full batches; packed anew, another may have one step more or fewer."""
        there = len(self._sequences(0)) if self.packing else len(self.usable)
        return there // self.per_step or 1

    def steps(self, done: int = 0) -> Iterator[list[list[Micro]]]:
        """From step `done` on, without end: per step, per rank, its micro-batches."""
        if not len(self.usable):
            raise ValueError(f"no row has between 1 and {self.capacity} tokens")
        step = 0
        for epoch in count():
            sequences = self._sequences(epoch) if self.packing else []
            there, start = len(sequences) or len(self.usable), 0
            while start == 0 or start + self._size(step) <= there:
                if step >= done:
                    sequences = sequences or self._sequences(epoch)
                    yield self._shared_out(sequences, start, *self.batches_of(step))
                start, step = start + self._size(step), step + 1

    def for_rank(self, rank: int, done: int = 0) -> Iterator[list[Micro]]:
        for step in self.steps(done):
            yield step[rank]

    def _size(self, step: int) -> int:
        batches, each = self.batches_of(step)
        return batches * each * self.world

    def _sequences(self, epoch: int) -> list[Sequence_]:
        random = np.random.default_rng((self.seed, epoch))
        rows = random.permutation(self.usable)
        if self.packing:
            packed: list[Sequence_] = []
            for start in range(0, len(rows), _WINDOW_ROWS):
                some = rows[start : start + _WINDOW_ROWS]
                windows = pack(self.lengths[some], self.capacity)
                packed += [tuple(some[window].tolist()) for window in windows]
            return [packed[index] for index in random.permutation(len(packed)).tolist()]
        if self.group_by_length:
            rows = self._grouped(rows, random)
        return [(row,) for row in rows.tolist()]

    def _grouped(self, rows: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.int64]:
        """Neighbours of like length in a batch, batches in random order."""
        chunk = self.per_step * _SORTED_BATCHES
        parts = [rows[start : start + chunk] for start in range(0, len(rows), chunk)]
        by_length = np.concatenate([part[np.argsort(self.lengths[part], kind="stable")] for part in parts])
        whole = len(by_length) // self.per_step * self.per_step
        batches = by_length[:whole].reshape(-1, self.per_step)
        return np.concatenate([batches[random.permutation(len(batches))].reshape(-1), by_length[whole:]])

    def _shared_out(
        self, sequences: list[Sequence_], start: int, batches: int, each: int
    ) -> list[list[Micro]]:
        """Rank by rank in turn, so that sequences of like length are spread evenly. An epoch shorter than one
        step repeats its sequences."""
        stride = self.world * batches
        taken = [sequences[(start + index) % len(sequences)] for index in range(stride * each)]
        return [
            [tuple(taken[rank + self.world * turn :: stride]) for turn in range(batches)]
            for rank in range(self.world)
        ]
