"""Earned, spent and kept of a week whose figures were reckoned by hand."""

from __future__ import annotations

import json
import sqlite3
import time
from typing import Any

import pytest

from core.domain.units import show_dollars
from miner.api.reports import Money, PeriodKind
from miner.fleet.costs import GpuCosts
from miner.fleet.fleet_file import NO_PRICES, Prices
from miner.jobs.views import job_summary
from miner.offers.policies.load import load_policy
from miner.reports.money import money_line, period_money
from miner.reports.report import ReportPeriod, build_report
from miner.reports.text import as_html, as_markdown, as_text
from miner.store.database import insert_row
from miner.store.jobs import get_job
from miner.store.ranks import record_rank
from miner.store.samples import record_gpus
from miner.store.store import Store
from tests.doubles.each import each
from tests.miner.history import DAY, HOUR, NOW, add_job, add_rollup, rank_row

MONDAY = NOW - 12 * HOUR
WEEK = ReportPeriod(PeriodKind.WEEKLY, MONDAY - 7 * DAY, MONDAY)
PRICES = Prices(1.0, {"H100-SXM": 2.5}, 300.0)


def fill(connection: sqlite3.Connection) -> None:
    """Two H100 and a GPU of another kind, each for 40 hours; the first works all the time, the second half
    of it, the third never. 0.2 TAO a day for three days, then 0.1 for two, then no reading for two days."""
    record_gpus(connection, {"h0": "H100-SXM", "h1": "H100-SXM", "x": "L4"})
    for hour in range(40):
        for gpu, busy in (("h0", 1.0), ("h1", 0.5), ("x", 0.0)):
            add_rollup(connection, WEEK.begins_at + hour * HOUR, gpu, busy=busy)
    add_rollup(connection, WEEK.begins_at - HOUR, "h0")  # the week before: 2.50
    for day in range(-1, 5):  # the first row holds from before the week on
        at = WEEK.begins_at + day * DAY
        record_rank(connection, rank_row(at, day + 10, tao_per_day=0.2 if day < 3 else 0.1))
    job_id = add_job(connection, "t1", WEEK.begins_at + 10 * HOUR, took=5.0)
    for number, (gpus, minutes) in enumerate(((["h0", "h1"], 90), (["x"], 30)), 1):
        began = WEEK.begins_at + number * HOUR
        attempt: dict[str, Any] = {"job_id": job_id, "number": number, "backend": "docker", "folder": ""}
        times = {"started_at": began, "ended_at": began + minutes * 60}
        insert_row(connection, "attempts", **attempt, **times, key=f"k{number}", gpus=json.dumps(gpus))


async def test_a_stored_week_costs_what_a_hand_calculation_says(store: Store) -> None:
    await store.write(fill)
    money = await store.read(period_money, WEEK.begins_at, WEEK.ends_at, PRICES)
    assert money is not None
    # 2 × 40 h × 2.50 + 40 h × 1.00; idle: half of h1's 100 and all of x's 40
    assert (money.spent, money.idle) == (pytest.approx(240.0), pytest.approx(90.0))
    # 3 d × 0.2; 2 d × 0.1, of which the last row holds for one day
    assert money.earned_tao == pytest.approx(0.8)
    assert (money.earned, money.kept) == (pytest.approx(240.0), pytest.approx(0.0))
    day = await store.read(period_money, WEEK.begins_at, WEEK.begins_at + DAY, PRICES)
    assert day is not None
    assert (day.spent, day.idle, day.earned) == (144.0, 54.0, pytest.approx(60.0))


async def test_of_a_week_that_is_not_over_nothing_is_earned_in_advance(store: Store) -> None:
    now = time.time()
    await store.write(record_rank, rank_row(now - 3600, 1, tao_per_day=2.4))
    money = await store.read(period_money, now - DAY, now + DAY, PRICES)
    assert money is not None
    assert money.earned_tao == pytest.approx(0.1, rel=0.01)


async def test_a_job_costs_its_attempts_gpus_for_their_time(store: Store) -> None:
    await store.write(fill)

    def cost(connection: sqlite3.Connection, prices: Prices) -> tuple[float, float | None]:
        job = job_summary(connection, get_job(connection, 1), costs=GpuCosts.read(connection, prices))
        return job.gpu_hours, job.cost

    # 1.5 h × 2 × 2.50 + 0.5 h × 1.00
    assert await store.read(cost, PRICES) == (3.5, 8.0)
    assert await store.read(cost, Prices(None, {"H100-SXM": 2.5})) == (3.5, None)
    assert await store.read(cost, NO_PRICES) == (3.5, None)


async def test_a_report_begins_with_the_line_and_says_nothing_of_money_without_a_price(store: Store) -> None:
    await store.write(fill)
    policy = load_policy("h100x4").terms
    report = await store.read(build_report, WEEK, policy, PRICES)
    line = "Earned $240.00 (0.8000 TAO); spent $240.00, $90.00 of it on idle GPUs; kept $0.00."
    assert report.money is not None
    assert money_line(report.money) == line
    assert " ".join(as_text(report).splitlines()[2:4]).startswith(line)
    assert as_markdown(report).split("\n\n")[1] == line
    assert line in as_html(report)
    spent = next(figure for figure in report.summary if figure.name == "spent")
    assert (spent.value, spent.before) == (pytest.approx(240.0), 2.5)
    report = await store.read(build_report, WEEK, policy)
    assert report.money is None
    assert "$" not in as_text(report)


@each(
    ("given", "line"),
    [
        ({}, "Earned not known; spent not known; kept not known."),
        ({"spent": 12.0, "idle": 0.0}, "Earned not known; spent $12.00; kept not known."),
        (
            {"earned_tao": 0.25, "spent": 1234.5, "idle": 1.0, "hours_without_price": 3.0},
            "Earned 0.2500 TAO; spent $1,234.50, $1.00 of it on idle GPUs; kept not known; "
            "3.0 GPU-hours have no price.",
        ),
    ],
)
def test_what_is_not_known_is_said(given: dict[str, float], line: str) -> None:
    nothing = dict.fromkeys(("spent", "idle", "earned_tao", "earned", "kept")) | {"hours_without_price": 0.0}
    assert money_line(Money.model_validate(nothing | given)) == line


def test_dollars_are_written_with_cents_and_sign() -> None:
    shown = {0: "$0.00", -0.001: "$0.00", 1234.567: "$1,234.57", -3: "-$3.00"}
    assert {value: show_dollars(value) for value in shown} == shown
