"""The largest micro-batch that this GPU really takes, found by real steps; the effective batch stays.

The plan's own is an estimate that keeps its distance. What is won is fewer, larger passes for the same step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from core.plan import TrainingPlan
from trainer.native.batches import IGNORED, Batch, Layout
from trainer.native.ranks import Ranks

#: Of the card's memory; the rest is for what the allocator cannot use and what others take.
SHARE = 0.9
#: Beyond so many tokens in a pass nothing gets faster.
ENOUGH_TOKENS = 16_384


def larger_micro(plan: TrainingPlan, fits: Callable[[int], bool]) -> TrainingPlan:
    """The plan with a larger micro-batch and as much less accumulation, where `fits` says so."""
    batch = plan.batch
    micro, accumulation = batch.micro, batch.accumulation
    while accumulation % 2 == 0 and micro * plan.sequence.length < ENOUGH_TOKENS and fits(2 * micro):
        micro, accumulation = 2 * micro, accumulation // 2
    if micro == batch.micro:
        return plan
    return plan.model_copy(
        update={"batch": batch.model_copy(update={"micro": micro, "accumulation": accumulation})}
    )


def probe(net: nn.Module, plan: TrainingPlan, layout: Layout, ranks: Ranks) -> Callable[[int], bool]:
    """Whether a pass of so many of the longest sequences stays within the card; on every rank, or on none."""
    device = ranks.device
    total = torch.cuda.get_device_properties(device).total_memory

    def fits(micro: int) -> bool:
        torch.cuda.reset_peak_memory_stats(device)
        try:
            net(_worst(micro, plan.sequence.length, layout).to(device)).sum().backward()
            fine = torch.cuda.max_memory_reserved(device) <= SHARE * total
        except torch.cuda.OutOfMemoryError:
            fine = False
        net.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        return not ranks.any(not fine)

    return fits


def _worst(micro: int, length: int, layout: Layout) -> Batch:
    """Full length, every prediction counts."""
    rows = micro * (2 if layout.pairs else 1)
    ids = torch.zeros(rows, length, dtype=torch.long)
    targets = torch.zeros_like(ids)
    targets[:, -1] = IGNORED
    return Batch(
        ids=ids,
        targets=targets,
        labelled=torch.ones_like(ids, dtype=torch.bool),
        positions=torch.arange(length).expand(rows, length).contiguous(),
        documents=torch.ones(rows, length, dtype=torch.int32) if layout.packed else None,
        weights=torch.ones(rows, length) if layout.by_row else None,
        reference=torch.zeros(micro) if layout.pairs else None,
        tokens=rows * length,
        count=1.0,
    )
