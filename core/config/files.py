"""Layered YAML files: find, inherit, validate and merge them.

The shipped files are in `configs/`: beside the packages in a checkout, inside `core` in a wheel. How the
layers of a file are merged is the business of its kind, with `LayeredValues`: `null` is a value in a profile
and takes back an inherited one in a policy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from core.config.problems import SchemaKeys, rule_of_error, shown_value
from core.config.yaml_lines import KeyPath, LocatedYaml, ValueOrigin, parse_yaml
from core.domain.errors import ConfigError, GodMinerError, Problem
from core.domain.records import Record
from core.system.files import read_regular_file


class MissingConfigs(GodMinerError):
    """The installation lacks its own files."""

    code = "missing_configs"


@lru_cache(maxsize=1)
def config_dir() -> Path:
    here = Path(__file__).resolve().parents[1]
    for candidate in (here / "configs", here.parent / "configs"):
        if (candidate / "profiles").is_dir():
            return candidate
    raise MissingConfigs(
        f"no configs/profiles beside {here}: the installation is incomplete, install the package again"
    )


MAX_LAYERS = 16


class ConfigFileModel(Record):
    """The keys of every kind of file."""

    description: str = ""
    extends: str | None = None


T = TypeVar("T", bound=ConfigFileModel)


class ConfigLayer(Generic[T]):
    """One file, on its own."""

    def __init__(self, kind: ConfigKind[T], file: Path, text: str) -> None:
        self.file = file
        self.text = text
        self.located = parse_yaml(text, file.name)
        self.content = kind.validated(self.located)

    @property
    def name(self) -> str:
        return self.file.stem


class LoadedConfig(Generic[T]):
    """A file and what it extends: the layers, oldest ancestor first."""

    def __init__(self, name: str, layers: Sequence[ConfigLayer[T]]) -> None:
        self.name = name
        self.layers = tuple(layers)
        #: Changes with the text of any layer.
        self.digest = hashlib.sha256("\0".join(layer.text for layer in layers).encode()).hexdigest()

    @property
    def file(self) -> Path:
        return self.layers[-1].file

    @property
    def content(self) -> T:
        """Return what the file itself says, without what it extends."""
        return self.layers[-1].content

    @property
    def description(self) -> str:
        return self.content.description

    def newest(self, key: str) -> str | None:
        """The value of a top-level key in the newest layer that sets it; None where none does."""
        values: Iterator[str | None] = (getattr(layer.content, key) for layer in reversed(self.layers))
        return next((value for value in values if value), None)


class LayeredValues:
    """Values by path, each with where it was written. What is set later wins."""

    def __init__(self) -> None:
        self.values: dict[KeyPath, Any] = {}
        self.origins: dict[KeyPath, ValueOrigin] = {}

    def set(self, path: KeyPath, value: Any, origin: ValueOrigin) -> None:
        for length in range(1, len(path)):  # an empty mapping that is filled now
            self.values.pop(path[:length], None)
            self.origins.pop(path[:length], None)
        self.values[path] = value
        self.origins[path] = origin

    def unset(self, path: KeyPath) -> None:
        """Take back the value at `path`, and all below it."""
        for known in [known for known in self.values if known[: len(path)] == path]:
            del self.values[known], self.origins[known]

    def below(self, *path: str) -> dict[str, Any]:
        """The values of one mapping, by key."""
        depth = len(path)
        return {
            str(known[depth]): value
            for known, value in self.values.items()
            if len(known) == depth + 1 and known[:depth] == path
        }

    def nested(self) -> dict[str, Any]:
        """All values as one tree."""
        tree: dict[str, Any] = {}
        for path, value in self.values.items():
            parent = tree
            for step in path[:-1]:
                parent = parent.setdefault(str(step), {})
            parent[str(path[-1])] = value
        return tree


class ConfigKind(Generic[T]):
    """A kind of file: profiles, policies."""

    def __init__(
        self,
        noun: str,
        directory: str,
        model: type[T],
        keys: SchemaKeys,
        *,
        null_unsets: bool = False,
        may_be_empty: bool = False,
    ) -> None:
        """`directory`: where under `configs/` the shipped ones lie.
        `null_unsets`: `null` may stand for any value, and whoever merges the layers takes the key out;
        otherwise it is a value like others, and wrong where the schema has none."""
        self.noun = noun
        self.directory = directory
        self.model = model
        self.keys = keys
        self.null_unsets = null_unsets
        self.may_be_empty = may_be_empty

    def parse(self, text: str, source: str) -> T:
        """Parse one file, without what it extends. `ConfigError` has all mistakes with their lines."""
        return self.validated(parse_yaml(text, source))

    def layers(self, name_or_path: str, directories: Sequence[Path] = ()) -> list[ConfigLayer[T]]:
        """Load a file and what it extends, oldest ancestor first. By path (with a slash or `.yaml`), or
        by name: in `directories` first, then as shipped."""
        file = self._find(name_or_path, directories, None)
        return self._with_parents(ConfigLayer(self, file, read_text(file)), directories, [])

    def layers_of_text(self, text: str, file: Path, directories: Sequence[Path] = ()) -> list[ConfigLayer[T]]:
        """Load `file` as if it held this text, and what it extends, which must be in a known folder."""
        layer = ConfigLayer(self, file, text)
        self._check_folder(layer, directories)
        return self._with_parents(layer, directories, [])

    def load(self, name_or_path: str, directories: Sequence[Path] = ()) -> LoadedConfig[T]:
        layers = self.layers(name_or_path, directories)
        return LoadedConfig(layers[-1].name, layers)

    def files(self, directories: Sequence[Path] = ()) -> dict[str, Path]:
        """Every file that has a name; an operator's hides the shipped one of the same name."""
        by_name: dict[str, Path] = {}
        for directory in (*directories, config_dir() / self.directory):
            for file in sorted(directory.glob("*.yaml")) if directory.is_dir() else ():
                if file.is_file():  # no link that leads nowhere, and nothing that would never end
                    by_name.setdefault(file.stem, file)
        return by_name

    def validated(self, located: LocatedYaml) -> T:
        data = located.data
        if data is None and self.may_be_empty:
            data = {}
        if data is None:
            rule = f"is empty; write what the {self.noun} says, or remove the file"
            raise ConfigError(located.source, [Problem(located.source, "", rule)])
        if not isinstance(data, dict):
            shown, rule = type(data).__name__, f"a {self.noun} is a mapping of keys to values"
            raise ConfigError(located.source, [Problem(located.source, shown, rule)])
        try:
            return self._model(data)
        except ValidationError as error:
            nulls = _null_paths(error, data) if self.null_unsets else []
            if not nulls:
                raise ConfigError(located.source, self._problems(error, located)) from None
        try:
            return self._model(_without_paths(data, nulls))
        except ValidationError as error:
            raise ConfigError(located.source, self._problems(error, located)) from None

    def _model(self, data: Any) -> T:
        """Through JSON: its strict mode takes "dpo" for an enum but not true for 1 or "64" for 64."""
        return self.model.model_validate_json(json.dumps(data), strict=True)

    def _find(self, name_or_path: str, directories: Sequence[Path], child: ConfigLayer[T] | None) -> Path:
        """`extends: h100x4` inside an operator's own h100x4.yaml means the shipped one, not itself."""
        if _is_path(name_or_path):
            path = Path(name_or_path)
            near = path if child is None or path.is_absolute() else child.file.parent / path
            if near.is_file():
                return near
        else:
            near_by = [] if child is None else [child.file.parent]
            for directory in (*near_by, *directories, config_dir() / self.directory):
                file = directory / f"{name_or_path}.yaml"
                itself = child is not None and file.resolve() == child.file.resolve()
                if file.is_file() and not itself:
                    return file
        raise self._not_found(name_or_path, directories, child)

    def _check_folder(self, layer: ConfigLayer[T], directories: Sequence[Path]) -> None:
        """Refuse a path out of the known folders: a check would show other files to people who may only have
        a text checked."""
        name = layer.content.extends or ""
        if not _is_path(name):
            return
        known = (layer.file.parent, *directories, config_dir() / self.directory)
        file = (layer.file.parent / name).resolve()
        if not any(file.is_relative_to(directory.resolve()) for directory in known):
            folders = ", ".join(map(str, dict.fromkeys(known)))
            rule = f"must name a file in {folders}; copy it there"
            raise ConfigError(layer.file.name, [Problem(layer.located.location(("extends",)), name, rule)])

    def _not_found(self, name: str, directories: Sequence[Path], child: ConfigLayer[T] | None) -> ConfigError:
        known = ", ".join(self.files(directories)) or "none"
        where = self.noun if child is None else child.located.location(("extends",))
        source = name if child is None else child.file.name
        return ConfigError(source, [Problem(where, name, f"no such {self.noun}; known by name: {known}")])

    def _with_parents(
        self, layer: ConfigLayer[T], directories: Sequence[Path], children: list[Path]
    ) -> list[ConfigLayer[T]]:
        chain = [*children, layer.file.resolve()]
        if layer.content.extends is None:
            return [layer]
        parent = self._find(layer.content.extends, directories, layer)
        if parent.resolve() in chain or len(chain) >= MAX_LAYERS:
            names = " → ".join([*(step.name for step in chain), parent.name])
            problem = Problem(
                layer.located.location(("extends",)), parent.stem, f"extends goes round in a circle: {names}"
            )
            raise ConfigError(layer.file.name, [problem])
        return [
            *self._with_parents(ConfigLayer(self, parent, read_text(parent)), directories, chain),
            layer,
        ]

    def _problems(self, error: ValidationError, located: LocatedYaml) -> list[Problem]:
        problems: dict[tuple[KeyPath, str], Problem] = {}
        for item in error.errors(include_url=False):
            path = _real_path(item["loc"], located.data)
            unknown = item["type"] == "extra_forbidden"
            rule = self.keys.advice(path) if unknown else rule_of_error(item)
            value = "" if unknown else shown_value(item["input"])
            problems[(path, rule)] = Problem(located.location(path), value, rule)
        order = sorted(problems, key=lambda key: located.line(key[0]) or 0)
        return [problems[key] for key in order]


