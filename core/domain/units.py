"""Sizes, durations, timestamps and parameter counts written with their unit: `75GB`, `90m`, `1.5h`, `13B`.

A bare number is refused on purpose: "75" may be megabytes to one reader and gigabytes to the next.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

_BYTES: Mapping[str, float] = {
    "b": 1,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "kib": 2.0**10,
    "mib": 2.0**20,
    "gib": 2.0**30,
    "tib": 2.0**40,
}
_SECONDS: Mapping[str, float] = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_PARAMS: Mapping[str, float] = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}

_ONE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")
#: No sensible number is larger, and up to here integers are exact in every JSON reader.
_MAX = 2.0**53


def _measure(value: Any, units: Mapping[str, float], what: str, example: str, parts: int = 1) -> float:
    text = str(value).strip()
    matches = list(_ONE.finditer(text))
    if isinstance(value, bool) or not matches or len(matches) > parts or _ONE.sub("", text).strip():
        raise ValueError(f"{what} is written with its unit, like {example}, not {value!r}")
    total = 0.0
    for match in matches:
        unit = match[2].lower()
        if unit not in units:
            raise ValueError(
                f"{value!r} has the unit {match[2]!r}; {what} is in one of {', '.join(units)}, like {example}"
            )
        total += float(match[1]) * units[unit]
    if not math.isfinite(total) or total > _MAX:
        raise ValueError(f"{value!r} is beyond any sensible {what}")
    return total


def parse_bytes(value: Any) -> int:
    """`75GB` is 75·10⁹, `75GiB` is 75·2³⁰."""
    return round(_measure(value, _BYTES, "a size", "75GB or 512MiB"))


def parse_seconds(value: Any) -> float:
    """`90m`, `1.5h`, `1h30m`."""
    return _measure(value, _SECONDS, "a duration", "90m, 1.5h or 1h30m", parts=4)


def parse_params(value: Any) -> int:
    """`13B`, `350M`: a model's parameters."""
    return round(_measure(value, _PARAMS, "a parameter count", "13B or 350M"))


def show_bytes(count: float) -> str:
    """Decimal gigabytes, as GPU memory is sold and as profiles write it."""
    if abs(count) >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.1f} MB" if abs(count) >= 1e6 else f"{count / 1e3:.1f} kB"


def show_dollars(amount: float) -> str:
    sign = "-" if amount < -0.005 else ""
    return f"{sign}${abs(amount):,.2f}"


def show_seconds(seconds: float) -> str:
    sign, whole = ("-" if seconds < 0 else ""), round(abs(seconds))
    if whole < 90:
        return f"{sign}{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{sign}{hours} h {minutes:02d} min" if hours else f"{sign}{minutes} min {rest:02d} s"


def rfc3339(at: float) -> str:
    """A time as all JSON output writes it: UTC, with its zone."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def show_params(count: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:g}"


def _schema(pattern: str, example: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": [example]})


Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    Field(ge=0),
    _schema(r"^\d+(\.\d+)?\s*([kKMGT]i?)?[bB]$", "75GB"),
]
Seconds = Annotated[
    float,
    BeforeValidator(parse_seconds),
    Field(ge=0),
    _schema(r"^(\d+(\.\d+)?\s*(s|sec|m|min|h|d)\s*)+$", "90m"),
]


def _written_seconds(seconds: float) -> str:
    return f"{Decimal(repr(seconds)):f}s"


#: As a profile writes them, in JSON too, so that a stored profile is read again.
WrittenBytes = Annotated[Bytes, PlainSerializer("{}B".format, when_used="json")]
WrittenSeconds = Annotated[Seconds, PlainSerializer(_written_seconds, when_used="json")]


def _written_params(count: int) -> str:
    """Write the exact count as a profile does, so that a stored one is read again."""
    return f"{count / 1e9:.9f}".rstrip("0").rstrip(".") + "B"


Params = Annotated[
    int,
    BeforeValidator(parse_params),
    PlainSerializer(_written_params, when_used="json"),
    Field(ge=0),
    _schema(r"^\d+(\.\d+)?\s*[kKmMbBtT]$", "13B"),
]


class MetricUnit(StrEnum):
    """Units of what is measured, and how a value is shown."""

    SHARE = "share"
    SECONDS = "seconds"
    BYTES = "bytes"
    CELSIUS = "°C"
    WATTS = "W"
    COUNT = "count"
    PER_SECOND = "per second"
    BYTES_PER_SECOND = "bytes per second"
    MEGAHERTZ = "MHz"

    def show(self, value: float) -> str:
        match self:
            case MetricUnit.SHARE:
                return f"{100 * value:.3g} %"
            case MetricUnit.SECONDS:
                return show_seconds(value)
            case MetricUnit.BYTES:
                return show_bytes(value)
            case MetricUnit.COUNT:
                return f"{value:g}"
            case MetricUnit.PER_SECOND:
                return f"{value:.4g}/s"
            case MetricUnit.BYTES_PER_SECOND:
                return f"{show_bytes(value)}/s"
        return f"{value:.4g} {self.value}"


_BLOCKS = "▁▂▃▄▅▆▇█"


def show_shares(shares: Iterable[float | None]) -> str:
    """Show each share of 1 as a block, and an unknown one as a dot."""
    last = len(_BLOCKS) - 1
    return "".join(
        "·" if share is None else _BLOCKS[min(int(share * len(_BLOCKS)), last)] for share in shares
    )
