"""LoRA adapters of the native trainer: PEFT's, with a leaner forward pass.

Imported only for a run with an adapter, because importing PEFT takes every process some seconds.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from torch import Tensor, nn

from core.planning.plan import TrainingPlan
from trainer.inputs.adapter_targets import keep_what_loads
from trainer.native.sharded_loading import shard_of


def add_adapters(model: nn.Module, plan: TrainingPlan) -> nn.Module:
    adapter = plan.adapter
    assert adapter is not None
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=plan.targets.lora_target_modules or "all-linear",
        rank_pattern=adapter.rank_pattern,
        use_rslora=plan.targets.rslora,
        use_dora=plan.targets.dora,
        bias="none",
        task_type="CAUSAL_LM",
    )
    keep_what_loads(model, config)
    config._register_custom_module({nn.Linear: LeanLoraLinear})
    with_adapters: nn.Module = get_peft_model(model, config)
    if plan.targets.dora:
        _set_magnitudes(with_adapters)
    return with_adapters


@torch.no_grad()
def _set_magnitudes(model: nn.Module) -> None:
    """Compute DoRA's first magnitudes, norms over the inputs: PEFT cannot for a stand-in."""
    for layer in model.modules():
        for magnitude in getattr(layer, "lora_magnitude_vector", {}).values():
            shard = shard_of(layer.get_base_layer().weight)  # type: ignore[operator]
            if shard is not None:
                inputs = 0 if layer.fan_in_fan_out else 1
                magnitude.weight.copy_(torch.linalg.norm(shard, dim=inputs).full_tensor())


class LeanLoraLinear(Linear):
    """PEFT's layer with another forward pass: one product adds the adapter's share, scaled, to the output.

    It is computed in the input's numbers, as autocast would. PEFT by itself copies each input and output of a
    bf16 layer to fp32 for an fp32 adapter, and keeps the inputs' copies for the backward pass."""

    def forward(self, x: Tensor, *args: Any, **named: Any) -> Tensor:
        if self.disable_adapters or self.merged or self.lora_variant:  # variants: DoRA
            other: Tensor = super().forward(x, *args, **named)
            return other
        (name,) = self.active_adapters
        down, up = self.lora_A[name].weight, self.lora_B[name].weight
        flat = x.flatten(0, -2)
        low = F.linear(self.lora_dropout[name](flat), down.to(x.dtype))
        summed = torch.addmm(self.base_layer(flat), low, up.to(x.dtype).T, alpha=self.scaling[name])
        return summed.view(*x.shape[:-1], -1)
