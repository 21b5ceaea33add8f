"""A process that sends notifications through Apprise: one order, then it ends.

Apprise is 36 MB and half a second, and a target can hang: neither belongs in the daemon. Messages are rare
(PERIOD_SECONDS), so that a process for each delivery costs less than one that waits.
"""

from __future__ import annotations

import logging
import sys
import threading
import time

import apprise

from miner.notify.messages import (
    PROTOCOL,
    NotifyDone,
    NotifyFailed,
    NotifyOrder,
    TargetOrder,
    TargetResult,
)
from miner.support.child_main import EventWriter, serve

#: Yields to the processes that answer validators.
NICENESS = 10
_MAX_ERROR_CHARS = 300


class _LastProblem(logging.Handler):
    """Keeps the last line that Apprise logged in each thread: it returns no reasons."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: dict[int, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self._texts[threading.get_ident()] = record.getMessage()

    def take(self) -> str:
        return self._texts.pop(threading.get_ident(), "")


def carry_out(order: NotifyOrder, write: EventWriter) -> NotifyDone:
    """Send to all targets at once. A target that exceeds its time has no result."""
    problems = _LastProblem()
    logging.getLogger("apprise").addHandler(problems)
    threads = [
        threading.Thread(target=lambda one=target: write(_deliver(one, problems)), daemon=True)
        for target in order.targets
    ]
    ends = time.monotonic() + order.seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(ends - time.monotonic(), 0))
    return NotifyDone()


def _deliver(order: TargetOrder, problems: _LastProblem) -> TargetResult:
    target = apprise.Apprise.instantiate(order.url)
    if target is None:
        problems.take()  # it has the URL in it
        return TargetResult(number=order.number, delivered=0, error="is not a URL that Apprise supports")
    if "overflow=" not in order.url:  # otherwise a service refuses what is too long for it
        target.overflow_mode = apprise.OverflowMode.SPLIT
    for count, message in enumerate(order.messages):
        try:
            sent = target.notify(
                title=message.title, body=message.body, notify_type=message.type, body_format=message.format
            )
        except Exception as error:  # noqa: BLE001 - whatever a service's plugin raises
            return _refused(order, count, f"{type(error).__name__}: {error}")
        if not sent:
            return _refused(order, count, problems.take() or "it was not taken")
    return TargetResult(number=order.number, delivered=len(order.messages))


def _refused(order: TargetOrder, delivered: int, error: str) -> TargetResult:
    text = error.replace(order.url, "its URL")
    return TargetResult(number=order.number, delivered=delivered, error=text[:_MAX_ERROR_CHARS])


def failure_event(error: Exception, _order: NotifyOrder) -> NotifyFailed:
    return NotifyFailed(text=f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS])


if __name__ == "__main__":
    sys.exit(serve(PROTOCOL, carry_out, failure_event, niceness=NICENESS))
