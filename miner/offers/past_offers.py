"""Past offers with their decisions and outcomes: from the store, or from a file of JSON lines.

Reads only; a daemon may be running beside it.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, ValidationError

from core.domain.decisions import Decision
from core.domain.errors import ConfigError, GodMinerError, Problem
from core.domain.job_states import JobState, ReservationState
from core.domain.tasks import TaskType
from core.domain.wire import MinerTaskOffer
from miner.api.offers import OfferOutcome
from miner.store.offers import decision_from

#: A longer line of JSON is not an offer.
MAX_LINE_LENGTH = 64 * 1024


class HistoricalOffer(NamedTuple):
    at: float
    offer: MinerTaskOffer
    #: Rows of the dataset, if known: only the start says.
    rows: int | None = None
    outcome: OfferOutcome | None = None


def _timestamp(value: Any) -> Any:
    if isinstance(value, str):
        parsed = datetime.fromisoformat(value)
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    return value


class _OfferLine(MinerTaskOffer):
    """One line of a file of offers: an offer as validators send it, and when."""

    received_at: Annotated[
        float, BeforeValidator(_timestamp), Field(ge=0, le=253_402_300_799, allow_inf_nan=False)
    ]
    rows: Annotated[int, Field(ge=0)] | None = None
    known: OfferOutcome | None = None


def offer_to_line(past: HistoricalOffer) -> str:
    extra = {"received_at": past.at, "rows": past.rows, "known": past.outcome}
    data = {**past.offer.model_dump(mode="json"), **extra}
    return json.dumps({key: value for key, value in data.items() if value is not None})


def read_offer_lines(lines: Iterable[str], source: str) -> list[HistoricalOffer]:
    """Return the offers in the order of their arrival. `ConfigError` names every bad line."""
    offers: list[HistoricalOffer] = []
    problems: list[Problem] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                offers.append(_read_line(line))
            except ValueError as error:
                problems.append(Problem(f"{source}:{number}", "", "; ".join(_error_texts(error))))
    if problems:
        raise ConfigError(source, problems)
    return sorted(offers, key=lambda offer: offer.at)


def _read_line(line: str) -> HistoricalOffer:
    if len(line) > MAX_LINE_LENGTH:
        raise ValueError(f"longer than {MAX_LINE_LENGTH} characters")
    read = _OfferLine.model_validate_json(line)
    offer = MinerTaskOffer.model_validate(read.model_dump(include=set(MinerTaskOffer.model_fields)))
    return HistoricalOffer(read.received_at, offer, read.rows, read.known)


def _error_texts(error: ValueError) -> Iterator[str]:
    if not isinstance(error, ValidationError):
        yield str(error)
        return
    for item in error.errors(include_url=False):
        where = ".".join(map(str, item["loc"]))
        yield f"{where}: {item['msg']}" if where else item["msg"]


class NoSuchOffer(GodMinerError):
    code = "no_such_offer"


class StoredOffer(NamedTuple):
    #: The store's id of the offer, or of the job for a start that no accepted offer went before.
    number: int
    validator: str
    received_at: float
    times_seen: int
    offer: MinerTaskOffer
    decision: Decision
    decided_at: float
    outcome: OfferOutcome
    #: Not an offer but a start that was decided like one.
    is_start: bool

    @property
    def historical(self) -> HistoricalOffer:
        return HistoricalOffer(self.received_at, self.offer, None, self.outcome)


_DECISION = """
decisions.accepted, decisions.message, decisions.score, decisions.factors, decisions.reasons,
decisions.details, decisions.policy, decisions.policy_hash, decisions.profile_hash, decisions.decided_at
"""
_OFFERS = f"""
SELECT offers.id AS number, offers.validator, offers.task_id, offers.task_type, offers.model, offers.params,
    offers.hours, offers.ds_size, offers.received_at, offers.times_seen, 0 AS is_start,
    reservations.state AS held, jobs.state AS job, {_DECISION}
FROM offers
JOIN decisions ON decisions.id = offers.decision_id
LEFT JOIN reservations ON (reservations.validator, reservations.task_id) = (offers.validator, offers.task_id)
LEFT JOIN jobs ON (jobs.validator, jobs.task_id) = (offers.validator, offers.task_id)
"""  # noqa: S608 - ours
_STARTS = f"""
SELECT jobs.id AS number, jobs.validator, jobs.task_id, jobs.task_type, jobs.model, NULL AS params,
    jobs.hours, NULL AS ds_size, jobs.started_at AS received_at, jobs.starts AS times_seen, 1 AS is_start,
    NULL AS held, jobs.state AS job, {_DECISION}
