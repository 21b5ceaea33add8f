"""A report over a history whose numbers were reckoned by hand, and over an empty store."""

from __future__ import annotations

import sqlite3

import pytest

from core.domain.decisions import ExpectedValue
from core.domain.tasks import TaskType
from miner.api.reports import ActionCount, PeriodKind, Report, SummaryFigure
from miner.offers.policies.load import load_policy
from miner.reports.report import (
    FIRST_PLACE,
    TOURNAMENTS,
    ReportPeriod,
    build_report,
    calendar_period,
    finished_period,
    last_period,
)
from miner.store.database import insert_row
from miner.store.ranks import record_rank
from miner.store.store import Store
from tests.miner.history import DAY, HOUR, NOW, add_job, add_rollup, rank_row

POLICY = load_policy("h100x4").terms
DAY_BEFORE = last_period(PeriodKind.DAILY, NOW)
#: Work 8, of which a published model is expected to win a tenth: 8 × (3 × 0.1 − 0) = 2.4 points.
VALUE = ExpectedValue(work=8.0, success=0.9, win=0.1, punished=0.0, points=1.36, gpu_hours=4.0)


def fill(connection: sqlite3.Connection) -> None:
    for index in range(3):
        add_job(connection, f"instruct{index}", NOW - HOUR * (index + 1), took=2.0, value=VALUE, gain=0.2)
    add_job(
        connection,
        "grpo",
        NOW - 5 * HOUR,
        took=6.0,
        task_type=TaskType.GRPO,
        model="org/Qwen2.5-14B",
        params=14_000_000_000,
        state="failed",
        reason="oom",
        value=VALUE,
    )
    add_job(connection, "cancelled", NOW - 6 * HOUR, state="cancelled", reason="cancelled")
    add_job(connection, "yesterday", NOW - 30 * HOUR, took=4.0, value=VALUE, gain=0.1)
    for hour in range(1, 5):  # three of four hours of one GPU were used
        add_rollup(connection, NOW - hour * HOUR, busy=0.0 if hour == 1 else 1.0, utilization=0.6)
    add_rollup(connection, NOW - 4 * HOUR, "g1", busy=0.0, utilization=0.0)
    for hour, rank in ((40, 30), (20, 25), (10, 35), (1, 28)):
        record_rank(connection, rank_row(NOW - hour * HOUR, rank))
    alert = {"value": None, "last_at": NOW, "times": 2}
    for subject, severity, resolved in (("gpu:0", "critical", NOW - 60), ("gpu:1", "warning", None)):
        row = {"rule": "gpu-hot", "subject": subject, "text": "hot", "resolved_at": resolved}
        insert_row(connection, "alerts", **alert, **row, severity=severity, raised_at=NOW - HOUR)
    insert_row(
        connection,
        "actions",
        rule="gpu-hot",
        job_id=1,
        attempt=1,
        kind="duty",
        asked_at=NOW - HOUR,
        before="{}",
        outcome="kept",
    )


@pytest.fixture
async def report(store: Store) -> Report:
    await store.write(fill)
    return await store.read(build_report, DAY_BEFORE, POLICY)


def figures(report: Report) -> dict[str, SummaryFigure]:
    return {figure.name: figure for figure in report.summary}


def test_the_summary_counts_what_ended_in_the_time(report: Report) -> None:
    now = {name: figure.value for name, figure in figures(report).items()}
    assert (now["published"], now["failed"]) == (3, 1)
    assert now["success_rate"] == 0.75  # without the cancelled one
    assert now["completion_rate"] == 0.6  # with it: three of five left a submission
    assert now["penalty_rate"] == pytest.approx(0.4)
    assert now["mean_hours"] == 2.0
    assert now["points"] == pytest.approx(3 * 2.4 - 8)
    assert now["expected_points"] == pytest.approx(4 * 1.36)
    assert (now["used_hours"], now["idle_hours"]) == (3.0, 2.0)
    assert now["points_per_gpu_hour"] == pytest.approx((3 * 2.4 - 8) / 3)
    assert now["expected_per_gpu_hour"] == pytest.approx(1.36 / 4)
    assert now["utilization"] == pytest.approx((4 * 0.6 + 0.0) / 5)
    assert now["mean_gain"] == pytest.approx(0.2)
    assert (now["offers"], now["accepted"]) == (5, 5)


def test_the_day_before_and_the_targets_stand_beside_it(report: Report) -> None:
    found = figures(report)
    assert found["published"].before == 1
    assert found["mean_hours"].before == 4.0
    assert found["used_hours"].before is None  # not measured, which is not zero
    assert [found[name].met for name in ("success_rate", "mean_hours", "published")] == [False, True, None]


