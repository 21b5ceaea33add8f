"""The adapter's ranks: of all layers, of some by name, of routed experts."""

from __future__ import annotations

from pydantic import JsonValue

from core.domain.choices import Engine
from core.models.experts import EXPERT_NAMES
from core.models.facts import ModelFacts
from core.models.shapes import RankFactors
from core.planning.budget import Concession, conceded
from core.profile.schema import ResolvedProfile
from core.profile.targets import ProfileLimits, Targets


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


def expert_factor(
    profile: ResolvedProfile, model: ModelFacts, engine: Engine, rank: int, given: list[Concession]
) -> float:
    """What `lora_experts_r` means relative to lora_r; 0: no adapter on experts."""
    asked, most = profile.targets.lora_experts_r, profile.limits.max_lora_r
    if asked is None or model.moe is None:
        return 0.0
    if (reason := _no_expert_adapter(profile.targets, model, engine)) is not None:
        given.append(conceded("lora_experts_r", asked, None, reason))
        return 0.0
    factor = asked / _asked_rank(profile)
    if factor * rank > most:
        given.append(conceded("lora_experts_r", asked, most, f"limits.max_lora_r is {most}"))
    return min(factor, most / rank)


def _no_expert_adapter(targets: Targets, model: ModelFacts, engine: Engine) -> str | None:
    if model.architecture not in EXPERT_NAMES:
        return f"evaluations might not load an adapter on the experts of {model.architecture}"
    if engine is not Engine.AXOLOTL:
        return "the native trainer has none"
    if targets.lora_dropout:
        return "peft adds it to the weights, which leaves no place for lora_dropout"
    for field in ("dora", "rslora", "lora_rank_pattern"):
        if getattr(targets, field):
            return f"not beside {field}, which evaluations would not apply to them alike"
    return "vLLM is not known to take it" if targets.grpo_vllm else None


def _asked_rank(profile: ResolvedProfile) -> float:
    return profile.before_scale.get("lora_r", profile.targets.lora_r)
