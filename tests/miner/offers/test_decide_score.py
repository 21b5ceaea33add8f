from __future__ import annotations

import math
from typing import Any

import pytest

from core.domain.decisions import ExpectedValue
from core.domain.tasks import TaskType
from miner.offers.decide import work_score
from tests.doubles.each import each
from tests.miner.offers.builders import decided, offer, picture_offer, policy


def test_the_work_score_is_the_validators_own() -> None:
    for hours, billions, score in ((4, 9, 12), (0, 40, 1), (0.01, 1, 1), (10_000, 40, 1264.91)):
        assert work_score(hours, billions) == pytest.approx(score, abs=0.01)


def test_the_score_of_the_strategy_for_eight_is_its_formula() -> None:
    decision = decided(by=policy("h100x8"), plan_by="h100x8")
    by_hand = (
        0.35 * 0.35  # task weight of instruct
        + 0.25 * 0.95  # llama
        + 0.20 * 0.95  # success of instruct
        + 0.10 * (1 - 3 / 20)  # three of twenty hours
        + 0.05 * 1.0  # 8B lies in 7B-13B
        + 0.05 * decision.plan.share
    )
    assert decision.score == pytest.approx(by_hand)
    assert decision.threshold == 0.45


@each(
    ("name", "low", "high"),
    [
        ("task", {"task_type": TaskType.CHAT}, {"task_type": TaskType.DPO}),
        ("time", {"hours_to_complete": 6.0}, {"hours_to_complete": 2.0}),
        (
            "size",
            {"model": "a/llama-3b", "model_params_count": 3 * 10**9},
            {"model": "a/llama-70b", "model_params_count": 70 * 10**9},
        ),
        ("hardware", {"model": "a/x-13b", "model_params_count": 13 * 10**9}, {}),
        ("value", {"model": "a/x-1b", "model_params_count": 10**9}, {}),
    ],
)
def test_a_factor_rises_with_what_it_stands_for(name: str, low: dict[str, Any], high: dict[str, Any]) -> None:
    small, large = (decided(offer(**changes), policy("h100x4")).factors[name] for changes in (low, high))
    assert small.value < large.value
    assert small.weight == large.weight > 0
    assert small.contribution == pytest.approx(small.value * small.weight)
    assert 0 <= small.value <= large.value <= 1


def test_every_factor_is_shown_also_one_without_weight() -> None:
    family = decided(by=policy("h100x4")).factors["family"]
    assert (family.weight, family.contribution) == (0, 0)
    assert family.value == 0.95
    assert family.text == "llama: 95%, the prior"


def value_of(**overrides: Any) -> ExpectedValue | None:
    return decided(by=policy(**overrides)).value


def test_expected_value_weighs_winning_against_failing() -> None:
    value = value_of(
        value__win_chance={"instruct": 0.2}, value__penalty=2, value__training_exponent={"instruct": 0}
    )
    assert value.work == pytest.approx(2 * math.sqrt(3 * 8))
    assert value.success == 0.95
    assert value.win == 0.2
    assert value.points == pytest.approx(value.work * (3 * 0.95 * 0.2 - 2 * 0.05))
    assert value.per_gpu_hour == pytest.approx(value.points / value.gpu_hours)


def test_a_training_cut_short_wins_less_often() -> None:
    whole = value_of(value__training_exponent={"instruct": 0})
    cut = value_of(value__training_exponent={"instruct": 1})
    share = decided().plan
    assert cut.win == pytest.approx(whole.win * share.share)
    default = value_of(value__training_exponent=None)
    assert default.win == pytest.approx(whole.win * share.share**0.3)


def test_pictures_can_lose_points_though_they_are_published() -> None:
    decision = decided(
        picture_offer(), policy(value__punished={"image": 0.25}, value__win_chance={"flux": 0.1})
    )
    assert decision.value.punished == 0.25
    success = decision.value.success
    lost = 1 - success + 0.25 * success
    assert decision.value.points == pytest.approx(
        decision.value.work * (3 * success * decision.value.win - lost)
    )
