"""Reports on the operator's port."""

from __future__ import annotations

from miner.store.ranks import newest_rank
from tests.doubles.each import each
from tests.miner.http.daemon_in_process import DaemonInProcess


@each("period", ["daily", "weekly", "monthly"])
async def test_every_period_has_its_report_with_indicators_and_rank(
    running: DaemonInProcess, period: str
) -> None:
    await running.daemon.metagraphs.refresh_once()
    await running.daemon.store.write(newest_rank)  # after the one of the refresh
    report = (await running.operator.get("/report", params={"period": period})).json()
    assert report["period"] == period
    names = ["success_rate", "completion_hours", "gpu_utilization", "quality", "rank"]
    assert [kpi["name"] for kpi in report["kpis"]] == names
    assert report["rank"]["last"]["rank"] == 1


async def test_a_date_chooses_a_period_of_the_calendar(running: DaemonInProcess) -> None:
    reply = await running.operator.get("/report", params={"period": "monthly", "at": 1_795_435_339})
    assert reply.json()["title"] == "Monthly report, 2026-11-01 00:00 to 2026-12-01 00:00 UTC"
    for bad in ({"period": "yearly"}, {"at": "nan"}, {"at": -1}, {"at": 253_402_300_799}):
        assert (await running.operator.get("/report", params=bad)).status_code == 422
