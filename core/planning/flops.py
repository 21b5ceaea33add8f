"""Floating-point operations per token, counted the way the GEMMs were: a LoRA has no weight gradients."""

from __future__ import annotations

from core.planning.setup import Setup, image_type, tokens_of_picture
from core.tasks import ImageModelType, TaskType

#: One 1024² picture through SDXL's U-Net, forward: its convolutions see tokens at several resolutions.
SDXL_FORWARD = 6.0e12


def training_flops(s: Setup, row_tokens: float) -> float:
    """Per token that passes through: forward, backward, what is recomputed, the reference's pass.

    4N for LoRA, 6N for a full fine-tune; checkpointing adds another 2N; adapters 6P, 8P with checkpointing;
    attention by the tokens that a row can see of itself.
    """
    again = 1 if s.checkpointing else 0
    dense = 2.0 * matmul_params(s) * ((3 if s.full else 2) + again)
    adapters = 2.0 * s.adapter_params * (3 + again)
    # Causal attention sees half of the row; its backward pass costs two and a half forward passes.
    attention = 2.0 * s.shape.layers * s.shape.queries * row_tokens * (3.5 + again)
    return dense + adapters + attention + reference_flops(s, row_tokens)


def reference_flops(s: Setup, row_tokens: float) -> float:
    """The untrained model's pass, where a step needs one."""
    needed = s.kl if s.task is not TaskType.DPO else not s.reference_ready
    return forward_flops(s, row_tokens) if needed else 0.0


def forward_flops(s: Setup, row_tokens: float) -> float:
    attention = 2.0 * s.shape.layers * s.shape.queries * row_tokens
    return 2.0 * (matmul_params(s) + s.adapter_params) + attention


def matmul_params(s: Setup) -> float:
    """Looking up an embedding is no multiplication; the head is one, tied or not."""
    lookup = max(s.shape.root - s.shape.table, 0)
    return float(max(s.shape.active - lookup, 1))


def picture_flops(s: Setup) -> float:
    """Per picture: the backbone's forward pass and its multiples."""
    assert s.picture is not None
    passes = (3 if s.full else 2) + (1 if s.checkpointing else 0)
    if image_type(s) is ImageModelType.SDXL:
        forward = SDXL_FORWARD * (s.picture.resolution / 1024) ** 2
    else:
        tokens = tokens_of_picture(s.picture.facts, s.picture.resolution)
        attention = 4.0 * s.shape.layers * s.shape.hidden * tokens
        forward = tokens * (2.0 * s.picture.facts.backbone_params + attention)
    return forward * passes
