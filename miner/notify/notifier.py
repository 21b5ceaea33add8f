"""Send alerts and reports to the targets of NOTIFY_URLS, without blocking anything else.

An alert goes out at once, but at most one message per rule in PERIOD_SECONDS: later alerts wait and are sent
together. A target that fails or hangs is tried again after growing pauses, and then gets
everything it has missed in one message. An alert is marked in the store once a target has taken it; those
without the mark are sent after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.domain.errors import GodMinerError
from core.domain.records import printable
from miner.api.alerts import Severity
from miner.api.status import NotificationTarget
from miner.notify.messages import NotifyMessage
from miner.notify.targets import Delivery, NotifyTargets
from miner.store.alerts import AlertRow, mark_notified, unsent_alerts
from miner.store.store import Store

log = logging.getLogger(__name__)

#: Minimum interval between two messages of a rule.
PERIOD_SECONDS = 900.0
#: Alerts within this time of the first are sent together.
COLLECT_SECONDS = 2.0
#: Pause before a target that failed is tried again; doubles.
RETRY_SECONDS, RETRY_MAX_SECONDS = 30.0, 3600.0
#: Older alerts are no longer sent, neither after a restart nor to a target that was down.
FORGET_SECONDS = 86_400.0
#: The most alerts that wait for a target; the newest stay.
MAX_WAITING = 200
#: The longest text of an alert, and the most alerts in one message.
_MAX_TEXT_CHARS, _MAX_LINES = 600, 100
_TYPES: dict[Severity, Any] = {
    Severity.INFO: "info",
    Severity.WARNING: "warning",
    Severity.CRITICAL: "failure",
}


@dataclass(frozen=True, slots=True)
class Notice:
    """One alert, raised or resolved, as it is sent."""

    alert: AlertRow
    came: float

    @property
    def key(self) -> tuple[int, bool]:
        return self.alert.id, self.alert.resolved_at is not None

    @property
    def head(self) -> str:
        word = "resolved" if self.alert.resolved_at is not None else self.alert.severity.value
        return f"[{word}] {self.alert.rule}, {self.alert.subject}"


@dataclass
class _TargetState:
    notices: deque[Notice] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))
    reports: deque[ReportNotice] = field(default_factory=lambda: deque(maxlen=3))
    failures: int = 0
    next_try: float = 0.0
    error: str = ""
    sent_at: float | None = None


@dataclass(frozen=True, slots=True)
class ReportNotice:
    """A report as it is sent, without secrets."""

    title: str
    markdown: str
    html: str


class Notifier:
    def __init__(
        self,
        store: Store,
        targets: NotifyTargets,
        *,
        period: float,
        host: str,
        clock: Callable[[], float] = time.time,
        collect: float = COLLECT_SECONDS,
    ) -> None:
        """`host` names this machine in every title."""
        self._store, self._targets, self._clock = store, targets, clock
        self._period, self._host, self._collect = period, host, collect
        self._states = [_TargetState() for _ in targets.urls]
        #: Alerts that wait until their rule may be sent again, and when each rule was sent last.
        self._held: deque[Notice] = deque(maxlen=MAX_WAITING)
        self._told: dict[str, float] = {}
        #: Alerts added lately: one that comes from the store too is sent once.
        self._known: deque[tuple[int, bool]] = deque(maxlen=1000)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, alert: AlertRow) -> None:
        """Take an alert that was raised or resolved. Returns at once, whatever the targets do."""
        notice = Notice(alert, self._clock())
        if not self._states or notice.key in self._known:
            return
        self._known.append(notice.key)
        self._held.append(notice)
        self._wake.set()

    def add_report(self, report: ReportNotice) -> None:
        for state in self._states:
            state.reports.append(report)
        self._wake.set()

    async def start(self) -> None:
        """Load the alerts that were not sent before the restart, and begin."""
        if not self._states:
            return
        for alert in await self._store.read(unsent_alerts, self._clock() - FORGET_SECONDS):
            self.add(alert)
        self._task = asyncio.create_task(self._run(), name="notifications")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def test(self, alert: AlertRow) -> list[Delivery]:
        """Send an alert to every target now; return their results."""
        message = self._alert_message([Notice(alert, self._clock())])
        results = await self._targets.deliver({number: [message] for number in range(len(self._states))})
        return [results[number] for number in sorted(results)]

    def status(self) -> list[NotificationTarget]:
        """Each target by its name, which holds no secret."""
        return [
            NotificationTarget(
                target=name,
                waiting=len(state.notices) + len(state.reports),
                failures=state.failures,
                error=state.error or None,
                sent_at=state.sent_at,
            )
            for name, state in zip(self._targets.names, self._states, strict=True)
        ]

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._seconds_to_wait()):
                    await self._wake.wait()
                    await asyncio.sleep(self._collect)
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                await self.send_due()
            except Exception:  # a bug here must not end all notifications
                log.exception("notifications could not be sent; they are tried again")
                await asyncio.sleep(RETRY_SECONDS)

    def _seconds_to_wait(self) -> float | None:
        """Time until a rule may be sent or a target is tried again, or None if nothing waits for that."""
        moments = [self._told.get(notice.alert.rule, 0.0) + self._period for notice in self._held]
        moments += [state.next_try for state in self._states if state.notices or state.reports]
        if not moments:
            return None
        # Not longer at once: the clock may be put back.
        return min(max(min(moments) - self._clock(), 0.0), RETRY_MAX_SECONDS) + self._collect

    async def send_due(self) -> None:
        """Send what is due to the targets that may be tried now."""
        now = self._clock()
        self._release(now)
        due: dict[int, list[NotifyMessage]] = {}
        sent: dict[int, tuple[list[Notice], list[ReportNotice]]] = {}
        for number, state in enumerate(self._states):
            while state.notices and now - state.notices[0].came > FORGET_SECONDS:
                state.notices.popleft()
            if not 0 < state.next_try - now <= RETRY_MAX_SECONDS and (state.notices or state.reports):
                sent[number] = list(state.notices), list(state.reports)
                due[number] = self._messages(number, *sent[number])
        if not due:
            return
        results = await self._targets.deliver(due)
        taken: set[int] = set()
        for number, result in results.items():
            taken.update(self._note_result(self._states[number], result, *sent[number]))
        await self._mark(taken, now)

    def _release(self, now: float) -> None:
        """Hand over the alerts of rules that may be sent again, and of those last sent in the future, by a
        clock that was put back since."""
        self._told = {rule: at for rule, at in self._told.items() if 0 <= now - at < self._period}
        free = {notice.alert.rule for notice in self._held} - self._told.keys()
        released = [notice for notice in self._held if notice.alert.rule in free]
        for notice in released:
            self._held.remove(notice)
            for state in self._states:
                state.notices.append(notice)
        self._told |= dict.fromkeys(free, now)

    def _messages(
        self, number: int, notices: Sequence[Notice], reports: Sequence[ReportNotice]
    ) -> list[NotifyMessage]:
        messages = [self._alert_message(notices)] if notices else []
        for report in reports:
            mail = self._targets.is_mail(number)
            title = f"god-miner on {self._host}: {report.title}"
            if mail:
                messages.append(NotifyMessage(title=title, body=report.html, format="html"))
            else:
                messages.append(NotifyMessage(title=title, body=report.markdown, format="markdown"))
        return messages

    def _alert_message(self, notices: Sequence[Notice]) -> NotifyMessage:
        """Write one alert, or a digest of several, the newest first."""
        newest = sorted(notices, key=lambda notice: notice.came)[::-1]
        worst = max((notice.alert for notice in newest), key=_badness)
        kind = "success" if worst.resolved_at is not None else _TYPES[worst.severity]
        if len(newest) == 1:
            title, lines = newest[0].head, [self._text(newest[0])]
        else:
            title = f"{len(newest)} alerts"
            lines = [f"{notice.head}: {self._text(notice)}" for notice in newest[:_MAX_LINES]]
            if len(newest) > _MAX_LINES:
                lines.append(f"and {len(newest) - _MAX_LINES} more: god-miner alerts list")
        return NotifyMessage(
            title=self._clean(f"god-miner on {self._host}: {title}"),
            body=self._clean("\n".join(lines)),
            type=kind,
        )

    def _text(self, notice: Notice) -> str:
        """Remove secrets from the text, then cut it: half a secret would not be recognised."""
        return self._targets.redact(notice.alert.text)[:_MAX_TEXT_CHARS]

    def _clean(self, text: str) -> str:
        """Remove secrets, control characters, and mentions of all members of a chat."""
        return printable(self._targets.redact(text)).replace("@", "@\N{ZERO WIDTH SPACE}")

    def _note_result(
        self,
        state: _TargetState,
        result: Delivery,
        notices: Sequence[Notice],
        reports: Sequence[ReportNotice],
    ) -> list[int]:
        """Remove what the target has taken; return the ids of its alerts."""
        taken: list[int] = []
        delivered = result.delivered
        if notices and delivered:
            delivered -= 1
            taken = [notice.alert.id for notice in notices]
            gone = {notice.key for notice in notices}
            left = [notice for notice in state.notices if notice.key not in gone]
            state.notices.clear()
            state.notices.extend(left)
        for report in reports[:delivered]:
            if report in state.reports:  # newer ones may have pushed it out meanwhile
                state.reports.remove(report)
        if not result.error:
            state.failures, state.next_try, state.error, state.sent_at = 0, 0.0, "", self._clock()
            return taken
        pause = min(RETRY_SECONDS * 2 ** min(state.failures, 16), RETRY_MAX_SECONDS)
        state.failures += 1
        state.next_try, state.error = self._clock() + pause, result.error
        log.warning("notifications to %s fail, tried again in %.0f s: %s", result.target, pause, result.error)
        return taken

    async def _mark(self, taken: set[int], now: float) -> None:
        if not taken:
            return
        try:
            await self._store.write(mark_notified, taken, now)
        except GodMinerError as error:  # they may be sent once more after a restart
            log.warning("sent alerts cannot be marked as sent: %s", error)


def _badness(alert: AlertRow) -> int:
    return -1 if alert.resolved_at is not None else list(Severity).index(alert.severity)
