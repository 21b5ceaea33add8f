"""Keys that an engine's configuration may contain: the checked-in tables, and checks for every engine.

The tables are generated from the engines themselves (`scripts/engine_tables/`), so that a configuration can
be checked where no engine is installed. They know keys and types; combinations of valid keys that go wrong
are in `core.recipes.<engine>.rules`.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from core.domain.choices import Engine
from core.domain.errors import Problem

#: One alternative of a type: "int", "any", {"list": [...]}, {"dict": [...]}, {"object": name} or
#: {"choices": [...]}. A key's type is a list of these.
TypeAlternative = str | Mapping[str, Any]

_SHOWN = 80


@dataclass(frozen=True)
class EngineTable:
    """One engine's keys, as named objects, and other facts that its generator collected."""

    engine: Engine
    version: str
    objects: Mapping[str, Mapping[str, Sequence[TypeAlternative]]]
    facts: Mapping[str, Any]

    def with_keys(self, name: str, keys: Mapping[str, Sequence[TypeAlternative]]) -> EngineTable:
        """A copy of the table in which the object `name` has `keys` too, or instead of its own."""
        merged = {**self.objects[name], **keys}
        return replace(self, objects={**self.objects, name: merged})

    @property
    def title(self) -> str:
        return f"{self.engine} {self.version.split()[0][:12]}"


@cache
def engine_table(engine: Engine) -> EngineTable:
    """The checked-in table of an engine."""
    file = resources.files("core.recipes") / engine.replace("-", "_") / "table.json"
    raw = json.loads(file.read_text("utf-8"))
    return EngineTable(engine, raw["version"], raw.pop("objects"), raw)


def check_keys(
    known: EngineTable, root: str, config: Mapping[str, Any], hints: Mapping[str, str] | None = None
) -> list[Problem]:
    """Find every key that `root` does not know and every value of a wrong type, at any depth.

    `hints` has the advice for well-known wrong keys, where the nearest key would mislead.
    """
    return _TableChecker(known, hints or {}).keys(root, config, "")


