"""Which rows are trained in which step, on which rank: a pure function of seed, epoch and shape.

Nothing is remembered but the number of steps done, so a run resumes at the exact sample, and every rank gets
the same number of batches, which is what keeps several of them from waiting for each other for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

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

    @property
    def per_step(self) -> int:
        """Sequences of one optimizer step, all ranks together."""
        return self.micro * self.accumulation * self.world

    @cached_property
    def usable(self) -> NDArray[np.int64]:
        return np.flatnonzero((self.lengths > 0) & (self.lengths <= self.capacity))

    @cached_property
    def steps_per_epoch(self) -> int:
        """Of the first epoch; packed anew, another may have one step more or fewer."""
        return self._steps_of(0)

    def steps(self, done: int = 0) -> Iterator[list[list[Micro]]]:
        """From step `done` on, without end: per step, per rank, its micro-batches."""
        if not len(self.usable):
            raise ValueError(f"no row has between 1 and {self.capacity} tokens")
        epoch = 0
        while done >= (count := self._steps_of(epoch)):
            done, epoch = done - count, epoch + 1
        while True:
            sequences = self._sequences(epoch)
            for step in range(done, len(sequences) // self.per_step or 1):
                yield self._shared_out(sequences, step)
            done, epoch = 0, epoch + 1

    def for_rank(self, rank: int, done: int = 0) -> Iterator[list[Micro]]:
        for step in self.steps(done):
            yield step[rank]

    def _steps_of(self, epoch: int) -> int:
        if not self.packing:
            return len(self.usable) // self.per_step or 1
        return len(self._sequences(epoch)) // self.per_step or 1

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

    def _shared_out(self, sequences: list[Sequence_], step: int) -> list[list[Micro]]:
        """Rank by rank in turn, so that sequences of like length are spread evenly. An epoch shorter than one
        step repeats its sequences."""
        start = step * self.per_step
        taken = [sequences[(start + index) % len(sequences)] for index in range(self.per_step)]
        stride = self.world * self.accumulation
        return [
            [tuple(taken[rank + self.world * turn :: stride]) for turn in range(self.accumulation)]
            for rank in range(self.world)
        ]