def test_success_is_reported_by_task_family_and_size(report: Report) -> None:
    tables = {name: {row.name: (row.published, row.jobs) for row in rows} for name, rows in report.success}
    assert tables == {
        "type": {"instruct": (3, 3), "grpo": (0, 1)},
        "family": {"llama": (3, 3), "qwen": (0, 1)},
        "size": {"7B-13B": (3, 3), "13B-40B": (0, 1)},
    }
    assert report.jobs.reasons == {"published": 3, "oom": 1, "cancelled": 1}


def test_gains_have_quality_times_work_and_a_failure_costs_its_work(report: Report) -> None:
    rows = {row.job_id: row for row in report.gains}
    assert rows[1].gain == pytest.approx(0.2)
    assert (rows[1].quality, rows[1].final) == (pytest.approx(1.0), pytest.approx(8.0))
    assert (rows[4].gain, rows[4].final) == (None, -8.0)
    week = report.quality[-1]
    # The three of today, the failure, and the one of yesterday with half their gain.
    half = 8 * (0.7 * 0.5**0.75 + 0.05 * 0.5) / (0.7 * (1 / (1 + 2.718281828459045**-4.5)) ** 0.75 + 0.05)
    assert (week.jobs, week.final) == (5, pytest.approx(3 * 8 - 8 + half))


def test_the_rank_is_shown_from_the_first_to_the_last(report: Report) -> None:
    rank = report.rank
    assert (rank.first.rank, rank.last.rank, rank.best, rank.worst) == (30, 28, 25, 35)
    assert [point.rank for point in rank.history] == [25, 35, 28]


def test_occupancy_has_a_column_for_each_hour_and_holes_where_nothing_was_measured(
    report: Report,
) -> None:
    occupancy = report.gpus.occupancy
    assert occupancy["g0"] == [*[None] * 20, 1.0, 1.0, 1.0, 0.0]
    assert occupancy["g1"] == [*[None] * 20, 0.0, None, None, None]


def test_alerts_and_what_rules_did_are_counted(report: Report) -> None:
    (alert,) = report.alerts
    assert (alert.rule, alert.raised, alert.times, alert.still_open) == ("gpu-hot", 2, 4, 1)
    assert alert.severity == "critical"  # the worst of them
    assert report.actions == [ActionCount(rule="gpu-hot", kind="duty", outcome="kept", count=1)]


async def test_an_empty_store_has_a_report_without_a_single_made_up_number(store: Store) -> None:
    report = await store.read(build_report, DAY_BEFORE, POLICY)
    unknown = {name: figure.value for name, figure in figures(report).items()}
    counts = ("published", "failed", "offers", "accepted")
    assert {name: unknown.pop(name) for name in counts} == dict.fromkeys(counts, 0)
    assert set(unknown.values()) == {None}
    assert report.rank.last is None
    assert (report.first_place, report.tournaments) == (FIRST_PLACE, TOURNAMENTS)
    assert not any(goal.met for goal in report.goals)


async def test_minutes_count_for_the_hour_that_is_not_over(store: Store) -> None:
    def query(connection: sqlite3.Connection) -> None:
        add_rollup(connection, NOW - HOUR, busy=1.0)
        for minute in range(60):  # of an hour that has a row of its own: not counted twice
            add_rollup(connection, NOW - HOUR + 60 * minute, busy=1.0, period=60)
        for minute in range(30):
            add_rollup(connection, NOW + 60 * minute, busy=1.0, period=60)

    await store.write(query)
    report = await store.read(build_report, last_period(PeriodKind.DAILY, NOW + HOUR / 2), POLICY)
    assert report.gpus.used_hours == pytest.approx(1.5)


async def test_half_an_hour_without_the_daemon_does_not_make_jobs_look_busier(store: Store) -> None:
    def query(connection: sqlite3.Connection) -> None:
        add_rollup(connection, NOW - HOUR, busy=0.5, utilization=0.6)
        connection.execute("UPDATE gpu_rollups SET watched = 0.5")

    await store.write(query)
    report = await store.read(build_report, DAY_BEFORE, POLICY)
    assert report.gpus.utilization_of_jobs == pytest.approx(0.6)
    assert report.gpus.measured_hours == pytest.approx(0.5)


def test_periods_of_the_calendar_begin_at_midnight_on_monday_and_on_the_first() -> None:
    at = 1_795_435_339.0  # Monday, 23 November 2026, 12:02:19 UTC
    day, week, month = (calendar_period(kind, at) for kind in PeriodKind)
    midnight = at - at % DAY
    assert (day.begins_at, day.ends_at) == (midnight, midnight + DAY)
    assert (week.begins_at, week.ends_at) == (midnight, midnight + 7 * DAY)
    assert (month.begins_at, month.ends_at) == (midnight - 22 * DAY, midnight + 8 * DAY)
    assert finished_period(PeriodKind.DAILY, at) == ReportPeriod(PeriodKind.DAILY, midnight - DAY, midnight)
    assert day.before == finished_period(PeriodKind.DAILY, at)
