"""Choose the policy and the profile from the settings and the GPUs: one rule for the daemon, `plan`,
`profile`, `policy` and doctor.
"""

from __future__ import annotations

from typing import NamedTuple

from core.domain.hardware import Hardware
from core.profile.resolve import LoadedProfile, load_profile
from miner.offers.policies.load import LoadedPolicy, load_policy
from miner.settings import Settings
from miner.settings.fields import AUTO

#: From this many GPUs on the strategy for eight is the default: one or two failures must not change it.
_MANY = 6


class ChosenName(NamedTuple):
    """A name or path, and why it is in force."""

    name: str
    why: str


class ActiveConfig(NamedTuple):
    """The policy that decides offers, and the profile that plans trainings."""

    policy: LoadedPolicy
    profile: LoadedProfile
    why_policy: str
    why_profile: str


def active_config(settings: Settings, hardware: Hardware | None) -> ActiveConfig:
    """Load what a daemon with these settings uses on `hardware`. `ConfigError` where it cannot be used."""
    policy = active_policy_name(settings, hardware)
    terms = load_policy(policy.name, [settings.policy_dir], settings_overrides(settings))
    profile = active_profile_name(settings, terms, hardware)
    return ActiveConfig(terms, load_profile(profile.name, [settings.profile_dir]), policy.why, profile.why)


def inactive_text(word: str, name: str, used: str, chosen: ChosenName) -> str:
    """Explain why an edited or named policy or profile (`word`) has no effect: `used` is in force."""
    if name == used:
        return f"this {word} {name} is not in force; another file of its name is"
    return f"{word} {name} is not in force; {used} is, because {chosen.why}; {word.upper()}={name} chooses it"


def active_policy_name(settings: Settings, hardware: Hardware | None) -> ChosenName:
    """The default without GPUs, which is a demonstration, accepts whatever is feasible."""
    if settings.policy != AUTO:
        return ChosenName(settings.policy, _setting_text(settings, "policy"))
    return default_policy_name(hardware)


def active_profile_name(settings: Settings, policy: LoadedPolicy, hardware: Hardware | None) -> ChosenName:
    """The default is the profile that the policy goes with."""
    if settings.profile != AUTO:
        return ChosenName(settings.profile, _setting_text(settings, "profile"))
    return default_profile_name(policy, hardware)


def default_policy_name(hardware: Hardware | None) -> ChosenName:
    return _default_name("POLICY", hardware, many="h100x8", few="h100x4", none="everything-feasible")


def default_profile_name(policy: LoadedPolicy, hardware: Hardware | None) -> ChosenName:
    if policy.profile is not None:
        return ChosenName(policy.profile, f"policy {policy.name} names it and PROFILE is auto")
    return _default_name("PROFILE", hardware, many="h100x8", few="h100x4", none="cpu-demo")


def _default_name(variable: str, hardware: Hardware | None, *, many: str, few: str, none: str) -> ChosenName:
    """GPUs that could not be counted are taken to exist: without any, nothing is accepted anyway."""
    if hardware is None:
        return ChosenName(few, f"{variable} is auto and the GPUs are not known")
    if hardware.gpus.is_cpu:
        return ChosenName(none, f"{variable} is auto and there is no GPU")
    return ChosenName(
        many if hardware.gpus.count >= _MANY else few, f"{variable} is auto, with {hardware.gpus}"
    )


def _setting_text(settings: Settings, name: str) -> str:
    source = settings.source_of(name)
    where = {".env": " in .env", "env": " in the environment"}.get(source, "")
    return f"{name.upper()}={getattr(settings, name)}{where}"


def settings_overrides(settings: Settings) -> dict[str, object]:
    """Return what TASK_TYPES, MAX_HOURS and MAX_JOBS change in any policy."""
    overrides: dict[str, object] = {}
    if settings.task_types:
        overrides["rules.tasks"] = [kind.word for kind in settings.task_types]
    if settings.max_hours is not None:
        overrides["rules.max_hours"] = settings.max_hours
    if settings.max_jobs is not None:
        overrides["rules.max_jobs"] = settings.max_jobs
    return overrides
