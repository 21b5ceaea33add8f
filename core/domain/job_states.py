"""The states of a job and the reasons for which a job, or one attempt at it, ends.

`offered → reserved → queued → preparing → training → publishing → done`, or it ends as `refused`,
`lapsed`, `failed` or `cancelled`. An offer that was never started has no job: its reservation carries the
first two states. Each end reason says whether to retry, what the operator reads and what the validator
can see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from core.domain.errors import GodMinerError


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
        return self in FINAL_STATES


FINAL_STATES = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED})
OPEN_STATES = tuple(state for state in JobState if state not in FINAL_STATES)


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

    # By request
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    #: An attempt that was stopped and left nothing.
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
    BACKEND_GONE = "backend_gone"
    BACKEND_REJECTED = "backend_rejected"
    NO_GPU = "no_gpu"
    GPU_LOST = "gpu_lost"
    HOST_MEMORY = "host_memory"
    KILLED = "killed"
    LOST = "lost"

    # The cluster
    PREEMPTED = "preempted"
    NODE_FAILED = "node_failed"
    #: Neither by the operator nor by us.
    CANCELLED_OUTSIDE = "cancelled_outside"
    NOT_STARTED = "not_started"

    # The training
    INFEASIBLE = "infeasible"
    OOM = "oom"
    NAN = "nan"
    HUNG = "hung"
    CRASHED = "crashed"
    #: Our own mistake: an unexpected exception.
    BUG = "bug"


class RetryRule(StrEnum):
    """The consequence of an end."""

    #: Nothing: the job ends.
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
    retry: RetryRule
    operator: str
    validator: str


_NOTHING = "no submission (404), unless an earlier one is published"
_LATER = "no submission yet (404), unless an earlier one is published"


def _final(operator: str) -> EndMeaning:
    return EndMeaning(RetryRule.NO, operator, _NOTHING)


def _retried(retry: RetryRule) -> Callable[[str], EndMeaning]:
    return lambda operator: EndMeaning(retry, operator, _LATER)


_wait, _again, _once = _retried(RetryRule.WAIT), _retried(RetryRule.AGAIN), _retried(RetryRule.ONCE)
_smaller = _retried(RetryRule.LADDER)


END_MEANINGS: dict[EndReason, EndMeaning] = {
    EndReason.PUBLISHED: EndMeaning(RetryRule.NO, "The model is published.", "a submission"),
    EndReason.TRAINED: EndMeaning(
        RetryRule.NO, "The training left a model; publishing is next.", "a submission soon"
    ),
    EndReason.DEADLINE: _final("The deadline passed before a model was published."),
    EndReason.CANCELLED: _final("Cancelled by the operator."),
    EndReason.STOPPED: _final("The training was stopped before it had anything to save."),
    EndReason.NETWORK: _wait("The other side cannot be reached."),
    EndReason.RATE_LIMITED: _wait("Rate-limited by the Hugging Face Hub; HF_TOKEN raises the limit."),
    EndReason.DATA_GONE: _final("The dataset's address is wrong or has expired."),
    EndReason.URL_REFUSED: _final("The dataset's address leads into a private network."),
    EndReason.BAD_DATA: _final("The dataset cannot be trained on: its format, its columns or its rows."),
    EndReason.BAD_REWARD: _final("None of the task's reward functions can be run."),
    EndReason.MODEL_MISSING: _final("The hub knows no such model."),
    EndReason.MODEL_GATED: _final("The model is gated: accept its terms with the account of HF_TOKEN."),
    EndReason.BAD_MODEL: _final("The model cannot be loaded, or no model of its kind is trained here."),
    EndReason.HUB_REFUSED: _wait(
        "The hub refuses the upload: check HF_TOKEN's write access and the account's quota."
    ),
    EndReason.BAD_SUBMISSION: _once("What the training left is not a valid submission; its check says why."),
    EndReason.DISK_FULL: _wait("The disk is full; the job continues when there is space."),
    EndReason.BACKEND_GONE: _wait("The backend does not respond; what is running continues without it."),
    EndReason.BACKEND_REJECTED: _final("The backend refuses to run this; its message is in the job's log."),
    EndReason.NO_GPU: _wait("No GPU of this host can be used."),
    EndReason.GPU_LOST: _again("A GPU failed during the job, which continues on others."),
    EndReason.HOST_MEMORY: _once("The host's memory ran out: use fewer loader workers or jobs."),
    EndReason.KILLED: _again("Something outside ended the training."),
    EndReason.LOST: _again("The training vanished, as when a host restarts."),
    EndReason.PREEMPTED: _wait(
        "The cluster took the node for a job that goes before; the job continues later."
    ),
    EndReason.NODE_FAILED: _again("The node failed or was restarted; the job continues, best on another."),
    EndReason.CANCELLED_OUTSIDE: _once("Somebody cancelled the job in the cluster."),
    EndReason.NOT_STARTED: _wait(
        "The job did not begin: its node could not start it, or the scheduler let it wait for too long."
    ),
    EndReason.INFEASIBLE: _final("No training of this task fits the GPUs and the time that is left."),
    EndReason.OOM: _smaller("The GPU's memory ran out; a smaller plan is tried."),
    EndReason.NAN: _once("The loss became NaN; retried at 0.3 of the learning rate."),
    EndReason.HUNG: _once("The training hung; its stacks are in its log."),
    EndReason.CRASHED: _once("The training failed unexpectedly; see its log."),
    EndReason.BUG: _once("god-miner itself failed; its log has the traceback."),
}


class StepFailed(GodMinerError):
    """A step of a job that failed, and why."""

    code = "job_step_failed"

    def __init__(self, reason: EndReason, text: str, retry_after: float | None = None) -> None:
        super().__init__(text)
        self.reason = reason
        #: Seconds that the other side asked to wait, as in `Retry-After`.
        self.retry_after = retry_after


#: ("model", "dataset", "check" or "upload", bytes so far, bytes in total if known). Called from the event
#: loop, at most a few times per second.
ProgressCallback = Callable[[str, int, int | None], None]
