"""A worker's code in this process, where a child of its own would only cost a start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

from miner.support.subprocess import ChildAnswer


class Events:
    """In the place of `EventWriter`; every progress is due."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self.tell = tell

    def __call__(self, event: Any) -> None:
        self.tell(event)

    def is_due(self, *_: object) -> bool:
        return True


def answered_by(worker: ModuleType) -> Callable[..., Awaitable[ChildAnswer[Any]]]:
    """Stand in for `run_order`. A caller that is cancelled ends nothing."""

    async def run(
        _protocol: object, order: Any, tell: Callable[[Any], None], **_: object
    ) -> ChildAnswer[Any]:
        def answer() -> Any:
            try:
                return worker.carry_out(order, Events(tell))
            except Exception as error:
                return worker.failure_event(error, order)

        return ChildAnswer(await asyncio.to_thread(answer), 0, "")

    return run
