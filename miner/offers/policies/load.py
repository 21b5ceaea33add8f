"""Load a policy: merge its files and the overrides, and check the result; choose which one is in force.

Mappings are merged key by key. Everything else is replaced, also tables by size, since bands of two
files would overlap. `null` takes back what an extended policy has set. Overrides (`--set`, the settings
TASK_TYPES, MAX_HOURS and MAX_JOBS) count as the newest layer. Unknown keys are answered with the nearest
known one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from core.config.files import ConfigKind, ConfigLayer, LayeredValues, LoadedConfig
from core.config.problems import SchemaKeys
from core.config.yaml_lines import KeyPath, LocatedYaml, dotted_path, parse_yaml
from core.domain.errors import ConfigError, Problem, nearest_name
from core.domain.hardware import Hardware
from core.profile.resolve import LoadedProfile, load_profile
from miner.offers.policies.schema import Policy
from miner.offers.policies.yaml_types import operator_key
from miner.settings import Settings
from miner.settings.fields import AUTO

KEY_SYNONYMS: dict[str, str] = {
    "task_types": "tasks",
    "types": "tasks",
    "model_families": "families",
    "family_allowed": "families",
    "deny": "models_denied",
    "denied": "models_denied",
    "blocked_models": "models_denied",
    "hours_by_task": "hours",
    "max_duration": "max_hours",
    "duration": "max_hours",
    "capacity": "max_jobs",
    "max_concurrent_jobs": "max_jobs",
    "concurrent_jobs": "max_jobs",
    "quiet_hours": "blackout",
    "min_history": "experience",
    "threshold_score": "threshold",
    "min_score": "threshold",
    "task_weight": "task",
    "model_performance": "family",
    "task_success_rate": "success",
    "time_efficiency": "time",
    "size_efficiency": "size",
    "h100x8_bonus": "hardware",
    "decay": "half_life",
    "max_queue": "max_wait",
}

POLICY_PARTS = ("rules", "fitting", "score", "success", "value", "targets")
POLICY_KIND = ConfigKind(
    "policy",
    "policies",
    Policy,
    SchemaKeys(Policy, KEY_SYNONYMS, [(), *((part,) for part in POLICY_PARTS), ("score", "weights")]),
    null_unsets=True,
)
#: Keys that belong to one file and are not inherited.
_NOT_INHERITED = ("description", "extends", "hardware", "profile", "notes")
_REPLACED_WHOLE: tuple[KeyPath, ...] = (("score", "size"), ("success", "size"))
#: From this many GPUs on the strategy for eight is the default: one or two failures must not change it.
_MANY = 6


class WrittenValue(NamedTuple):
    """One value, as it is written in a file or an override."""

    path: str
    value: Any
    #: `h100x4.yaml:12`, or `set`.
    origin: str


class LoadedPolicy(LoadedConfig[Policy]):
    """A policy for use: its merged terms, and where each of them was written."""

    def __init__(
        self, name: str, layers: Sequence[ConfigLayer[Policy]], overrides: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(name, layers)
        self._values = LayeredValues()
        for layer in layers:
            _add_layer(self._values, layer.located.data or {}, (), layer.located)
        self.overrides = dict(overrides or {})
        if self.overrides:
            newest = LocatedYaml("set")
            newest.data = _nested(self.overrides)
            POLICY_KIND.validated(newest)
            _add_layer(self._values, newest.data, (), newest)
            text = json.dumps(self.overrides, sort_keys=True, default=str)
            self.digest = hashlib.sha256(f"{self.digest}\0{text}".encode()).hexdigest()
        merged = LocatedYaml(name)
        merged.data = self._values.nested()
        self.terms = POLICY_KIND.validated(merged)

    @property
    def hardware(self) -> str | None:
        return self.newest("hardware")

    @property
    def profile(self) -> str | None:
        return self.newest("profile")

    def written(self) -> dict[str, WrittenValue]:
        """Return all values that were written, by dotted path."""
        values = (
            WrittenValue(dotted_path(path), value, str(self._values.origins[path]))
            for path, value in self._values.values.items()
        )
        return {value.path: value for value in values}

    def with_overrides(self, overrides: Mapping[str, Any]) -> LoadedPolicy:
        """Return the same policy with more overrides."""
        return LoadedPolicy(self.name, self.layers, {**self.overrides, **overrides})


def _add_layer(values: LayeredValues, data: Mapping[str, Any], path: KeyPath, source: LocatedYaml) -> None:
    for key, value in data.items():
        if not path and key in _NOT_INHERITED:
            continue
        inner: KeyPath = (*path, operator_key(key))
        if value is None or value == {} or inner in _REPLACED_WHOLE:
            values.unset(inner)
        if isinstance(value, dict) and value:
            _add_layer(values, value, inner, source)
        elif value is not None:
            values.set(inner, value, source.origin((*path, key)))


def load_policy(
    name_or_path: str, directories: Sequence[Path] = (), overrides: Mapping[str, Any] | None = None
) -> LoadedPolicy:
    """Load by path (with a slash or `.yaml`), or by name: in `directories` first, then as shipped.

    `overrides`: values by dotted path, `{"rules.hours.instruct": 12}`.
    """
    layers = POLICY_KIND.layers(name_or_path, directories)
    return LoadedPolicy(layers[-1].name, layers, overrides)


def policy_files(directories: Sequence[Path] = ()) -> dict[str, Path]:
    """Return every policy that has a name; an operator's hides the shipped one of the same name."""
    return POLICY_KIND.files(directories)


def parse_overrides(assignments: Sequence[str]) -> dict[str, object]:
    """`hours.InstructTextTask=12` → `{"rules.hours.instruct": 12}`; the value is YAML."""
    overrides = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            rule = "write KEY=VALUE, like rules.hours.instruct=12"
            raise ConfigError("--set", [Problem("--set", text, rule)])
        located = parse_yaml(f"value: {value}", "--set")
        overrides[_full_path(key.strip())] = located.data["value"]
    return overrides


def _full_path(key: str) -> str:
    """Add the part that the first word belongs to, where it was left out."""
    steps = [str(operator_key(step)) for step in key.split(".")]
    if steps[0] not in POLICY_KIND.keys.keys_at(()):
        parts = [part for part in POLICY_PARTS if steps[0] in POLICY_KIND.keys.keys_at((part,))]
        if len(parts) != 1:
            rule = f"is it {' or '.join(parts)}? write the part too" if parts else _nearest(steps[0])
            raise ConfigError("--set", [Problem("--set", key, rule)])
        steps.insert(0, parts[0])
    return ".".join(steps)


def _nearest(word: str) -> str:
    keys = {key: f"{part}.{key}" for part in POLICY_PARTS for key in POLICY_KIND.keys.keys_at((part,))}
    return f"no such key; nearest is {keys[nearest_name(word, keys, cutoff=0.0) or word]}"


def _nested(flat: Mapping[str, Any]) -> dict[str, object]:
    nested: dict[str, object] = {}
    for path, value in flat.items():
        *parts, last = path.split(".")
        table = nested
        for part in parts:
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ConfigError("set", [Problem("set", path, f"{part} is given a value as a whole, too")])
            table = inner
        table[last] = value
    return nested


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
