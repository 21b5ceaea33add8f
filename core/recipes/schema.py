"""What an engine's configuration may hold: the checked-in tables, and checking a value against them.

The tables are made from the engines themselves (`scripts/engine_tables/`), so that a configuration can be
checked where no engine is installed. They know keys and types; what goes wrong with keys that are right
one by one is in `core.recipes.rules`.
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from core.choices import Engine
from core.errors import Problem

#: One alternative of a type: "int", "any", {"list": [...]}, {"dict": [...]}, {"object": name} or
#: {"choices": [...]}. Which of them apply is a list of these.
Alternative = str | Mapping[str, Any]

_SHOWN = 80


@dataclass(frozen=True)
class Table:
    """One engine's keys: named objects of keys, and whatever else its generator found out."""

    engine: Engine
    version: str
    objects: Mapping[str, Mapping[str, Sequence[Alternative]]]
    facts: Mapping[str, Any]

    def with_keys(self, name: str, keys: Mapping[str, Sequence[Alternative]]) -> Table:
        """The same table, with the object `name` knowing `keys` as well, or differently."""
        merged = {**self.objects[name], **keys}
        return replace(self, objects={**self.objects, name: merged})

    @property
    def title(self) -> str:
        return f"{self.engine} {self.version.split()[0][:12]}"


@cache
def table(engine: Engine) -> Table:
    """The checked-in table of an engine."""
    file = resources.files("core.recipes") / "tables" / f"{engine.replace('-', '_')}.json"
    raw = json.loads(file.read_text("utf-8"))
    return Table(engine, raw["version"], raw.pop("objects"), raw)


def check(
    known: Table, root: str, config: Mapping[str, Any], hints: Mapping[str, str] | None = None
) -> list[Problem]:
    """Every key that `root` does not know and every value of a wrong type, at any depth.

    `hints` says of a well-known wrong key what to do instead, where the nearest key would mislead.
    """
    return _Checker(known, hints or {}).keys(root, config, "")


def nearest(key: str, known: Sequence[str]) -> str | None:
    """The known key a misspelled one most likely meant: among the similar ones, the one that begins alike."""
    similar = difflib.get_close_matches(key, known, n=5, cutoff=0.6)
    return max(similar, key=lambda one: _alike_at_first(one, key), default=None)


def _alike_at_first(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def shown(value: object) -> str:
    """A value for an error message: as JSON, not endless."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


@dataclass(frozen=True)
class _Checker:
    known: Table
    hints: Mapping[str, str]

    def keys(self, name: str, config: Mapping[str, Any], where: str) -> list[Problem]:
        fields = self.known.objects[name]
        problems: list[Problem] = []
        for key, value in config.items():
            path = f"{where}{key}"
            if key in fields:
                problems += self.value(value, fields[key], path)
            else:
                problems.append(Problem(path, shown(value), self._unknown(key, list(fields))))
        return problems

    def value(self, value: object, alternatives: Sequence[Alternative], path: str) -> list[Problem]:
        """No problem if any alternative fits, else those of the one that fits best."""
        best: list[Problem] | None = None
        for one in sorted(alternatives, key=lambda one: self._strangers(value, one)):
            problems = self._alternative(value, one, path)
            if problems is not None and (best is None or len(problems) < len(best)):
                best = problems
            if best == []:
                return best
        if best is not None:
            return best
        wanted = " or ".join(_words(one) for one in alternatives)
        return [Problem(path, shown(value), f"{self.known.title} takes {wanted} here")]

    def _strangers(self, value: object, one: Alternative) -> int:
        """How many keys of a mapping an object would not know: the likeliest is tried first."""
        if isinstance(one, str) or "object" not in one or not isinstance(value, Mapping):
            return 0
        return len(value.keys() - self.known.objects[one["object"]].keys())

    def _alternative(self, value: object, one: Alternative, path: str) -> list[Problem] | None:
        """The problems inside a value of the right kind, None when it is of another kind."""
        if isinstance(one, str):
            return [] if _is_scalar(value, one) else None
        if "choices" in one:
            return [] if value in one["choices"] and not isinstance(value, bool) else None
        if "list" in one and isinstance(value, list):
            items = (self.value(item, one["list"], f"{path}[{place}]") for place, item in enumerate(value))
            return [problem for problems in items for problem in problems]
        if "dict" in one and isinstance(value, Mapping):
            items = (self.value(item, one["dict"], f"{path}.{key}") for key, item in value.items())
            return [problem for problems in items for problem in problems]
        if "object" in one and isinstance(value, Mapping):
            return self.keys(one["object"], value, f"{path}.")
        return None

    def _unknown(self, key: str, fields: Sequence[str]) -> str:
        text = f"{self.known.title} has no such key and would drop it without a word"
        if key in self.hints:
            return f"{text}; {self.hints[key]}"
        close = nearest(key, fields)
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


def _words(one: Alternative) -> str:
    if isinstance(one, str):
        words = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}
        return words.get(one, {"null": "nothing", "any": "anything"}.get(one, one))
    if "choices" in one:
        return "one of " + ", ".join(map(str, one["choices"]))
    if "list" in one:
        return "a list of " + " or ".join(_words(item) for item in one["list"])
    return "a mapping"
