"""The state of every rule: inactive, pending, firing, resolved. Pure: time and values come from outside.

No value is not a good value: a rule that gets none stays as it is, and says so. An alert is resolved when
its value is on the good side of `clear`, when the rule no longer applies (nothing trains there any more), and
when its subject is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import NamedTuple

from miner.alerts.metrics import METRICS, MetricSeries, Point
from miner.alerts.rules import AlertRule, WindowStat
from miner.api.alerts import Severity
from miner.observe.alerts import AlertSubject, SubjectKind

#: A job that is not seen for this long is over; between two attempts it is not seen for a moment.
GONE_SECONDS = 30.0


class RuleState(StrEnum):
    INACTIVE = "inactive"
    PENDING = "pending"
    FIRING = "firing"


@dataclass(frozen=True, slots=True)
class MeasuredValue:
    """The value by which a rule judges one subject."""

    #: None if nothing was measured.
    value: float | None
    detail: str = ""
    #: False if the rule is not about this subject at the moment.
    applies: bool = True


class ChangeKind(StrEnum):
    RAISED = "raised"
    RESOLVED = "resolved"


class AlertChange(NamedTuple):
    kind: ChangeKind
    rule: str
    subject: AlertSubject
    value: float | None
    text: str


@dataclass(slots=True)
class TrackedRule:
    """One rule for one subject."""

    rule: str
    subject: AlertSubject
    state: RuleState = RuleState.INACTIVE
    #: Time at which the state began.
    since: float = 0.0
    value: float | None = None
    detail: str = ""
    #: True if nothing was measured the last time.
    no_data: bool = False
    seen_at: float = 0.0


class RuleTracker:
    """Every rule for every subject that it was evaluated for."""

    def __init__(self) -> None:
        self._tracked: dict[tuple[str, AlertSubject], TrackedRule] = {}

    def adopt(self, rule: str, subject: AlertSubject, raised_at: float, now: float) -> None:
        """Go on with an alert of an earlier process: it is not raised again."""
        self._tracked[rule, subject] = TrackedRule(
            rule, subject, RuleState.FIRING, raised_at, no_data=True, seen_at=now
        )

    def states(self) -> list[TrackedRule]:
        return list(self._tracked.values())

    def firing(self, rule: str) -> list[TrackedRule]:
        return [tracked for tracked in self._of_rule(rule) if tracked.state is RuleState.FIRING]

    def _of_rule(self, rule: str) -> list[TrackedRule]:
        return [tracked for tracked in self._tracked.values() if tracked.rule == rule]

    def evaluate(
        self,
        now: float,
        rules: Mapping[str, AlertRule],
        measured: Mapping[str, Mapping[AlertSubject, MeasuredValue]],
    ) -> list[AlertChange]:
        """Take one step. `measured`: by rule and subject; a rule that is missing has no data this time."""
        changes: list[AlertChange] = []
        for name, rule in rules.items():
            if name not in measured:
                for tracked in self._of_rule(name):
                    tracked.no_data, tracked.seen_at = True, now
                continue
            values = measured[name]
            for subject, value in values.items():
                tracked = self._tracked.setdefault((name, subject), TrackedRule(name, subject, since=now))
                tracked.seen_at = now
                changes += _step(tracked, rule, value, now)
            changes += self._missing(name, rule, values, now)
        changes += self._without_rule(rules, now)
        return changes

    def _missing(
        self, name: str, rule: AlertRule, values: Mapping[AlertSubject, MeasuredValue], now: float
    ) -> Iterable[AlertChange]:
        """Note the subjects that were not measured. A job is over then; a GPU is only silent."""
        metric = METRICS[rule.when.metric or ""]
        for tracked in self._of_rule(name):
            if tracked.subject in values:
                continue
            tracked.no_data = True
            if metric.scope is SubjectKind.JOB and now - tracked.seen_at >= GONE_SECONDS:
                del self._tracked[name, tracked.subject]
                yield from _resolved(tracked, "it is over", now)

    def _without_rule(self, rules: Mapping[str, AlertRule], now: float) -> Iterable[AlertChange]:
        for key in [key for key in self._tracked if key[0] not in rules]:
            yield from _resolved(self._tracked.pop(key), "the rule is off", now)


def _step(
    tracked: TrackedRule, rule: AlertRule, measured: MeasuredValue, now: float
) -> Iterable[AlertChange]:
    if not measured.applies:
        tracked.no_data = False
        yield from _resolved(tracked, "nothing trains there any more", now)
        return
    tracked.no_data = measured.value is None
    if measured.value is None:
        return
    tracked.value, tracked.detail = measured.value, measured.detail
    if tracked.state is RuleState.FIRING:
        if _is_clear(rule, measured.value):
            yield from _resolved(tracked, value_text(rule, measured), now)
        return
    if not _is_met(rule, measured.value):
        tracked.state, tracked.since = RuleState.INACTIVE, now
        return
    if tracked.state is RuleState.INACTIVE:
        tracked.state, tracked.since = RuleState.PENDING, now
    if now - tracked.since >= (rule.hold or 0.0):
        tracked.state, tracked.since = RuleState.FIRING, now
        yield AlertChange(
            ChangeKind.RAISED, tracked.rule, tracked.subject, measured.value, alert_text(rule, measured)
        )


def _resolved(tracked: TrackedRule, why: str, now: float) -> Iterable[AlertChange]:
    was_firing = tracked.state is RuleState.FIRING
    tracked.state, tracked.since = RuleState.INACTIVE, now
    if was_firing:
        yield AlertChange(
            ChangeKind.RESOLVED, tracked.rule, tracked.subject, tracked.value, f"resolved: {why}"
        )


def _is_met(rule: AlertRule, value: float) -> bool:
    when = rule.when
    if when.above is not None:
        return value > when.above.value
    assert when.below is not None
    return value < when.below.value


def _is_clear(rule: AlertRule, value: float) -> bool:
    when = rule.when
    limit = when.clear or when.above or when.below
    assert limit is not None
    return value <= limit.value if when.above is not None else value >= limit.value


# Values and texts


def measure(rule: AlertRule, series: MetricSeries) -> MeasuredValue:
    """Reduce the values in a rule's window to the one that it goes by."""
    points = series.points
    count = series.count if series.count is not None else len(points)
    if not points or count < (rule.when.least or 1):
        return MeasuredValue(None, series.detail)
    return MeasuredValue(_stat(rule.when.stat or WindowStat.MEAN, points), series.detail)


