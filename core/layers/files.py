"""From files to checked content: reading, inheritance, and every mistake told with its line."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from core.configs import config_dir
from core.errors import ConfigError, Problem
from core.facts import Record
from core.layers.lines import Located, Path, parse

MAX_LAYERS = 16


class FileModel(Record):
    """What every such file has."""

    description: str = ""
    extends: str | None = None


T = TypeVar("T", bound=FileModel)


class Layer(Generic[T]):
    """One file of an ancestry."""

    def __init__(self, kind: Kind[T], file: File, text: str) -> None:
        self.file = file
        self.text = text
        self.located = parse(text, file.name)
        self.content = kind.validated(self.located)

    @property
    def name(self) -> str:
        return self.file.stem


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A kind of file: profiles, policies."""

    #: What one is called: "profile".
    word: str
    #: Where under `configs/` the shipped ones lie.
    folder: str
    model: type[T]
    #: For a key that does not exist, what may have been meant.
    advice: Callable[[Path], str]
    #: `null` may stand for any value: whoever merges the layers takes the key out. Otherwise it is a value
    #: like others, and wrong where the schema has none.
    null_takes_back: bool = False
    may_be_empty: bool = False

    def parse(self, text: str, source: str) -> T:
        """One file's text, without what it extends. `ConfigError` names every mistake with its line."""
        return self.validated(parse(text, source))

    def layers(self, name_or_path: str, directories: Sequence[File] = ()) -> list[Layer[T]]:
        """By path (anything with a slash or `.yaml`), or by name: in `directories` first, then as shipped.
        Oldest ancestor first."""
        return self._ancestry(self._find(name_or_path, directories, None), directories, [])

    def files(self, directories: Sequence[File] = ()) -> dict[str, File]:
        """Every file that can be called by name; an operator's hides the shipped one of the same name."""
        found: dict[str, File] = {}
        for directory in (*directories, config_dir() / self.folder):
            for file in sorted(directory.glob("*.yaml")) if directory.is_dir() else ():
                found.setdefault(file.stem, file)
        return found

    def validated(self, located: Located) -> T:
        data = located.data
        if data is None and self.may_be_empty:
            data = {}
        if data is None:
            rule = f"is empty; write what the {self.word} says, or remove the file"
            raise ConfigError(located.source, [Problem(located.source, "", rule)])
        if not isinstance(data, dict):
            shown, rule = type(data).__name__, f"a {self.word} is a mapping of keys to values"
            raise ConfigError(located.source, [Problem(located.source, shown, rule)])
        try:
            return self._model(data)
        except ValidationError as error:
            nulls = _nulls(error, data) if self.null_takes_back else []
            if not nulls:
                raise ConfigError(located.source, self._problems(error, located)) from None
        try:
            return self._model(_without(data, nulls))
        except ValidationError as error:
            raise ConfigError(located.source, self._problems(error, located)) from None

    def _model(self, data: Any) -> T:
        """Through JSON: its strict mode takes "dpo" for an enum but not true for 1 or "64" for 64."""
        return self.model.model_validate_json(json.dumps(data), strict=True)

    def _find(self, name_or_path: str, directories: Sequence[File], asking: Layer[T] | None) -> File:
        """`extends: h100x4` inside an operator's own h100x4.yaml means the shipped one, not itself."""
        if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
            path = File(name_or_path)
            near = path if asking is None or path.is_absolute() else asking.file.parent / path
            if near.is_file():
                return near
        else:
            near_by = [] if asking is None else [asking.file.parent]
            for directory in (*near_by, *directories, config_dir() / self.folder):
                file = directory / f"{name_or_path}.yaml"
                itself = asking is not None and file.resolve() == asking.file.resolve()
                if file.is_file() and not itself:
                    return file
        raise self._not_found(name_or_path, directories, asking)

    def _not_found(self, name: str, directories: Sequence[File], asking: Layer[T] | None) -> ConfigError:
        known = ", ".join(self.files(directories)) or "none"
        where = self.word if asking is None else asking.located.where(("extends",))
        source = name if asking is None else asking.file.name
        return ConfigError(source, [Problem(where, name, f"no such {self.word}; known by name: {known}")])

    def _ancestry(self, file: File, directories: Sequence[File], seen: list[File]) -> list[Layer[T]]:
        layer = Layer(self, file, _read(file))
        chain = [*seen, file.resolve()]
        if layer.content.extends is None:
            return [layer]
        parent = self._find(layer.content.extends, directories, layer)
        if parent.resolve() in chain or len(chain) >= MAX_LAYERS:
            names = " → ".join([*(step.name for step in chain), parent.name])
            where = layer.located.where(("extends",))
            raise ConfigError(
                file.name, [Problem(where, parent.stem, f"extends goes round in a circle: {names}")]
            )
        return [*self._ancestry(parent, directories, chain), layer]

    def _problems(self, error: ValidationError, located: Located) -> list[Problem]:
        found: dict[tuple[Path, str], Problem] = {}
        for item in error.errors(include_url=False):
            path = _real_path(item["loc"], located.data)
            unknown = item["type"] == "extra_forbidden"
            rule = self.advice(path) if unknown else _rule(item)
            value = "" if unknown else _shown(item["input"])
            found[(path, rule)] = Problem(located.where(path), value, rule)
        order = sorted(found, key=lambda key: located.line(key[0]) or 0)
        return [found[key] for key in order]


