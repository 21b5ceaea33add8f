"""The order of rows in steps, and their tensors.

The order is a pure function of seed, epoch and shape: a run resumes at the exact sample, and every rank gets
the same number of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.inputs.token_file import TokenFile
from trainer.inputs.tokens import IGNORED
from trainer.session.step_order import passes_by_length


def pack_rows(lengths: Sequence[int] | NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Indices of `lengths`, grouped so that each group's sum is at most `capacity`; longer rows left out."""
    if capacity < 1:
        raise ValueError(f"a window of {capacity} tokens holds nothing")
    sizes = np.asarray(lengths, dtype=np.int64)
    windows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        if size > capacity or size < 1:
            continue
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            window = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
            windows[window].append(index)
        else:
            room, window = capacity, len(windows)
            windows.append([index])
        left = room - size
        if left:
            with_room[left].append(window)
            rooms |= 1 << left
    return windows


#: Rows packed, or sorted by length, together: enough to fill windows well, few enough to stay mixed.
_WINDOW_ROWS = 20_000
_SORTED_BATCHES = 32

#: One sequence: the rows that share it. One micro-batch: its sequences.
PackedRows = tuple[int, ...]
MicroBatch = tuple[PackedRows, ...]


@dataclass(frozen=True)
class SampleOrder:
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
    def sequences_per_epoch(self) -> int:
        """Sequences of the first epoch; packed differently, another may have a few more or fewer."""
        return len(self._sequences(0)) if self.packing else len(self.usable)

    @property
    def steps_per_epoch(self) -> int:
        """With full batches."""
        return self.sequences_per_epoch // self.per_step or 1

    def steps(self, done: int = 0) -> Iterator[list[list[MicroBatch]]]:
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

    def for_rank(self, rank: int, done: int = 0) -> Iterator[list[MicroBatch]]:
        for step in self.steps(done):
            yield step[rank]

    def _size(self, step: int) -> int:
        batches, sequences = self.batches_of(step)
        return batches * sequences * self.world

    def _sequences(self, epoch: int) -> list[PackedRows]:
        random = np.random.default_rng((self.seed, epoch))
        rows = random.permutation(self.usable)
        if self.packing:
            packed: list[PackedRows] = []
            for start in range(0, len(rows), _WINDOW_ROWS):
                chunk = rows[start : start + _WINDOW_ROWS]
                windows = pack_rows(self.lengths[chunk], self.capacity)
                packed += [tuple(chunk[window].tolist()) for window in windows]
            return [packed[index] for index in random.permutation(len(packed)).tolist()]
        if self.group_by_length:
            rows = self._grouped(rows, random)
        return [(row,) for row in rows.tolist()]

    def _grouped(self, rows: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.int64]:
        """Neighbours of like length in a batch, batches in random order."""
        chunk = self.per_step * _SORTED_BATCHES
        parts = [rows[start : start + chunk] for start in range(0, len(rows), chunk)]
        by_length = np.concatenate([part[np.argsort(self.lengths[part], kind="stable")] for part in parts])
        full = len(by_length) // self.per_step * self.per_step
        batches = by_length[:full].reshape(-1, self.per_step)
        return np.concatenate([batches[random.permutation(len(batches))].reshape(-1), by_length[full:]])

    def _shared_out(
        self, sequences: list[PackedRows], start: int, batches: int, each: int
    ) -> list[list[MicroBatch]]:
        """An epoch shorter than one step repeats its sequences. Packed ones are all about as long."""
        stride = self.world * batches
        taken = [sequences[(start + index) % len(sequences)] for index in range(stride * each)]
        if batches > 1 and not self.packing:
            rows = np.array([row for (row,) in taken])
            passes = [turn.tolist() for turn in passes_by_length(rows, self.lengths, each, self.world)]
            return [[tuple((row,) for row in turn[rank]) for turn in passes] for rank in range(self.world)]
        return [
            [tuple(taken[rank + self.world * turn :: stride]) for turn in range(batches)]
            for rank in range(self.world)
        ]


