"""The settings that a sweep tries: each lever's other positions, as plans and as a profile's targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from core.choices import Attention, CompileMode, Optimizer, Parallelism
from core.plan import TrainingPlan
from trainer.native.net import available_attention


@dataclass(frozen=True)
class Setting:
    name: str
    plan: TrainingPlan
    #: What a profile would say to have it; keys of the native trainer's own under "engine_config".
    targets: dict[str, Any]


def measurable(plan: TrainingPlan) -> TrainingPlan:
    """On one GPU, with just the batch that it says."""
    one = {
        "parallelism": Parallelism.SINGLE,
        "fsdp": None,
        "batch": plan.batch.model_copy(update={"world_size": 1}),
        "launch": plan.launch.model_copy(update={"processes": 1}),
        "engine_config": {**plan.engine_config, "probe_batch": False, "batch_ramp": 0.0},
    }
    return TrainingPlan.model_validate(plan.model_copy(update=one).model_dump())


def _precision(plan: TrainingPlan, **changes: Any) -> TrainingPlan:
    return plan.model_copy(update={"precision": plan.precision.model_copy(update=changes)})


def _own(plan: TrainingPlan, **changes: Any) -> TrainingPlan:
    return plan.model_copy(update={"engine_config": {**plan.engine_config, **changes}})


def _cuda() -> bool:
    return torch.cuda.is_available()


def compilation(plan: TrainingPlan) -> Iterator[Setting]:
    modes: list[CompileMode | None] = [None, CompileMode.DEFAULT]
    modes += [CompileMode.MAX_AUTOTUNE] if _cuda() else []
    for mode in modes:
        if mode is not plan.precision.compile_mode:
            yield Setting(mode or "off", _precision(plan, compile_mode=mode), {"compile_mode": mode})


def attention(plan: TrainingPlan) -> Iterator[Setting]:
    device = torch.device("cuda" if _cuda() else "cpu")
    for kind in (Attention.SDPA, Attention.FLASH_2, Attention.FLASH_3, Attention.FLEX):
        if kind is not plan.precision.attention and available_attention(kind, device) is kind:
            yield Setting(kind, _precision(plan, attention=kind), {"attention": kind})


def packing(plan: TrainingPlan) -> Iterator[Setting]:
    other = not plan.sequence.packing
    sequence = plan.sequence.model_copy(update={"packing": other})
    yield Setting(
        "on" if other else "off",
        plan.model_copy(update={"sequence": sequence}),
        {"sample_packing": other},
    )


def micro(plan: TrainingPlan) -> Iterator[Setting]:
    """The effective batch stays, as far as it divides."""
    batch = plan.batch
    for size in (2 * batch.micro, 4 * batch.micro, batch.micro // 2):
        if size and batch.micro * batch.accumulation % size == 0:
            fewer = {"micro": size, "accumulation": batch.micro * batch.accumulation // size}
            targets = {"micro_batch_size": size, "gradient_accumulation_steps": fewer["accumulation"]}
            changed = plan.model_copy(update={"batch": batch.model_copy(update=fewer)})
            yield Setting(f"{size} × {fewer['accumulation']}", changed, targets)


def checkpointing(plan: TrainingPlan) -> Iterator[Setting]:
    off = _precision(plan, gradient_checkpointing=False)
    on = _precision(plan, gradient_checkpointing=True)
    if plan.precision.gradient_checkpointing:
        yield Setting("off", off, {"gradient_checkpointing": False})
    for name, how in (
        ("layers", {"recompute": "layers"}),
        ("every second layer", {"recompute": "layers", "recompute_every": 2}),
        ("cheap", {"recompute": "cheap"}),
    ):
        targets = {"gradient_checkpointing": True, "engine_config": how}
        yield Setting(name, _own(on, **how), targets)


def optimizer(plan: TrainingPlan) -> Iterator[Setting]:
    names = [Optimizer.ADAMW_TORCH_FUSED, Optimizer.ADAMW_TORCH_8BIT, Optimizer.MUON]
    for name in names:
        if name is not plan.optimizer.name:
            changed = plan.optimizer.model_copy(update={"name": name})
            yield Setting(name, plan.model_copy(update={"optimizer": changed}), {"optimizer": name})


def numbers(plan: TrainingPlan) -> Iterator[Setting]:
    if not plan.precision.bf16:
        yield Setting("bf16", _precision(plan, bf16=True, fp16=False), {"bf16": True})
    if _cuda() and not plan.precision.fp8 and plan.adapter is None:
        both = _precision(plan, fp8=True, compile_mode=plan.precision.compile_mode or CompileMode.DEFAULT)
        yield Setting("fp8", both, {"fp8": True, "compile_mode": both.precision.compile_mode})


#: In the order in which they are tried: the largest first, since the others depend on them.
LEVERS: dict[str, Callable[[TrainingPlan], Iterator[Setting]]] = {
    "packing": packing,
    "numbers": numbers,
    "attention": attention,
    "checkpointing": checkpointing,
    "micro": micro,
    "compile": compilation,
    "optimizer": optimizer,
}
