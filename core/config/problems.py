"""Describe what is wrong with a file: the rule that a value breaks, and what a stray key may have meant."""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from core.config.yaml_lines import KeyPath, dotted_path
from core.domain.errors import nearest_name

#: pydantic's error types in words; `{…}` is filled from its context.
_RULE_TEXTS = {
    "missing": "is missing",
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


def rule_of_error(item: ErrorDetails) -> str:
    context = item.get("ctx", {})
    if item["type"] == "enum":
        allowed = re.findall(r"'([^']+)'", str(context.get("expected", "")))
        nearest = nearest_name(str(item["input"]), allowed)
        hint = f"; nearest is {nearest}" if nearest else ""
        return f"one of {', '.join(allowed)} is needed{hint}"
    text = _RULE_TEXTS.get(item["type"])
    if text is None:
        return item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return text.format(**context) + _lost_sign(item)


def _lost_sign(item: ErrorDetails) -> str:
    """`8e4` where 8e-4 was meant."""
    value, most = item["input"], item.get("ctx", {}).get("le")
    if not isinstance(value, float) or most is None or value < 10:
        return ""
    digits, _, power = f"{value:e}".partition("e")
    meant = float(f"{digits}e-{int(power)}")
    return f"; did you mean {float(digits):g}e-{int(power)}?" if meant <= most else ""


def shown_value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"


class SchemaKeys:
    """The keys of a kind of file and of its earlier versions, what others call them, and the parts that a
    stray one may belong to."""

    def __init__(
        self,
        root: type[BaseModel],
        synonyms: Mapping[str, str],
        parts: Sequence[KeyPath],
        removed: Collection[str] = (),
    ) -> None:
        self._root, self._removed = root, removed
        self._synonyms = synonyms
        self._parts = tuple(parts)

    def model_at(self, path: KeyPath) -> type[BaseModel] | None:
        """The part of the schema that a path leads to; None where keys are free or values are plain."""
        annotation: Any = self._root
        for step in path:
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                field = _fields_by_key(annotation).get(str(step))
                annotation = None if field is None else _inner_type(field.annotation)
            elif get_origin(annotation) in (dict, list):
                annotation = _inner_type(get_args(annotation)[-1])
            else:
                return None
        return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None

    def keys_at(self, path: KeyPath) -> list[str]:
        model = self.model_at(path)
        return list(_fields_by_key(model)) if model is not None else []

    def parts_with_key(self, key: str) -> list[str]:
        return [dotted_path(part) or "the top level" for part in self._parts if key in self.keys_at(part)]

    def advice(self, path: KeyPath) -> str:
        """Describe a key that does not exist: `no such key; nearest is lora_r`, or the part it belongs to."""
        *parent, key = path
        valid, name = self.keys_at(tuple(parent)), str(key)
        if name in self._removed:
            return (
                "this key was removed: no shipped profile changed its default, and measurements found no gain"
            )
        meant = self._synonyms.get(name, name)
        if meant in valid:
            return f"no such key; here it is called {meant}"
        if parts := self.parts_with_key(meant):
            called = "" if meant == name else f"; here it is called {meant}, and"
            return f"no such key{called or ';'} it belongs under {' or '.join(parts)}"
        nearest = nearest_name(name, valid, cutoff=0.0)
        return f"no such key; nearest is {nearest}" if nearest else "no such key"


def _fields_by_key(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _inner_type(annotation: Any) -> Any:
    """The type without Optional and Annotated around it."""
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return _inner_type(get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        options = [option for option in get_args(annotation) if option is not type(None)]
        return _inner_type(options[0]) if options else None
    return annotation
