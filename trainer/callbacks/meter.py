"""How fast a training is: tokens, floating-point operations, waiting, memory, between two logs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from core.plan import TrainingPlan
from core.planning.flops import training_flops
from core.planning.setup import setup_of
from core.tasks import TaskType


class Reading(NamedTuple):
    tokens_s: float | None = None
    mfu: float | None = None
    wait: float | None = None


@dataclass
class Meter:
    """Counts on one rank; the others are taken to be as fast, since every step waits for the slowest."""

    plan: TrainingPlan
    now: Callable[[], float] = time.monotonic
    tokens: int = 0
    waited: float = 0.0
    #: Evaluations and saves between two logs are no slowness of the steps.
    paused: float = 0.0
    _since: float | None = field(default=None)

    def read(self) -> Reading:
        """Since the last reading; nothing to tell the first time."""
        now = self.now()
        since, self._since = self._since, now
        tokens, waited, paused = self.tokens, self.waited, self.paused
        self.tokens, self.waited, self.paused = 0, 0.0, 0.0
        seconds = (now - since if since is not None else 0.0) - paused
        if seconds <= 0:
            return Reading()
        rate = tokens * self.plan.batch.world_size / seconds
        return Reading(rate, self._mfu(rate), min(waited / seconds, 1.0))

    def _mfu(self, tokens_s: float) -> float | None:
        """A CPU's peak is made up, and a GRPO step spends its time generating: no number there."""
        if self.plan.gpus.is_cpu or self.plan.task.task_type is TaskType.GRPO:
            return None
        row = min(self.plan.data.total.mean, self.plan.sequence.length)
        flops = training_flops(setup_of(self.plan), row)
        peak = self.plan.gpus.kind.bf16_flops * self.plan.batch.world_size
        return min(tokens_s * flops / peak, 1.0)
