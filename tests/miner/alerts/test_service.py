"""Alerts in the store: raised and resolved once, also over a restart; from rules and from the program."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from miner.alerts.metrics import LiveMeasurements
from miner.alerts.request_watch import RequestWatch
from miner.alerts.rules import LiveAlertRules
from miner.alerts.service import FORGET_SECONDS, AlertService
from miner.api.alerts import Severity
from miner.api.samples import GpuSample
from miner.chain.clock_offsets import ClockOffset
from miner.doctor.checks.machine import SYNC_FIX
from miner.fleet.sampler import SampleHistory
from miner.observe.alerts import (
    MINER,
    AlertKind,
    Alerts,
    AlertSubject,
    gpu_subject,
    job_subject,
    validator_subject,
)
from miner.observe.metrics import Metrics
from miner.store import alerts as store_alerts
from miner.store.alerts import AlertRow
from miner.store.events import EventFilter, list_events
from miner.store.store import Store
from tests.miner.history import NOW, add_job

G0 = gpu_subject("g0")
RULES = """
rules:
  gpu-hot: {for: 0s, when: {over: 10s}, act: null}
  gpu-memory: {off: true}
"""


class AlertBench:
    """The service with a clock, a GPU and somebody who is notified."""

    def __init__(self, store: Store, folder: Path, rules: str = RULES) -> None:
        self.store, self.now = store, 10_000.0
        file = folder / "alerts.yaml"
        file.write_text(rules)
        self.samples, self.requests = SampleHistory(), RequestWatch()
        self.notified: list[AlertRow] = []
        self.clock_offset: ClockOffset | None = None
        self.standing_problems: dict[str, str | None] = {}
        self.live = LiveMeasurements(self.samples, self.requests, list, lambda: self.clock_offset)
        self.metrics = Metrics()
        live_rules = LiveAlertRules(file, folder / "last-good.json", self.raise_alert)
        self.service = AlertService(
            store,
            self.metrics,
            live_rules,
            self.live,
            clock=lambda: self.now,
            standing_problems=lambda: self.standing_problems,
        )
        self.service.sink = self
        self.alerts = Alerts(self.metrics, self.service.on_kind)

    def raise_alert(self, kind: AlertKind, text: str, subject: AlertSubject = MINER) -> None:
        self.alerts(kind, text, subject)

    def add(self, alert: AlertRow) -> None:
        self.notified.append(alert)

    async def play(self, temperature: float | None, steps: int = 3) -> None:
        for _ in range(steps):
            self.now += 5.0
            if temperature is not None:
                self.samples.add([GpuSample(self.now, "g0", temperature=temperature)])
            await self.service.evaluate()

    async def settled(self) -> None:
        await self.store.write(lambda connection: None)
        await asyncio.sleep(0)

    def rows(self) -> list[AlertRow]:
        return self.store.read_now(store_alerts.newest_alerts, 100)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event.as_dict() for event in self.store.read_now(list_events, EventFilter(kinds=kinds))]


async def test_a_gpu_that_heats_up_and_cools_down_is_one_alert(store: Store, tmp_path: Path) -> None:
    bench = AlertBench(store, tmp_path)
    await bench.play(70.0)
    assert bench.rows() == []
    await bench.play(91.0, 20)
    (row,) = bench.rows()
    assert (row.rule, row.subject, row.severity) == ("gpu-hot", G0, Severity.WARNING)
    assert "above 85 °C" in row.text
    await bench.play(60.0)
    (row,) = bench.rows()
    assert row.resolved_at is not None
    assert [(one.id, one.resolved_at is None) for one in bench.notified] == [
        (row.id, True),
        (row.id, False),
    ]
    events = bench.events("gpu-hot")
    assert [event["alert"] for event in events] == [True, False]
    assert 'god_miner_alerts_total{kind="gpu-hot"} 1.0' in bench.metrics.render().decode()


async def test_a_published_model_that_misses_its_profiles_target_is_an_alert_of_its_job(
    store: Store, tmp_path: Path
) -> None:
    bench = AlertBench(store, tmp_path)
    bench.now = NOW
    missed = await store.write(add_job, "a", NOW - 60, gain=0.02, target_missed=True)
    await store.write(add_job, "b", NOW - 50, gain=0.2, target_missed=False)
    await store.write(add_job, "c", NOW - 40, gain=0.02)
    await store.write(add_job, "d", NOW - 30, gain=0.02, target_missed=True, state="failed", reason="oom")
    await bench.play(None, 1)
    (row,) = bench.rows()
    assert (row.rule, row.subject, row.severity) == ("target-missed", job_subject(missed), Severity.INFO)
    assert "loss 1.96, +2 % over the base; wanted: 15 % better than the base" in row.text
    assert [event["job_id"] for event in bench.events("target-missed")] == [missed]
    assert bench.notified == []


async def test_a_restart_goes_on_with_open_alerts(store: Store, tmp_path: Path) -> None:
    before = AlertBench(store, tmp_path)
    await before.play(91.0)
    after = AlertBench(store, tmp_path)
    await after.play(91.0)
    assert len(after.rows()) == 1
    assert after.notified == []
    await after.play(60.0)
    assert after.rows()[0].resolved_at is not None
    assert len(after.notified) == 1


async def test_who_is_silenced_is_stored_and_nobody_is_notified(store: Store, tmp_path: Path) -> None:
    bench = AlertBench(store, tmp_path)
    silence = await store.write(
        store_alerts.add_silence, "gpu-*", "gpu:g0", "the fan is on its way", bench.now, bench.now + 3600
    )
    await bench.play(91.0)
    assert (len(bench.rows()), bench.notified) == (1, [])
    await store.write(store_alerts.end_silence, silence.id, bench.now)
    with pytest.raises(store_alerts.NoSuchSilence):
        await store.write(store_alerts.end_silence, silence.id, bench.now)
    await bench.play(60.0)
    assert bench.notified == []  # who was not told of it need not know that it is over


async def test_alerts_of_the_program_are_rows_and_good_news_resolves_them(
    store: Store, tmp_path: Path
) -> None:
    bench = AlertBench(store, tmp_path)
    for _ in range(3):
        bench.alerts(AlertKind.GPU_OUT, "it fell off the bus", gpu_subject("g3"))
    bench.alerts(AlertKind.JOB_FAILED, "oom, no smaller plan", job_subject(7))
    await bench.settled()
    rows = {row.rule: row for row in bench.rows()}
    assert (rows["gpu_out"].subject, rows["gpu_out"].times) == (gpu_subject("g3"), 3)
    assert rows["gpu_out"].severity is Severity.CRITICAL
    assert rows["job_failed"].subject == job_subject(7)
    assert [event["gpu"] for event in bench.events("gpu_out")] == ["g3"] * 3
    assert [event["job_id"] for event in bench.events("job_failed")] == [7]
    assert [row.rule for row in bench.notified] == ["gpu_out", "job_failed"]
    bench.alerts(AlertKind.GPU_BACK, "fine again", gpu_subject("g3"))
    await bench.settled()
    rows = {row.rule: row for row in bench.rows()}
    assert rows["gpu_out"].resolved_at is not None
    assert rows["gpu_out"].text == "resolved: fine again"
    assert rows["job_failed"].resolved_at is None
    bench.now += FORGET_SECONDS + 60
    await bench.play(None, 1)
    assert store.read_now(store_alerts.open_alerts) == []
    assert len(bench.notified) == 3


async def test_a_validator_whose_requests_change_is_reported(store: Store, tmp_path: Path) -> None:
    bench = AlertBench(store, tmp_path)
    for number in range(10):
        bench.requests.note_valid("hot1", "/task_offer/", b'{"task_id": "t", "urgency": 3}', bench.now)
        if number > 4:
            bench.requests.note_invalid("hot1", "/task_offer/", "model: is missing", bench.now)
    await bench.play(None, 2)
    texts = {row.rule: row.text for row in bench.rows()}
    assert "33.3 % (/task_offer/: model: is missing)" in texts["protocol-invalid"]
    assert "urgency" in texts["protocol-new-fields"]
    assert {row.subject for row in bench.rows()} == {validator_subject("hot1")}


async def test_a_file_that_is_mended_resolves_the_alert_about_it(store: Store, tmp_path: Path) -> None:
    bench = AlertBench(store, tmp_path)
    (tmp_path / "alerts.yaml").write_text("rules: {gpu-hot: {of: true}}")
    bench.service.rules.refresh()
    await bench.play(70.0, 1)
    await bench.settled()
    assert [(row.rule, row.resolved_at) for row in bench.rows()] == [("alerts_problem", None)]
    (tmp_path / "alerts.yaml").write_text("rules: {gpu-hot: {off: true}}  # mended")
    bench.service.rules.refresh()
    await bench.play(91.0, 1)
    await bench.settled()
    assert bench.rows()[0].text == "resolved: the problem is gone"


async def test_a_policy_that_is_mended_resolves_its_alert_also_over_a_restart(
    store: Store, tmp_path: Path
) -> None:
    bench = AlertBench(store, tmp_path)
    bench.standing_problems = {"policy_problem": "own.yaml: rulez", "profile_problem": "mine.yaml: lora"}
    bench.alerts(AlertKind.POLICY_PROBLEM, "own.yaml: rulez")
    bench.alerts(AlertKind.PROFILE_PROBLEM, "mine.yaml: lora")
    bench.now += FORGET_SECONDS + 60
    await bench.play(None, 1)
    assert {row.rule for row in store.read_now(store_alerts.open_alerts)} == set(bench.standing_problems)
    bench.standing_problems["policy_problem"] = None
    await bench.play(None, 1)
    await bench.settled()
    assert [row.rule for row in store.read_now(store_alerts.open_alerts)] == ["profile_problem"]
    assert [row.text for row in bench.notified[2:]] == ["resolved: the problem is gone"]
    bench.alerts(AlertKind.POLICY_PROBLEM, "own.yaml: again")  # mended before anybody looked
    await bench.play(None, 1)
    await bench.settled()
    assert [row.rule for row in store.read_now(store_alerts.open_alerts)] == ["profile_problem"]
    after = AlertBench(store, tmp_path)
    after.standing_problems = {"profile_problem": None}
    await after.play(None, 1)
    await after.settled()
    assert store.read_now(store_alerts.open_alerts) == []


async def test_a_clock_that_is_off_is_reported_with_the_way_and_what_to_do(
    store: Store, tmp_path: Path
) -> None:
    bench = AlertBench(store, tmp_path)
    await bench.play(None, 1)
    assert bench.rows() == []
    bench.clock_offset = ClockOffset(-45.0, 3)
    await bench.play(None, 1)
    (row,) = bench.rows()
    assert (row.rule, row.subject, row.value) == ("clock-off", MINER, 45.0)
    assert "45 s (this clock is behind those of 3 validators), above 30 s" in row.text
    assert SYNC_FIX in row.text
    bench.clock_offset = None  # nobody says that it is right again
    await bench.play(None, 1)
    assert bench.rows()[0].resolved_at is None
    bench.clock_offset = ClockOffset(0.2, 3)
    await bench.play(None, 1)
    assert bench.rows()[0].resolved_at is not None


async def test_an_alert_is_never_in_the_way_of_whoever_raises_it(store: Store, tmp_path: Path) -> None:
    bench = AlertBench(store, tmp_path)
    await store.writer.close()
    bench.alerts(AlertKind.GPU_OUT, "it is gone", gpu_subject("g3"))
    assert bench.notified == []
