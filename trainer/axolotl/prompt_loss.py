"""Prompts that are learned a little: in place of the model's own loss, one in which tokens weigh differently.

The engine's datasets, collators and batches stay as they are: what is a prompt's follows from the labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainer.inputs.tokens import IGNORED


class PromptLoss:
    """While the model trains, its loss is that of the answers as it was, plus `weight` times the summed loss
    of the prompts' tokens, divided as the answers' is."""

    def __init__(self, trainer: Any, weight: float, warn: Callable[[str], None]) -> None:
        """`warn` hears of a model whose loss cannot be replaced."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._weight, self._warn = weight, warn
        self._plain, self._compute = model.loss_function, trainer.compute_loss
        #: Of the batch that is being computed.
        self._prompts: Any = None
        self._replaced = False
        model.loss_function, trainer.compute_loss = self._model_loss, self._batch_loss

    def _batch_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        if not model.training:
            return self._compute(model, inputs, *rest, **named)
        self._prompts = prompt_labels(inputs)
        loss = self._compute(model, inputs, *rest, **named)
        self._prompts = None
        if not self._replaced:
            self._warn("prompt_loss_share: this model computes a loss of its own, prompts are not learned")
            self._replaced = True
        return loss

    def _model_loss(
        self, logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **named: Any
    ) -> Any:
        if self._prompts is None:
            return self._plain(logits, labels, vocab_size, num_items_in_batch=num_items_in_batch, **named)
        self._replaced = True
        return weighted_loss(logits, labels, self._prompts, self._weight, num_items_in_batch)


def prompt_labels(inputs: Mapping[str, Any]) -> Any:
    """The tokens of prompts at their own places; ignored where the engine has labels, and in padding."""
    import torch

    ids, labels = inputs["input_ids"], inputs["labels"]
    there = torch.ones_like(ids, dtype=torch.bool)
    if inputs.get("attention_mask") is not None:
        there = inputs["attention_mask"].bool()
        there = there & torch.nn.functional.pad(there[:, :-1], (1, 0))  # nothing predicts the first one
    if inputs.get("position_ids") is not None:
        # Packed: padding is a row without labels, and no row predicts the next one's first token.
        first = inputs["position_ids"] == 0
        row = first.cumsum(-1)
        learned = torch.zeros(len(ids), int(row.max()) + 1, device=ids.device)
        learned.scatter_add_(-1, row, (labels != IGNORED).float())
        there = there & ~first & (learned.gather(-1, row) > 0)
    return torch.where(there & (labels == IGNORED), ids, IGNORED)


def weighted_loss(logits: Any, labels: Any, prompts: Any, weight: float, count: Any) -> Any:
    """The summed loss of the labels and, weighted, of the prompts, over `count` or the number of labels."""
    import torch

    answers, others = labels[:, 1:].reshape(-1), prompts[:, 1:].reshape(-1)
    learned = answers != IGNORED
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]).float(),
        torch.where(learned, answers, others),
        ignore_index=IGNORED,
        reduction="none",
    )
    summed = (losses * torch.where(learned, 1.0, weight)).sum()
    return summed / (learned.sum().clamp(min=1) if count is None else count)
