from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from core.domain.evaluation import (
    Era,
    RewardScore,
    evaluation_rules,
    gains_over_base,
    normalised_rewards,
    reward_standing,
    sequence_limit,
)
from core.runs.run_files import HeldOutScore
from tests.doubles.each import each


@each(
    ("window", "limit"),
    [(None, 4096), (131_072, 4096), (8192, 4096), (8191, 4096), (4096, 2048), (513, 257), (1, 1)],
)
def test_instruct_rows_may_take_half_of_a_small_window(window: int | None, limit: int) -> None:
    assert sequence_limit(window) == limit


@pytest.mark.parametrize(
    ("era", "window", "limit"),
    [
        (Era.OFFERS, None, 1024),
        (Era.OFFERS, 32_768, 1024),
        (Era.TOURNAMENTS, 32_768, 32_768),
        (Era.TOURNAMENTS, None, 8192),
    ],
)
def test_length_limit_of_pairs_is_that_of_the_evaluation(era: Era, window: int | None, limit: int) -> None:
    assert evaluation_rules(era).dpo_limit(window) == limit


def rewarded(*means: float, base: tuple[float, ...] = (1.0,), kl: float = 0.0) -> RewardScore:
    return RewardScore(means=means, base=base, weights=(1.0 / len(means),) * len(means), kl=kl)


@each(
    ("raw", "expected"),
    [
        ([[2.0], [4.0], [1.0]], [[0.5], [1.0], [0.25]]),
        ([[-3.0], [-1.0], [0.0]], [[0.0], [2 / 3], [1.0]]),
        ([[-3.0], [1.0]], [[0.25], [0.75]]),
        ([[0.0], [0.0]], [[1.0], [1.0]]),
        ([[5.0, 1.0]], [[5.0, 1.0]]),
        ([[1.0, 10.0], [2.0, 5.0]], [[0.5, 1.0], [1.0, 0.5]]),
    ],
)
def test_rewards_are_normalised_among_submissions(
    raw: list[list[float]], expected: list[list[float]]
) -> None:
    assert normalised_rewards(raw) == [pytest.approx(means) for means in expected]


def test_a_nat_of_kl_costs_half_a_point() -> None:
    assert reward_standing([1.0, 0.5], 0.2, [0.5, 0.5]) == pytest.approx(0.75 - 0.1)


@each(
    ("score", "margin"),
    [
        *((rewarded(1.0), 0.0), (rewarded(4.0), 0.75), (rewarded(0.5), -0.5), (rewarded(4.0, kl=0.5), 0.5)),
        *((rewarded(0.0, base=(0.0,)), 0.0), (rewarded(-1.0, base=(-3.0,)), 1.0)),
        (rewarded(1e308, base=(-1e308,)), 1.0),
    ],
)
def test_the_margin_is_measured_in_a_field_with_the_base(score: RewardScore, margin: float) -> None:
    assert score.margin == pytest.approx(margin)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        # 140 times the base's reward, and no model to submit: so it was seen.
        (rewarded(50.0, base=(0.7,), kl=0.5), rewarded(100.0, base=(0.7,), kl=2.26)),
        (rewarded(20.0, base=(0.1,), kl=0.3), rewarded(10.0, base=(0.1,), kl=0.1)),
        (rewarded(1.05), rewarded(100.0, kl=2.0)),
        # Measured on different prompts, as after a resumed run that had time for fewer: by their margins.
        (rewarded(12.0, base=(10.0,)), rewarded(13.5, base=(14.0,))),
        (rewarded(2.0, base=(1.0,)), rewarded(2.0, 3.0, base=(1.0, 3.0))),
        (rewarded(1e308, base=(-1e308,)), rewarded(0.0, base=(-1e308,))),
    ],
    ids=["two nats of KL", "twice a large reward", "above the base", "prompts", "functions", "huge"],
)
def test_the_better_of_two_beats_the_other(better: RewardScore, worse: RewardScore) -> None:
    assert better.beats(worse)
    assert not worse.beats(better)


def test_in_one_field_a_model_with_a_fiftieth_of_the_best_reward_gains_a_fiftieth() -> None:
    models = [rewarded(0.5, base=(0.0,), kl=0.02), rewarded(0.01, base=(0.0,), kl=0.05)]
    assert gains_over_base(models) == [pytest.approx(0.99), pytest.approx(-0.005)]


def test_every_function_has_a_mean_a_base_and_a_weight() -> None:
    for means, base, weights in (((1.0,), (1.0, 2.0), (1.0,)), ((), (), ()), ((1.0,), (1.0,), (0.5, 0.5))):
        with pytest.raises(ValidationError):
            RewardScore(means=means, base=base, weights=weights, kl=0.0)


def test_a_score_with_rewards_is_compared_by_them_and_otherwise_by_its_value() -> None:
    def score(value: float, of: RewardScore | None) -> HeldOutScore:
        return HeldOutScore(value=value, metric="reward-margin", lower_is_better=False, step=1, rewarded=of)

    far, near = rewarded(100.0, base=(0.7,), kl=2.26), rewarded(50.0, base=(0.7,), kl=0.5)
    assert score(far.margin, near).beats(score(near.margin, far))
    assert score(0.5, None).beats(score(0.4, far))
    assert HeldOutScore.model_validate_json(score(0.1, near).model_dump_json()) == score(0.1, near)


numbers = st.floats(-1e6, 1e6)


@given(
    st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=4), st.floats(0, 10), st.floats(0, 10)
)
def test_at_most_one_of_two_is_better_and_all_rewards_are_worth_one_point(
    functions: list[tuple[float, float, float]], kl: float, other_kl: float
) -> None:
    base, means, others = (tuple(column) for column in zip(*functions, strict=True))
    one, other = rewarded(*means, base=base, kl=kl), rewarded(*others, base=base, kl=other_kl)
    assert not (one.beats(other) and other.beats(one))
    assert not one.beats(one)
    assert one.margin <= 1 + 1e-9
