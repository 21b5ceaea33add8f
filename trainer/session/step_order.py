"""Order of a step's rows: those of similar length pass together, so that little is padded.

A step has random rows, and its gradient is the same however they are cut into passes, as long as each row or
label weighs the same in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray


def passes_by_length(
    rows: NDArray[np.int64], lengths: NDArray[np.int64], micro: int, ranks: int
) -> list[NDArray[np.int64]]:
    """By pass, the rows of each rank, longest first. Every other pass goes through the ranks backwards: none
    has the longest rows each time."""
    by_length = rows[np.argsort(-lengths[rows], kind="stable")]
    passes = by_length.reshape(-1, ranks, micro)
    return [each[::-1] if number % 2 else each for number, each in enumerate(passes)]


class StepOrder:
    """The order of an epoch's rows, for a loader that cuts them into micro-batches and deals these to the
    ranks in turn."""

    def __init__(
        self,
        lengths: NDArray[np.int64],
        micro: int,
        passes: int,
        ranks: int,
        seed: int,
        epoch: Callable[[], int],
    ) -> None:
        """`epoch`: the one that begins. A loader that skips rows tells its sampler no epoch."""
        self._lengths, self._micro, self._ranks, self._seed = lengths, micro, ranks, seed
        self._step, self._epoch = micro * passes * ranks, epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        rows = np.random.default_rng((self._seed, self._epoch())).permutation(len(self))
        whole = len(rows) // self._step * self._step
        for start in range(0, whole, self._step):
            step = rows[start : start + self._step]
            for turn in passes_by_length(step, self._lengths, self._micro, self._ranks):
                yield from turn.ravel().tolist()
        yield from rows[whole:].tolist()
