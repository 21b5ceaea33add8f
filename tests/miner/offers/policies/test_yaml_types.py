from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from core.domain.selectors import TaskWord
from core.domain.tasks import TaskType
from miner.offers.policies.yaml_types import (
    Blackout,
    BlackoutHours,
    Hours,
    HoursLimit,
    TaskKindName,
)
from tests.doubles.each import each

HOURS, BLACKOUT = TypeAdapter(Hours), TypeAdapter(Blackout)
KIND, TASK = TypeAdapter(TaskKindName), TypeAdapter(TaskWord)


@pytest.mark.parametrize(
    ("written", "shown", "allowed", "refused"),
    [(8, "8", 8, 8.01), (7.5, "7.5", 7.5, 7.6), ("<20", "<20", 19.99, 20), ("< 2.5", "<2.5", 2.4, 2.5)],
)
def test_hours_are_a_limit_that_holds_or_one_to_stay_below(
    written: Any, shown: str, allowed: float, refused: float
) -> None:
    limit: HoursLimit = HOURS.validate_python(written)
    assert str(limit) == shown
    assert limit.allows(allowed)
    assert not limit.allows(refused)


@each("written", ["8h", ">3", "", True, None, -1, 0, 1e9, [8]])
def test_anything_else_is_refused_as_hours(written: Any) -> None:
    with pytest.raises(ValidationError):
        HOURS.validate_python(written)


@pytest.mark.parametrize("written", ["instruct", "InstructTextTask", "INSTRUCT", "instructtexttask"])
def test_a_task_may_be_written_as_validators_write_it(written: str) -> None:
    assert KIND.validate_python(written) == "instruct"
    assert TASK.validate_python(written) is TaskType.INSTRUCT


@each("written", ["sd", "sdxl", "flux", "z-image", "image"])
def test_image_models_are_kinds_but_no_tasks(written: str) -> None:
    assert KIND.validate_python(written) == written
    if written != "image":
        with pytest.raises(ValidationError, match="one of instruct, chat"):
            TASK.validate_python(written)


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@each(
    ("written", "start", "end", "touched"),
    [
        ("Wed 08:00-09:00", "2025-10-01T08:30", "2025-10-01T08:31", True),
        ("Wed 08:00-09:00", "2025-10-02T08:30", "2025-10-02T08:31", False),
        ("Sat-Mon 00:00-24:00", "2025-10-05T12:00", "2025-10-05T13:00", True),
        ("Fri,sun 10:00-11:00", "2025-10-03T09:00", "2025-10-03T10:01", True),
        ("Sun 23:00-01:00", "2025-10-06T00:30", "2025-10-06T00:40", True),
        ("Tue 10:00-11:00", "2025-10-01T00:00", "2025-10-09T00:00", True),
    ],
)
def test_a_window_touches_blackout_hours_or_not(written: str, start: str, end: str, touched: bool) -> None:
    blackout: BlackoutHours = BLACKOUT.validate_python(written)
    assert blackout.touches(at(start), at(end)) is touched
    assert str(blackout) == written


@each(
    "written",
    ["22-06", "25:00-26:00", "10:00-10:00", "Foo 10:00-11:00", "Mon-Xyz 10:00-11:00", "10:75-11:00", 5],
)
def test_anything_else_is_refused_as_blackout_hours(written: Any) -> None:
    with pytest.raises(ValidationError):
        BLACKOUT.validate_python(written)


@given(
    st.integers(0, 23),
    st.integers(0, 59),
    st.integers(1, 24 * 60 - 1),
    st.integers(0, 10**6),
    st.integers(1, 10**5),
)
def test_a_window_touches_exactly_the_minutes_of_blackout_hours(
    hour: int, minute: int, length: int, start: int, lasts: int
) -> None:
    """Against minutes counted one by one: the same hours of every day, from any moment."""
    first = hour * 60 + minute
    last = (first + length) % (24 * 60)
    text = f"{hour:02}:{minute:02}-{last // 60:02}:{last % 60:02}"
    blackout: BlackoutHours = BLACKOUT.validate_python(text)
    minutes = range(start // 60, min((start + lasts - 1) // 60, start // 60 + 24 * 60) + 1)
    by_hand = any((at - first) % (24 * 60) < length for at in minutes)
    assert blackout.touches(start, start + lasts) is by_hand
