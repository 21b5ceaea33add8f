"""Who wins row by row, and when that is more than luck."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from trainer.scoring.eval import DEAD_ZONE, compare_models

assert torch  # collected with the training stack only, which numpy comes with
CHANCE = numpy.random.default_rng(0)
BOSS = CHANCE.gamma(2.0, 0.5, 800)


def test_a_clearly_better_challenger_wins() -> None:
    comparison = compare_models(BOSS.tolist(), (BOSS - 0.1 + CHANCE.normal(0, 0.05, 800)).tolist())
    assert comparison.won
    assert comparison.win_rate_bound > 0.9
    assert "at the 1st percentile" in comparison.reason
    assert comparison.mean_gap == pytest.approx(0.1, abs=0.01)
    assert comparison.mean_gap_bound < comparison.mean_gap


def test_a_model_does_not_beat_itself() -> None:
    comparison = compare_models(BOSS.tolist(), BOSS.tolist())
    assert (comparison.wins, comparison.losses, comparison.won) == (0, 0, False)
    assert comparison.win_rate_bound == 0.0


def test_differences_within_the_dead_zone_decide_nothing() -> None:
    comparison = compare_models(BOSS.tolist(), (BOSS - DEAD_ZONE * 0.9).tolist())
    assert (comparison.wins, comparison.won) == (0, False)


def test_noise_does_not_win() -> None:
    comparison = compare_models(BOSS.tolist(), (BOSS + CHANCE.normal(0, 0.3, 800)).tolist())
    assert not comparison.won
    assert 0.4 < comparison.win_rate < 0.6


def test_many_hairline_wins_do_not_outweigh_a_few_heavy_losses() -> None:
    challenger = BOSS - 0.02
    challenger[:100] += 1.0
    comparison = compare_models(BOSS.tolist(), challenger.tolist())
    assert comparison.win_rate > 0.8
    assert not comparison.won
    assert "mean gap" in comparison.reason


def test_high_losses_need_a_wider_gap() -> None:
    high = (BOSS + 9).tolist()
    assert compare_models(high, high).gap_needed == pytest.approx(0.01 * numpy.mean(high))
    assert compare_models([0.1] * 5, [0.1] * 5).gap_needed == 0.01


def test_rows_that_could_not_be_scored_count_for_nobody() -> None:
    comparison = compare_models([1.0, float("nan"), 1.0, float("inf")], [0.5, 0.5, float("nan"), 0.5])
    assert (comparison.rows, comparison.wins) == (1, 1)
    assert compare_models([], []).won is False


def test_the_bounds_are_those_of_the_validators_bootstrap() -> None:
    """Written down again: 10,000 draws of all rows, 1st percentile, a fixed seed."""
    boss, challenger = BOSS[:300], BOSS[:300] - CHANCE.normal(0.03, 0.1, 300)
    gaps = boss - challenger
    generator = numpy.random.default_rng(20260808)
    rates, means = [], []
    for start in range(0, 10_000, 2_000_000 // 300):
        drawn = generator.integers(0, 300, size=(min(2_000_000 // 300, 10_000 - start), 300))
        picked = gaps[drawn]
        decided = (abs(picked) > 0.01).sum(axis=1)
        rates += list((picked > 0.01).sum(axis=1) / decided)
        means += list(picked.mean(axis=1))
    comparison = compare_models(boss.tolist(), challenger.tolist())
    assert comparison.win_rate_bound == pytest.approx(numpy.percentile(rates, 1), abs=1e-12)
    assert comparison.mean_gap_bound == pytest.approx(numpy.percentile(means, 1), abs=1e-9)


def test_vectors_of_different_rows_are_not_compared() -> None:
    with pytest.raises(ValueError):
        compare_models([1.0], [1.0, 2.0])


def drawn_twice(boss: list[float], challenger: list[float], draws: int, again: int) -> float:
    """The chance to win, the long way: the whole rule on each of many other sets of rows."""
    chance = random.Random(1)
    pairs = list(zip(boss, challenger, strict=True))
    wins = 0
    for _ in range(draws):
        rows = chance.choices(pairs, k=len(pairs))
        gaps = [one - other for one, other in rows]
        rates, means = [], []
        for _ in range(again):
            some = chance.choices(gaps, k=len(gaps))
            decided = [gap for gap in some if abs(gap) > 0.01]
            rates.append(sum(gap > 0 for gap in decided) / len(decided) if decided else 0.0)
            means.append(sum(some) / len(some))
        needed = max(0.01, 0.01 * sum(one for one, _ in rows) / len(rows))
        wins += sorted(rates)[again // 100] >= 0.55 and sorted(means)[again // 100] >= needed
    return wins / draws


@pytest.mark.parametrize(("better_by", "noise"), [(0.05, 0.1), (0.03, 0.06), (0.02, 0.1)])
def test_the_chance_to_win_is_that_of_the_whole_rule_on_other_rows(better_by: float, noise: float) -> None:
    boss = BOSS[:120]
    challenger = (boss - better_by + numpy.random.default_rng(3).normal(0, noise, 120)).tolist()
    comparison = compare_models(boss.tolist(), challenger)
    expected = drawn_twice(boss.tolist(), challenger, draws=100, again=100)
    assert comparison.p_win == pytest.approx(expected, abs=0.15)


def test_the_chance_to_win_is_none_for_equals_and_sure_for_a_much_better_model() -> None:
    assert compare_models(BOSS.tolist(), BOSS.tolist()).p_win == 0.0
    assert compare_models(BOSS.tolist(), (BOSS - 0.5).tolist()).p_win == 1.0
    assert compare_models([], []).p_win == 0.0
