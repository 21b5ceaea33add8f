"""What follows when an attempt has ended: publish what is there, try again, or give up."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from core.remedies import MOST_OOM
from miner.jobs.states import MEANING, EndReason, Retry
from miner.jobs.times import Pace

#: Attempts that use up what is allowed: a full disk or the ladder's rungs do not.
_COUNTED = (Retry.AGAIN, Retry.ONCE)


class Next(StrEnum):
    PUBLISH = "publish"
    AGAIN = "again"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True)
class Situation:
    reason: EndReason
    #: How all attempts of this life ended, the last one included.
    history: tuple[EndReason, ...]
    #: Some attempt has left a model.
    has_model: bool
    #: Until a training would be asked to end.
    left_s: float
    #: What a new attempt needs before its first evaluation, roughly.
    needs_s: float


def after_attempt(now: Situation, pace: Pace) -> Next:
    """The rule. A model that is there is worth more than a try that can't end in time."""
    if now.reason is EndReason.TRAINED:
        return Next.PUBLISH
    ends = Next.PUBLISH if now.has_model else Next.GIVE_UP
    if not _allowed(now, pace) or now.left_s <= 0:
        return ends
    if now.has_model and now.left_s < max(now.needs_s, pace.attempt_needs_s):
        return ends
    return Next.AGAIN


def _allowed(now: Situation, pace: Pace) -> bool:
    retry = MEANING[now.reason].retry
    if retry is Retry.NO:
        return False
    if retry is Retry.LADDER:
        return now.history.count(now.reason) <= MOST_OOM
    if retry is Retry.ONCE and now.history.count(now.reason) > 1:
        return False
    return sum(MEANING[reason].retry in _COUNTED for reason in now.history) < pace.max_attempts
