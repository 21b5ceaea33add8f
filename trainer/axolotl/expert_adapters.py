"""Write an adapter on routed experts matrix by matrix, for any evaluation (`core.models.experts`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.models.experts import EXPERT_NAMES, EXPERT_PARAMETERS, ExpertNames

#: Where peft keeps the two adapters of a layer's experts: that of gate and up is wrapped in that of down.
_DOWN, _GATE_UP = ".mlp.experts.", ".mlp.experts.base_layer."


def split_experts(folder: Path, architecture: str) -> None:
    """Rewrite what peft saved in `folder`, if it has adapters on experts."""
    config_path, weights_path = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    config = json.loads(config_path.read_text("utf-8"))
    if not config.get("target_parameters"):
        return
    from safetensors.torch import load_file, save_file

    names, rank = EXPERT_NAMES[architecture], config["rank_pattern"][EXPERT_PARAMETERS[0]]
    matrices: dict[str, Any] = {}
    for key, tensor in load_file(weights_path).items():
        matrices.update(_matrices(key, tensor, rank, names) if _DOWN in key else {key: tensor})
    save_file(matrices, weights_path, metadata={"format": "pt"})
    # transformers 5 doubles `r` for gate and up, which are one tensor there, and knows no pattern for it: so
    # `r` is the experts', and the patterns are the others'.
    others = sorted(config["target_modules"])
    config |= {
        "r": rank,
        "rank_pattern": dict.fromkeys(others, config["r"]),
        "target_modules": [*others, names.gate, names.up, names.down],
        "target_parameters": None,
    }
    config_path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _matrices(key: str, tensor: Any, rank: int, names: ExpertNames) -> Iterator[tuple[str, Any]]:
    """Each expert's part of one factor; gate and up have the first factor in common."""
    fused, first = _GATE_UP in key, "lora_A" in key
    layer, _, factor = key.partition(_GATE_UP if fused else _DOWN)
    # peft lays out A as (expert, rank) × in, and B as out × (rank, expert).
    parts = tensor.unflatten(0, (-1, rank)) if first else tensor.unflatten(1, (rank, -1)).permute(2, 0, 1)
    for expert, part in enumerate(parts):
        if not fused:
            named = {names.down: part}
        elif first:
            named = {names.gate: part, names.up: part}
        else:
            gate, up = part.chunk(2)
            named = {names.gate: gate, names.up: up}
        for name, matrix in named.items():
            yield f"{layer}.{names.place}.{expert}.{name}.{factor}", matrix.clone().contiguous()
