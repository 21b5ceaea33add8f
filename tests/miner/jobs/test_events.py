from __future__ import annotations

import asyncio
import json

from miner.api.jobs import LiveJob
from miner.jobs.events import MAX_QUEUED_EVENTS, JobEvent, JobEventBus


async def listen(events: JobEventBus, count: int, job_id: int | None = None) -> list[JobEvent]:
    received: list[JobEvent] = []
    async for event in events.listen(job_id):
        received.append(event)
        if len(received) == count:
            break
    return received


async def test_a_listener_hears_of_one_job_or_of_all() -> None:
    events = JobEventBus()
    all_jobs = asyncio.create_task(listen(events, 3))
    one_job = asyncio.create_task(listen(events, 1, 2))
    await asyncio.sleep(0)
    for job in (1, 2, None):
        events.send("note", job, {"job": job})
    assert [change.data["job"] for change in await all_jobs] == [1, 2, None]
    assert [change.data["job"] for change in await one_job] == [2]


async def test_a_slow_listener_misses_some_learns_of_it_and_holds_nobody_up() -> None:
    events = JobEventBus()
    stream = events.listen()
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    for number in range(MAX_QUEUED_EVENTS + 50):
        events.send("note", 1, {"number": number})
    assert (await first).data == {"number": 0}
    assert (await anext(stream)).data == {"number": 1}
    events.send("note", 1, {"number": "after"})
    seen = [await anext(stream) for _ in range(MAX_QUEUED_EVENTS - 1)]
    assert seen[-1].kind == "missed"
    assert (await anext(stream)).data == {"number": "after"}


async def test_a_closed_bus_ends_every_stream_also_a_full_one() -> None:
    events = JobEventBus()
    waiting = asyncio.create_task(listen(events, 99))
    stream = events.listen()
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    for number in range(MAX_QUEUED_EVENTS):
        events.send("note", 1, {"number": number})
    await first
    events.close()
    assert [change async for change in stream] == []
    assert await waiting
    assert [change async for change in events.listen()] == []


def test_a_change_is_a_server_sent_event() -> None:
    text = JobEvent(7, "job", 1, {"a": "line\nbreak"}).as_text()
    kind, name, data, *rest = text.split("\n")
    assert (kind, name, rest) == ("id: 7", "event: job", ["", ""])
    assert json.loads(data.removeprefix("data: ")) == {"a": "line\nbreak"}


def test_a_run_that_is_over_leaves_no_numbers_behind() -> None:
    live = LiveJob(1, "t", "training", step=5, loss=1.0, attempt=1)
    live.clear_run()
    assert (live.step, live.loss, live.attempt) == (None, None, 1)
