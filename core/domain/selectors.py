"""Values that select tasks and models in YAML: task names, size bands, integer ranges and lanes.

Profiles and policies share them.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema, core_schema

from core.domain.records import Record
from core.domain.tasks import TASK_WORDS, ImageModelType, TaskType, task_type_named
from core.domain.units import parse_params, parse_seconds, show_params


class Lane(Record):
    """GPUs set aside for some tasks."""

    gpus: list[int] = Field(min_length=1, description="Indices of its GPUs.")
    size: Band | None = Field(default=None, description="Only models of this size.")
    task: Annotated[list[TaskWord], OneOrMany()] | None = Field(default=None, description="Only these tasks.")
    image: Annotated[list[ImageModelType], OneOrMany()] | None = Field(
        default=None, description="Only these image model types."
    )
    gpus_per_job: int | None = Field(default=None, ge=1, description="GPUs per job. Unset: the whole lane.")
    overflow: bool = Field(
        default=False, description="Use free GPUs of other lanes when this lane is busy too long."
    )


def _parse_task(value: Any) -> Any:
    known = task_type_named(value) if isinstance(value, str) else None
    if known is None:
        raise ValueError(f"a task is one of {', '.join(TASK_WORDS)}, not {value!r}")
    return known


class OneOrMany:
    """Annotates a list: `task: dpo` then means `task: [dpo]`, in our reader and in the editor's schema."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._listed, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        many = handler(schema)
        return {"anyOf": [many, many["items"]]}

    @staticmethod
    def _listed(value: Any) -> Any:
        return [value] if isinstance(value, str | int) else value


TaskWord = Annotated[
    TaskType, BeforeValidator(_parse_task), WithJsonSchema({"type": "string", "enum": list(TASK_WORDS)})
]


class SizeBand(Record):
    """Parameters from `low` (included) to `high` (excluded)."""

    low: int = 0
    high: int | None = None

    def __contains__(self, params: object) -> bool:
        return isinstance(params, int) and params >= self.low and (self.high is None or params < self.high)

    def __str__(self) -> str:
        if self.high is None:
            return f">={show_params(self.low)}"
        return (
            f"{show_params(self.low)}-{show_params(self.high)}" if self.low else f"<{show_params(self.high)}"
        )


_BAND = re.compile(r"(?P<low>[^<>=-]+)-(?P<high>[^<>=-]+)|(?P<op><|>=)(?P<bound>.+)")


def _parse_band(value: Any) -> Any:
    if isinstance(value, SizeBand):
        return value
    match = _BAND.fullmatch(str(value).replace(" ", ""))
    if match is None:
        raise ValueError(f"a size band is written <7B, 7B-13B or >=70B, not {value!r}")
    if match["op"]:
        bound = parse_params(match["bound"])
        return SizeBand(high=bound) if match["op"] == "<" else SizeBand(low=bound)
    low, high = parse_params(match["low"]), parse_params(match["high"])
    if low >= high:
        raise ValueError(f"the size band {value!r} is empty: its lower end comes first")
    return SizeBand(low=low, high=high)


Band = Annotated[
    SizeBand,
    BeforeValidator(_parse_band),
    WithJsonSchema({"type": "string", "examples": ["<7B", "7B-13B", ">=70B"]}),
]


class HoursBand(Record):
    """Hours from `low` (included) to `high` (excluded)."""

    low: float = 0.0
    high: float | None = None

    def __contains__(self, hours: object) -> bool:
        return (
            isinstance(hours, float | int) and hours >= self.low and (self.high is None or hours < self.high)
        )

    def __str__(self) -> str:
        if self.high is None:
            return f">={self.low:g}h"
        return f"{self.low:g}h-{self.high:g}h" if self.low else f"<{self.high:g}h"


def _parse_hours(value: Any) -> Any:
    if isinstance(value, HoursBand):
        return value
    match = _BAND.fullmatch(str(value).replace(" ", ""))
    if match is None:
        raise ValueError(f"hours are written <1h, 45m-2h or >=2h, not {value!r}")
    if match["op"]:
        bound = parse_seconds(match["bound"]) / 3600
        return HoursBand(high=bound) if match["op"] == "<" else HoursBand(low=bound)
    low, high = parse_seconds(match["low"]) / 3600, parse_seconds(match["high"]) / 3600
    if low >= high:
        raise ValueError(f"the hours {value!r} are empty: their lower end comes first")
    return HoursBand(low=low, high=high)


Hours = Annotated[
    HoursBand,
    BeforeValidator(_parse_hours),
    WithJsonSchema({"type": "string", "examples": ["<1h", "45m-2h", ">=2h"]}),
]


class IntegerRange(Record):
    """A whole number, or a range to choose from: `6`, `5-10`."""

    low: int = Field(ge=1)
    high: int = Field(ge=1)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


def _parse_range(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return {"low": value, "high": value}
    match = re.fullmatch(r"(\d{1,6})\s*-\s*(\d{1,6})", value) if isinstance(value, str) else None
    if match and int(match[1]) <= int(match[2]):
        return {"low": int(match[1]), "high": int(match[2])}
    if isinstance(value, IntegerRange | dict):
        return value
    raise ValueError(f"a number like 6 or a range like 5-10 is needed, not {value!r}")


IntRange = Annotated[
    IntegerRange,
    BeforeValidator(_parse_range),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "string", "pattern": r"^\d+\s*-\s*\d+$", "examples": ["5-10"]},
            ]
        }
    ),
]
