"""Setups and profiles for the planner's tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from core.config.files import ConfigLayer
from core.domain.choices import Attention, Parallelism
from core.domain.hardware import Hardware, parse_gpus
from core.models.facts import ModelFacts
from core.models.identify import facts_from_name
from core.planning.candidate import LossKind, RunCandidate, shape_of
from core.planning.memory.peak import moments
from core.profile.resolve import PROFILE_KIND, LoadedProfile, load_profile
from tests.core import builders
from tests.core.builders import resolved as resolved

GIB = 2**30
#: What published figures ("memory active") and fake tensors leave out.
UNSEEN = ("cuda", "fragmentation", "ddp buckets")


def with_strategy(strategy: str, name: str = "h100x4") -> LoadedProfile:
    """The profile with another `gpu_strategy`."""
    text = f"extends: {name}\ntargets: {{gpu_strategy: {strategy}}}"
    file = Path(f"{strategy}.yaml")
    return LoadedProfile(name, [*load_profile(name).layers, ConfigLayer(PROFILE_KIND, file, text)])


def on_all_gpus(name: str = "h100x4") -> LoadedProfile:
    """The profile with every job on all GPUs, as the guide of `h100x4` has it."""
    return with_strategy("all", name)


def a_candidate(model: ModelFacts | str = "meta-llama/Llama-3.1-8B", **changes: Any) -> RunCandidate:
    """LoRA of rank 16 on one H100: fp32 adapters, flash attention, plain cross-entropy, no dropout."""
    facts = facts_from_name(model) if isinstance(model, str) else model
    fields: dict[str, Any] = {
        "shape": shape_of(facts),
        "world": 1,
        "parallelism": Parallelism.SINGLE,
        "micro": 1,
        "rank": 16,
        "dropout": False,
        "checkpointing": True,
        "attention": Attention.FLASH_2,
        "loss": LossKind.FULL,
        "generations": 8,
    }
    return replace(builders.plan().candidate, **{**fields, **changes})


def active_gib(candidate: RunCandidate) -> float:
    """The worst moment of training, without what published figures leave out."""
    peaks = [
        sum(term.bytes for term in moment.terms if term.name not in UNSEEN)
        for moment in moments(candidate)
        if moment.phase not in ("evaluation", "generation")
    ]
    return max(peaks) / GIB


def host(gpus: str = "4xH100", **changes: Any) -> Hardware:
    return Hardware(gpus=parse_gpus(gpus), **changes)
