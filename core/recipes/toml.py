"""Writing TOML: flat tables of scalars and lists, which is all that sd-scripts reads.

The standard library only reads TOML. sd-scripts reads it with the old `toml` package, so what is written
keeps to the part that both agree on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def dumps(config: Mapping[str, Any]) -> str:
    """One `key = value` per line. `TypeError` for what a flat table cannot hold."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in config.items())


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    raise TypeError(f"{value!r} has no place in a flat TOML table")


def _number(value: float) -> str:
    """Always with a point: `1e-05` is a float to TOML, but not to every reader of it."""
    if not math.isfinite(value):
        raise TypeError(f"{value!r} is no number for a configuration")
    text = repr(value)
    if "e" in text and "." not in text:
        mantissa, exponent = text.split("e")
        return f"{mantissa}.0e{exponent}"
    return text


def _text(value: str) -> str:
    """JSON's strings are TOML's, but for DEL, which TOML wants escaped and JSON does not."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
