"""Blocking calls off the event loop, each with a time limit that holds.

A pool's threads are waited for when the program ends, and an engine that hangs would hold up the end of the
daemon. So every call has a thread of its own that nobody waits for; a few per second is what there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def aside(call: Callable[[], T], limit_s: float, what: str) -> T:
    """The call's result or exception; `TimeoutError` after the limit, while the thread is left to itself."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type] # None is a T when the call gives None

    def work() -> None:
        value, error = None, None
        try:
            value = call()
        except BaseException as caught:  # noqa: BLE001 - raised where it was waited for
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name=what, daemon=True).start()
    try:
        async with asyncio.timeout(limit_s):
            return await result
    except TimeoutError:
        if result.done() and not result.cancelled():
            raise
        raise TimeoutError(f"{what}: no answer after {limit_s:g} s") from None
