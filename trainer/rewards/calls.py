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
#: Prompts before anything is said: a few easy ones are no sign.
PROMPTS = 64
#: Completions at the maximum, and groups without a difference, from which on it is said.
SATURATED, ALIKE = 0.9, 0.5
#: Rewards that differ by less are equal, as TRL has it: such a group has no advantage.
_EQUAL = 1e-8
#: Of one completion, what each function gave.
Given = Sequence[float]


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


class RewardWatch:
    """Looks at `PROMPTS` prompts at a time; each thing is said once in a run."""

    def __init__(self, weights: Sequence[float], say: Callable[[str], None]) -> None:
        self._weights, self._say = list(weights), say
        self._groups: list[Sequence[Given]] = []
        self._said: set[str] = set()

    def add(self, rewards: Sequence[Given], group: int) -> None:
        """`group` completions of a prompt follow each other."""
        for start in range(0, len(rewards) - group + 1, group):
            self._groups.append(rewards[start : start + group])
            if len(self._groups) == PROMPTS:
                self._judge()
                self._groups.clear()

    def _judge(self) -> None:
        columns = zip(*(own for group in self._groups for own in group), strict=True)
        for place, column in enumerate(columns):
            most = max(column)
            share = sum(one == most for one in column) / len(column)
            if most - min(column) <= _EQUAL:
                what = f"gave {most:g} to every completion of {PROMPTS} prompts: it teaches nothing"
                self._once(f"equal {place}", f"reward {place} {what}")
            elif share >= SATURATED:
                what = f"is at its maximum of {most:g} for {share:.0%} of the completions"
                self._once(f"saturated {place}", f"reward {place} {what}: little is left to learn from it")
        share = sum(self._alike(group) for group in self._groups) / PROMPTS
        if share >= ALIKE:
            what = f"{share:.0%} of {PROMPTS} prompts had completions of equal reward"
            self._once("alike", f"{what}: only their distance to the base is learned from them")

    def _alike(self, group: Sequence[Given]) -> bool:
        totals = [sum(weight * one for weight, one in zip(self._weights, own, strict=True)) for own in group]
        return max(totals) - min(totals) <= _EQUAL

    def _once(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self._say(text)
