"""What a token's prediction cost, without ever holding all logits.

The head's logits are the largest tensor of a training by far: 128,000 numbers for every token. Here they
are made chunk by chunk, in the forward pass for the loss and again in the backward pass for its gradient, and
only for the tokens whose prediction counts; a prompt's never are. Where all of them together are small they
are kept instead of made twice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

#: fp32 logits in memory at a time.
CHUNK_BYTES = 256 * 2**20
#: Logits of up to so many bytes are kept for the backward pass.
KEPT_BYTES = 128 * 2**20


def token_losses(hidden: Tensor, head: Tensor, targets: Tensor, cap: float | None = None) -> Tensor:
    """−log p of each target, fp32, differentiable in `hidden` and `head`.

    `hidden` is (tokens, width), `head` (vocabulary, width); `cap` is Gemma's soft cap on logits."""
    size = 4 * hidden.shape[0] * head.shape[0]
    if size <= KEPT_BYTES:
        return F.cross_entropy(_capped(hidden @ head.T, cap).float(), targets, reduction="none")
    losses: Tensor = _ChunkedLosses.apply(hidden, head, targets, cap)
    return losses


class _ChunkedLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, cap: float | None) -> Tensor:
        normalizer = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        losses = torch.empty_like(normalizer)
        for part in _parts(len(hidden), head.shape[0]):
            logits = _capped(hidden[part] @ head.T, cap).float()
            normalizer[part] = logits.logsumexp(-1)
            losses[part] = normalizer[part] - logits.gather(-1, targets[part, None]).squeeze(-1)
        ctx.save_for_backward(hidden, head, targets, normalizer)
        ctx.cap = cap
        return losses

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, head, targets, normalizer = ctx.saved_tensors
        (weight,) = incoming
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        # Summed over chunks: in fp32, or the small ones are rounded away.
        head_grad = torch.zeros(head.shape, dtype=torch.float32, device=head.device) if wants_head else None
        for part in _parts(len(hidden), head.shape[0]):
            raw = hidden[part] @ head.T
            logits = _capped(raw, ctx.cap).float()
            delta = (logits - normalizer[part, None]).exp_()
            delta.scatter_add_(-1, targets[part, None], -torch.ones_like(delta[:, :1]))
            delta *= weight[part, None]
            if ctx.cap is not None:
                delta *= 1 - (logits / ctx.cap) ** 2
            small = delta.to(hidden.dtype)
            if hidden_grad is not None:
                hidden_grad[part] = small @ head
            if head_grad is not None:
                head_grad += (small.T @ hidden[part]).float()
        return hidden_grad, None if head_grad is None else head_grad.to(head.dtype), None, None


def divergence(
    hidden: Tensor, head: Tensor, there: Tensor, head_there: Tensor, cap: float | None = None
) -> Tensor:
    """KL(here || there) of the next token's distribution, summed over the tokens, differentiable in what is
    here. Chunk by chunk, and the logits again in the backward pass."""
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for part in _parts(len(hidden), 2 * head.shape[0]):
        apart = checkpoint(_apart, hidden[part], head, there[part], head_there, cap, use_reentrant=False)
        total = total + apart
    return total


def _apart(hidden: Tensor, head: Tensor, there: Tensor, head_there: Tensor, cap: float | None) -> Tensor:
    mine = _capped(hidden @ head.T, cap).float().log_softmax(-1)
    with torch.no_grad():
        theirs = _capped(there @ head_there.T, cap).float().log_softmax(-1)
    return F.kl_div(theirs, mine, reduction="sum", log_target=True)


def preference_losses(preferred: Tensor, reference: Tensor, beta: float) -> Tensor:
    """DPO's sigmoid loss per pair; both are log p(chosen) − log p(rejected), the model's and the base's."""
    return -F.logsigmoid(beta * (preferred - reference))


def _parts(tokens: int, vocabulary: int) -> list[slice]:
    size = max(CHUNK_BYTES // (4 * vocabulary), 1)
    return [slice(start, start + size) for start in range(0, tokens, size)]


def _capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)
