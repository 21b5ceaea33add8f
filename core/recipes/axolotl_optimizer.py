"""The optimizer and the learning rate of a text plan, in Axolotl's words."""

from __future__ import annotations

from typing import Any

from core.choices import Optimizer, Schedule
from core.plan import TrainingPlan
from core.recipes.base import Config
from core.recipes.run import RunInputs

_ADAMW = frozenset(one for one in Optimizer if "adamw" in one)
#: bitsandbytes' state does not survive being sharded; torchao's does.
_SHARDABLE = {
    Optimizer.ADAMW_BNB_8BIT: Optimizer.ADAMW_TORCH_8BIT,
    Optimizer.PAGED_ADAMW_8BIT: Optimizer.ADAMW_TORCH_8BIT,
    Optimizer.PAGED_ADAMW_32BIT: Optimizer.ADAMW_TORCH_FUSED,
}


def optimizer_keys(plan: TrainingPlan, inputs: RunInputs, notes: list[str]) -> Config:
    optimizer = plan.optimizer
    name = optimizer.name
    if plan.fsdp is not None and name in _SHARDABLE:
        name = _SHARDABLE[name]
        notes.append(f"optimizer {optimizer.name}: does not shard under FSDP2, {name} is written")
    betas: Config = {}
    if name in _ADAMW:
        betas = {
            "adam_beta1": optimizer.beta1,
            "adam_beta2": optimizer.beta2,
            "adam_epsilon": optimizer.epsilon,
        }
    if optimizer.fp32_master and plan.fsdp is None:
        notes.append("fp32 master weights: Axolotl trains bf16 weights in place outside FSDP")
    return {
        "optimizer": str(name),
        "learning_rate": optimizer.learning_rate,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        **betas,
        **_schedule(plan, notes),
    }


def _schedule(plan: TrainingPlan, notes: list[str]) -> Config:
    optimizer, name = plan.optimizer, plan.optimizer.schedule
    arguments: dict[str, Any] = {}
    least: float | None = None
    if name is Schedule.COSINE_WITH_RESTARTS:
        arguments = {"num_cycles": optimizer.cycles}
    elif name is Schedule.COSINE_WITH_MIN_LR:
        arguments = {"min_lr_rate": optimizer.min_lr_ratio}
    elif name is Schedule.WSD:
        decay = max(1, round(optimizer.cooldown_share * plan.steps.total))
        arguments = {"num_decay_steps": decay, "min_lr_ratio": optimizer.min_lr_ratio}
    elif name is Schedule.COSINE and optimizer.min_lr_ratio:
        least = optimizer.min_lr_ratio
    elif optimizer.min_lr_ratio:
        notes.append(f"min_lr_ratio: {name} has no end of its own in Axolotl; the plugin's schedule has one")
    if optimizer.stages:
        notes.append("lr_stages: laid over the schedule by the plugin")
    return {
        "lr_scheduler": str(name),
        "lr_scheduler_kwargs": arguments or None,
        "cosine_min_lr_ratio": least,
        "warmup_steps": optimizer.warmup_steps,
    }