def _stat(stat: WindowStat, points: Sequence[Point]) -> float:
    values = [point.value for point in points]
    match stat:
        case WindowStat.MEAN:
            return fmean(values)
        case WindowStat.MAX:
            return max(values)
        case WindowStat.MIN:
            return min(values)
        case WindowStat.CHANGE:
            return values[-1] - values[0]
    return values[-1]


def value_text(rule: AlertRule, measured: MeasuredValue) -> str:
    metric = METRICS[rule.when.metric or ""]
    if measured.value is None:
        return f"{metric.name} is not known"
    change = "changed by " if rule.when.stat is WindowStat.CHANGE else ""
    detail = f" ({measured.detail})" if measured.detail else ""
    return f"{metric.name} {change or 'is '}{metric.unit.show(measured.value)}{detail}"


def alert_text(rule: AlertRule, measured: MeasuredValue) -> str:
    """Describe the alert: the value, its limit, and the purpose of the rule."""
    return "; ".join(
        part for part in (f"{value_text(rule, measured)}, {condition_text(rule)}", rule.description) if part
    )


def condition_text(rule: AlertRule) -> str:
    """Describe the condition: `above 90 % (mean over 1m) for 30s`."""
    when, metric = rule.when, METRICS[rule.when.metric or ""]
    side, limit = ("above", when.above) if when.above is not None else ("below", when.below)
    assert limit is not None
    stat = when.stat or WindowStat.MEAN
    window = f" ({stat} over {_duration(when.over)})" if when.over else ""
    hold = f" for {_duration(rule.hold)}" if rule.hold else ""
    return f"{side} {metric.unit.show(limit.value)}{window}{hold}"


def _duration(seconds: float) -> str:
    """Write a duration as rules do: `7d`, `30s`."""
    units = ((86_400, "d"), (3600, "h"), (60, "m"))
    return next((f"{seconds / size:g}{unit}" for size, unit in units if seconds >= size), f"{seconds:g}s")


class RuleTrial(NamedTuple):
    """The effect of a rule at a value."""

    value: float | None
    #: Its condition is met; None without a value.
    met: bool | None
    text: str


def trial(rule: AlertRule, value: float | None) -> RuleTrial:
    """Tell what a rule does at a value."""
    measured = MeasuredValue(value)
    if value is None:
        return RuleTrial(None, None, "nothing is measured; the rule stays as it is")
    met = _is_met(rule, value)
    hold = f", once it has lasted for {_duration(rule.hold)}" if rule.hold else ""
    only = ", while something trains there" if rule.only else ""
    if met:
        text = f"raises a {rule.severity or Severity.WARNING} alert{hold}{only}: {alert_text(rule, measured)}"
    elif _is_clear(rule, value):
        text = f"raises nothing, and resolves an open alert: {value_text(rule, measured)}"
    else:
        text = f"raises nothing, and leaves an open alert open: {value_text(rule, measured)}"
    return RuleTrial(value, met, text)
