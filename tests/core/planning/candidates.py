"""Setups and profiles for the planner's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core.config.files import ConfigLayer
from core.domain.choices import Attention, Engine, Method, Optimizer, Parallelism
from core.domain.hardware import GPU_KINDS, Hardware, parse_gpus
from core.domain.tasks import TaskType
from core.models.facts import ModelFacts
from core.models.identify import facts_from_name
from core.planning.candidate import LossKind, RunCandidate, shape_of
from core.planning.memory import moments
from core.profile.resolve import PROFILE_KIND, LoadedProfile, load_profile
from core.profile.schema import EngineConfigs, ResolvedProfile
from core.profile.targets import ContainerTargets, ProfileLimits, Targets

GIB = 2**30
#: What published figures ("memory active") and fake tensors leave out.
UNSEEN = ("cuda", "fragmentation", "ddp buckets")


def on_all_gpus(name: str = "h100x4") -> LoadedProfile:
    """The profile with every job on all GPUs, as the guide of `h100x4` has it."""
    text = f"extends: {name}\ntargets: {{gpu_strategy: all}}"
    return LoadedProfile(
        name, [*load_profile(name).layers, ConfigLayer(PROFILE_KIND, Path("all.yaml"), text)]
    )


def a_candidate(model: ModelFacts | str = "meta-llama/Llama-3.1-8B", **changes: Any) -> RunCandidate:
    """LoRA of rank 16 on one H100: fp32 adapters, flash attention, plain cross-entropy, no dropout."""
    facts = facts_from_name(model) if isinstance(model, str) else model
    fields: dict[str, Any] = {
        "task": TaskType.INSTRUCT,
        "engine": Engine.AXOLOTL,
        "method": Method.LORA,
        "shape": shape_of(facts),
        "kind": GPU_KINDS["H100-SXM"],
        "world": 1,
        "parallelism": Parallelism.SINGLE,
        "micro": 1,
        "accumulation": 1,
        "eval_micro": 1,
        "length": 1024,
        "completion": 0,
        "rank": 16,
        "adapter_fp32": True,
        "dropout": False,
        "optimizer": Optimizer.ADAMW_TORCH_FUSED,
        "fp32_master": False,
        "width": 2,
        "checkpointing": True,
        "offload": False,
        "attention": Attention.FLASH_2,
        "loss": LossKind.FULL,
        "reshard": True,
        "compile_mode": None,
        "fp8": False,
        "reference_ready": False,
        "vllm_share": 0.0,
        "generations": 8,
        "kl": False,
        "gathered_layers": 0,
        "ema": False,
        "image": None,
    }
    return RunCandidate(**{**fields, **changes})


def active_gib(candidate: RunCandidate) -> float:
    """The worst moment of training, without what published figures leave out."""
    peaks = [
        sum(term.bytes for term in moment.terms if term.name not in UNSEEN)
        for moment in moments(candidate)
        if moment.phase not in ("evaluation", "generation")
    ]
    return max(peaks) / GIB


def resolved(limits: dict[str, Any] | None = None, **targets: Any) -> ResolvedProfile:
    """A profile of these targets alone, everything else at its default."""
    return ResolvedProfile(
        name="test",
        digest="",
        hardware=None,
        targets=Targets(**targets),
        limits=ProfileLimits.model_construct(**{**ProfileLimits().model_dump(), **(limits or {})}),
        container=ContainerTargets(),
        env={},
        engine_config=EngineConfigs(),
        sections=(),
        origins={},
        before_scale={},
    )


def host(gpus: str = "4xH100", **changes: Any) -> Hardware:
    return Hardware(gpus=parse_gpus(gpus), **changes)
