"""Which policy and which profile are in force, from the settings and the GPUs that there are."""

from __future__ import annotations

from typing import Any

from core.hardware import Hardware
from miner.offers.policies.load import LoadedPolicy
from miner.offers.policies.words import WORD_OF
from miner.settings import Settings
from miner.settings.fields import AUTO

#: From so many GPUs on the strategy for eight is the one to follow: one that fails must not change it.
_MANY = 6


def policy_name(settings: Settings, hardware: Hardware | None) -> str:
    """Without GPUs this is a demonstration: whatever can be done is done."""
    if settings.policy != AUTO:
        return settings.policy
    return _by_gpus(hardware, many="h100x8", few="h100x4", none="everything-feasible")


def profile_name(settings: Settings, policy: LoadedPolicy, hardware: Hardware | None) -> str:
    """The one that the policy goes with, where nobody chose another."""
    if settings.profile != AUTO:
        return settings.profile
    return policy.profile or _by_gpus(hardware, many="h100x8", few="h100x4", none="cpu-demo")


def _by_gpus(hardware: Hardware | None, *, many: str, few: str, none: str) -> str:
    """GPUs that could not be counted are there, or nothing would be accepted anyway."""
    if hardware is None:
        return few
    if hardware.gpus.is_cpu:
        return none
    return many if hardware.gpus.count >= _MANY else few


def on_top(settings: Settings) -> dict[str, Any]:
    """What TASK_TYPES, MAX_HOURS and MAX_JOBS set on top of any policy."""
    found: dict[str, Any] = {}
    if settings.task_types:
        found["rules.tasks"] = [WORD_OF[kind] for kind in settings.task_types]
    if settings.max_hours is not None:
        found["rules.max_hours"] = settings.max_hours
    if settings.max_jobs is not None:
        found["rules.max_jobs"] = settings.max_jobs
    return found
