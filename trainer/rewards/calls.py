"""Calls of reward functions beside other work: all functions at once, each in a thread of its own.

A thread only waits for the function's process. A slow function is called while completions are still being
generated: what is handed in while it is busy goes into its next call, so that one with fixed costs is not
called for every few completions. All others get everything in one call.
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

#: A function is slow if its call takes longer than this part of the generation before it,
SLOW = 0.1
#: as often as this in a row: once may be chance.
LONG_CALLS = 2
#: A slow one gets everything in one call again after so many collections, to see whether it still is slow.
UNTIL_MEASURED = 15


@dataclass
class _Caller:
    """One function, its thread, and what waits for it."""

    function: RewardFunction
    thread: ThreadPoolExecutor
    waiting: list[tuple[Sequence[int], Sequence[str], Columns]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    calls: list[Future[None]] = field(default_factory=list)
    #: Of the coming collection.
    given: set[int] = field(default_factory=set)
    rewards: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0
    #: Collections by single calls: all but the first, which loads what the function imports, are measured.
    measured: int = -1
    #: Of the last of those, how many in a row were long.
    long: int = 0
    #: Collections since then.
    unmeasured: int = 0

    @property
    def slow(self) -> bool:
        return self.long >= LONG_CALLS and self.unmeasured < UNTIL_MEASURED

    def take(self, rows: Sequence[int], completions: Sequence[str], columns: Columns) -> None:
        new = [at for at, row in enumerate(rows) if row not in self.given]
        if not new:
            return
        own = {name: [values[at] for at in new] for name, values in columns.items()}
        batch = [rows[at] for at in new], [completions[at] for at in new], own
        self.given.update(batch[0])
        with self.lock:
            self.waiting.append(batch)
        self.calls.append(self.thread.submit(self.call))

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

    def collect(self, beside_s: float) -> list[float]:
        calls, self.calls = self.calls, []
        for call in calls:
            call.result()
        found = [self.rewards[row] for row in sorted(self.given)]
        self._judge(beside_s)
        self.given, self.rewards, self.seconds = set(), {}, 0.0
        return found

    def _judge(self, beside_s: float) -> None:
        if self.slow:
            self.unmeasured += 1
            return
        self.measured, self.unmeasured = self.measured + 1, 0
        if self.measured:
            self.long = self.long + 1 if self.seconds > SLOW * beside_s else 0


class RewardCalls:
    """Completions are handed in, all of a prompt together, and their rewards collected at the end."""

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self._callers = [_Caller(one, ThreadPoolExecutor(1, "reward")) for one in functions]

    @property
    def any_slow(self) -> bool:
        """Return True if a function is to get completions while others are still being generated."""
        return any(caller.slow for caller in self._callers)

    def hand_in_early(self, rows: Sequence[int], completions: Sequence[str], columns: Columns) -> None:
        """Start slow functions on completions. `rows` are the completions' numbers."""
        for caller in self._callers:
            if caller.slow:
                caller.take(rows, completions, columns)

    def hand_in(self, rows: Sequence[int], completions: Sequence[str], columns: Columns) -> None:
        """Hand in everything, in the order in which functions get it, but for what a function already has."""
        for caller in self._callers:
            caller.take(rows, completions, columns)

    def collect(self, beside_s: float = 0.0) -> list[list[float]]:
        """Return the rewards of each function in the order of the rows; raise what a function raised.
        `beside_s`: what the generation before took; who is slow matters only where there are more."""
        return [caller.collect(beside_s) for caller in self._callers]