FROM jobs JOIN decisions ON decisions.job_id = jobs.id
"""  # noqa: S608 - ours


@dataclass(frozen=True, slots=True)
class OfferFilter:
    since: float = 0.0
    until: float = math.inf
    #: Offers that came before the one of this number.
    before: int | None = None
    accepted: bool | None = None
    task_type: TaskType | None = None
    #: A part of the model's name or the task's id.
    text: str = ""
    #: The newest, if there are more.
    most: int | None = None

    def where(self) -> tuple[str, list[Any]]:
        """Return the SQL condition and its values."""
        terms = ["offers.received_at >= ? AND offers.received_at < ?"]
        values: list[Any] = [self.since, self.until]
        if self.before is not None:
            that = "SELECT that.received_at, that.id FROM offers AS that WHERE that.id = ?"
            terms.append(f"(offers.received_at, offers.id) < ({that})")
            values.append(self.before)
        if self.accepted is not None:
            terms.append("decisions.accepted = ?")
            values.append(int(self.accepted))
        if self.task_type is not None:
            terms.append("offers.task_type = ?")
            values.append(self.task_type.value)
        if self.text:
            terms.append("(instr(lower(offers.model), ?) OR instr(lower(offers.task_id), ?))")
            values += [self.text.lower()] * 2
        return " AND ".join(terms), values


_ALL_OFFERS = OfferFilter()


def stored_offers(connection: sqlite3.Connection, wanted: OfferFilter = _ALL_OFFERS) -> list[StoredOffer]:
    """Return offers with the decision that stands, oldest first."""
    where, values = wanted.where()
    rows = connection.execute(
        f"{_OFFERS} WHERE {where} ORDER BY offers.received_at DESC, offers.id DESC LIMIT ?",
        (*values, -1 if wanted.most is None else wanted.most),
    ).fetchall()
    return [offer for row in reversed(rows) for offer in _stored_from(row)]


def find_stored_offer(connection: sqlite3.Connection, which: str) -> StoredOffer:
    """Find an offer by its number in the list or its task's id; of several validators' the newest. A task
    that was never offered, or whose offer was refused, may have been decided at its start: that counts."""
    number = int(which) if which.isdecimal() and len(which) < 18 else -1
    rows = [
        connection.execute(
            f"{_STARTS} WHERE jobs.task_id = ? ORDER BY decisions.decided_at DESC LIMIT 1", (which,)
        ).fetchone(),
        connection.execute(
            f"{_OFFERS} WHERE offers.task_id = ? OR offers.id = ? "
            "ORDER BY offers.task_id = ? DESC, offers.received_at DESC LIMIT 1",
            (which, number, which),
        ).fetchone(),
    ]
    offers = [offer for row in rows if row is not None for offer in _stored_from(row)]
    if not offers:
        raise NoSuchOffer(f"no offer has the number or the task id {which!r}; see god-miner offers list")
    return max(offers, key=lambda offer: offer.decided_at)


def _stored_from(row: sqlite3.Row) -> Iterator[StoredOffer]:
    try:
        task_type = TaskType(row["task_type"])
    except ValueError:  # of a version that knew more types
        return
    offer = MinerTaskOffer(
        model=row["model"],
        hours_to_complete=row["hours"],
        task_id=row["task_id"],
        task_type=task_type,
        ds_size=row["ds_size"],
        model_params_count=row["params"],
    )
    yield StoredOffer(
        number=row["number"],
        validator=row["validator"],
        received_at=row["received_at"],
        times_seen=row["times_seen"],
        offer=offer,
        decision=decision_from(row),
        decided_at=row["decided_at"],
        outcome=_outcome_from(row),
        is_start=bool(row["is_start"]),
    )


def _outcome_from(row: sqlite3.Row) -> OfferOutcome:
    if row["job"] == JobState.DONE:
        return OfferOutcome.PUBLISHED
    if row["job"] == JobState.FAILED:
        return OfferOutcome.FAILED
    if row["job"] is not None:
        return OfferOutcome.OPEN
    if not row["accepted"]:
        return OfferOutcome.REFUSED
    return OfferOutcome.LAPSED if row["held"] == ReservationState.LAPSED else OfferOutcome.OPEN
