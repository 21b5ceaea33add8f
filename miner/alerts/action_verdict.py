"""How large a change is, and what came of it: the arithmetic of actions. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.runs.control import even_micro
from core.runs.progress import ControlEvent
from miner.store.alerts import ActionOutcome, ActionRow

#: An action that helped may cost so many times more before it is undone.
_WORSE_ALTHOUGH_IT_HELPED = 3.0
#: The next number that shares a batch out evenly may be so many times the asked change away.
_MOST_GROWTH = 2.5
#: The loss is worse if it is this much above what it was, and beyond its own scatter.
_LOSS_WORSE = 0.1


def smaller_micro(sequences: int, micro: int, change: float) -> int:
    """At least one sequence less, shared out evenly."""
    return even_micro(sequences, max(1, min(micro - 1, math.floor(micro * (1 + change)))))


def larger_micro(sequences: int, micro: int, change: float) -> int | None:
    """The least larger number that saves a pass, from the change on; None where it would be far beyond."""
    wanted = max(micro + 1, round(micro * (1 + change)))
    passes = -(-sequences // micro)
    if passes == 1:
        return None
    larger = max(even_micro(sequences, wanted), -(-sequences // (passes - 1)))
    return larger if micro < larger <= max(micro + 1, micro * (1 + _MOST_GROWTH * change)) else None


def was_useless(row: ActionRow) -> bool:
    """Smaller passes that left the memory as it was: still smaller ones would only cost time."""
    old, new = row.before.get("value"), row.after.get("value")
    if row.kind != "batch" or row.outcome is not ActionOutcome.KEPT or old is None or new is None:
        return False
    return bool(row.after.get("micro", math.inf) < row.before.get("micro", 0) and new >= old)


def is_carried_out(row: ActionRow, answer: ControlEvent) -> bool:
    """Each kind by its own number: a request has both, and one of them may be refused."""
    if row.kind == "duty":
        return abs(answer.duty - float(row.after.get("duty") or 1.0)) < 0.005
    return answer.micro != row.before.get("micro")


@dataclass(frozen=True, slots=True)
class ActionVerdict:
    is_worse: bool
    text: str


def judge(row: ActionRow, after: Mapping[str, Any], worse: float, *, below: bool) -> ActionVerdict:
    """Compare the numbers before and after. `below`: the rule's number was too low."""
    before = row.before
    old, new = before.get("value"), after.get("value")
    improved = old is not None and new is not None and (new > old if below else new < old)
    if _loss_is_worse(before, after):
        return ActionVerdict(True, f"the loss rose from {before['loss']:.4g} to {after['loss']:.4g}")
    speed = _speed_change(row, after)
    limit = worse * _WORSE_ALTHOUGH_IT_HELPED if improved else worse
    shown = "" if speed is None else f"tokens per second {100 * speed:+.0f} %"
    if speed is not None and speed < -limit:
        return ActionVerdict(True, f"{shown}, more than the action should cost")
    grew = row.kind == "batch" and row.after.get("micro", 0) > before.get("micro", 0)
    if grew and speed is not None and speed <= 0:
        return ActionVerdict(True, f"{shown}: a larger pass is not faster")
    helped = "it helped" if improved else "it did not help" if new is not None else ""
    return ActionVerdict(False, ", ".join(part for part in (helped, shown) if part))


def _loss_is_worse(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    old, new = before.get("loss"), after.get("loss")
    if old is None or new is None:
        return False
    return bool(new > old + max(_LOSS_WORSE * abs(old), 3 * (before.get("loss_scatter") or 0.0)))


def _speed_change(row: ActionRow, after: Mapping[str, Any]) -> float | None:
    """The change of tokens per second, beyond what the duty explains."""
    old, new = row.before.get("tokens_s"), after.get("tokens_s")
    if not old or new is None:
        return None
    expected = old
    if row.kind == "duty":
        expected *= (row.after.get("duty") or 1.0) / (row.before.get("duty") or 1.0)
    return float(new / expected - 1)
