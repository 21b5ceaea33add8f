"""Instruct and chat: the mean over rows of the mean cross-entropy of a row's labels; and the KL to the base.

Every row weighs the same, however long its answer. Tasks with a KL term add a coefficient times the mean over
all labelled tokens of KL(fine-tuned || base). Evaluation takes it at the labels' own positions, not at those
that predict them, so it is taken there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.inputs.rows import LabelledRow
from trainer.scoring.batches import batch_tokens, share
from trainer.scoring.forward import (
    Predicted,
    by_row,
    divergence,
    in_halves,
    labelled,
    log_probs,
    predicted,
    predicted_and_labelled,
    scoring,
    unwrapped,
    vocabulary,
    without_adapter,
)


@dataclass
class Losses:
    """Of some of the rows, by their places."""

    rows: dict[int, float] = field(default_factory=dict)
    kl_total: float = 0.0
    kl_tokens: int = 0


def row_losses(
    model: Any,
    rows: Sequence[LabelledRow],
    pad: int,
    *,
    reference: Any = None,
    kl: bool = False,
    rank: int = 0,
    world: int = 1,
    most_tokens: int | None = None,
) -> Losses:
    """`reference` (None: the adapter switched off) is asked only for the KL."""
    model, found = unwrapped(model), Losses()
    most = most_tokens or batch_tokens(vocabulary(model))

    def compute(places: list[int]) -> tuple[list[float], torch.Tensor | None]:
        ids, labels = [rows[place].ids for place in places], [rows[place].labels for place in places]
        apart = None
        if kl:
            seen, here = predicted_and_labelled(model, ids, labels, pad)
            apart = divergence(here, _base(model, reference, ids, labels, pad))
        else:
            seen = predicted(model, ids, labels, pad)
        sums, tokens = by_row(-log_probs(seen), seen, len(places))
        return (sums / tokens).tolist(), apart

    with scoring(model):
        for batch, counts in share([len(row.ids) for row in rows], most, rank, world):
            for places, (losses, apart) in in_halves(model, batch, compute):
                if not counts:
                    continue
                found.rows |= dict(zip(places, losses, strict=True))
                if apart is not None:
                    found.kl_total += float(apart.double().sum())
                    found.kl_tokens += int(apart.numel())
    return found


def _base(
    model: Any, reference: Any, ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], pad: int
) -> Predicted:
    if reference is not None:
        with scoring(reference):
            return labelled(reference, ids, labels, pad)
    with without_adapter(model) as base:
        return labelled(base, ids, labels, pad)
