"""Values that select tasks and models in YAML: task names, bands, integer ranges and lanes.

Profiles and policies share them.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema, core_schema

from core.domain.records import Record
from core.domain.tasks import TASK_WORDS, ImageModelType, TaskType, task_type_named
from core.domain.units import parse_params, show_params


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


_BAND = re.compile(r"(?P<low>[^<>=-]+)-(?P<high>[^<>=-]+)|(?P<op><|>=)(?P<bound>.+)")


class NumberBand(Record):
    """Whole numbers from `low` (included) to `high` (excluded)."""

    #: In messages, and how such a band is written.
    noun: ClassVar[str]
    examples: ClassVar[tuple[str, str, str]]

    low: int = 0
    high: int | None = None

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and number >= self.low and (self.high is None or number < self.high)

    def __str__(self) -> str:
        if self.high is None:
            return f">={self._written(self.low)}"
        high = self._written(self.high)
        return f"{self._written(self.low)}-{high}" if self.low else f"<{high}"

    @staticmethod
    def _read(text: str) -> int:
        raise NotImplementedError

    @staticmethod
    def _written(number: int) -> str:
        raise NotImplementedError

    @classmethod
    def parse(cls, value: Any) -> Any:
        if isinstance(value, cls | dict):  # a dict: as it is stored with a plan
            return value
        match = _BAND.fullmatch(str(value).replace(" ", ""))
        if match is None:
            below, between, above = cls.examples
            raise ValueError(f"a {cls.noun} is written {below}, {between} or {above}, not {value!r}")
        if match["op"]:
            bound = cls._read(match["bound"])
            return cls(high=bound) if match["op"] == "<" else cls(low=bound)
        low, high = cls._read(match["low"]), cls._read(match["high"])
        if low >= high:
            raise ValueError(f"the {cls.noun} {value!r} is empty: its lower end comes first")
        return cls(low=low, high=high)


class SizeBand(NumberBand):
    """Parameters of a model."""

    noun = "size band"
    examples = ("<7B", "7B-13B", ">=70B")

    @staticmethod
    def _read(text: str) -> int:
        return parse_params(text)

    @staticmethod
    def _written(number: int) -> str:
        return show_params(number)


class PictureBand(NumberBand):
    """Numbers of training pictures."""

    noun = "number of pictures"
    examples = ("<10", "10-28", ">=28")

    @staticmethod
    def _read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,6}", text):
            raise ValueError(f"a number of pictures is whole, without a unit, like 10, not {text!r}")
        return int(text)

    @staticmethod
    def _written(number: int) -> str:
        return str(number)


Band = Annotated[
    SizeBand,
    BeforeValidator(SizeBand.parse),
    WithJsonSchema({"type": "string", "examples": list(SizeBand.examples)}),
]
Pictures = Annotated[
    PictureBand,
    BeforeValidator(PictureBand.parse),
    WithJsonSchema({"type": "string", "examples": list(PictureBand.examples)}),
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
