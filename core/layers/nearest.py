"""For a key that does not exist: which one was meant, and where it belongs."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from core.layers.lines import Path, dotted


class Keys:
    """The keys of a kind of file, what others call them, and the parts where a stray one may be at home."""

    def __init__(self, root: type[BaseModel], synonyms: Mapping[str, str], homes: Sequence[Path]) -> None:
        self._root = root
        self._synonyms = synonyms
        self._homes = tuple(homes)

    def model_at(self, path: Path) -> type[BaseModel] | None:
        """The part of the schema that a path leads to; None where keys are free or values are plain."""
        kind: Any = self._root
        for step in path:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                field = _fields(kind).get(str(step))
                kind = None if field is None else _inner(field.annotation)
            elif get_origin(kind) in (dict, list):
                kind = _inner(get_args(kind)[-1])
            else:
                return None
        return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None

    def keys_at(self, path: Path) -> list[str]:
        model = self.model_at(path)
        return list(_fields(model)) if model is not None else []

    def homes_of(self, key: str) -> list[str]:
        """The parts of such a file that have this key."""
        return [dotted(part) or "the top level" for part in self._homes if key in self.keys_at(part)]

    def advice(self, path: Path) -> str:
        """`no such key here; nearest is lora_r`, or where the key is at home."""
        *parent, key = path
        valid, name = self.keys_at(tuple(parent)), str(key)
        meant = self._synonyms.get(name, name)
        if meant in valid:
            return f"no such key; here it is called {meant}"
        if homes := self.homes_of(meant):
            called = "" if meant == name else f"; here it is called {meant}, and"
            return f"no such key{called or ';'} it belongs under {' or '.join(homes)}"
        close = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
        return f"no such key; nearest is {close[0]}" if close else "no such key"


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _inner(annotation: Any) -> Any:
    """The type without Optional and Annotated around it."""
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return _inner(get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return _inner(kinds[0]) if kinds else None
    return annotation
