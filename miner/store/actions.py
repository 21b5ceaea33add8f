"""Actions in the store: what rules asked of running trainings, with the numbers before and after."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TypedDict

from miner.api.reports import ActionCount
from miner.store.database import add_event, insert_row

_MAX_DETAIL_CHARS = 2000


class ActionOutcome(StrEnum):
    """The state of an action, or its result."""

    ASKED = "asked"  # of the training, which has not answered
    APPLIED = "applied"  # it answered; whether it helped is not known yet
    KEPT = "kept"
    UNDONE = "undone"  # it made things worse
    REFUSED = "refused"  # cannot be done, in words in `detail`
    NEXT_ATTEMPT = "next attempt"  # this training cannot; the plan of the next one will
    RETURNED = "returned"  # duty that was given back because the alert is resolved

    @property
    def is_final(self) -> bool:
        return self not in (ActionOutcome.ASKED, ActionOutcome.APPLIED)


class ActionNumbers(TypedDict, total=False):
    """Numbers before or after an action. None: not known."""

    #: Settings of the training.
    micro: int | None
    duty: float | None
    #: The number of the request in the control file.
    number: int
    #: What the rule is about.
    value: float | None
    tokens_s: float | None
    loss: float | None
    loss_scatter: float | None


@dataclass(frozen=True, slots=True)
class NewAction:
    """A change that a rule asks of a training."""

    rule: str
    job_id: int
    attempt: int
    #: "batch" or "duty".
    kind: str
    before: ActionNumbers
    after: ActionNumbers
    outcome: ActionOutcome = ActionOutcome.ASKED
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ActionRow(NewAction):
    """An action, from when it was asked until it is judged."""

    id: int = 0
    asked_at: float = 0.0
    ended_at: float | None = None

    @property
    def micro_change(self) -> float:
        """The change of the sequences in one pass; 0 if it is another kind of action, or not known."""
        old, new = self.before.get("micro"), self.after.get("micro")
        return new - old if self.kind == "batch" and old is not None and new is not None else 0


def add_action(connection: sqlite3.Connection, action: NewAction, now: float) -> ActionRow:
    """Insert an action, with its event."""
    values = asdict(action) | {
        "asked_at": now,
        "before": json.dumps(action.before),
        "after": json.dumps(action.after),
        "detail": action.detail[:_MAX_DETAIL_CHARS],
        "ended_at": now if action.outcome.is_final else None,
    }
    return _changed(connection, insert_row(connection, "actions", **values), now)


def update_action(
    connection: sqlite3.Connection,
    action_id: int,
    outcome: ActionOutcome,
    after: ActionNumbers,
    detail: str,
    now: float,
) -> ActionRow:
    """Store the new state of an action, with its event. Later numbers are added to `after`."""
    (before,) = connection.execute("SELECT after FROM actions WHERE id = ?", (action_id,)).fetchone()
    merged = json.dumps(json.loads(before or "{}") | after)
    ended_at = now if outcome.is_final else None
    connection.execute(
        "UPDATE actions SET outcome = ?, after = ?, detail = ?, ended_at = ? WHERE id = ?",
        (outcome, merged, detail[:_MAX_DETAIL_CHARS], ended_at, action_id),
    )
    return _changed(connection, action_id, now)


def _changed(connection: sqlite3.Connection, action_id: int, now: float) -> ActionRow:
    """Return the row as it is now, and add its event."""
    row = _action_from(connection.execute("SELECT * FROM actions WHERE id = ?", (action_id,)).fetchone())
    changes = (
        ("micro", row.before.get("micro"), row.after.get("micro")),
        ("duty", row.before.get("duty"), row.after.get("duty")),
    )
    shown = ", ".join(f"{name} {old} → {new}" for name, old, new in changes if new not in (None, old))
    text = f"attempt {row.attempt}, {row.rule}: {shown or row.kind}: {row.outcome}"
    text += f", {row.detail}" if row.detail else ""
    about = {"rule": row.rule, "before": row.before, "after": row.after, "outcome": row.outcome}
    add_event(connection, now, "rule_action", None, job_id=row.job_id, text=text, **about)
    return row


def actions_of_job(connection: sqlite3.Connection, job_id: int) -> list[ActionRow]:
    rows = connection.execute("SELECT * FROM actions WHERE job_id = ? ORDER BY id", (job_id,))
    return [_action_from(row) for row in rows]


def count_actions(connection: sqlite3.Connection, begins_at: float, ends_at: float) -> list[ActionCount]:
    """Count the actions of a time by rule, kind and outcome, the most frequent first."""
    rows = connection.execute(
        "SELECT rule, kind, outcome, count(*) AS count FROM actions WHERE asked_at >= ? AND asked_at < ? "
        "GROUP BY rule, kind, outcome ORDER BY count DESC, rule, outcome",
        (begins_at, ends_at),
    )
    return [ActionCount(**row) for row in rows]


def micro_of_next_attempt(connection: sqlite3.Connection, job_id: int) -> int | None:
    """Return the largest micro batch that the next plan of a job may have, if a training could not be
    changed."""
    row = connection.execute(
        "SELECT min(json_extract(after, '$.micro')) FROM actions "
        "WHERE job_id = ? AND kind = 'batch' AND outcome = ?",
        (job_id, ActionOutcome.NEXT_ATTEMPT),
    ).fetchone()
    return None if row[0] is None else int(row[0])


def _action_from(row: sqlite3.Row) -> ActionRow:
    typed = {
        "before": json.loads(row["before"]),
        "after": json.loads(row["after"] or "{}"),
        "outcome": ActionOutcome(row["outcome"]),
    }
    return ActionRow(**dict(row) | typed)
