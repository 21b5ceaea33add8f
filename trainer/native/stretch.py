"""Training on held-out rows at the end; see `trainer.session.last_stretch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trainer.native.batches import MicroBatch, TokenRows
from trainer.native.evaluation import HeldOutLoss, held_out_loss
from trainer.native.loader import regrouped
from trainer.session.last_stretch import Stretcher, divided

if TYPE_CHECKING:
    from trainer.native.train import Trainer


class NativeStretcher(Stretcher):
    def __init__(
        self, trainer: Trainer, held_out: TokenRows, scorer: HeldOutLoss, clusters: Sequence[int]
    ) -> None:
        """`clusters` of near-duplicates, by held-out row; empty: there are none."""
        self._trainer, self._held, self._scorer = trainer, held_out, scorer
        self._clusters = clusters or range(len(held_out.lengths))
        self._out = self._rows = held_out
        self._steps: list[list[MicroBatch]] = []

    def begin(self) -> int:
        held, parts = self._held, divided(self._scorer.places.tolist(), self._clusters)
        if parts is None:
            return 0
        # Held-out rows are as long as validators take them, whatever the training has room for.
        fits = (held.lengths > 0) & (held.lengths <= self._trainer.setup.order.capacity)
        trained = np.array(parts.trained)
        trained = trained[fits[trained]]
        if not len(trained):
            return 0
        layout = self._trainer.setup.train.layout
        self._out = held.part(np.array(parts.judges))
        self._rows = replace(held.part(trained), layout=layout)
        self._steps = self._one_pass(self._rows.lengths)
        self._trainer.stepper.masters.reread()
        return len(self._steps)

    def _one_pass(self, lengths: NDArray[np.int64]) -> list[list[MicroBatch]]:
        """This rank's batches of each step: as many steps as a pass needs, of equal size."""
        order = replace(self._trainer.setup.order, lengths=lengths, ramp=0)
        steps = -(-order.sequences_per_epoch // order.per_step)
        passes = round(order.sequences_per_epoch / steps / (order.micro * order.world))
        order = replace(order, accumulation=max(passes, 1))
        batches = order.for_rank(self._trainer.ranks.rank)
        return [next(batches) for _ in range(order.steps_per_epoch)]

    def score(self) -> float:
        ranks = self._trainer.ranks
        return held_out_loss(self._trainer.setup.net, self._out, ranks, self._scorer.micro)

    def step(self, factor: float, place: int) -> float:
        micros = regrouped(self._steps[place], self._trainer.session.controls.micro)
        loss = self._trainer.stepper.step(self._rows.batches(micros), factor).loss
        self._trainer.ranks.heartbeat()
        return loss
