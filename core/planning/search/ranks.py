"""The adapter's ranks: of all layers, and of some by name."""

from __future__ import annotations

from pydantic import JsonValue

from core.models.facts import ModelFacts
from core.models.shapes import RankFactors
from core.planning.budget import Concession, conceded
from core.profile.limits import ProfileLimits
from core.profile.schema import ResolvedProfile
from core.profile.targets import Targets


def lora_rank(targets: Targets, limits: ProfileLimits, given: list[Concession]) -> int:
    if targets.lora_r > limits.max_lora_r:
        given.append(
            conceded("lora_r", targets.lora_r, limits.max_lora_r, f"limits.max_lora_r is {limits.max_lora_r}")
        )
    return min(targets.lora_r, limits.max_lora_r)


def rank_factors(
    profile: ResolvedProfile, model: ModelFacts, rank: int, given: list[Concession]
) -> RankFactors:
    """What `lora_rank_pattern` means relative to lora_r, so that both are scaled and lowered together."""
    targets, most = profile.targets, profile.limits.max_lora_r
    if model.is_image:
        return ()
    asked = _asked_rank(profile)
    factors = {pattern: wanted / asked for pattern, wanted in targets.lora_rank_pattern.items()}
    over: dict[str, JsonValue] = {
        pattern: targets.lora_rank_pattern[pattern]
        for pattern, factor in factors.items()
        if factor * rank > most
    }
    if over:
        got: dict[str, JsonValue] = dict.fromkeys(over, most)
        given.append(conceded("lora_rank_pattern", over, got, f"limits.max_lora_r is {most}"))
    return tuple((pattern, min(factor, most / rank)) for pattern, factor in factors.items())


def _asked_rank(profile: ResolvedProfile) -> float:
    return profile.before_scale.get("lora_r", profile.targets.lora_r)
