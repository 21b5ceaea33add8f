"""Offers in the books: the first answer stands, and an accepted one holds a place."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from typing import Any

from core.wire import MinerTaskOffer
from miner.jobs.states import ReservationState
from miner.offers.decision import Decision, Reason
from miner.store import schema
from miner.store.sql import insert_into

_INSERT_OFFER = insert_into(schema.Offer, "id", or_ignore=True)
_INSERT_DECISION = insert_into(schema.Decision)
_INSERT_RESERVATION = insert_into(schema.Reservation)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The decision that stands for an offer: the first one, however often it is repeated."""

    decision: Decision
    repeated: bool


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
        _hold_again(connection, validator, offer.task_id, now + hold_seconds)
        return Recorded(_known_decision(connection, validator, offer.task_id, now), repeated=True)
    offer_id = cursor.lastrowid
    connection.execute(_INSERT_DECISION, _decision_row(offer_id, decision, now))
    if decision.accepted:
        hold = (offer_id, offer.task_id, ReservationState.HELD, "[]", now, now + hold_seconds)
        connection.execute(_INSERT_RESERVATION, hold)
    return Recorded(decision, repeated=False)


def started(connection: sqlite3.Connection, validator: str, task_id: str) -> None:
    """The start came: what the offer held, the job holds now."""
    connection.execute(
        "UPDATE reservations SET state = ? WHERE task_id = ? AND offer_id IN "
        "(SELECT id FROM offers WHERE validator = ? AND task_id = ?)",
        (ReservationState.STARTED, task_id, validator, task_id),
    )


def _hold_again(connection: sqlite3.Connection, validator: str, task_id: str, lapses_at: float) -> None:
    """The validator still asks, so an accepted offer's place is held anew; a started one is the job's."""
    held = ReservationState.HELD
    connection.execute(
        "UPDATE reservations SET state = ?, lapses_at = ? WHERE state IN (?, ?) AND offer_id IN "
        "(SELECT id FROM offers WHERE validator = ? AND task_id = ?)",
        (held, lapses_at, held, ReservationState.LAPSED, validator, task_id),
    )


def lapse(connection: sqlite3.Connection, now: float) -> list[str]:
    """End the holds whose start never came; the tasks that are free now."""
    rows = connection.execute(
        "UPDATE reservations SET state = ? WHERE state = ? AND lapses_at <= ? RETURNING task_id",
        (ReservationState.LAPSED, ReservationState.HELD, now),
    )
    return [row[0] for row in rows.fetchall()]


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
        json.dumps([[reason.rule, reason.passed, reason.text] for reason in decision.reasons]),
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
        factors={name: (value, part) for name, (value, part) in json.loads(row["factors"]).items()},
        profile_hash=row["profile_hash"],
    )
