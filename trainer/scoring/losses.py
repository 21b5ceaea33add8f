"""The validator's losses: row means for instruct and chat (with KL to the base if asked), and DPO.

DPO: minus the log sigmoid of beta times how much more the model has learned to prefer the chosen answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from core.domain.evaluation import DPO_BETA
from trainer.inputs.tokens import IGNORED, LabelledRow, PairRow
from trainer.scoring.forward import (
    Predicted,
    batch_tokens,
    by_row,
    divergence,
    in_halves,
    label_logits,
    log_probs,
    predict,
    predict_and_label,
    rank_share,
    scoring_mode,
    unwrapped,
    vocabulary,
    without_adapter,
)


@dataclass
class RowLosses:
    """Losses of some of the rows, by their indices."""

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
    max_tokens: int | None = None,
) -> RowLosses:
    """The loss of each row of this rank. `reference` (None: the model without its adapter) is for the KL
    only."""
    model, result = unwrapped(model), RowLosses()
    limit = max_tokens or batch_tokens(vocabulary(model))

    def compute(places: list[int]) -> tuple[list[float], torch.Tensor | None]:
        ids, labels = [rows[place].ids for place in places], [rows[place].labels for place in places]
        divergences = None
        if kl:
            predicted, labelled = predict_and_label(model, ids, labels, pad)
            divergences = divergence(labelled, _base(model, reference, ids, labels, pad))
        else:
            predicted = predict(model, ids, labels, pad)
        sums, tokens = by_row(-log_probs(predicted), predicted, len(places))
        return (sums / tokens).tolist(), divergences

    with scoring_mode(model):
        for batch, counts in rank_share([len(row.ids) for row in rows], limit, rank, world):
            for places, (losses, divergences) in in_halves(model, batch, compute):
                if not counts:
                    continue
                result.rows |= dict(zip(places, losses, strict=True))
                if divergences is not None:
                    result.kl_total += float(divergences.double().sum())
                    result.kl_tokens += int(divergences.numel())
    return result


def _base(
    model: Any, reference: Any, ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], pad: int
) -> Predicted:
    if reference is not None:
        with scoring_mode(reference):
            return label_logits(reference, ids, labels, pad)
    with without_adapter(model) as base:
        return label_logits(base, ids, labels, pad)


class LogProbs(NamedTuple):
    """Log p of the two answers of a pair."""

    chosen: float
    rejected: float


def pair_log_probs(
    model: Any,
    rows: Sequence[PairRow],
    pad: int,
    *,
    rank: int = 0,
    world: int = 1,
    max_tokens: int | None = None,
) -> dict[int, LogProbs]:
    """Log p by row index. Both answers are in one pass: they are about as long, and share the prompt."""
    model, result = unwrapped(model), dict[int, LogProbs]()
    lengths = [2 * (len(row.prompt) + max(len(row.chosen), len(row.rejected))) for row in rows]
    limit = max_tokens or batch_tokens(vocabulary(model))

    def compute(places: list[int]) -> list[list[float]]:
        sides = [(rows[place].prompt, rows[place].chosen) for place in places]
        sides += [(rows[place].prompt, rows[place].rejected) for place in places]
        ids = [[*prompt, *answer] for prompt, answer in sides]
        labels = [[*[IGNORED] * len(prompt), *answer] for prompt, answer in sides]
        predicted = predict(model, ids, labels, pad)
        sums, _ = by_row(log_probs(predicted), predicted, len(sides))
        pairs: list[list[float]] = sums.view(2, -1).T.tolist()
        return pairs

    with scoring_mode(model):
        for batch, counts in rank_share(lengths, limit, rank, world):
            for places, pairs in in_halves(model, batch, compute):
                if counts:
                    result |= {place: LogProbs(*pair) for place, pair in zip(places, pairs, strict=True)}
    return result


def pair_losses(policy: Mapping[int, LogProbs], reference: Mapping[int, LogProbs]) -> dict[int, float]:
    places = list(policy)
    margins = torch.tensor(
        [
            (policy[place].chosen - reference[place].chosen)
            - (policy[place].rejected - reference[place].rejected)
            for place in places
        ],
        dtype=torch.float64,
    )
    losses = -torch.nn.functional.logsigmoid(DPO_BETA * margins)
    return dict(zip(places, losses.tolist(), strict=True))
