"""The operator's tuning profiles: schema, loading, inheritance, resolution, explanation."""

from core.domain.selectors import Lane
from core.profile.resolve import LoadedProfile, load_profile, profile_files, resolve_profile
from core.profile.schema import (
    EngineConfigs,
    Profile,
    ProfileSection,
    ResolvedProfile,
    SectionSelector,
)
from core.profile.targets import ContainerTargets, ProfileLimits, Targets, TargetScale

__all__ = [
    "ContainerTargets",
    "EngineConfigs",
    "Lane",
    "LoadedProfile",
    "Profile",
    "ProfileLimits",
    "ProfileSection",
    "ResolvedProfile",
    "SectionSelector",
    "TargetScale",
    "Targets",
    "load_profile",
    "profile_files",
    "resolve_profile",
]
