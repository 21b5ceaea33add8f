"""Blocking calls beside the event loop, and tasks that are run regularly."""

from __future__ import annotations

import asyncio
import threading

import pytest

from miner.support.background import OneBlockingCall, PeriodicTask, PeriodicTasks, run_in_thread


async def test_the_result_and_the_error_come_back() -> None:
    assert await run_in_thread(lambda: 7, 60, "call") == 7

    def broken() -> None:
        raise ValueError("of the call")

    with pytest.raises(ValueError, match="of the call"):
        await run_in_thread(broken, 60, "call")

    def late() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await run_in_thread(late, 60, "call")


async def test_nobody_waits_for_a_call_that_hangs() -> None:
    over = threading.Event()
    with pytest.raises(TimeoutError, match=r"hanging call: no answer after 0\.05 s"):
        await run_in_thread(over.wait, 0.05, "hanging call")
    # It hangs on, and was left alone.
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "hanging call"]
    assert thread.daemon
    over.set()
    thread.join(60)
    await asyncio.sleep(0)


async def test_while_one_call_hangs_no_other_begins() -> None:
    hangs, over = OneBlockingCall("look", 0.05), threading.Event()
    with pytest.raises(TimeoutError, match=r"look: no answer after 0\.05 s"):
        await hangs.run(over.wait)
    with pytest.raises(TimeoutError, match="look: no answer yet"):
        await hangs.run(lambda: pytest.fail("it began"))
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "look"]
    over.set()
    thread.join(60)
    calls = OneBlockingCall("look", 60)
    assert await asyncio.gather(*(calls.run(lambda number=number: number) for number in range(3))) == [
        0,
        1,
        2,
    ]
    with pytest.raises(ZeroDivisionError):
        await calls.run(lambda: 1 // 0)
    assert await calls.run(lambda: "goes on") == "goes on"


def test_a_loop_that_is_closed_meanwhile_does_not_break_the_thread() -> None:
    over = threading.Event()

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await run_in_thread(over.wait, 0.01, "left behind")

    asyncio.run(leave())
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "left behind"]
    over.set()
    thread.join(60)
    assert not thread.is_alive()


async def test_a_task_that_fails_keeps_no_other_from_being_run(caplog: pytest.LogCaptureFixture) -> None:
    runs: list[str] = []

    async def fails() -> None:
        raise RuntimeError("a bug")

    async def works() -> None:
        runs.append("works")

    tasks = PeriodicTasks([PeriodicTask("failing", fails), PeriodicTask("working", works)])
    await tasks.run_due()
    await tasks.run_due()
    assert runs == ["works", "works"]
    assert "a periodic task failed: failing" in caplog.text


async def test_a_task_is_run_as_often_as_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    now, runs = 100.0, []

    async def rare() -> None:
        runs.append(now)

    monkeypatch.setattr("time.monotonic", lambda: now)
    tasks = PeriodicTasks([PeriodicTask("rare", rare, interval_s=60.0)])
    for now in (100.0, 159.0, 160.0, 219.0, 220.0):  # noqa: B007 - read by the clock
        await tasks.run_due()
    assert runs == [100.0, 160.0, 220.0]


async def test_periodic_tasks_can_be_stopped_twice() -> None:
    tasks = PeriodicTasks([])
    tasks.start()
    await tasks.stop()
    await tasks.stop()
