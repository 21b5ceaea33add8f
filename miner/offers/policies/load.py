"""Load a policy: merge its files and the overrides, and check the result.

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
from miner.offers.policies.schema import Policy
from miner.offers.policies.yaml_types import operator_key

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
