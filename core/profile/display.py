"""Values as one would write them in a profile."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_args

from pydantic import BaseModel, BeforeValidator, JsonValue
from pydantic.fields import FieldInfo

from core.profile.targets import ContainerTargets, Limits, Targets
from core.units import parse_bytes, parse_params, parse_seconds, show_bytes, show_params, show_seconds

_PARTS: dict[str, type[BaseModel]] = {"targets": Targets, "limits": Limits, "container": ContainerTargets}
_UNITS: tuple[tuple[Callable[[Any], float], Callable[[float], str]], ...] = (
    (parse_bytes, show_bytes),
    (parse_seconds, show_seconds),
    (parse_params, show_params),
)


def in_words(path: str, value: JsonValue) -> str:
    """As one would write it in a profile: sizes, durations and ranges in words."""
    if value is None:
        return "–"
    part, _, name = path.partition(".")
    model = _PARTS.get(part)
    if model is not None and isinstance(value, int | float) and not isinstance(value, bool):
        return _measured(model.model_fields[name], value)
    if isinstance(value, dict) and value.keys() == {"low", "high"}:
        low, high = value["low"], value["high"]
        return str(low) if low == high else f"{low}-{high}"
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return {"True": "yes", "False": "no"}.get(str(value), str(value))


def _measured(field: FieldInfo, value: float) -> str:
    rules = [*field.metadata, *(rule for kind in get_args(field.annotation) for rule in _metadata(kind))]
    for rule in rules:
        for parse, show in _UNITS:
            if isinstance(rule, BeforeValidator) and rule.func is parse:
                return show(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _metadata(kind: Any) -> tuple[Any, ...]:
    return getattr(kind, "__metadata__", ())
