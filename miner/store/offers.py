"""Offers in the books: what was answered, what an accepted one holds, and which answer stands."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from core.wire import MinerTaskOffer
from miner.fleet.base import Hold, HoldKind, TaskKey
from miner.jobs.states import ReservationState
from miner.offers.decision import Decision
from miner.offers.record import decision_from, texts_of
from miner.store.jobs import IS_OPEN
from miner.store.sql import insert_into
from miner.store.writer import StoreUnavailable

#: In the order of `_offer_row`, of `_decision_row` and of `save_place`.
_OFFER = (
    "validator",
    "task_id",
    "task_type",
    "model",
    "params",
    "hours",
    "ds_size",
    "received_at",
    "last_seen_at",
    "times_seen",
    "raw",
    "decision_id",
)
_DECISION = (
    "offer_id",
    "job_id",
    "accepted",
    "message",
    "score",
    "factors",
    "reasons",
    "details",
    "policy",
    "policy_hash",
    "profile_hash",
    "decided_at",
)
_RESERVATION = (
    "validator",
    "task_id",
    "offer_id",
    "state",
    "gpus",
    "starts_at",
    "ends_at",
    "priority",
    "firm",
    "held_at",
    "lapses_at",
)
_INSERT_OFFER = insert_into("offers", _OFFER, or_ignore=True)
_INSERT_DECISION = insert_into("decisions", _DECISION)
_UPSERT_RESERVATION = insert_into("reservations", _RESERVATION) + (
    " ON CONFLICT (validator, task_id) DO UPDATE SET offer_id = coalesce(excluded.offer_id, offer_id), "
    "state = excluded.state, gpus = excluded.gpus, starts_at = excluded.starts_at, "
    "ends_at = excluded.ends_at, priority = excluded.priority, firm = excluded.firm, "
    "held_at = excluded.held_at, lapses_at = excluded.lapses_at"
)
_SELECT_STANDING = (
    "SELECT offers.id AS known_id, decisions.* FROM offers "
    "LEFT JOIN decisions ON decisions.id = offers.decision_id "
    "WHERE offers.validator = ? AND offers.task_id = ?"
)
_SELECT_TAKEN = (
    "SELECT * FROM reservations WHERE state = ? OR (state = ? AND (validator, task_id) IN "  # noqa: S608
    f"(SELECT validator, task_id FROM jobs WHERE {IS_OPEN}))"
)
_SEEN_AGAIN = "UPDATE offers SET last_seen_at = ?, times_seen = times_seen + 1 WHERE id = ?"


@dataclass(frozen=True, slots=True)
class Place:
    """What a task holds from now on, for the books."""

    hold: Hold
    firm: bool
    #: An offer's: until when it waits for its start.
    lapses_at: float


class Taken(NamedTuple):
    """What a restart takes up."""

    place: Place
    #: The job's deadline; None: it is an offer's.
    deadline_at: float | None


@dataclass(frozen=True, slots=True)
class Recorded:
    """The decision that stands for an offer."""

    decision: Decision
    #: Whether it is an earlier one, sent again.
    repeated: bool
    #: Its row, unless it is an earlier one.
    decision_id: int | None = None


def record(
    connection: sqlite3.Connection,
    validator: str,
    offer: MinerTaskOffer,
    raw: bytes,
    decision: Decision | None,
    place: Place | None,
    *,
    now: float,
    is_kept: bool,
    refusal_stands_for: float,
    shared: int | None = None,
) -> Recorded:
    """Store an offer and what was decided, unless an earlier answer stands: an acceptance as long as it
    `is_kept` (its GPUs are held, or its job is open), a refusal for some seconds.

    No decision: it is known that an acceptance is kept. `place` is what the task holds from now on. `shared`:
    the row that the decision, a refusal, has already: it names no offer, the offers name it.
    """
    cursor = connection.execute(_INSERT_OFFER, _offer_row(validator, offer, raw, now, shared))
    standing = None
    if cursor.rowcount:
        if shared is not None and decision is not None:
            return Recorded(decision, repeated=False, decision_id=shared)
        offer_id = cursor.lastrowid
    else:
        standing = connection.execute(_SELECT_STANDING, (validator, offer.task_id)).fetchone()
        offer_id = standing["known_id"]
        connection.execute(_SEEN_AGAIN, (now, offer_id))
    if standing is not None and _stands(standing, now, is_kept, refusal_stands_for):
        if place is not None and standing["accepted"]:
            save_place(connection, place, offer_id, now)
        return Recorded(decision_from(standing, standing["details"]), repeated=True)
    if decision is None:  # the acceptance that was being written at the same time could not be
        raise StoreUnavailable("the answer to this offer could not be stored a moment ago; ask again")
    if shared is None:
        owner = offer_id if decision.accepted else None
        shared = connection.execute(_INSERT_DECISION, _decision_row(decision, now, offer_id=owner)).lastrowid
    connection.execute("UPDATE offers SET decision_id = ? WHERE id = ?", (shared, offer_id))
    if place is not None:
        save_place(connection, place, offer_id, now)
    return Recorded(decision, repeated=False, decision_id=shared)


def record_start_decision(
    connection: sqlite3.Connection, job_id: int, decision: Decision, now: float
) -> None:
    """What was decided about a start that no accepted offer went before."""
    connection.execute(_INSERT_DECISION, _decision_row(decision, now, job_id=job_id))


def save_place(connection: sqlite3.Connection, place: Place, offer_id: int | None, now: float) -> None:
    hold = place.hold
    state = ReservationState.HELD if hold.kind is HoldKind.OFFER else ReservationState.STARTED
    row = (
        *hold.key,
        offer_id,
        state,
        json.dumps(hold.gpus),
        hold.starts_at,
        hold.ends_at,
        hold.priority,
        place.firm,
        now,
        place.lapses_at,
    )
    connection.execute(_UPSERT_RESERVATION, row)


def lapse(connection: sqlite3.Connection, keys: Iterable[TaskKey]) -> None:
    """The starts of these never came."""
    connection.executemany(
        "UPDATE reservations SET state = ? WHERE validator = ? AND task_id = ? AND state = ?",
        [(ReservationState.LAPSED, *key, ReservationState.HELD) for key in keys],
    )


def taken(connection: sqlite3.Connection, open_jobs: Mapping[TaskKey, float]) -> list[Taken]:
    """The places of held offers, and of the jobs that are not over, also of those that have none."""
    rows = connection.execute(_SELECT_TAKEN, (ReservationState.HELD, ReservationState.STARTED))
    places = {TaskKey(row["validator"], row["task_id"]): _place(row) for row in rows.fetchall()}
    found = [Taken(place, None) for key, place in places.items() if place.hold.kind is HoldKind.OFFER]
    for key, deadline in open_jobs.items():
        nowhere = Place(Hold(key, HoldKind.JOB, (), deadline, deadline), firm=False, lapses_at=deadline)
        found.append(Taken(places.get(key, nowhere), deadline))
    return found


def _place(row: sqlite3.Row) -> Place:
    kind = HoldKind.OFFER if row["state"] == ReservationState.HELD else HoldKind.JOB
    hold = Hold(
        TaskKey(row["validator"], row["task_id"]),
        kind,
        tuple(json.loads(row["gpus"])),
        row["starts_at"],
        row["ends_at"],
        row["priority"],
    )
    return Place(hold, bool(row["firm"]), row["lapses_at"])


def _stands(standing: sqlite3.Row, now: float, is_kept: bool, refusal_stands_for: float) -> bool:
    if standing["id"] is None:  # no decision: pruned
        return False
    if standing["accepted"]:
        return is_kept
    # A clock that was set back makes no refusal stand for longer.
    return 0.0 <= now - float(standing["decided_at"]) < refusal_stands_for


def _offer_row(
    validator: str, offer: MinerTaskOffer, raw: bytes, now: float, decision_id: int | None
) -> tuple[Any, ...]:
    """In the order of `_OFFER`."""
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
        decision_id,
    )


def _decision_row(
    decision: Decision, now: float, *, offer_id: int | None = None, job_id: int | None = None
) -> tuple[Any, ...]:
    """In the order of `_DECISION`."""
    texts = texts_of(decision)
    return (
        offer_id,
        job_id,
        decision.accepted,
        decision.message,
        decision.score,
        texts.factors,
        texts.reasons,
        texts.details,
        decision.policy,
        decision.policy_hash,
        decision.profile_hash,
        now,
    )
