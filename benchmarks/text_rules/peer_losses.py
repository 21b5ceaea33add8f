"""The losses of the winner's trainers, from logits that exist only where something is learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from core.domain.evaluation import DPO_BETA
from trainer.inputs.tokens import IGNORED
from trainer.scoring.forward import (
    by_row,
    divergence,
    label_logits,
    log_probs,
    predict,
    predict_and_label,
    without_adapter,
)

Rows = Sequence[Any]


class Loss(Protocol):
    def __call__(self, model: Any, rows: Rows) -> Any: ...


class Answers:
    """Instruct and chat: the mean over tokens, with what KL tasks add to it. `base` None: the model without
    its adapter. `prompt_weight`: what a token of a prompt counts, an answer's counting 1."""

    def __init__(self, pad: int, base: Any, coefficient: float, prompt_weight: float) -> None:
        self._pad, self._base, self._coefficient, self._weight = pad, base, coefficient, prompt_weight

    def __call__(self, model: Any, rows: Rows) -> Any:
        ids, labels = [row.ids for row in rows], [row.labels for row in rows]
        if not self._coefficient:
            return self._entropy(model, ids, labels)
        predicted, labelled = predict_and_label(model, ids, labels, self._pad)
        with torch.no_grad():
            if self._base is not None:
                known = label_logits(self._base, ids, labels, self._pad)
            else:
                with without_adapter(model) as base:
                    known = label_logits(base, ids, labels, self._pad)
        return self._coefficient * divergence(labelled, known).mean() - log_probs(predicted).mean()

    def _entropy(self, model: Any, ids: list[Any], labels: list[Any]) -> Any:
        if not self._weight:
            return -log_probs(predict(model, ids, labels, self._pad)).mean()
        found = log_probs(predict(model, ids, ids, self._pad))
        learned = [label != IGNORED for row in labels for label in list(row)[1:]]
        weights = torch.where(torch.tensor(learned), 1.0, self._weight)
        return -(weights * found).sum() / weights.sum()


class Preferences:
    """DPO, against references that are computed once."""

    def __init__(self, pad: int, model: Any, rows: Rows) -> None:
        self._pad, self._known = pad, dict[int, Any]()
        with torch.no_grad():
            for start in range(0, len(rows), 64):
                part = rows[start : start + 64]
                margins = self._margins(model, part)
                self._known |= {id(row): margin for row, margin in zip(part, margins, strict=True)}

    def __call__(self, model: Any, rows: Rows) -> Any:
        known = torch.stack([self._known[id(row)] for row in rows])
        return -torch.nn.functional.logsigmoid(DPO_BETA * (self._margins(model, rows) - known)).mean()

    def _margins(self, model: Any, rows: Rows) -> Any:
        sides = [(row.prompt, row.chosen) for row in rows] + [(row.prompt, row.rejected) for row in rows]
        ids = [[*prompt, *answer] for prompt, answer in sides]
        labels = [[*[IGNORED] * len(prompt), *answer] for prompt, answer in sides]
        predicted = predict(model, ids, labels, self._pad)
        chosen, rejected = by_row(log_probs(predicted), predicted, len(sides))[0].view(2, -1)
        return chosen - rejected


def add_noise(model: Any, alpha: float) -> None:
    """NEFTune, while the model trains."""

    def noisy(module: Any, inputs: Any, output: Any) -> Any:
        if not module.training:
            return output
        size = alpha / math.sqrt(output.size(1) * output.size(2))
        return output + torch.zeros_like(output).uniform_(-size, size)

    model.get_input_embeddings().register_forward_hook(noisy)
