"""What a profile says for one task and one model.

Order, later wins: built-in defaults; the general parts of each file, oldest ancestor first; then the matching
sections in the order in which they were first written, each laid over by its namesake in a later file. So a
section beats a general value even of a later file: it is the more special one. Factors (`scale`) come last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from core.errors import ConfigError, Problem
from core.layers.lines import Path
from core.models import ModelFacts
from core.profile.load import Layer, LoadedProfile
from core.profile.schema import EngineConfigs, Origin, ResolvedProfile, When
from core.profile.targets import ContainerTargets, Limits, Targets
from core.tasks import TaskType

Values = dict[str, Any]


class _Pile:
    """Values by dotted path, and where each came from."""

    def __init__(self) -> None:
        self.values: Values = {}
        self.origins: dict[str, Origin] = {}

    def lay(self, layer: Layer, part: BaseModel, base: Path, name: str, section: str | None = None) -> None:
        for field in part.model_fields_set:
            key = type(part).model_fields[field].alias or field
            self.put(f"{name}.{field}", getattr(part, field), layer, (*base, name, key), section)

    def put(self, key: str, value: Any, layer: Layer, path: Path, section: str | None = None) -> None:
        self.values[key] = value
        line = layer.located.line(path)
        self.origins[key] = Origin(file=layer.file.name, line=line, section=section)

    def under(self, name: str) -> Values:
        cut = len(name) + 1
        return {key[cut:]: value for key, value in self.values.items() if key.startswith(f"{name}.")}


def resolve(profile: LoadedProfile, task_type: TaskType, model: ModelFacts) -> ResolvedProfile:
    """Flat and final. `ConfigError` only where sections together make limits that contradict each other."""
    matched = tuple(name for name, when in selectors(profile) if matches(when, task_type, model))
    if matched not in profile.resolved:
        profile.resolved[matched] = _resolved(profile, matched)
    return profile.resolved[matched]


def _resolved(profile: LoadedProfile, matched: tuple[str, ...]) -> ResolvedProfile:
    pile, factors = _general(profile), _Factors()
    for name in matched:
        base: Path = ("sections", name)
        scale = _Pile()
        for layer in _with_section(profile, name):
            section = layer.content.sections[name]
            _lay_common(pile, layer, section, base, name)
            scale.lay(layer, section.scale, base, "scale", name)
        factors.multiply(scale)
    return _built(profile, pile, factors, matched)


def selectors(profile: LoadedProfile) -> list[tuple[str, When]]:
    """Every section with what it is for, in the order in which they apply."""
    if profile.selectors is None:
        profile.selectors = [(name, _when(profile, name)) for name in section_names(profile)]
    return profile.selectors


def section_names(profile: LoadedProfile) -> list[str]:
    return list(dict.fromkeys(name for layer in profile.layers for name in layer.content.sections))


def _when(profile: LoadedProfile, name: str) -> When:
    """The section's selector, each key as last written."""
    values: Values = {}
    for layer in _with_section(profile, name):
        when = layer.content.sections[name].when
        values.update({field: getattr(when, field) for field in when.model_fields_set})
    return When.model_construct(**{**When().model_dump(), **values})


def matches(when: When, task_type: TaskType, model: ModelFacts) -> bool:
    image = model.image.image_type if model.image else None
    return (
        (when.task is None or task_type in when.task)
        and (when.image is None or image in when.image)
        and (when.size is None or model.params_total in when.size)
        and (when.family is None or model.family in when.family)
    )


def _with_section(profile: LoadedProfile, name: str) -> Iterator[Layer]:
    return (layer for layer in profile.layers if name in layer.content.sections)


def _general(profile: LoadedProfile) -> _Pile:
    pile = _Pile()
    for layer in profile.layers:
        _lay_common(pile, layer, layer.content, (), None)
        pile.lay(layer, layer.content.container, (), "container")
    return pile


def _lay_common(pile: _Pile, layer: Layer, part: Any, base: Path, section: str | None) -> None:
    pile.lay(layer, part.targets, base, "targets", section)
    pile.lay(layer, part.limits, base, "limits", section)
    for key, value in part.env.items():
        pile.put(f"env.{key}", value, layer, (*base, "env", key), section)
    for field, info in EngineConfigs.model_fields.items():
        engine = info.alias or field
        for key, value in getattr(part.engine_config, field).items():
            path = (*base, "engine_config", engine, key)
            pile.put(f"engine_config.{field}.{key}", value, layer, path, section)


class _Factors:
    def __init__(self) -> None:
        self.by_target: dict[str, float] = {}
        self.origins: dict[str, Origin] = {}

    def multiply(self, scale: _Pile) -> None:
        for target, factor in scale.under("scale").items():
            self.by_target[target] = self.by_target.get(target, 1.0) * factor
            self.origins[f"scale.{target}"] = scale.origins[f"scale.{target}"]


def _built(
    profile: LoadedProfile, pile: _Pile, factors: _Factors, matched: tuple[str, ...]
) -> ResolvedProfile:
    targets = Targets().model_copy(update=pile.under("targets"))
    limits = Limits().model_copy(update=pile.under("limits"))
    scaled, before = _scaled(targets, factors.by_target)
    if problems := contradictions(limits, pile.origins):
        raise ConfigError(profile.name, problems)
    engines = {field: pile.under(f"engine_config.{field}") for field in EngineConfigs.model_fields}
    return ResolvedProfile(
        name=profile.name,
        digest=profile.digest,
        hardware=profile.hardware,
        targets=scaled,
        limits=limits,
        container=ContainerTargets().model_copy(update=pile.under("container")),
        env=pile.under("env"),
        engine_config=EngineConfigs().model_copy(update=engines),
        sections=matched,
        origins={**pile.origins, **factors.origins},
        before_scale=before,
    )


def _scaled(targets: Targets, factors: dict[str, float]) -> tuple[Targets, dict[str, float]]:
    update: Values = {}
    before: dict[str, float] = {}
    for name, factor in factors.items():
        value = getattr(targets, name)
        if value is not None and factor != 1.0:
            before[name] = value
            update[name] = _times(name, value, factor)
    return targets.model_copy(update=update), before


def _times(name: str, value: float, factor: float) -> float:
    if name == "lora_r":
        step = 8 if value % 8 == 0 and value * factor >= 4 else 1
        return max(round(value * factor / step), 1) * step
    if isinstance(value, int):
        return max(round(value * factor), 1 if value else 0)
    # 12 digits: 4e-4 · 1.2 is to read 0.00048.
    return float(f"{value * factor:.12g}")


_PAIRS = (
    ("min_gpus", "max_gpus"),
    ("min_lora_r", "max_lora_r"),
    ("min_sequence_len", "max_sequence_len"),
)


def contradictions(limits: Limits, origins: dict[str, Origin]) -> list[Problem]:
    found = []
    for low, high in _PAIRS:
        least, most = getattr(limits, low), getattr(limits, high)
        if least > most:
            written = [origins[f"limits.{name}"] for name in (low, high) if f"limits.{name}" in origins]
            where = " and ".join(map(str, written)) or "limits"
            found.append(Problem(f"{where}: {low}", str(least), f"is above {high} ({most}); nothing is left"))
    return found
