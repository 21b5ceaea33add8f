"""One answer with everything that the page's first look needs."""

from __future__ import annotations

from core.domain.tasks import TaskType
from miner.api.samples import HostSample
from miner.http.overview import thinned
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
