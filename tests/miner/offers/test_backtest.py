from __future__ import annotations

import pytest

from core.hardware import Hardware, parse_gpus
from miner.offers.backtest import Backtest, differences
from miner.offers.stream import stream
from tests.miner.offers.builders import policy, profile


@pytest.fixture(scope="module")
def played() -> Backtest:
    offers = list(stream(1, days=2, per_day=40))
    return Backtest(offers, profile(), Hardware(gpus=parse_gpus("4xH100")), policy().terms)


def test_only_what_is_answered_differently_differs(played: Backtest) -> None:
    before, same = (played.run("a", policy()) for _ in range(2))
    assert differences(before, same) == []
    strict = played.run("b", policy(rules__max_hours=2))
    found = differences(before, strict)
    assert found
    lost = [one for one in found if one.before.decision.accepted]
    assert lost
    assert any("over the limit of 2" in one.why for one in lost)
    assert all(one.why for one in found)
    gone = {one.before.offered.offer.task_id for one in found}
    kept = [one for one in before.entries if one.offered.offer.task_id not in gone]
    by_task = {one.offered.offer.task_id: one for one in strict.entries}
    assert all(by_task[one.offered.offer.task_id].decision.accepted == one.decision.accepted for one in kept)


def test_all_are_judged_alike_so_their_sums_can_be_compared(played: Backtest) -> None:
    dreamer = policy(value__win_chance={"instruct": 1.0, "chat": 1.0, "dpo": 1.0, "grpo": 1.0, "image": 1.0})
    assert played.run("a", policy()).summary.points == played.run("b", dreamer).summary.points
