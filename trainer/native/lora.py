"""LoRA on a linear layer in as few operations as it takes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor


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
