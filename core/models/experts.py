"""How published checkpoints name the matrices of routed experts, one by one.

transformers 5 holds a layer's experts in two tensors, and peft adapts these as parameters. An evaluation with
transformers 4 has a layer for each matrix, and would load such an adapter as none at all, with a warning.
Written matrix by matrix, with a checkpoint's names, an adapter gives the same loss in both: tried with
transformers 4.57 and peft 0.17, and with 5.16 and 0.20. Architectures whose dense or shared layers have the
experts' names (Qwen2-MoE, DeepSeek, GLM-4-MoE) are not here: peft 0.20 takes those for experts when it reads
such a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class ExpertNames(NamedTuple):
    #: Of the list of experts within a layer.
    place: str
    gate: str
    up: str
    down: str


_QWEN = ExpertNames("mlp.experts", "gate_proj", "up_proj", "down_proj")
#: By architecture.
EXPERT_NAMES: Mapping[str, ExpertNames] = {
    "mixtral": ExpertNames("block_sparse_moe.experts", "w1", "w3", "w2"),
    "qwen3_moe": _QWEN,
    "olmoe": _QWEN,
}
#: The parameters of transformers 5 that carry the adapter: gate and up together, and down.
EXPERT_PARAMETERS = ("experts.gate_up_proj", "experts.down_proj")
