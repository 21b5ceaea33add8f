"""Where a job can be and how it, or one attempt at it, can end.

`offered → reserved → queued → preparing → training → publishing → done`, and the ends `refused`,
`lapsed`, `failed`, `cancelled`. An offer that was never started has no job; its reservation carries the
first two states. Each end reason says what is done next, what the operator is told and what the validator
can see of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from core.run_files import RunEnd
from miner.engines.base import Why


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
    """Why a job, an attempt or a step ended."""

    # Good ends
    PUBLISHED = "published"
    #: An attempt left a complete submission.
    TRAINED = "trained"

    # Told to
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    #: An attempt that was asked to end and left nothing.
    STOPPED = "stopped"

    # The outside
    NETWORK = "network"
    RATE_LIMITED = "rate_limited"
    DATA_GONE = "data_gone"
    URL_REFUSED = "url_refused"
    BAD_DATA = "bad_data"
    BAD_REWARD = "bad_reward"
    MODEL_MISSING = "model_missing"
    MODEL_GATED = "model_gated"
    BAD_MODEL = "bad_model"
    HUB_REFUSED = "hub_refused"
    BAD_SUBMISSION = "bad_submission"

    # This host
    DISK_FULL = "disk_full"
    ENGINE_GONE = "engine_gone"
    ENGINE_REJECTED = "engine_rejected"
    NO_GPU = "no_gpu"
    GPU_LOST = "gpu_lost"
    HOST_MEMORY = "host_memory"
    KILLED = "killed"
    LOST = "lost"

    # The training
    INFEASIBLE = "infeasible"
    OOM = "oom"
    NAN = "nan"
    HUNG = "hung"
    CRASHED = "crashed"
    #: Our own mistake: an exception that nobody foresaw.
    BUG = "bug"


class Retry(StrEnum):
    """What follows."""

    #: Nothing: this is the job's end.
    NO = "no"
    #: The same step again after a growing pause, until the deadline.
    WAIT = "wait"
    #: A new attempt, as often as attempts are allowed.
    AGAIN = "again"
    #: A new attempt, one for this reason.
    ONCE = "once"
    #: A new attempt with the planner's next smaller plan.
    LADDER = "ladder"


@dataclass(frozen=True)
class EndMeaning:
    retry: Retry
    operator: str
    validator: str


_NOTHING = "no submission (404), unless an earlier one is published"
_LATER = "no submission yet (404), unless an earlier one is published"


def _final(operator: str) -> EndMeaning:
    return EndMeaning(Retry.NO, operator, _NOTHING)


def _tried(retry: Retry, operator: str) -> EndMeaning:
    return EndMeaning(retry, operator, _LATER)


MEANING: dict[EndReason, EndMeaning] = {
    EndReason.PUBLISHED: EndMeaning(Retry.NO, "The model is published.", "a submission"),
    EndReason.TRAINED: EndMeaning(
        Retry.NO, "The training left a model; it is published next.", "a submission soon"
    ),
    EndReason.DEADLINE: _final("The deadline passed before a model was published."),
    EndReason.CANCELLED: _final("Cancelled by the operator."),
    EndReason.STOPPED: _final("The training was asked to end and had nothing to save yet."),
    EndReason.NETWORK: _tried(Retry.WAIT, "The other side can't be reached; tried again until the deadline."),
    EndReason.RATE_LIMITED: _tried(
        Retry.WAIT, "The hub says that too much was asked of it; HF_TOKEN raises the limit."
    ),
    EndReason.DATA_GONE: _final("The dataset is not there (any more): its address has run out or is wrong."),
    EndReason.URL_REFUSED: _final("The dataset's address leads where a miner must not look."),
    EndReason.BAD_DATA: _final("The dataset can't be trained on: its form, its columns or its rows."),
    EndReason.BAD_REWARD: _final("None of the task's reward functions can be run."),
    EndReason.MODEL_MISSING: _final("The hub knows no such model."),
    EndReason.MODEL_GATED: _final("The model is gated: accept its terms with the account of HF_TOKEN."),
    EndReason.BAD_MODEL: _final("The model can't be loaded or is of no kind that is trained here."),
    EndReason.HUB_REFUSED: _tried(
        Retry.WAIT, "The hub refuses the upload: see that HF_TOKEN may write, and the account's quota."
    ),
    EndReason.BAD_SUBMISSION: _tried(
        Retry.ONCE, "What the training left is no valid submission; its check says why."
    ),
    EndReason.DISK_FULL: _tried(Retry.WAIT, "The disk is full; it goes on when there is room again."),
    EndReason.ENGINE_GONE: _tried(Retry.WAIT, "The engine does not answer; what runs goes on without it."),
    EndReason.ENGINE_REJECTED: _final("The engine refuses to run this: its words are in the job's log."),
    EndReason.NO_GPU: _tried(Retry.WAIT, "No GPU of this host can be used; tried again until the deadline."),
    EndReason.GPU_LOST: _tried(Retry.AGAIN, "A GPU failed under the job; it goes on with others."),
    EndReason.HOST_MEMORY: _tried(
        Retry.ONCE, "The host's memory ran out (not the GPU's): fewer loader workers or jobs would help."
    ),
    EndReason.KILLED: _tried(
        Retry.AGAIN, "Something outside ended the training; it goes on from its last save."
    ),
    EndReason.LOST: _tried(Retry.AGAIN, "The training vanished without a trace, as when a host restarts."),
    EndReason.INFEASIBLE: _final("No training of this task fits the GPUs and the time that is left."),
    EndReason.OOM: _tried(Retry.LADDER, "The GPU's memory ran out; a smaller plan is tried."),
    EndReason.NAN: _tried(Retry.ONCE, "The loss became NaN; tried again at 0.3 of the learning rate."),
    EndReason.HUNG: _tried(
        Retry.ONCE, "The training stood still and was ended; where it hung is in its log."
    ),
    EndReason.CRASHED: _tried(Retry.ONCE, "The training failed in a way nobody foresaw; see its log."),
    EndReason.BUG: _tried(Retry.ONCE, "god-miner itself failed; its log has the traceback."),
}

#: The trainer's own word for how it ended, where no submission came of it.
OF_RUN: dict[RunEnd, EndReason] = {
    RunEnd.FINISHED: EndReason.BAD_SUBMISSION,
    RunEnd.EARLY: EndReason.BAD_SUBMISSION,
    RunEnd.CLOCK: EndReason.STOPPED,
    RunEnd.STOPPED: EndReason.STOPPED,
    RunEnd.OOM: EndReason.OOM,
    RunEnd.NAN: EndReason.NAN,
    RunEnd.BAD_DATA: EndReason.BAD_DATA,
    RunEnd.BAD_MODEL: EndReason.BAD_MODEL,
    RunEnd.BAD_REWARD: EndReason.BAD_REWARD,
    RunEnd.DISK_FULL: EndReason.DISK_FULL,
    RunEnd.HUNG: EndReason.HUNG,
    RunEnd.KILLED: EndReason.KILLED,
    RunEnd.INFEASIBLE: EndReason.INFEASIBLE,
    RunEnd.CRASHED: EndReason.CRASHED,
}

#: The engine's, for a trainer that could say nothing any more.
OF_ENGINE: dict[Why, EndReason] = {
    Why.OK: EndReason.BAD_SUBMISSION,
    Why.FAILED: EndReason.CRASHED,
    Why.STOPPED: EndReason.STOPPED,
    Why.KILLED: EndReason.KILLED,
    Why.TIMEOUT: EndReason.STOPPED,
    Why.NODE_FAIL: EndReason.LOST,
    Why.OOM_KILLED: EndReason.HOST_MEMORY,
    Why.LOST: EndReason.LOST,
}
