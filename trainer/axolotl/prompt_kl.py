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
from core.recipes.axolotl.recipe import BASE_ONLY

#: In a part of a generation: how many of all its completions answer the row's prompt, 0 where another row
#: stands for the prompt.
PROMPT_COUNTS = "prompt_counts"


def add_prompt_kl(trainer: Any, weight: float) -> None:
    """Train with loss + weight · KL(base || model) on the prompts. The base is TRL's, or the model itself
    with its adapter switched off."""
    plain, base = trainer.compute_loss, trainer.ref_model
    trainer.with_prompt_kl = True
    if trainer.beta == BASE_ONLY and not trainer.use_liger_kernel:  # whose loss was made for a base
        trainer.beta = 0.0  # else each step has a pass of the base over all completions

    def with_kl(model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        loss = plain(model, inputs, *rest, **named)
        if not model.training:
            return loss
        counts = inputs.get(PROMPT_COUNTS)
        kl = prompt_kl(trainer, model, base, inputs["prompt_ids"], inputs["prompt_mask"], counts)
        trainer._metrics["train"]["prompt_kl"].append(float(kl.detach()))
        # TRL divides its loss by the passes of a step itself.
        return loss + weight * kl / trainer.current_gradient_accumulation_steps

    trainer.compute_loss = with_kl


def prompt_counts(ids: torch.Tensor, mask: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """`PROMPT_COUNTS` of all rows. A prompt is read in the last part that has it: its completions are the
    shortest, which leave most memory."""
    _, prompts, counts = torch.cat([ids, mask], dim=1).unique(dim=0, return_inverse=True, return_counts=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    last = torch.zeros_like(counts).scatter_reduce_(0, prompts, places, "amax")
    return counts[prompts] * (places == last[prompts])


def prompt_kl(
    trainer: Any,
    model: Any,
    base: Any,
    ids: torch.Tensor,
    mask: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mean KL of all rows; a row's is the mean over its tokens. A prompt of several rows is read once, or
    where `counts` says."""
    rows = len(ids)
    ids, mask = left_aligned(ids, mask)
    if counts is None:
        both, counts = torch.cat([ids, mask], dim=1).unique(dim=0, return_counts=True)
        ids, mask = both[:, : ids.shape[1]], both[:, ids.shape[1] :]
    else:
        read = counts > 0
        if read.any():
            ids, mask, counts = ids[read], mask[read], counts[read]
            width = int(mask.sum(dim=1).max())
        else:  # all ranks pass through the model equally often: one token
            ids, mask, counts, width = ids[:1], mask[:1], counts[:1], 1
        ids, mask = ids[:, :width], mask[:, :width]
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    with torch.no_grad():
        if base is not None:
            known = base(**inputs).logits
        else:
            with trainer.accelerator.unwrap_model(model).disable_adapter():
                known = model(**inputs).logits
    logits = model(**inputs).logits
    means = [
        checkpoint(_row_kl, logits[row, :width], known[row, :width], use_reentrant=False)
        for row, width in enumerate(mask.sum(dim=1).tolist())
    ]
    return (torch.stack(means) * counts).sum() / rows


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
