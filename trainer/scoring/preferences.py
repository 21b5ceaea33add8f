"""DPO: minus the log of the sigmoid of beta times how much more the model has learned to prefer the chosen
answer.

Log-probabilities are summed over an answer's tokens, not averaged, against those of the original model; the
score is the mean over pairs, and ln 2 for a model that learned nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from core.evaluation import DPO_BETA
from trainer.inputs.rows import IGNORED, PairRow
from trainer.scoring.batches import batch_tokens, share
from trainer.scoring.forward import by_row, in_halves, log_probs, predicted, scoring, unwrapped, vocabulary


class LogProbs(NamedTuple):
    """Of the two answers of a pair."""

    chosen: float
    rejected: float


def pair_log_probs(
    model: Any,
    rows: Sequence[PairRow],
    pad: int,
    *,
    rank: int = 0,
    world: int = 1,
    most_tokens: int | None = None,
) -> dict[int, LogProbs]:
    """By the places of the rows. Both answers pass together: they are about as long, and share the prompt."""
    model, found = unwrapped(model), dict[int, LogProbs]()
    lengths = [2 * (len(row.prompt) + max(len(row.chosen), len(row.rejected))) for row in rows]
    most = most_tokens or batch_tokens(vocabulary(model))

    def compute(places: list[int]) -> list[list[float]]:
        sides = [(rows[place].prompt, rows[place].chosen) for place in places]
        sides += [(rows[place].prompt, rows[place].rejected) for place in places]
        ids = [[*prompt, *answer] for prompt, answer in sides]
        labels = [[*[IGNORED] * len(prompt), *answer] for prompt, answer in sides]
        seen = predicted(model, ids, labels, pad)
        sums, _ = by_row(log_probs(seen), seen, len(sides))
        pairs: list[list[float]] = sums.view(2, -1).T.tolist()
        return pairs

    with scoring(model):
        for batch, counts in share(lengths, most, rank, world):
            for places, pairs in in_halves(model, batch, compute):
                if counts:
                    found |= {place: LogProbs(*pair) for place, pair in zip(places, pairs, strict=True)}
    return found


def pair_losses(
    policy: Mapping[int, LogProbs], reference: Mapping[int, LogProbs], beta: float = DPO_BETA
) -> dict[int, float]:
    places = list(policy)
    margins = torch.tensor(
        [
            (policy[one].chosen - reference[one].chosen) - (policy[one].rejected - reference[one].rejected)
            for one in places
        ],
        dtype=torch.float64,
    )
    losses = -torch.nn.functional.logsigmoid(beta * margins)
    return dict(zip(places, losses.tolist(), strict=True))
