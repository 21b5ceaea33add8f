from __future__ import annotations

import asyncio
import json

from miner.jobs.live import BACKLOG, Bus, Change, Live


async def listen(bus: Bus, count: int, job_id: int | None = None) -> list[Change]:
    found: list[Change] = []
    async for change in bus.listen(job_id):
        found.append(change)
        if len(found) == count:
            break
    return found


async def test_a_listener_hears_of_one_job_or_of_all() -> None:
    bus = Bus()
    all_jobs = asyncio.create_task(listen(bus, 3))
    one = asyncio.create_task(listen(bus, 1, 2))
    await asyncio.sleep(0)
    for job in (1, 2, None):
        bus.tell("note", job, {"job": job})
    assert [change.data["job"] for change in await all_jobs] == [1, 2, None]
    assert [change.data["job"] for change in await one] == [2]


async def test_a_slow_listener_misses_some_is_told_so_and_holds_nobody_up() -> None:
    bus = Bus()
    stream = bus.listen()
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    for number in range(BACKLOG + 50):
        bus.tell("note", 1, {"number": number})
    assert (await first).data == {"number": 0}
    assert (await anext(stream)).data == {"number": 1}
    bus.tell("note", 1, {"number": "after"})
    seen = [await anext(stream) for _ in range(BACKLOG - 1)]
    assert seen[-1].kind == "missed"
    assert (await anext(stream)).data == {"number": "after"}


async def test_a_closed_bus_ends_every_stream_also_a_full_one() -> None:
    bus = Bus()
    waiting = asyncio.create_task(listen(bus, 99))
    stream = bus.listen()
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    for number in range(BACKLOG):
        bus.tell("note", 1, {"number": number})
    await first
    bus.close()
    assert [change async for change in stream] == []
    assert await waiting
    assert [change async for change in bus.listen()] == []


def test_a_change_is_a_server_sent_event() -> None:
    text = Change(7, "job", 1, {"a": "line\nbreak"}).as_text()
    kind, name, data, *rest = text.split("\n")
    assert (kind, name, rest) == ("id: 7", "event: job", ["", ""])
    assert json.loads(data.removeprefix("data: ")) == {"a": "line\nbreak"}


def test_a_run_that_is_over_leaves_no_numbers_behind() -> None:
    live = Live(1, "t", "training", step=5, loss=1.0, attempt=1)
    live.forget_run()
    assert (live.step, live.loss, live.attempt) == (None, None, 1)