def digest_of(layers: Sequence[Layer[T]]) -> str:
    """The same for the same text of all files."""
    return hashlib.sha256("\0".join(layer.text for layer in layers).encode()).hexdigest()


def _read(file: File) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(file.name, [Problem(str(file), "", f"cannot be read: {error}")]) from None


def _rule(item: ErrorDetails) -> str:
    if item["type"] != "enum":
        return _in_words(item)
    allowed = re.findall(r"'([^']+)'", str(item.get("ctx", {}).get("expected", "")))
    close = difflib.get_close_matches(str(item["input"]), allowed, n=1)
    hint = f"; nearest is {close[0]}" if close else ""
    return f"one of {', '.join(allowed)} is needed{hint}"


#: pydantic's kinds of mistake in words; `{…}` is filled from its context.
_WORDS = {
    "missing": "is needed and not there",
    "bool_type": "yes or no is needed",
    "int_type": "a whole number is needed, without quotes",
    "int_from_float": "a whole number is needed",
    "float_type": "a number is needed, without quotes",
    "string_type": "text is needed; put it in quotes",
    "list_type": "a list is needed, like [a, b]",
    "dict_type": "keys with values are needed below it, indented",
    "model_type": "keys with values are needed below it, indented",
    "model_attributes_type": "keys with values are needed below it, indented",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "string_too_long": "at most {max_length} characters are read",
    "string_too_short": "at least {min_length} characters are needed",
    "too_short": "at least {min_length} of them are needed",
    "too_long": "at most {max_length} of them are read",
    "finite_number": "a number is needed, not infinity",
}


def _in_words(item: ErrorDetails) -> str:
    words = _WORDS.get(item["type"])
    if words is None:
        return item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return words.format(**item.get("ctx", {})) + _lost_sign(item)


def _lost_sign(item: ErrorDetails) -> str:
    """`8e4` where 8e-4 was meant."""
    value, most = item["input"], item.get("ctx", {}).get("le")
    if not isinstance(value, float) or most is None or value < 10:
        return ""
    digits, _, power = f"{value:e}".partition("e")
    meant = float(f"{digits}e-{int(power)}")
    return f"; did you mean {float(digits):g}e-{int(power)}?" if meant <= most else ""


def _real_path(loc: tuple[int | str, ...], data: Any) -> Path:
    """pydantic adds steps for union branches and dictionary keys; keep those that the file really has."""
    path: list[str | int] = []
    for step in loc:
        inner = _item(data, step)
        if inner is not _ABSENT:
            data = inner
            path.append(step)
    return tuple(path)


def _nulls(error: ValidationError, data: Any) -> list[Path]:
    """Known keys that are set to null."""
    found = []
    for item in error.errors(include_url=False):
        path = _real_path(item["loc"], data)
        if item["input"] is None and item["type"] != "extra_forbidden" and path and isinstance(path[-1], str):
            found.append(path)
    return found


def _without(data: Any, paths: Sequence[Path]) -> Any:
    copy = json.loads(json.dumps(data))
    for *parents, last in paths:
        home = copy
        for step in parents:
            home = home[step]
        home.pop(last, None)
    return copy


def _item(data: Any, step: int | str) -> Any:
    if isinstance(data, dict):
        return data.get(step, data.get(str(step), _ABSENT))
    if isinstance(data, list) and isinstance(step, int) and step < len(data):
        return data[step]
    return _ABSENT


_ABSENT = object()


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"
