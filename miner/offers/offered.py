"""An offer to be played again: when it came, and what is known of its end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, ValidationError

from core.errors import ConfigError, Problem
from core.wire import MinerTaskOffer

#: A line of JSON that is longer is no offer.
MAX_LINE = 64 * 1024


class Known(StrEnum):
    """What became of an offer in fact."""

    REFUSED = "refused"
    LAPSED = "lapsed"  # accepted, and never started
    OPEN = "open"
    PUBLISHED = "published"
    FAILED = "failed"


class Offered(NamedTuple):
    at: float
    offer: MinerTaskOffer
    #: Rows of the dataset, which only the start tells; None: not known.
    rows: int | None = None
    known: Known | None = None


def _moment(value: Any) -> Any:
    if isinstance(value, str):
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return value


class _Line(MinerTaskOffer):
    """One line of a file of offers: an offer as validators send it, and when."""

    received_at: Annotated[
        float, BeforeValidator(_moment), Field(ge=0, le=253_402_300_799, allow_inf_nan=False)
    ]
    rows: Annotated[int, Field(ge=0)] | None = None
    known: Known | None = None


def to_line(offered: Offered) -> str:
    extra = {"received_at": offered.at, "rows": offered.rows, "known": offered.known}
    data = {**offered.offer.model_dump(mode="json"), **extra}
    return json.dumps({key: value for key, value in data.items() if value is not None})


def from_lines(lines: Iterable[str], source: str) -> list[Offered]:
    """In the order of their arrival. `ConfigError` names every bad line."""
    found: list[Offered] = []
    problems: list[Problem] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_read(line))
            except ValueError as error:
                problems.append(Problem(f"{source}:{number}", "", "; ".join(_said(error))))
    if problems:
        raise ConfigError(source, problems)
    return sorted(found, key=lambda one: one.at)


def _read(line: str) -> Offered:
    if len(line) > MAX_LINE:
        raise ValueError(f"longer than {MAX_LINE} characters")
    read = _Line.model_validate_json(line)
    offer = MinerTaskOffer.model_validate(read.model_dump(include=set(MinerTaskOffer.model_fields)))
    return Offered(read.received_at, offer, read.rows, read.known)


def _said(error: ValueError) -> Iterator[str]:
    if not isinstance(error, ValidationError):
        yield str(error)
        return
    for item in error.errors(include_url=False):
        where = ".".join(map(str, item["loc"]))
        yield f"{where}: {item['msg']}" if where else item["msg"]
