"""Values of a file and all that it extends, as one YAML text with the origin of each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from miner.api.config_files import EffectiveValue

#: A word that YAML reads as the text it is, or as the number or measure that it shows.
_PLAIN = re.compile(r"[A-Za-z0-9._/+-][A-Za-z0-9._/+ -]*")
#: Where comments begin, unless a line is longer.
_COLUMN = 44


def effective_yaml(values: Sequence[EffectiveValue]) -> str:
    """Nested as in a file, each value with its origin as a comment."""
    return "".join(f"{line}\n" for line in _lines(values))


def _lines(values: Sequence[EffectiveValue]) -> Iterator[str]:
    above: list[str] = []
    for entry in values:
        *parents, key = _steps(entry.path)
        shared = next(
            (at for at, pair in enumerate(zip(above, parents, strict=False)) if pair[0] != pair[1]),
            min(len(above), len(parents)),
        )
        for depth in range(shared, len(parents)):
            yield f"{'  ' * depth}{_key(parents[depth])}:"
        above = parents
        line = f"{'  ' * len(parents)}{_key(key)}: {_scalar(entry.value)}"
        yield f"{line:<{_COLUMN}}  # {entry.origin}"


def _steps(path: str) -> list[str]:
    """Engine keys may have dots of their own: they are below two steps."""
    return path.split(".", 2 if path.startswith("engine_config.") else -1)


def _key(step: str) -> str:
    return step if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", step) else json.dumps(step, ensure_ascii=False)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and not value.endswith(" "):
        return value
    return json.dumps(value, ensure_ascii=False)
