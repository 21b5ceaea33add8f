"""Work beside the event loop: blocking calls with a time limit that holds, and periodic tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

#: How often due tasks are looked for.
ROUND_SECONDS = 5.0


async def run_in_thread(call: Callable[[], T], limit_s: float, what: str) -> T:
    """The call's result or exception; `TimeoutError` after the limit, while the thread is left to itself.

    A pool's threads are waited for when the program ends, and a backend that hangs would delay the daemon's
    exit. So every call has a daemon thread of its own; there are only a few calls per second.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type] # None is a T when the call returns None

    def work() -> None:
        value, error = None, None
        try:
            value = call()
        except BaseException as caught:  # noqa: BLE001 - raised where the result is awaited
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits any more
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name=what, daemon=True).start()
    try:
        async with asyncio.timeout(limit_s):
            return await result
    except TimeoutError:
        if result.done() and not result.cancelled():
            raise
        raise TimeoutError(f"{what}: no answer after {limit_s:g} s") from None


class OneBlockingCall:
    """Blocking calls in threads, one at a time: while one hangs, for example on a dead network file system,
    no other begins."""

    def __init__(self, what: str, limit_s: float) -> None:
        self._what, self._limit_s = what, limit_s
        self._lock = asyncio.Lock()
        self._is_over = threading.Event()
        self._is_over.set()

    async def run(self, call: Callable[[], T]) -> T:
        """Return the call's result or raise its exception; `TimeoutError` after the limit, or while an
        earlier one hangs."""

        def run_to_the_end() -> T:
            try:
                return call()
            finally:
                self._is_over.set()

        async with self._lock:
            if not self._is_over.is_set():
                raise TimeoutError(f"{self._what}: no answer yet")
            self._is_over.clear()
            return await run_in_thread(run_to_the_end, self._limit_s, self._what)


@dataclass
class PeriodicTask:
    name: str
    run: Callable[[], Awaitable[object]]
    #: At least so long between two runs.
    interval_s: float = 0.0
    last_run: float | None = None

    def is_due(self, now: float) -> bool:
        return self.last_run is None or now - self.last_run >= self.interval_s


class PeriodicTasks:
    """Runs what is due, one task after the other; a task that fails is tried again."""

    def __init__(self, tasks: Sequence[PeriodicTask]) -> None:
        self._tasks = tuple(tasks)
        self._runner: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._runner = asyncio.create_task(self._run(), name="periodic tasks")

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.cancel()
            await asyncio.gather(runner, return_exceptions=True)

    async def run_due(self) -> None:
        now = time.monotonic()
        for task in self._tasks:
            if not task.is_due(now):
                continue
            task.last_run = now
            try:
                await task.run()
            except Exception:  # a full disk must not end these tasks for good, nor one task the others
                log.exception("a periodic task failed: %s; it is tried again", task.name)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(ROUND_SECONDS)
            await self.run_due()