def _is_path(name_or_path: str) -> bool:
    return "/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))


def read_text(file: Path) -> str:
    """Read a configuration file; raise `ConfigError` if that fails."""
    try:
        return read_regular_file(file).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(file.name, [Problem(str(file), "", f"cannot be read: {error}")]) from None


def _real_path(loc: tuple[int | str, ...], data: Any) -> KeyPath:
    """pydantic adds steps for union branches and dictionary keys; keep those that the file has."""
    path: list[str | int] = []
    for step in loc:
        inner = _child_of(data, step)
        if inner is not _ABSENT:
            data = inner
            path.append(step)
    return tuple(path)


def _null_paths(error: ValidationError, data: Any) -> list[KeyPath]:
    """Known keys that are set to null."""
    paths = []
    for item in error.errors(include_url=False):
        path = _real_path(item["loc"], data)
        if item["input"] is None and item["type"] != "extra_forbidden" and path and isinstance(path[-1], str):
            paths.append(path)
    return paths


def _without_paths(data: Any, paths: Sequence[KeyPath]) -> Any:
    tree = json.loads(json.dumps(data))
    for *steps, last in paths:
        parent = tree
        for step in steps:
            parent = parent[step]
        parent.pop(last, None)
    return tree


def _child_of(data: Any, step: int | str) -> Any:
    if isinstance(data, dict):
        return data.get(step, data.get(str(step), _ABSENT))
    if isinstance(data, list) and isinstance(step, int) and step < len(data):
        return data[step]
    return _ABSENT


_ABSENT = object()
