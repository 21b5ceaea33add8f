"""Reward functions beside other work: who gets completions early, and that rewards go to their rows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from trainer.rewards import calls
from trainer.rewards.calls import LONG_CALLS, UNTIL_MEASURED, RewardCalls


class Counted:
    """Gives each completion its number, and takes as long as it is to, by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.takes, self.now = 0.0, 0.0
        self.sizes: list[int] = []
        monkeypatch.setattr(calls.time, "monotonic", lambda: self.now)

    def __call__(self, completions: Sequence[str], **columns: Any) -> list[float]:
        assert columns["numbers"] == [int(text) for text in completions]
        self.sizes.append(len(completions))
        self.now += self.takes
        return [float(text) for text in completions]


def handed(rows: Sequence[int]) -> tuple[Sequence[int], list[str], dict[str, list[int]]]:
    return rows, [str(row) for row in rows], {"numbers": list(rows)}


def collection(rewards: RewardCalls, generation_s: float = 10.0) -> list[list[float]]:
    """Two prompts of two completions, the second one finished first."""
    for prompt in ([2, 3], [0, 1]):
        rewards.hand_in_early(*handed(prompt))
    rewards.hand_in(*handed(range(4)))
    return rewards.collect(generation_s)


def test_a_function_that_is_not_slow_gets_everything_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    function = Counted(monkeypatch)
    function.takes = 1.0
    rewards = RewardCalls([function])
    for _ in range(5):
        assert collection(rewards) == [[0.0, 1.0, 2.0, 3.0]]
    assert function.sizes == [4] * 5
    assert not rewards.any_slow


def test_a_first_call_and_a_single_long_one_make_no_function_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    function = Counted(monkeypatch)
    rewards = RewardCalls([function])
    for takes in (90.0, 3.0, 0.1, 3.0, 0.1):
        function.takes = takes
        collection(rewards)
        assert not rewards.any_slow


def test_a_slow_function_gets_completions_early_and_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function = Counted(monkeypatch)
    function.takes = 2.0
    rewards = RewardCalls([function])
    for _ in range(1 + LONG_CALLS):
        assert not rewards.any_slow
        collection(rewards)
    assert set(function.sizes) == {4}
    for _ in range(UNTIL_MEASURED):
        assert rewards.any_slow
        function.sizes.clear()
        assert collection(rewards) == [[0.0, 1.0, 2.0, 3.0]]
        assert sum(function.sizes) == 4, "none twice"
    assert not rewards.any_slow
    collection(rewards)
    assert rewards.any_slow, "it still is"
    for _ in range(UNTIL_MEASURED):
        collection(rewards)
    function.takes = 0.5
    for _ in range(2 * UNTIL_MEASURED):
        collection(rewards)
        assert not rewards.any_slow, "it no longer is"


def test_only_slow_functions_get_completions_early() -> None:
    """Their threads are let go one by one: no clock decides."""
    early, sizes = threading.Event(), list[int]()

    def slow(completions: Sequence[str], **columns: Any) -> list[float]:
        early.set()
        return [1.0] * len(completions)

    def quick(completions: Sequence[str], **columns: Any) -> list[float]:
        sizes.append(len(completions))
        return [2.0] * len(completions)

    rewards = RewardCalls([slow, quick])
    rewards._callers[0].long = LONG_CALLS
    rewards.hand_in_early(*handed([0, 1]))
    assert early.wait(60)
    rewards.hand_in(*handed([0, 1, 2, 3]))
    assert rewards.collect(1.0) == [[1.0] * 4, [2.0] * 4]
    assert sizes == [4]


def test_what_waits_for_a_busy_function_goes_into_one_call() -> None:
    busy, free, sizes = threading.Event(), threading.Event(), list[int]()

    def slow(completions: Sequence[str], **columns: Any) -> list[float]:
        sizes.append(len(completions))
        busy.set()
        assert free.wait(60)
        return [float(text) for text in completions]

    rewards = RewardCalls([slow])
    rewards._callers[0].long = LONG_CALLS
    rewards.hand_in_early(*handed([4, 5]))
    assert busy.wait(60)
    rewards.hand_in_early(*handed([0, 1]))
    rewards.hand_in_early(*handed([2, 3]))
    free.set()
    rewards.hand_in(*handed(range(6)))
    assert rewards.collect(1.0) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]
    assert sizes == [2, 4]


def test_what_a_function_raises_is_raised_at_the_collection() -> None:
    def broken(completions: Sequence[str], **columns: Any) -> list[float]:
        raise OSError("no room")

    rewards = RewardCalls([broken])
    rewards.hand_in(*handed([0]))
    with pytest.raises(OSError, match="no room"):
        rewards.collect()
