"""How a launch went, from all that it left behind: its own word first, then the failures, then the exit
code."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from core.run_files import ExitCode, RunEnd
from trainer.callbacks.failures import is_disk_full
from trainer.sheet import Failure, Outcome
from trainer.wrapper.supervise import Ended

#: The kernel kills with this when a container's memory is used up; launchers report it in their own words.
_KILLED = re.compile(r"exitcode\s*:\s*-9|SIGKILL|Signal 9", re.IGNORECASE)
#: The launcher lists who failed by itself, and not whom it ended on that account.
_EXIT_9 = re.compile(r"exitcode\s*:\s*-9\b")
_EXIT_FULL = re.compile(rf"exitcode\s*:\s*{ExitCode.DISK_FULL}\b")
_SAID = 12


class Attempt(NamedTuple):
    end: RunEnd
    detail: str
    outcome: Outcome | None = None
    moment: str | None = None
    #: Where the failure was raised, as far as it left a record.
    stack: str = ""


def _killed(ended: Ended) -> Attempt:
    """Only the kernel's own count makes it memory: anybody can send the signal."""
    if ended.oom_kills:
        text = "a training process was killed by the kernel: the host's memory ran out"
        return Attempt(RunEnd.OOM, text, moment="train")
    return Attempt(RunEnd.KILLED, "a training process was killed from outside (SIGKILL), and not for memory")


def judged(
    ended: Ended, outcome: Outcome | None, failures: Sequence[Failure | None], marked: bool
) -> Attempt:
    """`marked`: our plugin was there."""
    if outcome is not None:
        return Attempt(outcome.end, outcome.detail, outcome)
    found = sorted((one for one in failures if one is not None), key=_weight)
    if found and found[0].end is RunEnd.CRASHED and _was_killed(ended):
        return _killed(ended)
    if found and found[0].end is RunEnd.CRASHED and (room := _no_room(ended)):
        return room
    if found and (ended.verdict is None or ended.verdict.end is RunEnd.HUNG):
        # One rank's failure leaves the others waiting: what hung afterwards is only a consequence.
        first = found[0]
        return Attempt(first.end, first.detail, moment=first.moment, stack=first.traceback)
    if ended.verdict is not None:
        return Attempt(ended.verdict.end, ended.verdict.detail)
    if not marked and (room := _no_room(ended)):
        return room
    if not marked:
        return Attempt(RunEnd.CRASHED, f"the engine never loaded our plugin{_last_words(ended)}")
    if ended.code == -signal.SIGKILL or any(_KILLED.search(line) for line in ended.tail):
        return _killed(ended)
    return _no_room(ended) or Attempt(
        RunEnd.CRASHED, f"the engine ended with {ended.code}{_last_words(ended)}"
    )


def _no_room(ended: Ended) -> Attempt | None:
    """On a full disk the failure's own record is lost as well; its words are in the output."""
    line = next((line for line in ended.tail if is_disk_full(line)), None)
    full = line is not None or any(_EXIT_FULL.search(one) for one in ended.tail)
    return Attempt(RunEnd.DISK_FULL, f"the disk is full: {line or 'a rank says so'}"[:500]) if full else None


def _was_killed(ended: Ended) -> bool:
    """A rank that was killed is the cause, and not what the others then say of a lost connection."""
    return any(_EXIT_9.search(line) for line in ended.tail)


def _weight(failure: Failure) -> tuple[bool, bool, float]:
    """Memory first: the ranks that did not run out fail as well, some of them sooner; and last whoever only
    lost the others."""
    return failure.end is not RunEnd.OOM, failure.consequence, failure.at


def _last_words(ended: Ended) -> str:
    lines = [line for line in ended.tail if line.strip()][-_SAID:]
    return "; its last words:\n" + "\n".join(lines) if lines else " without a word"
