"""Architectures that the engine's faster kernels are made for.

Each entry computes the same loss and gradients as transformers' own code on a small random model, in Triton's
interpreter on a CPU (`tests/trainer/axolotl/test_patches_kernels.py`). None has been run on a GPU by us.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class LigerPart(StrEnum):
    """Parts of a model that Liger replaces; the values are Axolotl's keys."""

    ROPE = "liger_rope"
    RMS_NORM = "liger_rms_norm"
    GLU = "liger_glu_activation"
    #: The cross-entropy together with the head's product: logits exist a chunk at a time.
    LOSS = "liger_fused_linear_cross_entropy"


_ALL = frozenset(LigerPart)
#: Liger 0.8 refuses Granite's loss and GLM-4's rotation, and leaves the factor out of Falcon-H1's loss. Its
#: experts are tuned on a GPU at their first use, so they were never compared.
LIGER_PARTS: Mapping[str, frozenset[LigerPart]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "olmo2"), _ALL),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), _ALL),
    **dict.fromkeys(("granite", "falcon_h1"), _ALL - {LigerPart.LOSS}),
    "glm4": _ALL - {LigerPart.ROPE},
    "mixtral": _ALL - {LigerPart.GLU},
    "qwen3_moe": _ALL - {LigerPart.GLU},
}
#: Axolotl rewrites the source of the attention layer and stops where it does not know it: with Phi, OLMo,
#: Command R, Falcon, Pythia, GPT-2 and others. In Gemma's layers it computes the exact GELU, and Gemma
#: approximates it.
LORA_KERNELS = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "glm4", "cohere2", "starcoder2"}
    | {"mixtral", "qwen3_moe"}
)


def liger_parts(architecture: str) -> frozenset[LigerPart]:
    """Empty: Liger has nothing for it."""
    return LIGER_PARTS.get(architecture, frozenset())
