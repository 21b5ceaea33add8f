"""The verdict on an attempt, and what follows: publish, try again, or give up.

The reason is the daemon's own request to end if there was one, then the trainer's result, then the
backend's status. `core.runs.remedies` decides about another try.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from core.domain.job_states import EndReason
from core.runs.remedies import GOOD_ENDS, REASON_OF_RUN_END, AttemptFailure, retry_allowed
from core.runs.run_files import EXIT_OF, RunEnd, RunResult, TrainerExitCode
from miner.backends.base import EndCause, RunStatus
from miner.jobs.progress import RunProgress
from miner.jobs.timeline import JobTimings

#: The reason by the backend's word, for a trainer that could not say how it ended.
REASON_OF_BACKEND_END: dict[EndCause, EndReason] = {
    EndCause.OK: EndReason.BAD_SUBMISSION,
    EndCause.FAILED: EndReason.CRASHED,
    EndCause.STOPPED: EndReason.STOPPED,
    EndCause.KILLED: EndReason.KILLED,
    EndCause.TIMEOUT: EndReason.STOPPED,
    EndCause.NODE_FAIL: EndReason.NODE_FAILED,
    EndCause.PREEMPTED: EndReason.PREEMPTED,
    EndCause.CANCELLED: EndReason.CANCELLED_OUTSIDE,
    EndCause.NOT_STARTED: EndReason.NOT_STARTED,
    EndCause.OOM_KILLED: EndReason.HOST_MEMORY,
    EndCause.LOST: EndReason.LOST,
}


_END_OF_EXIT_CODE: dict[int, RunEnd] = {int(code): end for end, code in EXIT_OF.items()}


class AttemptVerdict(NamedTuple):
    reason: EndReason
    detail: str


def attempt_verdict(
    status: RunStatus,
    result: RunResult | None,
    progress: RunProgress,
    *,
    stop_verdict: AttemptVerdict | None,
    has_model: bool,
) -> AttemptVerdict:
    """`stop_verdict`: why we asked it to end, if we did. `has_model`: there is a submission."""
    if stop_verdict is not None and stop_verdict.reason is EndReason.DEADLINE:
        return _at_the_deadline(status, result, has_model=has_model)
    if stop_verdict is not None:
        return stop_verdict
    if result is not None:
        return _verdict_of_result(status, result, progress, has_model=has_model)
    return _verdict_of_backend(status, progress)


def _at_the_deadline(status: RunStatus, result: RunResult | None, *, has_model: bool) -> AttemptVerdict:
    detail = result.detail if result else status.detail
    return AttemptVerdict(EndReason.TRAINED if has_model else EndReason.STOPPED, detail)


def _verdict_of_result(
    status: RunStatus, result: RunResult, progress: RunProgress, *, has_model: bool
) -> AttemptVerdict:
    if result.end in GOOD_ENDS and has_model:
        return AttemptVerdict(EndReason.TRAINED, result.detail)
    if result.end is RunEnd.STOPPED:
        # Stopped from outside, or by a backend that was restarted. There is time to go on.
        if status.why in (EndCause.PREEMPTED, EndCause.CANCELLED, EndCause.NODE_FAIL):
            return AttemptVerdict(REASON_OF_BACKEND_END[status.why], status.detail)
        return AttemptVerdict(EndReason.KILLED, result.detail or status.detail or "asked to end from outside")
    if result.end is RunEnd.KILLED and status.why is EndCause.OOM_KILLED:
        # Counted by the kernel, where the trainer could not see it.
        return AttemptVerdict(EndReason.HOST_MEMORY, _most_telling_text(status, result, progress))
    return AttemptVerdict(REASON_OF_RUN_END[result.end], _most_telling_text(status, result, progress))


def _verdict_of_backend(status: RunStatus, progress: RunProgress) -> AttemptVerdict:
    text = _most_telling_text(status, None, progress)
    if progress.oom is not None:
        return AttemptVerdict(EndReason.OOM, text)
    if progress.end is not None and progress.end.end not in GOOD_ENDS:
        return AttemptVerdict(REASON_OF_RUN_END[progress.end.end], text)
    if status.why is EndCause.FAILED and status.code in _END_OF_EXIT_CODE:
        return AttemptVerdict(REASON_OF_RUN_END[_END_OF_EXIT_CODE[status.code]], text)
    if status.why in (EndCause.STOPPED, EndCause.TIMEOUT):
        # By an earlier daemon that could not record the reason any more.
        return AttemptVerdict(EndReason.KILLED, text)
    return AttemptVerdict(REASON_OF_BACKEND_END[status.why or EndCause.LOST], text)


def _most_telling_text(status: RunStatus, result: RunResult | None, progress: RunProgress) -> str:
    texts = [
        result.detail if result else "",
        progress.oom.text if progress.oom else "",
        progress.end.text if progress.end else "",
        status.detail,
    ]
    if text := next(filter(None, texts), ""):
        return text
    has_code = status.code not in (None, TrainerExitCode.OK)
    return f"ended with code {status.code}" if has_code else "no reason is known"


class NextAction(StrEnum):
    PUBLISH = "publish"
    AGAIN = "again"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True)
class RetrySituation:
    reason: EndReason
    #: The failures of all attempts since the job's last start, the last one included.
    history: tuple[AttemptFailure, ...]
    #: True if some attempt has left a model.
    has_model: bool
    #: Time until a training would be asked to end.
    left_s: float
    #: Rough time that a new attempt needs before its first evaluation.
    needs_s: float


def next_action(now: RetrySituation, timings: JobTimings) -> NextAction:
    """The retry rule. An existing model is worth more than a try that cannot end in time."""
    if now.reason is EndReason.TRAINED:
        return NextAction.PUBLISH
    ends = NextAction.PUBLISH if now.has_model else NextAction.GIVE_UP
    if not retry_allowed(now.history, timings.max_attempts) or now.left_s <= 0:
        return ends
    if now.has_model and now.left_s < max(now.needs_s, timings.attempt_needs_s):
        return ends
    return NextAction.AGAIN
