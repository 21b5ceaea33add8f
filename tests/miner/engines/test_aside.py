"""Blocking calls beside the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from miner.engines.aside import aside


async def test_the_result_and_the_error_come_back() -> None:
    assert await aside(lambda: 7, 5, "call") == 7

    def broken() -> None:
        raise ValueError("of the call")

    with pytest.raises(ValueError, match="of the call"):
        await aside(broken, 5, "call")


async def test_a_call_s_own_timeout_is_its_own() -> None:
    def late() -> None:
        raise TimeoutError("of the call")

    with pytest.raises(TimeoutError, match="of the call"):
        await aside(late, 60, "call")


async def test_nobody_waits_for_a_call_that_hangs() -> None:
    over = threading.Event()
    with pytest.raises(TimeoutError, match=r"hanging call: no answer after 0\.05 s"):
        await aside(over.wait, 0.05, "hanging call")
    # It hangs on, and was left alone.
    (thread,) = [one for one in threading.enumerate() if one.name == "hanging call"]
    assert thread.daemon
    over.set()
    thread.join(60)
    await asyncio.sleep(0)


async def test_the_loop_goes_on_meanwhile() -> None:
    over = threading.Event()
    waiting = asyncio.create_task(aside(lambda: over.wait(60), 60, "call"))
    await asyncio.sleep(0)
    over.set()
    assert await waiting


def test_a_loop_that_is_closed_meanwhile_does_not_break_the_thread() -> None:
    over = threading.Event()

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await aside(over.wait, 0.01, "left behind")

    asyncio.run(leave())
    (thread,) = [one for one in threading.enumerate() if one.name == "left behind"]
    over.set()
    thread.join(60)
    assert not thread.is_alive()
