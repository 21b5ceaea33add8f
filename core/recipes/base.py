"""The engine templates under `configs/base`, and laying one mapping over another."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from core.configs import config_dir

Config = dict[str, Any]


def templates() -> Path:
    """The folder with every engine's template."""
    return config_dir() / "base"


def base(*names: str) -> Config:
    """The named templates, each laid over the one before; a fresh copy every time."""
    merged: Config = {}
    for name in names:
        merged = overlay(merged, _read(templates() / name))
    return merged


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> Config:
    """`above` wins, mappings merge, and a null takes the key away. Neither argument is changed."""
    merged = {key: _copied(value) for key, value in below.items()}
    for key, value in above.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            inner = merged.get(key)
            merged[key] = overlay(inner if isinstance(inner, Mapping) else {}, value)
        else:
            merged[key] = _copied(value)
    return merged


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list | tuple) else value


@cache
def _read(path: Path) -> Config:
    text = path.read_text("utf-8")
    found = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    return dict(found)
