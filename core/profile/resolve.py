"""Load a profile with what it extends, and resolve it for one task and one model.

Order, later wins: built-in defaults; the general parts of each file, oldest ancestor first; then the
matching sections in the order in which they were first written, each merged with the section of the same
name in later files. So a section beats a general value even of a later file: it is the more specific one.
Factors (`scale`) come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from core.config.files import ConfigKind, ConfigLayer, LayeredValues, LoadedConfig
from core.config.problems import SchemaKeys
from core.config.yaml_lines import KeyPath, ValueOrigin, dotted_path
from core.data.facts import TYPICAL_PICTURES
from core.domain.choices import Engine
from core.domain.errors import ConfigError, Problem
from core.domain.tasks import ImageModelType, TaskType
from core.models.facts import ModelFacts
from core.models.image_families import IMAGE_FAMILIES
from core.profile.declare import NameSystem
from core.profile.limits import ContainerTargets, ProfileLimits, SlurmTargets
from core.profile.schema import (
    FIELD_NAMES,
    REMOVED_FIELDS,
    EngineConfigs,
    Profile,
    ProfileSection,
    ResolvedProfile,
    SectionSelector,
)
from core.profile.targets import Targets


def engine_for(targets: Targets, task_type: TaskType, image_type: ImageModelType | None) -> Engine:
    """The profile's engine where it trains such tasks, else the usual one."""
    engines: tuple[Engine, ...] = (Engine.AI_TOOLKIT,)
    if task_type.is_text:
        engines = (Engine.AXOLOTL, Engine.NATIVE)
    elif image_type is not None:
        engines = IMAGE_FAMILIES[image_type].engines
    return targets.engine if targets.engine in engines else engines[0]


PROFILE_SYNONYMS = (
    FIELD_NAMES[NameSystem.KOHYA] | FIELD_NAMES[NameSystem.AXOLOTL] | FIELD_NAMES[NameSystem.GUIDES]
)
PROFILE_KIND = ConfigKind(
    "profile",
    "profiles",
    Profile,
    SchemaKeys(
        Profile,
        PROFILE_SYNONYMS,
        [(), ("targets",), ("limits",), ("container",), ("slurm",)],
        removed=REMOVED_FIELDS,
    ),
)


class LoadedProfile(LoadedConfig[Profile]):
    """A profile and what it extends."""

    def __init__(self, name: str, layers: Sequence[ConfigLayer[Profile]]) -> None:
        super().__init__(name, layers)
        #: Filled by `resolve_profile`: what it returns depends on the matching sections alone.
        self.resolved: dict[tuple[str, ...], ResolvedProfile] = {}

    @property
    def hardware(self) -> str | None:
        return self.newest("hardware")

    @cached_property
    def selectors(self) -> list[tuple[str, SectionSelector]]:
        """Every section with what it is for, in the order in which they apply."""
        names = dict.fromkeys(name for layer in self.layers for name in layer.content.sections)
        return [(name, self._selector_of(name)) for name in names]

    def _selector_of(self, name: str) -> SectionSelector:
        """The section's selector, each key as last written."""
        values: dict[str, Any] = {}
        for layer in self.layers_with(name):
            when = layer.content.sections[name].when
            values.update({field: getattr(when, field) for field in when.model_fields_set})
        return SectionSelector.model_construct(**{**SectionSelector().model_dump(), **values})

    def layers_with(self, section: str) -> list[ConfigLayer[Profile]]:
        return [layer for layer in self.layers if section in layer.content.sections]


def load_profile(name_or_path: str, directories: Sequence[Path] = ()) -> LoadedProfile:
    """By path (anything with a slash or `.yaml`), or by name: in `directories` first, then as shipped."""
    layers = PROFILE_KIND.layers(name_or_path, directories)
    return LoadedProfile(layers[-1].name, layers)


def profile_files(directories: Sequence[Path] = ()) -> dict[str, Path]:
    """Every profile that has a name; an operator's hides the shipped one of the same name."""
    return PROFILE_KIND.files(directories)


def resolve_profile(
    profile: LoadedProfile, task_type: TaskType, model: ModelFacts, pictures: int | None = None
) -> ResolvedProfile:
    """Flat and final. `ConfigError` only where sections together make limits that contradict each other.

    `pictures`: those of an image task's training, or None if not known."""
    matched = tuple(
        name for name, when in profile.selectors if selector_matches(when, task_type, model, pictures)
    )
    if matched not in profile.resolved:
        profile.resolved[matched] = _resolved(profile, matched)
    return profile.resolved[matched]


def selector_matches(
    when: SectionSelector, task_type: TaskType, model: ModelFacts, pictures: int | None = None
) -> bool:
    """Match a section; if the pictures are not known, as many count as a plan assumes then."""
    image = model.image.image_type if model.image else None
    if pictures is None and not task_type.is_text:
        pictures = TYPICAL_PICTURES
    return (
        (when.task is None or task_type in when.task)
        and (when.image is None or image in when.image)
        and (when.size is None or model.params_total in when.size)
        and (when.family is None or model.family in when.family)
        and (when.pictures is None or pictures in when.pictures)
    )


