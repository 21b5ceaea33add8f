"""Faster steps on this GPU: TF32, fp8, compilation, and the largest micro-batch that really fits.

Each has a fallback, and a note says why when it is left off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from core.domain.choices import CompileMode
from core.planning.plan import TrainingPlan
from trainer.inputs.tokens import IGNORED
from trainer.native.batches import BatchLayout, TokenBatch
from trainer.native.distributed import NativeCommunicator, layers_of

log = logging.getLogger(__name__)

Note = Callable[[str, str], None]

#: Products with a side that is no multiple of 16 cannot run in fp8; small ones lose more to scaling than they
#: gain.
_FP8_MULTIPLE = 16
_FP8_LEAST = 2048


def allow_tf32(plan: TrainingPlan) -> None:
    """TF32 for what stays in fp32."""
    torch.set_float32_matmul_precision("high" if plan.precision.tf32 else "highest")


def convert_to_fp8(net: nn.Module, plan: TrainingPlan, note: Note) -> None:
    """Large products of a full fine-tune in fp8; an adapter's are small and its base is frozen."""
    if not plan.precision.fp8:
        return
    if (why := _why_no_fp8(plan)) is not None:
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


def _why_no_fp8(plan: TrainingPlan) -> str | None:
    if plan.adapter is not None:
        return "the frozen weights of a LoRA run gain nothing from fp8 products"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        return "this device has no fp8 units"
    if plan.precision.compile_mode is None:
        return "without compilation its scaling makes steps several times slower"
    return None


def compile_layers(net: nn.Module, plan: TrainingPlan, note: Note) -> None:
    """Layer by layer: one compilation serves all of them, and the loss with its changing shapes stays out.

    A layer that cannot be compiled runs as it is; the reason is noted once."""
    mode = plan.precision.compile_mode
    if mode is None:
        return
    torch._dynamo.config.suppress_errors = True
    # Rows of many lengths: one graph for all of them after the second.
    dynamic = None if plan.sequence.packing or plan.sequence.pad_to_length else True
    options: dict[str, Any] = {} if mode is CompileMode.DEFAULT else {"mode": _without_graphs(mode, plan)}
    layers = layers_of(net)
    for layer in layers:
        layer.compile(dynamic=dynamic, **options)
    note("compile", f"{len(layers)} layers compiled when first used ({options.get('mode', 'default')})")


def _without_graphs(mode: CompileMode, plan: TrainingPlan) -> str:
    """CUDA graphs replay fixed shapes and addresses; checkpointing and varying lengths have neither."""
    static = plan.sequence.packing or plan.sequence.pad_to_length
    if static and not plan.precision.gradient_checkpointing:
        return mode.value
    return "max-autotune-no-cudagraphs"


#: Of the GPU's memory; the rest is for what the allocator cannot use and what others take.
MEMORY_SHARE = 0.9
#: Tokens in a pass beyond which nothing gets faster.
ENOUGH_TOKENS = 16_384


def larger_micro(plan: TrainingPlan, fits: Callable[[int], bool]) -> TrainingPlan:
    """The plan with a larger micro-batch and as much less accumulation, where `fits` says so."""
    batch = plan.batch
    micro, accumulation = batch.micro, batch.accumulation
    while accumulation % 2 == 0 and micro * plan.sequence.length < ENOUGH_TOKENS and fits(2 * micro):
        micro, accumulation = 2 * micro, accumulation // 2
    if micro == batch.micro:
        return plan
    return plan.model_copy(
        update={"batch": batch.model_copy(update={"micro": micro, "accumulation": accumulation})}
    )


def probe_batch(
    net: nn.Module, plan: TrainingPlan, layout: BatchLayout, ranks: NativeCommunicator
) -> Callable[[int], bool]:
    """A test whether a pass of so many of the longest sequences fits on the GPU; the same on every rank."""
    device = ranks.device
    total = torch.cuda.get_device_properties(device).total_memory

    def fits(micro: int) -> bool:
        torch.cuda.reset_peak_memory_stats(device)
        try:
            net(_longest_batch(micro, plan.sequence.length, layout).to(device)).sum().backward()
            fits_here = torch.cuda.max_memory_reserved(device) <= MEMORY_SHARE * total
        except torch.cuda.OutOfMemoryError:
            fits_here = False
        net.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        return not ranks.any(not fits_here)

    return fits


def _longest_batch(micro: int, length: int, layout: BatchLayout) -> TokenBatch:
    """Full length, every prediction counts."""
    rows = micro * (2 if layout.pairs else 1)
    ids = torch.zeros(rows, length, dtype=torch.long)
    targets = torch.zeros_like(ids)
    targets[:, -1] = IGNORED
    return TokenBatch(
        ids=ids,
        targets=targets,
        labelled=torch.ones_like(ids, dtype=torch.bool),
        positions=torch.arange(length).expand(rows, length).contiguous() if layout.packed else None,
        weights=torch.ones(rows, length) if layout.by_row else None,
        reference=torch.zeros(micro) if layout.pairs else None,
        tokens=rows * length,
        count=1.0,
    )
