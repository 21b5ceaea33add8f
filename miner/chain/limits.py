"""Time limits that hold even against a coroutine that does not want to end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

#: Abandoned calls; the event loop itself only keeps weak references to tasks.
_abandoned: set[asyncio.Task[Any]] = set()


async def within(seconds: float, call: Coroutine[Any, Any, T]) -> T:
    """The result of `call`, or TimeoutError after `seconds`, whatever `call` does.

    Not `asyncio.wait_for`: that one waits until the cancelled call has ended. The SDK's submit answers a
    cancellation by unsubscribing over the same dead socket, and so never ends.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        _abandon(task)
        raise
    if not task.done():
        _abandon(task)
        raise TimeoutError(f"no answer in {seconds:g} s")
    return task.result()


def _abandon(task: asyncio.Task[Any]) -> None:
    task.cancel()
    _abandoned.add(task)
    task.add_done_callback(_bury)


def _bury(task: asyncio.Task[Any]) -> None:
    """Take note of the outcome, so that asyncio does not report it as never retrieved."""
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()
