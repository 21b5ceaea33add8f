"""One time limit for a whole check: a repository may be made to keep its readers busy."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from core.domain.errors import GodMinerError
from miner.tournament.check.entry import CheckedEntry, FindingState, RuleFinding

#: Time limit. Our own checkout takes one minute on two busy cores.
CHECK_LIMIT_S = 600.0
#: Time to clean up. Then the signal comes again, in case the first exception was swallowed.
_AGAIN_S = 30.0


class CheckTooSlow(GodMinerError):
    """A repository that could not be cloned within the limit."""

    code = "check_too_slow"


class TimeIsUp(BaseException):
    """The limit is reached. It is a `BaseException`, so that no `except Exception` catches it on the way."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeIsUp` in the main thread after so many seconds, by a signal, which ends loops, regular
    expressions and waits for other processes alike."""

    def on_alarm(*_: object) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_within_limit(
    opened: Callable[[], CheckedEntry],
    run_checks: Callable[[CheckedEntry], Iterator[RuleFinding]],
    on_finding: Callable[[RuleFinding], None],
) -> CheckedEntry:
    """Open an entry and check it. The limit ends the check with a finding of its own."""
    entry, number = None, 1
    try:
        with time_limit(CHECK_LIMIT_S):
            entry = opened()
            for finding in run_checks(entry):
                on_finding(finding)
                number = finding.number + 1
    except TimeIsUp:
        signal.setitimer(signal.ITIMER_REAL, 0)  # it may have come while the limit was removed
        if entry is None:
            raise CheckTooSlow(
                f"cloning was not done within {CHECK_LIMIT_S:g} s in all: look at the connection, or name "
                "fewer entries by --other"
            ) from None
        on_finding(_unfinished(number))
    assert entry is not None
    return entry


def _unfinished(number: int) -> RuleFinding:
    text = f"the check was ended after {CHECK_LIMIT_S:g} s, at this rule: it and those after it are not known"
    to_do = "take out files that are huge or generated; on a busy machine, check again"
    return RuleFinding(number, "time limit", FindingState.FAILED, text, to_do=to_do)