#: Lengths are rounded up to this: matrix units like it, and a compiled graph sees fewer shapes.
_LENGTH_MULTIPLE = 8


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch of one rank; all tensors of shape (sequences, length)."""

    ids: Tensor
    #: The next token where its prediction counts, else `IGNORED`: already moved by one.
    targets: Tensor
    #: Where a token counts, not moved: evaluation takes the KL to the base there.
    labelled: Tensor
    #: Of packed sequences: from 0 in every document; padding is a document of its own. None: each sequence is
    #: one row, padded at the right.
    positions: Tensor | None
    #: Factor on each token's loss, if it is not 1.
    weights: Tensor | None
    #: Pairs: how much the base model preferred what was chosen.
    reference: Tensor | None
    #: Tokens without padding.
    tokens: int
    #: What the summed loss is divided by, all batches of a step together: tokens that count, rows or pairs.
    count: float
    #: Tokens that count, as `labelled` has them.
    learned: int = 0
    #: Sequences, or pairs of them.
    samples: int = 0

    def to(self, device: torch.device) -> TokenBatch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> TokenBatch:
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> TokenBatch:
        tensors = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


@dataclass(frozen=True)
class BatchLayout:
    """Rules by which sequences become tensors."""

    #: None: as long as the longest of the batch.
    length: int | None = None
    #: Several documents share a sequence.
    packed: bool = False
    #: Rows weigh the same whatever their length, as the evaluator has it; else tokens do.
    by_row: bool = False
    #: Rows come in twos, chosen and rejected: sequence p is the rows 2p and 2p + 1.
    pairs: bool = False


@dataclass(frozen=True)
class TokenRows:
    """Rows for training, or held out."""

    tokens: TokenFile
    layout: BatchLayout
    #: Pairs: the base model's preference, in the order of the pairs.
    reference: Tensor | None = None

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Lengths of rows, or of the longer row of each pair."""
        lengths = self.tokens.lengths
        return lengths.reshape(-1, 2).max(axis=1) if self.layout.pairs else lengths

    def batches(self, micros: Sequence[MicroBatch]) -> list[TokenBatch]:
        return [collate(self.tokens, micro, self.layout, self.reference) for micro in micros]


def collate(
    rows: TokenFile, micro: MicroBatch, layout: BatchLayout, reference: Tensor | None = None
) -> TokenBatch:
    """Tensors of one micro-batch. Pairs: first all that were chosen, then all that were rejected.

    `reference` is the base model's preference by pair, once it is known."""
    if reference is not None:
        reference = reference[[pair for (pair,) in micro]]
    if layout.pairs:
        micro = tuple((2 * pair + side,) for side in (0, 1) for (pair,) in micro)
    longest = max(sum(int(rows.lengths[row]) for row in sequence) for sequence in micro)
    width = layout.length or -(-longest // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
    shape = (len(micro), width)
    ids = np.zeros(shape, dtype=np.int64)
    targets = np.full(shape, IGNORED, dtype=np.int64)
    labelled = np.zeros(shape, dtype=np.bool_)
    positions = np.zeros(shape, dtype=np.int64)
    weights = np.zeros(shape, dtype=np.float32)
    tokens = counted = rows_counted = 0
    for at, sequence in enumerate(micro):
        start = 0
        for index in sequence:
            row = rows[index]
            end = start + len(row.ids)
            counts = row.trained[1:]
            row_count = int(counts.sum())
            ids[at, start:end] = row.ids
            # The last token of a document predicts nothing, least of all the next document's first.
            targets[at, start : end - 1] = np.where(counts, row.ids[1:].astype(np.int64), IGNORED)
            labelled[at, start:end] = row.trained
            if layout.packed:
                positions[at, start:end] = np.arange(end - start)
            weights[at, start : end - 1] = counts / max(row_count, 1)
            tokens, counted, rows_counted = (
                tokens + end - start,
                counted + row_count,
                rows_counted + bool(row_count),
            )
            start = end
        if layout.packed:
            positions[at, start:] = np.arange(width - start)
    return TokenBatch(
        torch.from_numpy(ids),
        torch.from_numpy(targets),
        torch.from_numpy(labelled),
        torch.from_numpy(positions) if layout.packed else None,
        torch.from_numpy(weights) if layout.by_row else None,
        reference,
        tokens,
        len(micro) / 2 if layout.pairs else float(rows_counted if layout.by_row else counted),
        int(labelled.sum()),
        len(micro) // 2 if layout.pairs else len(micro),
    )
