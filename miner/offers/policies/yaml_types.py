"""Value types that only policies use: kinds of task, limits of hours, hours of blackout."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from core.domain.records import Record
from core.domain.tasks import OFFERED_TASKS, ImageModelType, task_type_named
from core.models.image_families import OLDER_SD

#: Every kind of work that hours can be given for: task types, and image models more exactly.
TASK_KINDS: tuple[str, ...] = (
    *(one.word for one in OFFERED_TASKS),
    OLDER_SD,
    *(kind.value for kind in ImageModelType),
)


def operator_key(key: Any) -> Any:
    """`InstructTextTask` means the same as `instruct`; anything else is left as it is."""
    task_type = task_type_named(key) if isinstance(key, str) else None
    return key if task_type is None else task_type.word


def _kind(value: Any) -> Any:
    word = operator_key(value)
    word = word.lower() if isinstance(word, str) else word
    if word in TASK_KINDS:
        return word
    raise ValueError(f"a kind of task is one of {', '.join(TASK_KINDS)}, not {value!r}")


#: A task as a key or an item: the operator's name or the validators', read as the operator's.
TaskKindName = Annotated[
    str, BeforeValidator(_kind), WithJsonSchema({"type": "string", "enum": list(TASK_KINDS)})
]


class HoursLimit(Record):
    """`8` allows eight hours, `"<20"` all that is below twenty."""

    hours: float = Field(gt=0, le=10_000)
    below: bool = False

    def allows(self, hours: float) -> bool:
        return hours < self.hours if self.below else hours <= self.hours

    def __str__(self) -> str:
        return f"{'<' if self.below else ''}{self.hours:g}"


_LIMIT = re.compile(r"<\s*(\d+(?:\.\d+)?)")


def _hours(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"hours": float(value)}
    match = _LIMIT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match:
        return {"hours": float(match[1]), "below": True}
    if isinstance(value, HoursLimit):
        return value
    raise ValueError(f'hours are a number like 8, or "<20" for less than twenty, not {value!r}')


Hours = Annotated[
    HoursLimit,
    BeforeValidator(_hours),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "pattern": r"^<\s*\d+(\.\d+)?$"},
            ],
            "examples": [8, "<20"],
        }
    ),
]

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_BLACKOUT_HOURS = re.compile(
    r"(?:(?P<days>[A-Za-z]{3}(?:[-,][A-Za-z]{3})*)\s+)?(?P<h1>\d{1,2}):(?P<m1>\d\d)-(?P<h2>\d{1,2}):(?P<m2>\d\d)"
)
_DAY_MINUTES = 24 * 60
_WEEK_MINUTES = 7 * _DAY_MINUTES


class BlackoutHours(Record):
    """Part of the week, in UTC: `22:00-06:00` every night, `Sat,Sun 00:00-24:00`, `Mon-Fri 08:00-18:00`."""

    text: str
    #: (first, last) minutes of the week from Monday 00:00; the last may lie beyond the week's end.
    minutes: tuple[tuple[int, int], ...]

    def touches(self, start: float, end: float) -> bool:
        """Return True if any of it lies between two moments."""
        if end - start >= _WEEK_MINUTES * 60:
            return True
        at = datetime.fromtimestamp(start, UTC)
        first = at.weekday() * _DAY_MINUTES + at.hour * 60 + at.minute + at.second / 60
        last = first + (end - start) / 60
        return any(
            low + shift < last and first < high + shift
            for low, high in self.minutes
            for shift in (-_WEEK_MINUTES, 0, _WEEK_MINUTES)
        )

    def __str__(self) -> str:
        return self.text


def _blackout_hours(value: Any) -> Any:
    if isinstance(value, BlackoutHours):
        return value
    match = _BLACKOUT_HOURS.fullmatch(value.strip()) if isinstance(value, str) else None
    days = _days(match["days"]) if match else None
    if match is None or days is None:
        raise ValueError(
            f'blackout hours are written "22:00-06:00" or "Sat,Sun 08:00-12:00" (UTC), not {value!r}'
        )
    first, last = (int(match[f"h{n}"]) * 60 + int(match[f"m{n}"]) for n in (1, 2))
    if max(first, last) > _DAY_MINUTES or first == last or int(match["m1"]) > 59 or int(match["m2"]) > 59:
        raise ValueError(f"{value!r} is not part of a day; write it like 22:00-06:00")
    length = last - first if last > first else last + _DAY_MINUTES - first
    minutes = tuple((day * _DAY_MINUTES + first, day * _DAY_MINUTES + first + length) for day in days)
    return {"text": value.strip(), "minutes": minutes}


def _days(text: str | None) -> list[int] | None:
    """Return the days of the week; None where a name is not a day."""
    if text is None:
        return list(range(7))
    days: set[int] = set()
    for part in text.lower().split(","):
        first, _, last = part.partition("-")
        if first not in _DAYS or (last and last not in _DAYS):
            return None
        low, high = _DAYS.index(first), _DAYS.index(last or first)
        days |= {day % 7 for day in range(low, high + 1 if high >= low else high + 8)}
    return sorted(days)


Blackout = Annotated[
    BlackoutHours,
    BeforeValidator(_blackout_hours),
    WithJsonSchema({"type": "string", "examples": ["22:00-06:00", "Sat,Sun 08:00-12:00"]}),
]