def nearest_key(key: str, known: Sequence[str]) -> str | None:
    """The known key that a misspelled one most likely means: of the similar ones, that with the longest
    common prefix."""

    def common_prefix(other: str) -> int:
        pairs = zip(other, key, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    return max(difflib.get_close_matches(key, known, n=5, cutoff=0.6), key=common_prefix, default=None)


def shown_value(value: object) -> str:
    """A value for an error message: as JSON, shortened."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


@dataclass(frozen=True)
class _TableChecker:
    known: EngineTable
    hints: Mapping[str, str]

    def keys(self, name: str, config: Mapping[str, Any], where: str) -> list[Problem]:
        fields = self.known.objects[name]
        problems: list[Problem] = []
        for key, value in config.items():
            path = f"{where}{key}"
            if key in fields:
                problems += self.value(value, fields[key], path)
            else:
                problems.append(Problem(path, shown_value(value), self._unknown(key, list(fields))))
        return problems

    def value(self, value: object, alternatives: Sequence[TypeAlternative], path: str) -> list[Problem]:
        """No problem if any alternative fits, else those of the one that fits best."""
        best: list[Problem] | None = None
        for alternative in sorted(alternatives, key=lambda each: self._unknown_count(value, each)):
            problems = self._alternative(value, alternative, path)
            if problems is not None and (best is None or len(problems) < len(best)):
                best = problems
            if best == []:
                return best
        if best is not None:
            return best
        wanted = " or ".join(_describe(alternative) for alternative in alternatives)
        return [Problem(path, shown_value(value), f"{self.known.title} takes {wanted} here")]

    def _unknown_count(self, value: object, kind: TypeAlternative) -> int:
        """Count the keys of a mapping that an object does not know: the best match is tried first."""
        if isinstance(kind, str) or "object" not in kind or not isinstance(value, Mapping):
            return 0
        return len(value.keys() - self.known.objects[kind["object"]].keys())

    def _alternative(self, value: object, kind: TypeAlternative, path: str) -> list[Problem] | None:
        """The problems inside a value of this kind; None when it is of another kind."""
        if isinstance(kind, str):
            return [] if _is_scalar(value, kind) else None
        if "choices" in kind:
            return [] if value in kind["choices"] and not isinstance(value, bool) else None
        if "list" in kind and isinstance(value, list):
            items = (self.value(item, kind["list"], f"{path}[{index}]") for index, item in enumerate(value))
            return [problem for problems in items for problem in problems]
        if "dict" in kind and isinstance(value, Mapping):
            items = (self.value(item, kind["dict"], f"{path}.{key}") for key, item in value.items())
            return [problem for problems in items for problem in problems]
        if "object" in kind and isinstance(value, Mapping):
            return self.keys(kind["object"], value, f"{path}.")
        return None

    def _unknown(self, key: str, fields: Sequence[str]) -> str:
        text = f"{self.known.title} has no such key and would silently drop it"
        if key in self.hints:
            return f"{text}; {self.hints[key]}"
        close = nearest_key(key, fields)
        return f"{text}; the nearest is {close}" if close else text


def _is_scalar(value: object, kind: str) -> bool:
    if kind == "any":
        return True
    if kind == "null":
        return value is None
    if isinstance(value, bool):
        return kind == "bool"
    if kind == "float":
        return isinstance(value, int | float)
    return isinstance(value, {"int": int, "str": str, "bool": bool}[kind])


_SCALARS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "null": "nothing",
    "any": "anything",
}


def _describe(kind: TypeAlternative) -> str:
    if isinstance(kind, str):
        return _SCALARS[kind]
    if "choices" in kind:
        return "one of " + ", ".join(map(str, kind["choices"]))
    if "list" in kind:
        return "a list of " + " or ".join(_describe(item) for item in kind["list"])
    return "a mapping"


ConfigMapping = Mapping[str, Any]

_SECRET_KEY = re.compile(r"(^|_)(api_key|token|password|secret)$")
_SECRET_VALUE = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|wandb_v1_[A-Za-z0-9]{20,})\b")


def find_secrets(config: ConfigMapping, where: str = "") -> Iterator[Problem]:
    """Find secrets: a rendered file is logged, stored with the attempt and uploaded by validators."""
    for key, value in config.items():
        path = f"{where}{key}"
        if isinstance(value, Mapping):
            yield from find_secrets(value, f"{path}.")
        for text in [value] if isinstance(value, str) else value if isinstance(value, list) else []:
            if isinstance(text, Mapping):
                yield from find_secrets(text, f"{path}.")
            elif isinstance(text, str) and text and _looks_secret(path, text):
                yield Problem(path, "", "a secret must not be in a file; set it in the environment")


def _looks_secret(path: str, text: str) -> bool:
    """Not `special_tokens.pad_token` and the like, which belong to the tokenizer's vocabulary."""
    section, _, key = path.rpartition(".")
    by_name = _SECRET_KEY.search(key) and section != "special_tokens"
    return bool(by_name or _SECRET_VALUE.search(text))


def invalid(config: ConfigMapping, key: str, rule: str) -> Problem:
    """A problem with the value of a key."""
    return Problem(key, shown_value(config.get(key)), rule)


def missing_keys(config: ConfigMapping, keys: Iterable[str], why: str) -> Iterator[Problem]:
    for key in keys:
        if config.get(key) in (None, ""):
            yield Problem(key, "", f"is missing: {why}")


def check_choice(config: ConfigMapping, key: str, known: Iterable[str]) -> Iterator[Problem]:
    """A name that the engine's schema accepts as any text and looks up only when the model is loaded."""
    value, names = config.get(key), list(known)
    if value is not None and not (isinstance(value, str) and value in names):
        yield unknown_choice(key, value, names)


def unknown_choice(key: str, value: object, names: Sequence[str], also: str = "") -> Problem:
    close = nearest_key(str(value).lower(), names)
    rule = f"is not one of {', '.join(names)}{also}"
    return Problem(key, shown_value(value), f"{rule}; the nearest is {close}" if close else rule)


def check_range(
    config: ConfigMapping,
    key: str,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
) -> Iterator[Problem]:
    """Numbers whose range no engine checks. Wrong types are left to the schema."""
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if above is not None and not value > above:
        yield Problem(key, shown_value(value), f"must be over {above:g}")
    if least is not None and not value >= least:
        yield Problem(key, shown_value(value), f"must be at least {least:g}")
    if below is not None and not value < below:
        yield Problem(key, shown_value(value), f"must be under {below:g}")
