"""Offers, decisions and reservations in the store: what was answered, what an accepted offer reserves, and
which answer stands.

The parts of a decision are stored as JSON under the names of their fields: a field that a later version
adds, moves or drops misreads nothing.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from pydantic_core import PydanticSerializationError, to_json

from core.domain.choices import Refusal
from core.domain.decisions import Decision, ExpectedValue, PlanBrief, Reason, ScoreFactor
from core.domain.errors import GodMinerError
from core.domain.job_states import EndReason, ReservationState
from core.domain.keys import GpuReservation, Placement, ReservationKind, TaskKey
from core.domain.wire import MinerTaskOffer
from miner.store.database import StoreUnavailable, add_event, insert_row
from miner.store.jobs import IS_OPEN, RecordedStart, StartRequest, record_start

T = TypeVar("T")


class DecisionUnreadable(GodMinerError):
    code = "decision_unreadable"


_INSERT_OFFER = """
INSERT OR IGNORE INTO offers (validator, task_id, task_type, model, params, hours, ds_size, received_at,
    last_seen_at, times_seen, raw, decision_id) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 1, ?, ?)
"""
_UPSERT_RESERVATION = """
INSERT INTO reservations (validator, task_id, offer_id, state, gpus, starts_at, ends_at, priority, firm,
    held_at, lapses_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (validator, task_id) DO UPDATE SET offer_id = coalesce(excluded.offer_id, offer_id),
    state = excluded.state, gpus = excluded.gpus, starts_at = excluded.starts_at,
    ends_at = excluded.ends_at, priority = excluded.priority, firm = excluded.firm,
    held_at = excluded.held_at, lapses_at = excluded.lapses_at
"""
_SELECT_STANDING = (
    "SELECT offers.id AS known_id, decisions.* FROM offers "
    "LEFT JOIN decisions ON decisions.id = offers.decision_id "
    "WHERE offers.validator = ? AND offers.task_id = ?"
)
_SELECT_RESERVATIONS = (
    "SELECT * FROM reservations WHERE state = ? OR (state = ? AND (validator, task_id) IN "  # noqa: S608
    f"(SELECT validator, task_id FROM jobs WHERE {IS_OPEN}))"
)
_SELECT_OPEN_JOBS = f"SELECT validator, task_id, deadline_at FROM jobs WHERE {IS_OPEN}"  # noqa: S608 - our enum
_SEEN_AGAIN = "UPDATE offers SET last_seen_at = ?, times_seen = times_seen + 1 WHERE id = ?"


class ColumnValues(Protocol):
    """A row by column names: SQLite's or a dictionary."""

    def __getitem__(self, name: str, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class ReservationRow:
    """The reservation of a task from now on."""

    hold: GpuReservation
    firm: bool
    #: Of an offer: until when it waits for its start.
    lapses_at: float


class OpenReservation(NamedTuple):
    """A reservation that a restart restores."""

    reservation: ReservationRow
    #: The job's deadline; None for an offer.
    deadline_at: float | None


class ReceivedOffer(NamedTuple):
    """An offer as it came."""

    validator: str
    offer: MinerTaskOffer
    raw: bytes
    at: float


class StandingRule(NamedTuple):
    """The rule by which an earlier decision about an offer stands."""

    #: Its GPUs are reserved, or its job is open.
    acceptance_holds: bool
    #: Seconds.
    refusal_stands_for: float


@dataclass(frozen=True, slots=True)
class RecordedOffer:
    """The decision that stands for an offer."""

    decision: Decision
    #: Whether it is an earlier one, sent again.
    repeated: bool
    #: Its row, unless it is an earlier one.
    decision_id: int | None = None


# Writing


def record_offer(
    connection: sqlite3.Connection,
    received: ReceivedOffer,
    decision: Decision | None,
    reservation: ReservationRow | None,
    standing: StandingRule,
    *,
    decision_id: int | None = None,
) -> RecordedOffer:
    """Store an offer and its decision, unless an earlier decision stands.

    `decision` is None where an acceptance is known to hold. `reservation` is what the task holds from now on.
    `decision_id` is the row of a refusal that other offers have as well: it names no offer, they name it.
    """
    validator, offer, raw, now = received
    cursor = connection.execute(
        _INSERT_OFFER,
        (
            validator,
            offer.task_id,
            offer.task_type,
            offer.model,
            offer.model_params_count,
            offer.hours_to_complete,
            offer.ds_size,
            now,
            now,
            raw,
            decision_id,
        ),
    )
    earlier = None
    if cursor.rowcount:
        if decision_id is not None and decision is not None:
            return RecordedOffer(decision, repeated=False, decision_id=decision_id)
        offer_id = cursor.lastrowid
    else:
        earlier = connection.execute(_SELECT_STANDING, (validator, offer.task_id)).fetchone()
        offer_id = earlier["known_id"]
        connection.execute(_SEEN_AGAIN, (now, offer_id))
    if earlier is not None and _stands(earlier, now, standing):
        if reservation is not None and earlier["accepted"]:
            save_reservation(connection, reservation, offer_id, now)
        return RecordedOffer(decision_from(earlier), repeated=True)
    if decision is None:  # the acceptance that was being written at the same time failed
        raise StoreUnavailable("the answer to this offer could not be stored a moment ago; ask again")
    if decision_id is None:
        owner = offer_id if decision.accepted else None
        decision_id = insert_row(
            connection, "decisions", offer_id=owner, decided_at=now, **decision_columns(decision)
        )
    connection.execute("UPDATE offers SET decision_id = ? WHERE id = ?", (decision_id, offer_id))
    if reservation is not None:
        save_reservation(connection, reservation, offer_id, now)
    return RecordedOffer(decision, repeated=False, decision_id=decision_id)


def record_offered_start(
    connection: sqlite3.Connection,
    validator: str,
    start: StartRequest,
    reservation: ReservationRow | None,
    *,
    now: float,
    decision: Decision | None,
    infeasible: EndReason | None,
) -> RecordedStart:
    """Store a start, the reservation of its job, and what was decided if there was no accepted offer."""
    started = record_start(connection, validator, start, now, infeasible=infeasible)
    if decision is not None:
        insert_row(
            connection, "decisions", job_id=started.job_id, decided_at=now, **decision_columns(decision)
        )
    if reservation is not None and not started.state.is_over:
        save_reservation(connection, reservation, None, now)
    return started


def save_reservation(
    connection: sqlite3.Connection, reservation: ReservationRow, offer_id: int | None, now: float
) -> None:
    hold = reservation.hold
    state = ReservationState.HELD if hold.kind is ReservationKind.OFFER else ReservationState.STARTED
    values = (
        *hold.key,
        offer_id,
        state,
        json.dumps(hold.gpus),
        hold.starts_at,
        hold.ends_at,
        hold.priority,
        reservation.firm,
        now,
        reservation.lapses_at,
    )
    connection.execute(_UPSERT_RESERVATION, values)


def lapse_reservations(connection: sqlite3.Connection, keys: Collection[TaskKey], now: float) -> None:
    """Mark the reservations of offers whose starts never came."""
    connection.executemany(
        "UPDATE reservations SET state = ? WHERE validator = ? AND task_id = ? AND state = ?",
        [(ReservationState.LAPSED, *key, ReservationState.HELD) for key in keys],
    )
    for key in keys:
        add_event(connection, now, "reservation_lapsed", key.task_id)


def _stands(earlier: sqlite3.Row, now: float, rule: StandingRule) -> bool:
    if earlier["id"] is None:  # the decision was pruned
        return False
    if earlier["accepted"]:
        return rule.acceptance_holds
    # If the clock was set back, no refusal stands for longer.
    return 0.0 <= now - float(earlier["decided_at"]) < rule.refusal_stands_for


# Reading


def open_reservations(connection: sqlite3.Connection) -> list[OpenReservation]:
    """Return the reservations of offers and of open jobs; an open job without one gets an empty one."""
    rows = connection.execute(_SELECT_RESERVATIONS, (ReservationState.HELD, ReservationState.STARTED))
    reservations = [_reservation_from(row) for row in rows.fetchall()]
    by_key = {reservation.hold.key: reservation for reservation in reservations}
    opened = [
        OpenReservation(reservation, None)
        for reservation in reservations
        if reservation.hold.kind is ReservationKind.OFFER
    ]
    for validator, task_id, deadline in connection.execute(_SELECT_OPEN_JOBS).fetchall():
        key = TaskKey(validator, task_id)
        without_gpus = ReservationRow(
            GpuReservation(key, ReservationKind.JOB, (), deadline, deadline), firm=False, lapses_at=deadline
        )
        opened.append(OpenReservation(by_key.get(key, without_gpus), deadline))
    return opened


def count_offers(connection: sqlite3.Connection, begins_at: float, ends_at: float) -> tuple[int, int]:
    """Count the offers of a time, and those of them that were accepted."""
    offers, accepted = connection.execute(
        "SELECT count(*), coalesce(sum(decisions.accepted), 0) FROM offers "
        "JOIN decisions ON decisions.id = offers.decision_id "
        "WHERE offers.received_at >= ? AND offers.received_at < ?",
        (begins_at, ends_at),
    ).fetchone()
    return offers, accepted


class TaskName(NamedTuple):
    """A task's names for people."""

    #: None for an offer.
    job_id: int | None
    model: str


def task_names(connection: sqlite3.Connection, keys: Iterable[TaskKey]) -> dict[TaskKey, TaskName]:
    names = {}
    for key in keys:
        row = connection.execute(
            "SELECT id, model FROM jobs WHERE validator = ? AND task_id = ? UNION ALL "
            "SELECT NULL, model FROM offers WHERE validator = ? AND task_id = ? LIMIT 1",
            (*key, *key),
        ).fetchone()
        if row is not None:
            names[key] = TaskName(*row)
    return names


def _reservation_from(row: sqlite3.Row) -> ReservationRow:
    kind = ReservationKind.OFFER if row["state"] == ReservationState.HELD else ReservationKind.JOB
    hold = GpuReservation(
        TaskKey(row["validator"], row["task_id"]),
        kind,
        tuple(json.loads(row["gpus"])),
        row["starts_at"],
        row["ends_at"],
        row["priority"],
    )
    return ReservationRow(hold, bool(row["firm"]), row["lapses_at"])


# Decisions as columns


def decision_columns(decision: Decision) -> dict[str, object]:
    """The columns of `decisions` that hold a decision; those that hold JSON have what has no column."""
    details = {
        "profile": decision.profile,
        "threshold": decision.threshold,
        "placement": decision.placement and asdict(decision.placement),
        "value": decision.value and decision.value._asdict(),
        "plan": decision.plan and decision.plan._asdict(),
        "refusal": decision.refusal,
    }
    return {
        "accepted": decision.accepted,
        "message": decision.message,
        "score": decision.score,
        "factors": _json({name: factor._asdict() for name, factor in decision.factors.items()}),
        "reasons": _json([reason._asdict() for reason in decision.reasons]),
        "details": _json({key: value for key, value in details.items() if value is not None}),
        "policy": decision.policy,
        "policy_hash": decision.policy_hash,
        "profile_hash": decision.profile_hash,
    }


def _json(value: dict[str, object] | list[Any]) -> str:
    """A third of the time that `json` takes, for every new offer."""
    try:
        return to_json(value).decode()
    except PydanticSerializationError:  # half a surrogate pair in a message, which only `json` can write
        return json.dumps(value)


def decision_from(row: ColumnValues) -> Decision:
    """Read a decision from a row of `decisions`."""
    details: dict[str, Any] = json.loads(row["details"])
    placement, value, plan = (details.get(key) for key in ("placement", "value", "plan"))
    where = read_part(Placement, placement) if placement else None
    return Decision(
        accepted=bool(row["accepted"]),
        message=row["message"],
        policy=row["policy"],
        policy_hash=row["policy_hash"],
        reasons=tuple(read_part(Reason, reason) for reason in json.loads(row["reasons"])),
        score=row["score"],
        factors={name: read_part(ScoreFactor, part) for name, part in json.loads(row["factors"]).items()},
        profile_hash=row["profile_hash"],
        profile=details.get("profile"),
        threshold=details.get("threshold"),
        placement=where and replace(where, gpus=tuple(where.gpus)),
        value=read_part(ExpectedValue, value) if value else None,
        plan=read_part(PlanBrief, plan) if plan else None,
        refusal=Refusal(details["refusal"]) if details.get("refusal") in list(Refusal) else None,
    )


def read_part(part: type[T], stored: dict[str, object]) -> T:
    """Read a part of a decision by field names; names that this version does not know are left out."""
    fields: tuple[str, ...] = part.__match_args__  # type: ignore[attr-defined]
    try:
        return part(**{name: stored[name] for name in fields if name in stored})
    except TypeError as error:
        raise DecisionUnreadable(f"a stored {part.__name__} cannot be read: {error}") from None
