"""The five indicators and the goals, over a history with numbers reckoned by hand."""

from __future__ import annotations

import sqlite3

import pytest

from miner.fleet.fleet_file import Prices
from miner.offers.policies.load import load_policy
from miner.offers.policies.schema import PolicyTargets
from miner.reports.current import CurrentFigures
from miner.reports.ended_jobs import ended_jobs
from miner.reports.kpis import goal_progress, kpis
from miner.store.ranks import record_rank
from miner.store.store import Store
from tests.miner.history import DAY, HOUR, NOW, add_job, add_rollup, rank_row

TARGETS = load_policy("h100x4").terms.targets


def fill(connection: sqlite3.Connection) -> None:
    for index in range(9):
        add_job(connection, f"good{index}", NOW - index * HOUR, took=3.0 + index % 2, gain=0.1)
    add_job(connection, "bad", NOW - 10 * HOUR, state="failed", reason="oom")
    add_job(connection, "ours", NOW - 11 * HOUR, state="cancelled", reason="cancelled")
    add_job(connection, "before", NOW - 9 * DAY, took=20.0, gain=0.1)
    for hour in range(1, 5):
        add_rollup(connection, NOW - hour * HOUR, busy=hour % 2, utilization=0.9 * (hour % 2))
    record_rank(connection, rank_row(NOW - 2 * DAY, 50))
    record_rank(connection, rank_row(NOW - HOUR, 38))


async def test_the_five_are_measured_over_a_week_and_compared_with_the_targets(store: Store) -> None:
    await store.write(fill)
    found = {kpi.name: kpi for kpi in await store.read(kpis, NOW + 1, TARGETS)}
    success, hours = found["success_rate"], found["completion_hours"]
    assert (success.value, success.met, success.detail) == (0.9, False, "9 of 10 jobs in 7 days")
    assert hours.value == pytest.approx((5 * 3 + 4 * 4) / 9)
    assert hours.met
    assert found["gpu_utilization"].value == pytest.approx(0.45)
    assert found["gpu_utilization"].detail == "a job had 50 % of 4.0 GPU-hours in 7 days"
    # Nine jobs as good as the best of their kind and one failure; a week ago one as good as the best.
    assert found["quality"].value == pytest.approx(0.8)
    assert (found["quality"].target, found["quality"].met) == (pytest.approx(1.0), False)
    assert (found["rank"].value, found["rank"].target, found["rank"].met) == (38, 40, True)
    assert found["rank"].detail == "of 200; 12 up in a day"


async def test_nothing_measured_is_not_known_and_not_zero(store: Store) -> None:
    found = await store.read(kpis, NOW, PolicyTargets())
    assert [kpi.value for kpi in found] == [None] * 5
    assert [kpi.met for kpi in found] == [None] * 5


async def test_goals_count_from_the_first_job(store: Store) -> None:
    await store.write(fill)
    history = await store.read(ended_jobs, 0.0, NOW + 1)
    short, medium, long = await store.read(goal_progress, NOW + 1, TARGETS, history)
    first = NOW - 9 * DAY - 20 * HOUR
    assert [goal.due_at for goal in (short, medium, long)] == [first + days * DAY for days in (14, 30, 90)]
    assert short.met
    assert short.text.startswith("jobs 10 (goal 10); rank in the best 19% (goal 20%)")
    assert [check.met for check in medium.checks] == [False, False, False]


async def test_the_page_s_copy_is_read_again_after_half_a_minute(store: Store) -> None:
    now = [NOW]
    current = CurrentFigures(store, PolicyTargets, Prices, lambda: now[0])
    assert (await current.read()).kpis[0].value is None
    await store.write(fill)
    assert (await current.read()).kpis[0].value is None
    now[0] += 31
    assert (await current.read()).kpis[0].value == 0.9
