"""LoRA's layers without what peft does around their products, for the many small passes of a generation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import linear


@contextlib.contextmanager
def direct_adapters(model: Any) -> Iterator[None]:
    """The same numbers. peft looks at its settings in every layer and for every token: with small models half
    of a pass."""
    replaced = [module for module in model.modules() if _is_plain(module)]
    for module in replaced:
        module.forward = _forward(module)
    try:
        yield
    finally:
        for module in replaced:
            del module.forward


def _is_plain(module: Any) -> bool:
    """Return True for a LoRA of one adapter on a linear layer, as peft made it, switched on and apart from
    its base."""
    try:
        from peft.tuners.lora.layer import Linear
    except ImportError:
        return False
    if type(module) is not Linear or "forward" in module.__dict__:
        return False
    active = [name for name in module.active_adapters if name in module.lora_A]
    return (
        type(module.base_layer) is torch.nn.Linear
        and not (module.merged or module.disable_adapters or module.lora_variant)
        and len(active) == 1
        and module.lora_B[active[0]].bias is None
    )


def _forward(module: Any) -> Callable[..., torch.Tensor]:
    (active,) = (name for name in module.active_adapters if name in module.lora_A)
    weight, bias = module.base_layer.weight, module.base_layer.bias
    down, up, scale = module.lora_A[active].weight, module.lora_B[active].weight, module.scaling[active]

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        base = linear(hidden, weight, bias)
        added = linear(linear(hidden.to(down.dtype), down), up)
        return (base + added * scale).to(base.dtype)

    return forward
