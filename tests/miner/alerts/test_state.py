"""Rules play scripts on a clock of their own: pending, firing, resolved; no value is not a good value."""

from __future__ import annotations

from typing import Any

from miner.alerts.metrics import MetricSeries, Point
from miner.alerts.rules import AlertRule
from miner.alerts.state import (
    GONE_SECONDS,
    AlertChange,
    ChangeKind,
    MeasuredValue,
    RuleState,
    RuleTracker,
    condition_text,
    measure,
)
from miner.observe.alerts import AlertSubject, gpu_subject, job_subject

GPU, JOB = gpu_subject("g0"), job_subject(7)


def rule(metric: str = "gpu.temperature", **more: Any) -> AlertRule:
    when = {"metric": metric, "above": 85, "clear": 80, **more.pop("when", {})}
    return AlertRule.model_validate({"when": {k: v for k, v in when.items() if v is not None}, **more})


class Play:
    """One rule, a step of five seconds at a time."""

    def __init__(self, played: AlertRule, subject: AlertSubject = GPU) -> None:
        self.tracker, self.rules, self.subject, self.now = RuleTracker(), {"hot": played}, subject, 1000.0

    def __call__(self, value: float | MeasuredValue | None, seconds: float = 5.0) -> list[AlertChange]:
        self.now += seconds
        found = value if isinstance(value, MeasuredValue) else MeasuredValue(value)
        return self.tracker.evaluate(self.now, self.rules, {"hot": {self.subject: found}})

    @property
    def state(self) -> RuleState:
        return self.tracker.states()[0].state


def kinds(changes: list[AlertChange]) -> list[ChangeKind]:
    return [change.kind for change in changes]


def test_an_alert_is_raised_once_the_condition_has_held_and_resolved_beyond_the_hysteresis() -> None:
    play = Play(rule(**{"for": "30s"}))
    assert play(86.0) == []
    assert play.state is RuleState.PENDING
    assert play(86.0, 29.0) == []
    assert kinds(play(87.0, 1.0)) == [ChangeKind.RAISED]
    assert play(90.0, 600.0) == []  # once only
    assert play(83.0) == []  # between the two limits
    assert play.state is RuleState.FIRING
    (change,) = play(80.0)
    assert (change.kind, change.text) == (ChangeKind.RESOLVED, "resolved: gpu.temperature is 80 °C")
    assert play.state is RuleState.INACTIVE


def test_a_condition_that_is_met_only_now_and_then_raises_nothing() -> None:
    play = Play(rule(**{"for": "30s"}))
    for _ in range(20):
        assert play(86.0, 20.0) == []
        assert play(84.0) == []
    assert play.state is RuleState.INACTIVE


def test_without_values_a_rule_keeps_its_state_and_says_so() -> None:
    play = Play(rule())
    play(90.0)
    assert play(None, 3600.0) == []
    assert play.tracker.states()[0].no_data
    play.tracker.evaluate(play.now + 3600.0, play.rules, {"hot": {}})  # not even the GPU is seen
    assert play.state is RuleState.FIRING
    assert kinds(play(70.0)) == [ChangeKind.RESOLVED]
    assert not play.tracker.states()[0].no_data


def test_an_alert_is_resolved_when_nothing_trains_there_any_more() -> None:
    play = Play(rule())
    play(90.0)
    (change,) = play(MeasuredValue(None, applies=False))
    assert change.text == "resolved: nothing trains there any more"


def test_a_job_that_is_gone_resolves_its_alert_but_not_between_two_attempts() -> None:
    play = Play(rule("job.training_time", when={"above": "8h", "clear": None}), JOB)
    assert kinds(play(9 * 3600.0)) == [ChangeKind.RAISED]
    assert play.tracker.evaluate(play.now + 3600, play.rules, {}) == []  # nobody knows which jobs there are
    play.now += 3600
    nobody = {"hot": dict[AlertSubject, MeasuredValue]()}
    assert play.tracker.evaluate(play.now + GONE_SECONDS - 1, play.rules, nobody) == []
    (change,) = play.tracker.evaluate(play.now + GONE_SECONDS, play.rules, nobody)
    assert (change.kind, change.subject) == (ChangeKind.RESOLVED, JOB)
    assert play.tracker.states() == []


def test_a_rule_that_is_taken_out_resolves_its_alerts() -> None:
    play = Play(rule())
    play(90.0)
    (change,) = play.tracker.evaluate(play.now, {}, {})
    assert change.text == "resolved: the rule is off"


def test_an_alert_of_an_earlier_process_is_not_raised_again() -> None:
    play = Play(rule())
    play.tracker.adopt("hot", GPU, 900.0, play.now)
    assert play(90.0) == []
    assert kinds(play(70.0)) == [ChangeKind.RESOLVED]


def test_a_rule_below_a_limit_works_the_other_way_round() -> None:
    play = Play(rule("gpu.utilization", when={"above": None, "below": "50%", "clear": "60%"}))
    assert kinds(play(0.3)) == [ChangeKind.RAISED]
    assert play(0.55) == []
    assert kinds(play(0.6)) == [ChangeKind.RESOLVED]


def test_values_of_a_window_become_one_by_the_rules_statistic() -> None:
    series = MetricSeries(tuple(Point(at, value) for at, value in enumerate((1.0, 5.0, 3.0))))
    found = {
        stat: measure(rule(when={"stat": stat}), series).value
        for stat in ("mean", "max", "min", "last", "change")
    }
    assert found == {"mean": 3.0, "max": 5.0, "min": 1.0, "last": 3.0, "change": 2.0}
    assert measure(rule(when={"least": 4}), series).value is None
    assert measure(rule(when={"least": 4}), MetricSeries(series.points, count=9)).value == 3.0
    assert measure(rule(), MetricSeries()).value is None


def test_a_condition_is_shown_as_it_is_written() -> None:
    shown = condition_text(rule(when={"over": "90s", "stat": "max"}, **{"for": "2m"}))
    assert shown == "above 85 °C (max over 1.5m) for 2m"
