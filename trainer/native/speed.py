"""What makes steps faster on this GPU, each lever with a way back and a reason when it is taken."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from core.choices import CompileMode
from core.plan import TrainingPlan
from trainer.native.ranks import layers_of

log = logging.getLogger(__name__)

Note = Callable[[str, str], None]

#: Products with a side that is no multiple of 16 cannot run in fp8; small ones lose more to scaling than they
#: gain.
_FP8_MULTIPLE = 16
_FP8_LEAST = 2048


def fast_numbers(plan: TrainingPlan) -> None:
    """TF32 for what stays in fp32."""
    torch.set_float32_matmul_precision("high" if plan.precision.tf32 else "highest")


def fp8(net: nn.Module, plan: TrainingPlan, note: Note) -> None:
    """Large products of a full fine-tune in fp8; an adapter's are small and its base is frozen."""
    if not plan.precision.fp8:
        return
    if (why := _no_fp8(plan)) is not None:
        note("fp8", f"left off: {why}")
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def gains(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or "lm_head" in name:
            return False
        sides = (module.in_features, module.out_features)
        return all(side % _FP8_MULTIPLE == 0 for side in sides) and max(sides) >= _FP8_LEAST

    config = Float8LinearConfig.from_recipe_name(str(plan.engine_config.get("fp8_recipe", "tensorwise")))
    convert_to_float8_training(net.model, config=config, module_filter_fn=gains)
    note("fp8", f"{sum(gains(module, name) for name, module in net.named_modules())} products in fp8")


def _no_fp8(plan: TrainingPlan) -> str | None:
    if plan.adapter is not None:
        return "the frozen weights of a LoRA run gain nothing from fp8 products"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        return "this device has no fp8 units"
    if plan.precision.compile_mode is None:
        return "without compilation its scaling makes steps several times slower"
    return None


def compiled(net: nn.Module, plan: TrainingPlan, note: Note) -> None:
    """Layer by layer: one compilation serves all of them, and the loss with its changing shapes stays out.

    A layer that cannot be compiled runs as it is; the reason is noted once."""
    mode = plan.precision.compile_mode
    if mode is None:
        return
    torch._dynamo.config.suppress_errors = True
    # Rows of many lengths: one graph for all of them after the second.
    dynamic = None if plan.sequence.packing or plan.sequence.pad_to_length else True
    how: dict[str, Any] = {} if mode is CompileMode.DEFAULT else {"mode": _without_graphs(mode, plan)}
    layers = layers_of(net)
    for layer in layers:
        layer.compile(dynamic=dynamic, **how)
    note("compile", f"{len(layers)} layers compiled when first used ({how.get('mode', 'default')})")


def _without_graphs(mode: CompileMode, plan: TrainingPlan) -> str:
    """CUDA graphs replay fixed shapes and addresses; checkpointing and varying lengths have neither."""
    static = plan.sequence.packing or plan.sequence.pad_to_length
    if static and not plan.precision.gradient_checkpointing:
        return mode.value
    return "max-autotune-no-cudagraphs"
