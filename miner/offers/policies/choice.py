"""Which policy and which profile are in force, from the settings and the GPUs that there are: one rule for
the daemon, `plan`, `profile`, `policy` and doctor."""

from __future__ import annotations

from typing import Any, NamedTuple

from core.hardware import Hardware
from core.profile.load import LoadedProfile, load_profile
from miner.offers.policies.load import LoadedPolicy, load_policy
from miner.offers.policies.words import WORD_OF
from miner.settings import Settings
from miner.settings.fields import AUTO

#: From so many GPUs on the strategy for eight is the one to follow: one that fails must not change it.
_MANY = 6


class Chosen(NamedTuple):
    """A name or path, and why it is the one in force."""

    name: str
    why: str


class InForce(NamedTuple):
    """What offers are judged by and trainings are planned by."""

    policy: LoadedPolicy
    profile: LoadedProfile
    why_policy: str
    why_profile: str


def in_force(settings: Settings, hardware: Hardware | None) -> InForce:
    """What a daemon with these settings would use on `hardware`. `ConfigError` where it cannot be used."""
    policy = policy_in_force(settings, hardware)
    terms = load_policy(policy.name, [settings.policy_dir], on_top(settings))
    profile = profile_in_force(settings, terms, hardware)
    return InForce(terms, load_profile(profile.name, [settings.profile_dir]), policy.why, profile.why)


def not_in_force(word: str, name: str, used: str, chosen: Chosen) -> str:
    """For a policy or profile (`word`) that somebody edits or asks about, where `used` is in force."""
    if name == used:
        return f"this {word} {name} is not in force; another file of its name is"
    return f"{word} {name} is not in force; {used} is, because {chosen.why}; {word.upper()}={name} chooses it"


def policy_in_force(settings: Settings, hardware: Hardware | None) -> Chosen:
    """Without GPUs this is a demonstration: whatever can be done is done."""
    if settings.policy != AUTO:
        return Chosen(settings.policy, _said(settings, "policy"))
    return policy_by_gpus(hardware)


def profile_in_force(settings: Settings, policy: LoadedPolicy, hardware: Hardware | None) -> Chosen:
    """The one that the policy goes with, where nobody chose another."""
    if settings.profile != AUTO:
        return Chosen(settings.profile, _said(settings, "profile"))
    return profile_by_gpus(policy, hardware)


def policy_by_gpus(hardware: Hardware | None) -> Chosen:
    return _by_gpus("POLICY", hardware, many="h100x8", few="h100x4", none="everything-feasible")


def profile_by_gpus(policy: LoadedPolicy, hardware: Hardware | None) -> Chosen:
    if policy.profile is not None:
        return Chosen(policy.profile, f"policy {policy.name} names it and PROFILE is auto")
    return _by_gpus("PROFILE", hardware, many="h100x8", few="h100x4", none="cpu-demo")


def _by_gpus(variable: str, hardware: Hardware | None, *, many: str, few: str, none: str) -> Chosen:
    """GPUs that could not be counted are there, or nothing would be accepted anyway."""
    if hardware is None:
        return Chosen(few, f"{variable} is auto and the GPUs are not known")
    if hardware.gpus.is_cpu:
        return Chosen(none, f"{variable} is auto and there is no GPU")
    return Chosen(many if hardware.gpus.count >= _MANY else few, f"{variable} is auto, with {hardware.gpus}")


def _said(settings: Settings, name: str) -> str:
    source = settings.source_of(name)
    where = {".env": " in .env", "env": " in the environment"}.get(source, "")
    return f"{name.upper()}={getattr(settings, name)}{where}"


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
