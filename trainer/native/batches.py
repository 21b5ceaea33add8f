"""From rows on disk to tensors on the device, ahead of the training.

One thread per rank prepares: slicing a mapped file and filling arrays let go of the interpreter's lock, and a
thread shares memory with the training, which a worker process pays for in copies. Two finished batches lie in
pinned memory while the GPU works on a third.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trainer.native.order import Micro, Order
from trainer.native.tokens import TokenFile

#: What is not predicted.
IGNORED = -100
#: Lengths are rounded up to this: matrix units like it, and a compiled graph sees fewer shapes.
_MULTIPLE = 8


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank; all tensors of shape (sequences, length)."""

    ids: Tensor
    #: The next token where its prediction counts, else `IGNORED`: already moved by one.
    targets: Tensor
    #: Where a token counts, not moved: evaluation takes the KL to the base there.
    labelled: Tensor
    #: From 0 in every document.
    positions: Tensor
    #: Which document a token belongs to, from 1; 0 is padding. None: one document each, padded at the right.
    documents: Tensor | None
    #: What each token's loss is multiplied by; None: 1.
    weights: Tensor | None
    #: Pairs: how much the base model preferred what was chosen.
    reference: Tensor | None
    #: Tokens that are somebody's.
    tokens: int
    #: What the summed loss is divided by, all batches of a step together: tokens that count, rows or pairs.
    count: float
    #: Tokens that count, as `labelled` has them.
    learned: int = 0

    def to(self, device: torch.device) -> Batch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return replace(
            self,
            ids=change(self.ids),
            targets=change(self.targets),
            labelled=change(self.labelled),
            positions=change(self.positions),
            documents=None if self.documents is None else change(self.documents),
            weights=None if self.weights is None else change(self.weights),
            reference=None if self.reference is None else change(self.reference),
        )


@dataclass(frozen=True)
class Layout:
    """How sequences become tensors."""

    pad: int = 0
    #: None: as long as the longest of the batch.
    length: int | None = None
    #: Several documents share a sequence.
    packed: bool = False
    #: Rows weigh the same whatever their length, as the evaluator has it; else tokens do.
    by_row: bool = False
    #: Rows come in twos, chosen and rejected: sequence p is the rows 2p and 2p + 1.
    pairs: bool = False


@dataclass(frozen=True)
class Rows:
    """What is trained on, or held out."""

    tokens: TokenFile
    layout: Layout
    #: Pairs: the base model's preference, in the order of the pairs.
    reference: Tensor | None = None


def collate(rows: TokenFile, micro: Micro, layout: Layout, reference: Tensor | None = None) -> Batch:
    """Tensors of one micro-batch. Pairs: first all that were chosen, then all that were rejected.

    `reference` is the base model's preference by pair, once it is known."""
    if reference is not None:
        reference = reference[[pair for (pair,) in micro]]
    if layout.pairs:
        micro = tuple((2 * pair + side,) for side in (0, 1) for (pair,) in micro)
    longest = max(sum(int(rows.lengths[row]) for row in sequence) for sequence in micro)
    width = layout.length or -(-longest // _MULTIPLE) * _MULTIPLE
    shape = (len(micro), width)
    ids = np.full(shape, layout.pad, dtype=np.int64)
    targets = np.full(shape, IGNORED, dtype=np.int64)
    labelled = np.zeros(shape, dtype=np.bool_)
    positions = np.zeros(shape, dtype=np.int64)
    documents = np.zeros(shape, dtype=np.int32)
    weights = np.zeros(shape, dtype=np.float32)
    tokens = counted = telling = 0
    for at, sequence in enumerate(micro):
        start = 0
        for number, index in enumerate(sequence, start=1):
            row = rows[index]
            end = start + len(row.ids)
            counts = row.trained[1:]
            here = int(counts.sum())
            ids[at, start:end] = row.ids
            # The last token of a document predicts nothing, least of all the next document's first.
            targets[at, start : end - 1] = np.where(counts, row.ids[1:].astype(np.int64), IGNORED)
            labelled[at, start:end] = row.trained
            positions[at, start:end] = np.arange(end - start)
            documents[at, start:end] = number
            weights[at, start:end] = 1 / max(here, 1)
            tokens, counted, telling = tokens + end - start, counted + here, telling + bool(here)
            start = end
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(targets),
        torch.from_numpy(labelled),
        torch.from_numpy(positions),
        torch.from_numpy(documents) if layout.packed else None,
        torch.from_numpy(weights) if layout.by_row else None,
        reference,
        tokens,
        len(micro) / 2 if layout.pairs else float(telling if layout.by_row else counted),
        int(labelled.sum()),
    )


class Loader:
    """The micro-batches of one rank, step by step. Iterating blocks only when the disk is slower than the
    GPU; how long that was is in `waited_s`."""

    def __init__(
        self,
        rows: Rows,
        order: Order,
        *,
        rank: int = 0,
        done: int = 0,
        pin: bool = False,
        ahead: int = 2,
    ) -> None:
        self._rows, self._pin = rows, pin
        self._steps = order.for_rank(rank, done)
        self._ready: queue.Queue[list[Batch] | BaseException] = queue.Queue(max(ahead, 1))
        self._closed = threading.Event()
        self.waited_s = 0.0
        self._thread = threading.Thread(target=self._prepare, name="batches", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[list[Batch]]:
        while not self._closed.is_set():
            began = time.perf_counter()
            item = self._ready.get()
            self.waited_s += time.perf_counter() - began
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        """Ends the thread, which may be waiting to hand something over."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def _prepare(self) -> None:
        try:
            for micros in self._steps:
                batches = [self._batch(micro) for micro in micros]
                if not self._hand_over(batches):
                    return
        except BaseException as error:  # noqa: BLE001 - raised again where the batches are used
            self._hand_over(error)

    def _batch(self, micro: Micro) -> Batch:
        batch = collate(self._rows.tokens, micro, self._rows.layout, self._rows.reference)
        return batch.pinned() if self._pin else batch

    def _hand_over(self, item: list[Batch] | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False
