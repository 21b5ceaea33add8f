"""Calls of reward functions beside other work: all functions at once, each in a thread of its own.

A thread only waits for the function's process. What is handed in while a function is busy goes into its next
call, so that one with fixed costs is not called for every few completions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

#: A number for each completion; the columns by name, each with a value for every completion.
RewardFunction = Callable[..., list[float]]
Columns = Mapping[str, Sequence[Any]]


@dataclass
class _Caller:
    """One function, its thread, and what waits for it."""

    function: RewardFunction
    thread: ThreadPoolExecutor
    waiting: list[tuple[Sequence[int], Sequence[str], Columns]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    rewards: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0

    def call(self) -> None:
        with self.lock:
            batches, self.waiting = self.waiting, []
        if not batches:
            return  # they went with the call before
        completions = [text for _, texts, _ in batches for text in texts]
        columns = {name: [value for _, _, own in batches for value in own[name]] for name in batches[0][2]}
        began = time.monotonic()
        rewards = self.function(completions=completions, **columns)
        self.seconds += time.monotonic() - began
        rows = [row for own, _, _ in batches for row in own]
        self.rewards |= dict(zip(rows, rewards, strict=True))


class RewardCalls:
    """Completions are handed in, all of a prompt together, and their rewards collected at the end."""

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self._callers = [_Caller(one, ThreadPoolExecutor(1, "reward")) for one in functions]
        self._calls: list[Future[None]] = []
        self._rows: set[int] = set()
        #: What the slowest function took, for all that was collected last.
        self.seconds = 0.0

    def hand_in(self, rows: Sequence[int], completions: Sequence[str], columns: Columns) -> None:
        """`rows`: the completions' numbers, by which their rewards will be asked for."""
        self._rows |= set(rows)
        for caller in self._callers:
            with caller.lock:
                caller.waiting.append((rows, completions, columns))
            self._calls.append(caller.thread.submit(caller.call))

    @property
    def rows(self) -> set[int]:
        """Those handed in since the last collection."""
        return self._rows

    def collect(self) -> list[list[float]]:
        """Of each function, the rewards in the order of the rows; what a function raised is raised here."""
        calls, self._calls = self._calls, []
        rows, self._rows = sorted(self._rows), set()
        for call in calls:
            call.result()
        self.seconds = max((caller.seconds for caller in self._callers), default=0.0)
        found = [[caller.rewards[row] for row in rows] for caller in self._callers]
        for caller in self._callers:
            caller.rewards, caller.seconds = {}, 0.0
        return found
