"""Offers in the books: the first answer stands, and an accepted one holds a place."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from typing import Any

from core.wire import MinerTaskOffer
from miner.jobs.states import ReservationState
from miner.offers.decision import Decision, Factor, Reason
from miner.store import schema
from miner.store.jobs import IS_OPEN
from miner.store.sql import insert_into

_INSERT_OFFER = insert_into(schema.Offer, "id", or_ignore=True)
_INSERT_DECISION = insert_into(schema.Decision)
_INSERT_RESERVATION = insert_into(schema.Reservation)
_HOLD_AGAIN = (
    "UPDATE reservations SET state = ?, lapses_at = ? WHERE "  # noqa: S608 - our enum
    f"(state IN (?, ?) OR NOT EXISTS (SELECT 1 FROM jobs WHERE task_id = ? AND {IS_OPEN})) "
    "AND offer_id IN (SELECT id FROM offers WHERE validator = ? AND task_id = ?)"
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The decision that stands for an offer: the first one, however often it is repeated."""

    decision: Decision
    repeated: bool
    #: Whether the offer holds a place now. A started one does not: its job does.
    holds: bool


def record(
    connection: sqlite3.Connection,
    validator: str,
    offer: MinerTaskOffer,
    raw: bytes,
    decision: Decision,
    *,
    now: float,
    hold_seconds: float,
) -> Recorded:
    cursor = connection.execute(_INSERT_OFFER, _offer_row(validator, offer, raw, now))
    if cursor.rowcount == 0:
        holds = _hold_again(connection, validator, offer.task_id, now + hold_seconds)
        known = _known_decision(connection, validator, offer.task_id, now)
        return Recorded(known, repeated=True, holds=holds)
    offer_id = cursor.lastrowid
    connection.execute(_INSERT_DECISION, _decision_row(offer_id, decision, now))
    if decision.accepted:
        hold = (offer_id, offer.task_id, ReservationState.HELD, "[]", now, now + hold_seconds)
        connection.execute(_INSERT_RESERVATION, hold)
    return Recorded(decision, repeated=False, holds=decision.accepted)


def started(connection: sqlite3.Connection, validator: str, task_id: str) -> None:
    """The start came: what the offer held, the job holds now."""
    connection.execute(
        "UPDATE reservations SET state = ? WHERE task_id = ? AND offer_id IN "
        "(SELECT id FROM offers WHERE validator = ? AND task_id = ?)",
        (ReservationState.STARTED, task_id, validator, task_id),
    )


def _hold_again(connection: sqlite3.Connection, validator: str, task_id: str, lapses_at: float) -> bool:
    """The validator still asks, so an accepted offer's place is held anew, unless an open job has it."""
    held = ReservationState.HELD
    cursor = connection.execute(
        _HOLD_AGAIN, (held, lapses_at, held, ReservationState.LAPSED, task_id, validator, task_id)
    )
    return cursor.rowcount > 0


def lapse(connection: sqlite3.Connection, now: float) -> list[str]:
    """End the holds whose start never came; the tasks that nobody holds any more."""
    rows = connection.execute(
        "UPDATE reservations SET state = ? WHERE state = ? AND lapses_at <= ? RETURNING task_id",
        (ReservationState.LAPSED, ReservationState.HELD, now),
    )
    lapsed = {row[0] for row in rows.fetchall()}
    # Two validators may have offered the same task.
    return sorted(lapsed - set(held(connection))) if lapsed else []


def held(connection: sqlite3.Connection) -> dict[str, float]:
    """Held tasks and when they lapse."""
    rows = connection.execute(
        "SELECT task_id, max(lapses_at) FROM reservations WHERE state = ? GROUP BY task_id",
        (ReservationState.HELD,),
    )
    return dict(map(tuple, rows))


def _offer_row(validator: str, offer: MinerTaskOffer, raw: bytes, now: float) -> tuple[Any, ...]:
    """In the order of the table's columns."""
    return (
        validator,
        offer.task_id,
        offer.task_type,
        offer.model,
        offer.model_params_count,
        offer.hours_to_complete,
        offer.ds_size,
        now,
        now,
        1,
        raw,
    )


def _decision_row(offer_id: int | None, decision: Decision, now: float) -> tuple[Any, ...]:
    """In the order of the table's columns."""
    return (
        offer_id,
        decision.accepted,
        decision.message,
        decision.score,
        json.dumps(decision.factors) if decision.factors else "{}",
        json.dumps([list(reason) for reason in decision.reasons]),
        decision.policy,
        decision.policy_hash,
        decision.profile_hash,
        now,
    )


def _known_decision(connection: sqlite3.Connection, validator: str, task_id: str, now: float) -> Decision:
    row = connection.execute(
        "SELECT offers.id, decisions.* FROM offers JOIN decisions ON decisions.offer_id = offers.id "
        "WHERE validator = ? AND task_id = ?",
        (validator, task_id),
    ).fetchone()
    connection.execute(
        "UPDATE offers SET last_seen_at = ?, times_seen = times_seen + 1 WHERE id = ?", (now, row["id"])
    )
    return Decision(
        accepted=bool(row["accepted"]),
        message=row["message"],
        policy=row["policy"],
        policy_hash=row["policy_hash"],
        reasons=tuple(Reason(*reason) for reason in json.loads(row["reasons"])),
        score=row["score"],
        factors={name: Factor(*parts) for name, parts in json.loads(row["factors"]).items()},
        profile_hash=row["profile_hash"],
    )
