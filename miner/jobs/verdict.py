"""How an attempt has ended: what we asked for, then the trainer's word, then the engine's."""

from __future__ import annotations

from typing import NamedTuple

from core.run_files import EXIT_OF, ExitCode, RunEnd, RunResult
from miner.engines.base import Status, Why
from miner.jobs.states import OF_ENGINE, OF_RUN, EndReason
from miner.watch.progress import Course

_OF_CODE: dict[int, RunEnd] = {int(code): end for end, code in EXIT_OF.items()}
#: Ends after which nothing more is to be had from the same attempt.
_WELL = frozenset({RunEnd.FINISHED, RunEnd.EARLY, RunEnd.CLOCK})


class Verdict(NamedTuple):
    reason: EndReason
    detail: str


def verdict(
    status: Status,
    result: RunResult | None,
    course: Course,
    *,
    asked: Verdict | None,
    has_model: bool,
) -> Verdict:
    """`asked`: why we told it to end, if we did. `has_model`: a submission lies in its place."""
    if asked is not None and asked.reason is EndReason.DEADLINE:
        return _at_the_deadline(status, result, has_model=has_model)
    if asked is not None:
        return asked
    if result is not None:
        return _told(status, result, course, has_model=has_model)
    return _untold(status, course)


def _at_the_deadline(status: Status, result: RunResult | None, *, has_model: bool) -> Verdict:
    detail = result.detail if result else status.detail
    return Verdict(EndReason.TRAINED if has_model else EndReason.STOPPED, detail)


def _told(status: Status, result: RunResult, course: Course, *, has_model: bool) -> Verdict:
    if result.end in _WELL and has_model:
        return Verdict(EndReason.TRAINED, result.detail)
    if result.end is RunEnd.STOPPED:
        # Not by us: somebody outside, or an engine that was restarted. There is time to go on.
        return Verdict(EndReason.KILLED, result.detail or status.detail or "asked to end from outside")
    if result.end is RunEnd.KILLED and status.why is Why.OOM_KILLED:
        # Counted by the kernel where the trainer could not look.
        return Verdict(EndReason.HOST_MEMORY, _words(status, result, course))
    return Verdict(OF_RUN[result.end], _words(status, result, course))


def _untold(status: Status, course: Course) -> Verdict:
    words = _words(status, None, course)
    if course.oom is not None:
        return Verdict(EndReason.OOM, words)
    if course.end is not None and course.end.end not in _WELL:
        return Verdict(OF_RUN[course.end.end], words)
    if status.why is Why.FAILED and status.code in _OF_CODE:
        return Verdict(OF_RUN[_OF_CODE[status.code]], words)
    if status.why in (Why.STOPPED, Why.TIMEOUT):
        # By a life of this daemon that could not write down why any more.
        return Verdict(EndReason.KILLED, words)
    return Verdict(OF_ENGINE[status.why or Why.LOST], words)


def _words(status: Status, result: RunResult | None, course: Course) -> str:
    """The most telling sentence that somebody has left."""
    said = [
        result.detail if result else "",
        course.oom.text if course.oom else "",
        course.end.text if course.end else "",
        status.detail,
    ]
    text = next((words for words in said if words), "")
    if text:
        return text
    return f"ended with code {status.code}" if status.code not in (None, ExitCode.OK) else "no word of why"
