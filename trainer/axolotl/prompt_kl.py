"""The KL of GRPO's evaluation as a part of the training's loss.

Validators take half of KL(base || model) off a submission's rewards, and they take it on the tokens of the
prompts. TRL's own term is KL(model || base) on the completions: it restrains what is to be learned, and not
what is scored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from core.domain.evaluation import GRPO_KL_LENGTH


def add_prompt_kl(trainer: Any, weight: float) -> None:
    """Train with loss + weight · KL(base || model) on the prompts. The base is TRL's, or the model itself
    with its adapter switched off."""
    plain, base = trainer.compute_loss, trainer.ref_model

    def with_kl(model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        loss = plain(model, inputs, *rest, **named)
        if not model.training:
            return loss
        kl = prompt_kl(trainer, model, base, inputs["prompt_ids"], inputs["prompt_mask"])
        trainer._metrics["train"]["prompt_kl"].append(float(kl.detach()))
        # TRL divides its loss by the passes of a step itself.
        return loss + weight * kl / trainer.current_gradient_accumulation_steps

    trainer.compute_loss = with_kl


def prompt_kl(trainer: Any, model: Any, base: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean KL of all rows; a row's is the mean over its tokens. A prompt of several rows is read once."""
    ids, mask = left_aligned(ids, mask)
    both, counts = torch.cat([ids, mask], dim=1).unique(dim=0, return_counts=True)
    ids, mask = both[:, : ids.shape[1]], both[:, ids.shape[1] :]
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    with torch.no_grad():
        if base is not None:
            known = base(**inputs).logits
        else:
            with trainer.accelerator.unwrap_model(model).disable_adapter():
                known = model(**inputs).logits
    found = model(**inputs).logits
    means = [
        checkpoint(_row_kl, found[row, :width], known[row, :width], use_reentrant=False)
        for row, width in enumerate(mask.sum(dim=1).tolist())
    ]
    return (torch.stack(means) * counts).sum() / counts.sum()


def _row_kl(found: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    log_found, log_known = found.float().log_softmax(dim=-1), known.float().log_softmax(dim=-1)
    return (log_known.exp() * (log_known - log_found)).sum(dim=-1).mean()


def left_aligned(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the padding behind the tokens, and cut rows at the length that the evaluation reads. An empty
    prompt counts as one token of padding: a row without any has no mean."""
    order = mask.argsort(dim=1, descending=True, stable=True)
    width = min(max(int(mask.sum(dim=1).max()), 1), GRPO_KL_LENGTH)
    ids, mask = ids.gather(1, order)[:, :width], mask.gather(1, order)[:, :width]
    mask[:, 0] = 1
    return ids, mask
