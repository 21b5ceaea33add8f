"""Measurements on the operator's port."""

from __future__ import annotations

import pytest

from core.domain.keys import TaskKey
from miner.api.samples import GpuRollup, GpuSample, HostSample
from miner.fleet.base import GpuOption
from miner.store.samples import HOUR, MINUTE, add_minutes
from tests.miner.http.daemon_in_process import DaemonInProcess, task


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
