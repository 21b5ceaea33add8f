"""Where a job can be and how it can end.

`offered → reserved → queued → preparing → training → publishing → done`, and the ends `refused`,
`lapsed`, `failed`, `cancelled`. An offer that was never started has no job; its reservation carries the
first two states. Each end reason says whether a new attempt makes sense, what the operator is told and
what the validator can see of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class JobState(StrEnum):
    QUEUED = "queued"
    PREPARING = "preparing"
    TRAINING = "training"
    PUBLISHING = "publishing"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self in OVER


OVER = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED})
OPEN = tuple(state for state in JobState if state not in OVER)


class ReservationState(StrEnum):
    #: An accepted offer holds its place until the start comes.
    HELD = "held"
    #: The start came: the job holds the place now.
    STARTED = "started"
    #: No start came in time.
    LAPSED = "lapsed"


class EndReason(StrEnum):
    PUBLISHED = "published"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class EndMeaning:
    retry: bool
    operator: str
    validator: str


MEANING: dict[EndReason, EndMeaning] = {
    EndReason.PUBLISHED: EndMeaning(False, "The model is published.", "a submission"),
    EndReason.DEADLINE: EndMeaning(
        False, "The deadline passed before a model was published.", "no submission (404)"
    ),
    EndReason.CANCELLED: EndMeaning(False, "Cancelled by the operator.", "no submission (404)"),
}
