"""The base class of what the operator's port answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from pydantic import ConfigDict

from core.domain.records import Record


class Answer(Record):
    """A frozen record, made by `model_validate` from any object with the same attributes. A reader ignores
    keys of a newer daemon; a number that is not finite becomes null."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=True, from_attributes=True, defer_build=True)

    @classmethod
    def of_each(cls, rows: Iterable[object]) -> list[Self]:
        """Make a record of each row of the store."""
        return [cls.model_validate(row) for row in rows]


#: A count stays one in JSON.
Number = int | float
