"""The operator's tuning profiles: schema, loading, inheritance, resolution, explanation."""

from core.profile.schema import EngineConfigs, Origin, Profile, ResolvedProfile, Section, When
from core.profile.targets import ContainerTargets, Lane, Limits, Scale, Targets

__all__ = [
    "ContainerTargets",
    "EngineConfigs",
    "Lane",
    "Limits",
    "Origin",
    "Profile",
    "ResolvedProfile",
    "Scale",
    "Section",
    "Targets",
    "When",
]
