"""Training steps that are undone: what the session tries learning rates with."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.native.batches import MicroBatch, SampleOrder, TokenRows
from trainer.native.distributed import NativeCommunicator
from trainer.native.optimizer import Stepper
from trainer.session.snapshots import Snapshots
from trainer.session.undo import StepUndo


class NativeProber:
    """Makes the steps that the training would begin with. The order of rows is a function of the step, and
    the loader is made later, so neither has anything to undo."""

    def __init__(
        self,
        stepper: Stepper,
        rows: TokenRows,
        order: SampleOrder,
        ranks: NativeCommunicator,
        states: Snapshots,
    ) -> None:
        self._stepper, self._rows, self._order, self._ranks = stepper, rows, order, ranks
        self._states = states
        self._before: StepUndo | None = None
        self._coming: Iterator[list[MicroBatch]] = iter(())
        self._steps: list[list[MicroBatch]] = []

    def begin(self) -> bool:
        self._before = StepUndo.of(self._states, self._stepper.masters.parts)
        self._coming = self._order.for_rank(self._ranks.rank)
        return self._before is not None

    def step(self, factor: float, place: int) -> float:
        while place >= len(self._steps):
            self._steps.append(next(self._coming))
        loss = self._stepper.step(self._rows.batches(self._steps[place]), factor).loss
        self._ranks.heartbeat()
        return loss

    def restore(self) -> None:
        assert self._before is not None
        self._before.restore()
        self._stepper.masters.restart()

    def end(self) -> None:
        assert self._before is not None
        self._before.end()
        self._before, self._coming, self._steps = None, iter(()), []
