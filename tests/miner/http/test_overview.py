"""One answer with everything that the page's first look needs."""

from __future__ import annotations

import pytest

from core.domain.keys import TaskKey
from core.domain.tasks import TaskType
from miner.api.samples import GpuRollup, GpuSample, HostSample
from miner.fleet.base import GpuOption
from miner.http.overview import thinned
from miner.store.ranks import newest_rank
from miner.store.samples import HOUR, MINUTE, add_minutes
from tests.doubles.each import each
from tests.miner.http.daemon_in_process import DaemonInProcess, task


async def test_the_overview_shows_state_indicators_gpus_jobs_and_decisions(
    running: DaemonInProcess,
) -> None:
    accepted, refused = task(), task(TaskType.DPO, 1)
    await running.offer(accepted)
    await running.start(accepted)
    await running.offer(refused)
    running.daemon.samples.add([], HostSample(running.daemon.clock(), cpu=0.5))
    reply = await running.operator.get("/overview")
    assert reply.status_code == 200
    answer = reply.json()
    assert answer["daemon"]["hotkey"] == running.daemon.hotkey
    assert answer["daemon"]["open_jobs"] == 1
    assert [kpi["name"] for kpi in answer["kpis"]] == [
        "success_rate",
        "completion_hours",
        "gpu_utilization",
        "quality",
        "rank",
    ]
    assert answer["fleet"]["host"]["cpu"] == 0.5
    assert len(answer["fleet"]["gpus"]) == len(running.daemon.fleet.inventory.gpus)
    (job,) = answer["jobs"]
    assert (job["task_id"], job["spark"], answer["ended"]) == (accepted.task_id, [], [])
    assert [one["task_id"] for one in answer["decisions"]] == [refused.task_id, accepted.task_id]


async def test_jobs_are_listed_by_pages_and_narrowed_by_state_and_text(running: DaemonInProcess) -> None:
    tasks = [task(seed=seed) for seed in range(3)]
    for one in tasks:
        await running.start(one)

    async def page(query: str) -> tuple[list[str], int | None]:
        answer = (await running.operator.get(f"/jobs?{query}")).json()
        return [job["task_id"] for job in answer["jobs"]], answer["next"]

    first, next_page = await page("limit=2")
    rest, end = await page(f"limit=2&before={next_page}")
    assert first + rest == [one.task_id for one in reversed(tasks)]
    assert end is None
    assert (await page("state=done"))[0] == []
    assert (await page(f"q={tasks[1].task_id[:13].upper()}"))[0] == [tasks[1].task_id]


@each("count", [0, 1, 59, 60, 61, 5000])
def test_a_little_curve_keeps_its_ends(count: int) -> None:
    values = [float(number) for number in range(count)]
    shown = thinned([None, *values])
    assert len(shown) == min(count, 60)
    assert (shown[:1], shown[-1:]) == (values[:1], values[-1:])


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


async def test_an_hour_of_samples_is_thinned_and_its_peaks_stay(
    running: DaemonInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, history = running.daemon.clock(), running.daemon.samples
    monkeypatch.setattr(running.daemon, "clock", lambda: now)
    for number in range(720):
        at = now - 3600 + 5 * number + 1
        degrees = 95.0 if number == 101 else 60.0
        sample = GpuSample(
            at,
            "0",
            utilization=number % 2,
            temperature=degrees,
            memory_used=1,
            memory_total=4,
            throttle=("heat",),
            xids=(31,) if number == 5 else (),
        )
        history.add([sample], HostSample(at, cpu=0.5, memory_share=0.25, disk_free_bytes=7))
    page = (await running.operator.get("/samples")).json()
    gpu = page["gpus"]["0"]
    assert (len(gpu["at"]), len(gpu["temperature"]), max(gpu["temperature"])) == (360, 360, 95.0)
    assert set(gpu["utilization"]) == {1}
    assert (gpu["memory"][-1], gpu["throttle"], gpu["xids"], gpu["tensor"][-1]) == (
        0.25,
        ["heat"],
        [31],
        None,
    )
    assert (page["host"]["cpu"][-1], page["host"]["disk_free_bytes"]) == (0.5, 7)
    short = (await running.operator.get("/samples?seconds=60")).json()
    assert len(short["gpus"]["0"]["at"]) == 12
    assert (await running.operator.get("/samples?seconds=0")).status_code == 422


async def test_the_history_is_by_minutes_for_some_hours_and_by_hours_beyond(running: DaemonInProcess) -> None:
    now = running.daemon.clock()
    at = int(now // MINUTE) * MINUTE
    rows = [GpuRollup(MINUTE, at - 60 * number, "0", utilization=0.5, samples=12) for number in range(3)]
    await running.daemon.store.write(add_minutes, [(row, None) for row in rows])
    minutes = (await running.operator.get("/samples/history?hours=1")).json()
    assert (minutes["period_s"], len(minutes["gpus"]["0"])) == (MINUTE, 3)
    hours = (await running.operator.get("/samples/history")).json()
    assert hours["period_s"] == HOUR
    assert sum(row["samples"] for row in hours["gpus"]["0"]) == 36


async def test_the_fleet_shows_what_a_gpu_measures_and_which_job_has_it_until_when(
    running: DaemonInProcess,
) -> None:
    now = running.daemon.clock()
    await running.start(task(seed=1))
    (job,) = running.rows("SELECT id, task_id, validator FROM jobs")
    key = TaskKey(job["validator"], job["task_id"])
    grant = await running.daemon.fleet.acquire(key, [GpuOption(1)], until=now + HOUR)
    name = grant.ids[0]
    running.daemon.samples.add([GpuSample(now, name, temperature=61.0, memory_used=1, memory_total=2)])
    running.daemon.samples.add([GpuSample(now - 600, "63", temperature=61.0)])  # vanished since
    gpus = {gpu["id"]: gpu for gpu in (await running.operator.get("/fleet")).json()["gpus"]}
    held = gpus[name]
    assert (held["job_id"], held["task_id"], held["until"] > now) == (job["id"], key.task_id, True)
    assert (held["sample"]["temperature"], held["sample"]["memory_share"]) == (61.0, 0.5)
    assert (gpus["63"]["sample"], gpus["63"]["job_id"], gpus["63"]["until"]) == (None, None, None)
