"""One optimizer step over all ranks: the heart that training, measuring and tracing share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from core.plan import TrainingPlan
from trainer.native import optimizing, ranks
from trainer.native.batches import Batch
from trainer.native.net import Net
from trainer.native.ranks import Ranks


@dataclass(frozen=True)
class Step:
    """What one optimizer step was."""

    loss: float
    norm: float
    rate: float
    #: Of all ranks.
    tokens: int


class Stepper:
    """The net spread over the ranks, and what moves its weights."""

    def __init__(self, net: Net, plan: TrainingPlan, here: Ranks) -> None:
        self.net, self.plan, self._ranks = net, plan, here
        # Sharding replaces the parameters, so the optimizer comes after it.
        self.spread = ranks.spread(net, plan, here)
        self.masters = optimizing.build(net, plan, here.device)
        self._weights = [weight for weight in net.parameters() if weight.requires_grad]

    def step(self, batches: list[Batch], factor: float = 1.0) -> Step:
        """With the plan's rate times `factor`. Gradients without a number move nothing."""
        rate = self.plan.optimizer.learning_rate * factor
        count, learned, tokens = self._ranks.total(
            sum(batch.count for batch in batches),
            sum(batch.learned for batch in batches),
            sum(batch.tokens for batch in batches),
        )
        shares = self.net.shares(count, learned, self._ranks.device)
        summed = self._gradients(batches, shares)
        norm = self._clipped()
        if math.isfinite(norm):
            self.masters.set_rate(rate)
            self.masters.step()
        self.masters.zero_grad()
        (loss,) = self._ranks.total(float(summed))
        return Step(loss, norm, rate, int(tokens))

    def _gradients(self, batches: list[Batch], shares: Tensor) -> Tensor:
        device, world = self._ranks.device, self._ranks.world
        summed = torch.zeros((), device=device)
        for number, batch in enumerate(batches, start=1):
            with ranks.no_sync(self.spread, last=number == len(batches)):
                loss = (self.spread(batch.to(device)) * shares).sum()
                # DDP and FSDP take the mean over ranks of what is a sum here.
                (loss * world).backward()
                summed += loss.detach()
        return summed

    def _clipped(self) -> float:
        most = self.plan.optimizer.max_grad_norm or math.inf
        return float(ranks.whole(torch.nn.utils.clip_grad_norm_(self._weights, most, foreach=True)))
