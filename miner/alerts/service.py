"""Alerts of the running daemon: evaluate the rules, store alerts, and pass them on to the notifier.

Two sources, one table: rules of `alerts.yaml`, and every `AlertKind` that the program raises. Neither may
hold up anything else: rules run every few seconds beside the offers, slow queries in a thread once a minute.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from core.domain.errors import GodMinerError
from miner.alerts.actions import ActionController
from miner.alerts.metrics import (
    METRICS,
    LiveMeasurements,
    MetricSeries,
    SeriesBySubject,
)
from miner.alerts.request_watch import unknown_fields
from miner.alerts.rules import AlertRule, LiveAlertRules
from miner.alerts.state import AlertChange, ChangeKind, MeasuredValue, RuleTracker, TrackedRule, measure
from miner.api.alerts import RuleStatus, Severity
from miner.jobs.running_training import RunningTraining
from miner.observe.alerts import (
    ENDED_BY_GOOD_NEWS,
    MINER,
    AlertKind,
    AlertSubject,
    SubjectKind,
    gpu_subject,
    job_subject,
)
from miner.observe.metrics import Metrics
from miner.store import alerts as store_alerts
from miner.store.alerts import AlertRow, NewAlert
from miner.store.store import Store

log = logging.getLogger(__name__)

#: Interval at which the store is read.
STORE_SECONDS = 60.0
#: An alert of the program that nothing resolves is closed after this long without coming again.
FORGET_SECONDS = 6 * 3600.0
#: Without a window, the last measurement counts if it is not older than this.
NOW_SECONDS = 30.0


class AlertSink(Protocol):
    """Notifies the operator. Never waits, never fails."""

    def add(self, alert: AlertRow) -> None: ...


class AlertService:
    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        rules: LiveAlertRules,
        live: LiveMeasurements,
        *,
        clock: Callable[[], float],
        standing_problems: Callable[[], Mapping[str, str | None]] = dict,
    ) -> None:
        """`standing_problems` returns by kind of alert what is wrong now, or None once that is over."""
        self.rules, self.live = rules, live
        self.sink: AlertSink | None = None
        self.tracker = RuleTracker()
        self.actions = ActionController(store, live)
        self._store, self._metrics, self._clock = store, metrics, clock
        self._standing_problems = standing_problems
        #: Kinds without an open alert. Others may have one, perhaps of an earlier process.
        self._clear: set[str] = set()
        self._adopted = False
        #: By metric and window, as last read from the store.
        self._stored: dict[tuple[str, float], SeriesBySubject] = {}
        self._stored_at = float("-inf")
        #: Changes that could not be stored; they are tried again.
        self._unsaved: list[AlertChange] = []

    # Alerts of the program

    def on_kind(self, kind: AlertKind, text: str, subject: AlertSubject = MINER) -> None:
        """Store an alert of the program with its event; good news resolves the alerts that it ends."""
        rules, now = self.rules.current(), self._clock()
        if kind.is_good_news:
            ended = [alert.value for alert in ENDED_BY_GOOD_NEWS[kind]]
            resolved = f"resolved: {text}"
            self._write(store_alerts.record_resolution, ended, subject, resolved, now, event=kind.value)
            return
        self._clear.discard(kind)  # what is mended before the next step is seen there
        alert = NewAlert(kind.value, subject, rules.severity_of_kind(kind), text)
        self._write(store_alerts.record_alert, alert, now, notify=rules.notifies(kind))

    def _write(self, work: Callable[..., list[AlertRow]], *args: Any, **more: Any) -> None:
        try:
            self._store.write(work, *args, **more).add_done_callback(self._note_written)
        except GodMinerError:  # the store is not open yet, closed already, or its disk is full
            log.debug("an alert is not stored")

    def _note_written(self, future: asyncio.Future[list[AlertRow]]) -> None:
        if future.cancelled():
            return
        if (error := future.exception()) is not None:
            log.debug("an alert is not stored: %s", error)
        else:
            self._notify(future.result())

    def _notify(self, alerts: Iterable[AlertRow]) -> None:
        if self.sink is not None:
            for alert in alerts:
                self.sink.add(alert)

    # Rules

    async def evaluate(self) -> None:
        """Take one step with every rule, store what changed, and act."""
        now = self._clock()
        if not self._adopted:
            await self._adopt(now)
        rules = self.rules.current()
        self._resolve_what_is_over(now)
        self.live.record(now)
        if now - self._stored_at >= STORE_SECONDS:
            await self._read_store(rules.rules, now)
        measured = {}
        for name, rule in rules.rules.items():
            if (values := self._measured(rule, now)) is not None:
                measured[name] = values
            await asyncio.sleep(0)  # all rules for eight GPUs take 15 ms: offers go in between
        self._unsaved += self.tracker.evaluate(now, rules.rules, measured)
        await self._save_changes(rules.rules, now)
        await self.actions.step(rules.rules, self.tracker, now)

    async def _adopt(self, now: float) -> None:
        """Go on with the open alerts of an earlier process."""
        kinds = set(AlertKind)
        for row in await self._store.read(store_alerts.open_alerts):
            if row.rule not in kinds:
                self.tracker.adopt(row.rule, row.subject, row.raised_at, now)
        self._adopted = True
        if self.rules.problem is not None:  # found before the store was open
            self.on_kind(AlertKind.ALERTS_PROBLEM, self.rules.problem)

    def _problems(self) -> dict[str, str | None]:
        return {AlertKind.ALERTS_PROBLEM: self.rules.problem, **self._standing_problems()}

    def _resolve_what_is_over(self, now: float) -> None:
        for kind, problem in self._problems().items():
            if problem is not None:
                self._clear.discard(kind)
            elif kind not in self._clear:
                self._clear.add(kind)
                text = "resolved: the problem is gone"
                self._write(store_alerts.record_resolution, [str(kind)], MINER, text, now)

    async def _read_store(self, rules: Mapping[str, AlertRule], now: float) -> None:
        wanted = {
            (rule.when.metric, rule.when.over or 0.0)
            for rule in rules.values()
            if rule.when.metric and METRICS[rule.when.metric].query
        }

        def query(connection: sqlite3.Connection) -> dict[tuple[str, float], SeriesBySubject]:
            series = {}
            for name, over in wanted:
                read = METRICS[name].query
                assert read is not None
                series[name, over] = read(connection, now - over, now)
            return series

        self._stored_at = now
        self._stored = await self._store.read(query)
        await self._look_at_bodies()
        resolved = frozenset(self._problems()).union(*ENDED_BY_GOOD_NEWS.values())
        unresolved = [kind for kind in AlertKind if kind not in resolved]
        await self._store.write(store_alerts.expire_alerts, unresolved, now - FORGET_SECONDS, now)
        firing = [tracked for name in rules for tracked in self.tracker.firing(name) if not tracked.no_data]
        values = [(tracked.rule, tracked.subject, tracked.value) for tracked in firing]
        await self._store.write(store_alerts.note_values, values, now)

    async def _look_at_bodies(self) -> None:
        """Look for fields that are new, in the newest request of each kind from each validator."""
        bodies = self.live.requests.take_bodies()
        if not bodies:
            return

        def look() -> list[tuple[str, list[str], float]]:
            return [(hotkey, unknown_fields(path, raw), at) for (hotkey, path), (at, raw) in bodies.items()]

        for hotkey, names, at in await asyncio.to_thread(look):
            self.live.requests.note_new_fields(hotkey, names, at)

    def _measured(self, rule: AlertRule, now: float) -> dict[AlertSubject, MeasuredValue] | None:
        """Return the value of each subject, or None while the subjects are not known."""
        metric = METRICS[rule.when.metric or ""]
        over = rule.when.over or 0.0
        if metric.query is not None:
            series = self._stored.get((metric.name, over), {})
            return {subject: measure(rule, values) for subject, values in series.items()}
        assert metric.read is not None
        values = metric.read(self.live, now - (over or NOW_SECONDS))
        trainings = self.live.trainings()
        if metric.scope is SubjectKind.JOB and trainings is None:
            return None
        return {
            subject: self._measured_there(rule, subject, series, trainings, now)
            for subject, series in values.items()
        }

    def _measured_there(
        self,
        rule: AlertRule,
        subject: AlertSubject,
        series: MetricSeries,
        trainings: list[RunningTraining] | None,
        now: float,
    ) -> MeasuredValue:
        if rule.only is None:
            return measure(rule, series)
        if trainings is None:
            return MeasuredValue(None)
        since = training_since(subject, trainings)
        if since is None:
            return MeasuredValue(None, applies=False)
        if now - since < (rule.when.over or 0.0):
            return MeasuredValue(None)  # of what was before the training, nothing may count
        points = tuple(point for point in series.points if point.at >= since)
        return measure(rule, MetricSeries(points, series.count, series.detail))

    async def _save_changes(self, rules: Mapping[str, AlertRule], now: float) -> None:
        while self._unsaved:
            await self._save(self._unsaved[0], rules, now)
            del self._unsaved[0]

    async def _save(self, change: AlertChange, rules: Mapping[str, AlertRule], now: float) -> None:
        rule = rules.get(change.rule)
        severity = (rule.severity if rule else None) or Severity.WARNING
        if change.kind is ChangeKind.RAISED:
            alert = NewAlert(change.rule, change.subject, severity, change.text, change.value)
            notify = self.rules.current().notifies(change.rule)
            changed = await self._store.write(store_alerts.record_alert, alert, now, notify=notify)
            self._metrics.alerts.labels(change.rule).inc()
            level = logging.INFO if severity is Severity.INFO else logging.WARNING
            log.log(level, "alert %s, %s: %s", change.rule, change.subject, change.text)
        else:
            changed = await self._store.write(
                store_alerts.record_resolution,
                [change.rule],
                change.subject,
                change.text,
                now,
                event=change.rule,
            )
            log.info("%s, %s: %s", change.rule, change.subject, change.text)
        self._notify(changed)

    # For displays

    def rule_states(self) -> list[RuleStatus]:
        """Return every rule with its state and value: an entry for each subject, or one without."""
        tracked: dict[str, list[TrackedRule]] = {}
        for state in self.tracker.states():
            tracked.setdefault(state.rule, []).append(state)
        shown = []
        for name, rule in self.rules.current().rules.items():
            unit, limit = METRICS[rule.when.metric or ""].unit, rule.when.above or rule.when.below
            sign = ">" if rule.when.above else "<"
            states = tracked.get(name, [])
            for state in states or [TrackedRule(name, MINER, no_data=True)]:
                status = RuleStatus(
                    name=name,
                    metric=rule.when.metric,
                    severity=rule.severity or Severity.WARNING,
                    description=rule.description,
                    limit_text=f"{sign} {unit.show(limit.value)}" if limit else "",
                    subject=str(state.subject) if states else "",
                    state=state.state,
                    since=state.since,
                    value=state.value,
                    detail=state.detail,
                    no_data=state.no_data,
                    value_text=None if state.value is None else unit.show(state.value),
                )
                shown.append(status)
        return shown


def training_since(subject: AlertSubject, trainings: list[RunningTraining]) -> float | None:
    """Return the time since which the job, or the job on the GPU, trains, or None if it does not."""
    for training in trainings:
        if subject == job_subject(training.job_id) or subject in map(gpu_subject, training.gpus):
            return training.training_since
    return None
