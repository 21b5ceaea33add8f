"""The operator's tuning profiles: schema, loading, inheritance, resolution, explanation."""

from core.profile.load import LoadedProfile, load_profile, parse_profile, profile_files
from core.profile.resolve import resolve
from core.profile.schema import EngineConfigs, Origin, Profile, ResolvedProfile, Section, When
from core.profile.targets import ContainerTargets, Lane, Limits, Scale, Targets

__all__ = [
    "ContainerTargets",
    "EngineConfigs",
    "Lane",
    "Limits",
    "LoadedProfile",
    "Origin",
    "Profile",
    "ResolvedProfile",
    "Scale",
    "Section",
    "Targets",
    "When",
    "load_profile",
    "parse_profile",
    "profile_files",
    "resolve",
]
