"""The best score, and patience."""

from __future__ import annotations

import math

from core.run_files import Score
from trainer.callbacks.best import Best


def score(value: float, lower: bool = True, step: int = 1) -> Score:
    return Score.model_construct(value=value, metric="eval_loss", lower_is_better=lower, step=step)


def test_better_is_lower_for_a_loss_and_higher_for_a_reward() -> None:
    loss, reward = Best(), Best()
    assert [loss.judge(score(value)) for value in (2.0, 2.5, 1.5)] == [True, False, True]
    assert [reward.judge(score(value, lower=False)) for value in (0.2, 0.1, 0.3)] == [True, False, True]


def test_an_equal_score_is_no_better() -> None:
    best = Best()
    best.judge(score(1.0))
    assert not best.judge(score(1.0))


def test_what_is_no_number_is_never_better() -> None:
    best = Best()
    assert not best.judge(score(math.nan))
    assert not best.judge(score(-math.inf))
    assert best.score is None


def test_patience_ends_after_as_many_evaluations_without_a_better_one() -> None:
    best = Best(patience=2)
    for value, exhausted in ((1.0, False), (1.1, False), (0.9, False), (1.0, False), (1.0, True)):
        best.judge(score(value))
        assert best.exhausted is exhausted


def test_without_patience_nothing_is_ever_exhausted() -> None:
    best = Best()
    for _ in range(100):
        best.judge(score(1.0))
    assert not best.exhausted
