"""A decision in the store and back. What is stored is shown, explained and replayed long afterwards.

Every part is stored under the names of its fields: one that a later version adds, moves or drops misreads
nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from pydantic_core import PydanticSerializationError, to_json

from core.budget import Refusal
from core.errors import GodMinerError
from miner.fleet.base import Placement
from miner.offers.decision import Decision, ExpectedValue, Factor, PlanBrief, Reason

T = TypeVar("T")

#: Versions before 0.2 stored bare values, in this order.
_BARE: dict[str, tuple[str, ...]] = {
    "Reason": ("rule", "passed", "text", "way"),
    "Factor": ("value", "contribution", "text", "weight"),
    "ExpectedValue": ("work", "success", "win", "punished", "points", "gpu_hours"),
    "PlanBrief": ("gpus", "busy_s", "wait_s", "epochs", "share"),
    "Placement": ("gpus", "starts_at", "ends_at", "why"),
}


class DecisionUnreadable(GodMinerError):
    code = "decision_unreadable"


class Row(Protocol):
    """A row by column names, SQLite's or a dictionary."""

    def __getitem__(self, name: str, /) -> Any: ...


class Texts(NamedTuple):
    """The JSON columns of a stored decision."""

    factors: str
    reasons: str
    details: str


def texts_of(decision: Decision) -> Texts:
    return Texts(
        _json({name: factor._asdict() for name, factor in decision.factors.items()}),
        _json([reason._asdict() for reason in decision.reasons]),
        details_of(decision),
    )


def details_of(decision: Decision) -> str:
    """Everything that has no column of its own."""
    kept: dict[str, Any] = {
        "profile": decision.profile,
        "threshold": decision.threshold,
        "placement": decision.placement and asdict(decision.placement),
        "value": decision.value and decision.value._asdict(),
        "plan": decision.plan and decision.plan._asdict(),
        "refusal": decision.refusal,
    }
    return _json({key: value for key, value in kept.items() if value is not None})


def _json(value: dict[str, Any] | list[Any]) -> str:
    """A third of what `json` takes, for every new offer."""
    try:
        return to_json(value).decode()
    except PydanticSerializationError:  # half a surrogate pair in a message, which only `json` can write
        return json.dumps(value)


def decision_from(row: Row, details: str = "{}") -> Decision:
    """From a row of `decisions`; `details` of an older file is empty."""
    known: dict[str, Any] = json.loads(details or "{}")
    placement, value, plan = (known.get(key) for key in ("placement", "value", "plan"))
    where = read_part(Placement, placement) if placement else None
    return Decision(
        accepted=bool(row["accepted"]),
        message=row["message"],
        policy=row["policy"],
        policy_hash=row["policy_hash"],
        reasons=tuple(read_part(Reason, reason) for reason in json.loads(row["reasons"])),
        score=row["score"],
        factors={name: read_part(Factor, part) for name, part in json.loads(row["factors"]).items()},
        profile_hash=row["profile_hash"],
        profile=known.get("profile"),
        threshold=known.get("threshold"),
        placement=where and replace(where, gpus=tuple(where.gpus)),
        value=read_part(ExpectedValue, value) if value else None,
        plan=read_part(PlanBrief, plan) if plan else None,
        refusal=Refusal(known["refusal"]) if known.get("refusal") in list(Refusal) else None,
    )


def read_part(part: type[T], stored: dict[str, Any] | list[Any]) -> T:
    """By name; what this version has no field for is left out."""
    if isinstance(stored, list):
        stored = dict(zip(_BARE[part.__name__], stored, strict=False))
    fields: tuple[str, ...] = part.__match_args__  # type: ignore[attr-defined]
    try:
        return part(**{name: stored[name] for name in fields if name in stored})
    except TypeError as error:
        raise DecisionUnreadable(f"a stored {part.__name__} can't be read: {error}") from None
