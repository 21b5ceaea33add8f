"""A decision in the books and back. What is stored is shown, explained and replayed long afterwards."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Protocol

from core.budget import Refusal
from miner.fleet.base import Placement
from miner.offers.decision import Decision, ExpectedValue, Factor, PlanBrief, Reason


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
        json.dumps(decision.factors) if decision.factors else "{}",
        json.dumps([list(reason) for reason in decision.reasons]),
        details_of(decision),
    )


def details_of(decision: Decision) -> str:
    """Everything that has no column of its own."""
    placement = decision.placement
    kept: dict[str, Any] = {
        "profile": decision.profile,
        "threshold": decision.threshold,
        "placement": placement
        and [list(placement.gpus), placement.starts_at, placement.ends_at, placement.why],
        "value": decision.value and list(decision.value),
        "plan": decision.plan and list(decision.plan),
        "refusal": decision.refusal,
    }
    return json.dumps({key: value for key, value in kept.items() if value is not None})


def decision_from(row: Row, details: str = "{}") -> Decision:
    """From a row of `decisions`; `details` of an older file is empty."""
    known: dict[str, Any] = json.loads(details or "{}")
    placement, value, plan = (known.get(key) for key in ("placement", "value", "plan"))
    return Decision(
        accepted=bool(row["accepted"]),
        message=row["message"],
        policy=row["policy"],
        policy_hash=row["policy_hash"],
        reasons=tuple(Reason(*reason) for reason in json.loads(row["reasons"])),
        score=row["score"],
        factors={name: Factor(*parts) for name, parts in json.loads(row["factors"]).items()},
        profile_hash=row["profile_hash"],
        profile=known.get("profile"),
        threshold=known.get("threshold"),
        placement=Placement(tuple(placement[0]), *placement[1:]) if placement else None,
        value=ExpectedValue(*value) if value else None,
        plan=PlanBrief(*plan) if plan else None,
        refusal=Refusal(known["refusal"]) if known.get("refusal") in list(Refusal) else None,
    )
