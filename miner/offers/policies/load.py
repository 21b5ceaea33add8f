"""From files to a checked policy: its layers laid over one another, and whatever is set on top of them.

Mappings are merged key by key; everything else is replaced, tables by size as a whole too since bands of two
files would overlap; and `null` takes back what an extended policy has set. What is set on top (`--set`, the
settings TASK_TYPES, MAX_HOURS and MAX_JOBS) counts as the newest layer.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path as File
from typing import Any, NamedTuple

from core.errors import ConfigError, Problem
from core.layers import files
from core.layers.files import Kind, digest_of
from core.layers.lines import Located, Path, dotted, parse
from core.layers.live import Live, folders_of
from miner.offers.policies.keys import KEYS, PARTS
from miner.offers.policies.schema import Policy
from miner.offers.policies.words import operators_word

POLICIES = Kind(word="policy", folder="policies", model=Policy, advice=KEYS.advice, null_takes_back=True)
Layer = files.Layer[Policy]
#: What belongs to one file and is not inherited.
_OWN = ("description", "extends", "hardware", "profile", "notes")
_WHOLE: tuple[Path, ...] = (("score", "size"), ("success", "size"))


class Written(NamedTuple):
    """One value, as somebody wrote it."""

    path: str
    value: Any
    #: `h100x4.yaml:12`, or `set`.
    origin: str


class LoadedPolicy:
    """A policy for use: the terms in force, and where each of them was written."""

    def __init__(self, name: str, layers: Sequence[Layer], on_top: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.layers = tuple(layers)
        self._data: dict[str, Any] = {}
        self._origins: dict[Path, str] = {}
        for layer in layers:
            self._lay(layer.located.data or {}, (), layer.located)
        self.on_top = dict(on_top or {})
        if self.on_top:
            top = Located("set")
            top.data = _nested(self.on_top)
            POLICIES.validated(top)
            self._lay(top.data, (), top)
        merged = Located(name)
        merged.data = self._data
        self.terms = POLICIES.validated(merged)
        self.digest = self._digest()

    @property
    def file(self) -> File | None:
        return self.layers[-1].file if self.layers else None

    @property
    def description(self) -> str:
        return self.layers[-1].content.description if self.layers else ""

    @property
    def hardware(self) -> str | None:
        return next((one for one in self._stated("hardware") if one), None)

    @property
    def profile(self) -> str | None:
        return next((one for one in self._stated("profile") if one), None)

    def _stated(self, key: str) -> Iterator[str | None]:
        """Newest first."""
        return (getattr(layer.content, key) for layer in reversed(self.layers))

    def written(self) -> dict[str, Written]:
        """All that was written, by dotted path."""
        found = (Written(dotted(path), _at(self._data, path), at) for path, at in self._origins.items())
        return {one.path: one for one in found}

    def changed(self, on_top: Mapping[str, Any]) -> LoadedPolicy:
        """The same with more set on top of it."""
        return LoadedPolicy(self.name, self.layers, {**self.on_top, **on_top})

    def _lay(self, data: Mapping[str, Any], path: Path, source: Located) -> None:
        for key, value in data.items():
            if not path and key in _OWN:
                continue
            inner: Path = (*path, operators_word(key))
            if inner in _WHOLE:
                self._take_back(inner)
            if isinstance(value, dict) and value:
                self._lay(value, inner, source)
            elif value is None:
                self._take_back(inner)
            else:
                self._put(inner, value)
                line = source.line((*path, key))
                self._origins[inner] = source.source if line is None else f"{source.source}:{line}"

    def _put(self, path: Path, value: Any) -> None:
        home = self._data
        for step in path[:-1]:
            home = home.setdefault(str(step), {})
        home[str(path[-1])] = value

    def _take_back(self, path: Path) -> None:
        home: Any = self._data
        for step in path[:-1]:
            home = home.get(step, {}) if isinstance(home, dict) else {}
        home.pop(path[-1], None)
        for known in [known for known in self._origins if known[: len(path)] == path]:
            del self._origins[known]

    def _digest(self) -> str:
        text = digest_of(self.layers)
        if not self.on_top:
            return text
        top = json.dumps(self.on_top, sort_keys=True, default=str)
        return hashlib.sha256(f"{text}\0{top}".encode()).hexdigest()


class LivePolicy(Live[LoadedPolicy]):
    """An edit works without a restart, a bad edit or a lost file keeps the last good policy and is told."""

    def __init__(
        self,
        name_or_path: str,
        directories: Sequence[File] = (),
        on_problem: Callable[[ConfigError], None] | None = None,
        on_top: Mapping[str, Any] | None = None,
        fallback: Callable[[ConfigError], LoadedPolicy] | None = None,
    ) -> None:
        super().__init__(
            lambda: load_policy(name_or_path, tuple(directories), on_top),
            on_problem,
            folders_of(name_or_path, directories),
            fallback,
        )


def parse_policy(text: str, source: str = "policy.yaml") -> Policy:
    """One file's text, without what it extends. `ConfigError` names every mistake with its line."""
    return POLICIES.parse(text, source)


def load_policy(
    name_or_path: str, directories: Sequence[File] = (), on_top: Mapping[str, Any] | None = None
) -> LoadedPolicy:
    """By path (anything with a slash or `.yaml`), or by name: in `directories` first, then as shipped.

    `on_top`: values by dotted path, `{"rules.hours.instruct": 12}`.
    """
    layers = POLICIES.layers(name_or_path, directories)
    return LoadedPolicy(layers[-1].name, layers, on_top)


def policy_files(directories: Sequence[File] = ()) -> dict[str, File]:
    """Every policy that can be called by name; an operator's hides the shipped one of the same name."""
    return POLICIES.files(directories)


def read_settings(settings: Sequence[str]) -> dict[str, Any]:
    """`hours.InstructTextTask=12` → `{"rules.hours.instruct": 12}`; the value is YAML."""
    found = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            rule = "write KEY=VALUE, like rules.hours.instruct=12"
            raise ConfigError("--set", [Problem("--set", text, rule)])
        located = parse(f"value: {value}", "--set")
        found[_full_path(key.strip())] = located.data["value"]
    return found


def _full_path(key: str) -> str:
    """With the part that its first word belongs to, where that was left out."""
    steps = [str(operators_word(step)) for step in key.split(".")]
    if steps[0] not in KEYS.keys_at(()):
        homes = [part for part in PARTS if steps[0] in KEYS.keys_at((part,))]
        if len(homes) != 1:
            rule = f"is it {' or '.join(homes)}? write the part too" if homes else _nearest(steps[0])
            raise ConfigError("--set", [Problem("--set", key, rule)])
        steps.insert(0, homes[0])
    return ".".join(steps)


def _nearest(word: str) -> str:
    keys = {key: f"{part}.{key}" for part in PARTS for key in KEYS.keys_at((part,))}
    close = difflib.get_close_matches(word, keys, n=1, cutoff=0.0)
    return f"no such key; nearest is {keys[close[0]]}"


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, value in flat.items():
        *parts, last = path.split(".")
        home = found
        for part in parts:
            home = home.setdefault(part, {})
        home[last] = value
    return found


def _at(data: Mapping[str, Any], path: Path) -> Any:
    value: Any = data
    for step in path:
        value = value[step]
    return value
