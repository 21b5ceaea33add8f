"""The micro-batches of one rank, made in time: one thread fills pinned memory while the GPU works.

How many sequences share a pass may change between two steps. The rows of a step never do, nor does what its
loss is divided by: the sequences are divided again before they become tensors.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from core.runs.run_files import even_micro
from trainer.native.batches import MicroBatch, SampleOrder, TokenBatch, TokenRows
from trainer.session.control import MicroChange


def regrouped(micros: Sequence[MicroBatch], most: int) -> list[MicroBatch]:
    """The same sequences in as few micro-batches as hold them, of at most `most` and of like size."""
    sequences = [sequence for micro in micros for sequence in micro]
    passes = -(-len(sequences) // most)
    bounds = [number * len(sequences) // passes for number in range(passes + 1)]
    return [tuple(sequences[start:end]) for start, end in pairwise(bounds)]


class _LoadedStep(NamedTuple):
    #: As the order has them.
    micros: list[MicroBatch]
    #: The most sequences in one of the `batches`.
    most: int
    batches: list[TokenBatch]


class BatchLoader:
    """The micro-batches of one rank, step by step. Iterating blocks only when the disk is slower than the
    GPU; how long that was is in `waited_s`."""

    def __init__(
        self,
        rows: TokenRows,
        order: SampleOrder,
        *,
        rank: int = 0,
        done: int = 0,
        pin: bool = False,
        ahead: int = 2,
    ) -> None:
        self._rows, self._order, self._pin = rows, order, pin
        self._steps = order.for_rank(rank, done)
        self._micro = order.micro
        #: Before it grew, where that was the last change.
        self._smaller: int | None = None
        self._step = _LoadedStep([], order.micro, [])
        self._ready: queue.Queue[_LoadedStep | BaseException] = queue.Queue(max(ahead, 1))
        self._closed = threading.Event()
        self.waited_s = 0.0
        self._thread = threading.Thread(target=self._prepare, name="batches", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[list[TokenBatch]]:
        while not self._closed.is_set():
            began = time.perf_counter()
            item = self._ready.get()
            if isinstance(item, BaseException):
                raise item
            self._step = item
            # What was read ahead before a change is divided again.
            batches = item.batches if item.most == self._micro else self._batches(item.micros, self._micro)
            self.waited_s += time.perf_counter() - began
            yield batches

    def regroup(self, micro: int | None) -> MicroChange:
        """From the next step on, put at most `micro` sequences in a micro-batch; with None, as many as the
        order has."""
        sequences, before = self._order.micro * self._order.accumulation, self._micro
        wanted = self._order.micro if micro is None else micro
        after = even_micro(sequences, wanted)
        if after == before != wanted:
            passes = -(-sequences // before)
            text = f"a step's {sequences} sequences take {passes} passes of {before} either way"
            return MicroChange(before, text)
        if after != before:
            self._micro, self._smaller = after, before if after > before else None
        return MicroChange(after)

    def undo_growth(self) -> tuple[int, list[TokenBatch]] | None:
        """Return the size before the last growth and the current step's batches at that size, or None if it
        has not grown."""
        if self._smaller is None:
            return None
        self._micro, self._smaller = self._smaller, None
        return self._micro, self._batches(self._step.micros, self._micro)

    def close(self) -> None:
        """End the thread, which may be waiting for room in the queue."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def _prepare(self) -> None:
        try:
            for micros in self._steps:
                most = self._micro
                if not self._put(_LoadedStep(micros, most, self._batches(micros, most))):
                    return
        except BaseException as error:  # noqa: BLE001 - raised again where the batches are used
            self._put(error)

    def _batches(self, micros: Sequence[MicroBatch], most: int) -> list[TokenBatch]:
        batches = self._rows.batches(regrouped(micros, most))
        return [batch.pinned() for batch in batches] if self._pin else batches

    def _put(self, item: _LoadedStep | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False