class _ProfileValues(LayeredValues):
    """Values by path as in a file's general part, and the product of all factors."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: dict[str, float] = {}

    def add_part(
        self, layer: ConfigLayer[Profile], name: str, part: BaseModel, section: str | None = None
    ) -> None:
        """Add what is written in one mapping of a layer, or of a section of it."""
        base: KeyPath = ("sections", section, name) if section else (name,)
        for field in part.model_fields_set:
            key = type(part).model_fields[field].alias or field
            origin = layer.located.origin((*base, key), section)
            self.set((name, field), getattr(part, field), origin)

    def add_layer(
        self, layer: ConfigLayer[Profile], part: Profile | ProfileSection, section: str | None = None
    ) -> None:
        """Add what the general part and a section of a layer have in common."""
        base: KeyPath = ("sections", section) if section else ()
        self.add_part(layer, "targets", part.targets, section)
        self.add_part(layer, "limits", part.limits, section)
        self.add_part(layer, "slurm", part.slurm, section)
        for key, value in part.env.items():
            self.set(("env", key), value, layer.located.origin((*base, "env", key), section))
        for field, info in EngineConfigs.model_fields.items():
            for key, value in getattr(part.engine_config, field).items():
                origin = layer.located.origin((*base, "engine_config", info.alias or field, key), section)
                self.set(("engine_config", field, key), value, origin)

    def add_section(self, profile: LoadedProfile, name: str) -> None:
        scale: dict[str, float] = {}
        for layer in profile.layers_with(name):
            section = layer.content.sections[name]
            self.add_layer(layer, section, name)
            for target in section.scale.model_fields_set:
                scale[target] = getattr(section.scale, target)
                self.origins[("scale", target)] = layer.located.origin(
                    ("sections", name, "scale", target), name
                )
        for target, factor in scale.items():
            self.factors[target] = self.factors.get(target, 1.0) * factor


def _resolved(profile: LoadedProfile, matched: tuple[str, ...]) -> ResolvedProfile:
    values = _ProfileValues()
    for layer in profile.layers:
        values.add_layer(layer, layer.content)
        values.add_part(layer, "container", layer.content.container)
    for name in matched:
        values.add_section(profile, name)
    targets = Targets().model_copy(update=values.below("targets"))
    limits = ProfileLimits().model_copy(update=values.below("limits"))
    scaled, before = _scaled(targets, values.factors)
    origins = {dotted_path(path): origin for path, origin in values.origins.items()}
    if problems := limit_contradictions(limits, origins):
        raise ConfigError(profile.name, problems)
    engines = {field: values.below("engine_config", field) for field in EngineConfigs.model_fields}
    return ResolvedProfile(
        name=profile.name,
        digest=profile.digest,
        hardware=profile.hardware,
        targets=scaled,
        limits=limits,
        container=ContainerTargets().model_copy(update=values.below("container")),
        slurm=SlurmTargets().model_copy(update=values.below("slurm")),
        env=values.below("env"),
        engine_config=EngineConfigs().model_copy(update=engines),
        sections=matched,
        origins=origins,
        before_scale=before,
    )


def _scaled(targets: Targets, factors: dict[str, float]) -> tuple[Targets, dict[str, float]]:
    update: dict[str, Any] = {}
    before: dict[str, float] = {}
    for name, factor in factors.items():
        value = getattr(targets, name)
        if value is not None and factor != 1.0:
            before[name] = value
            update[name] = _scaled_value(name, value, factor)
    return targets.model_copy(update=update), before


def _scaled_value(name: str, value: float, factor: float) -> float:
    if name == "lora_r":
        step = 8 if value % 8 == 0 and value * factor >= 4 else 1
        return max(round(value * factor / step), 1) * step
    if isinstance(value, int):
        return max(round(value * factor), 1 if value else 0)
    # 12 digits: 4e-4 · 1.2 must be shown as 0.00048.
    return float(f"{value * factor:.12g}")


_MIN_MAX_PAIRS = (
    ("min_gpus", "max_gpus"),
    ("min_lora_r", "max_lora_r"),
    ("min_sequence_len", "max_sequence_len"),
)


def limit_contradictions(limits: ProfileLimits, origins: dict[str, ValueOrigin]) -> list[Problem]:
    problems = []
    for low, high in _MIN_MAX_PAIRS:
        least, most = getattr(limits, low), getattr(limits, high)
        if least > most:
            written = [origins[f"limits.{name}"] for name in (low, high) if f"limits.{name}" in origins]
            where = " and ".join(map(str, written)) or "limits"
            rule = f"is above {high} ({most}); nothing is left"
            problems.append(Problem(f"{where}: {low}", str(least), rule))
    return problems
