"""How many pictures are held out, when a training is past its optimum, and which candidate wins."""

from __future__ import annotations

import numpy
import pytest

from trainer.pictures.choice import (
    FEWEST_STEPS,
    Candidate,
    Kind,
    best_of,
    compare,
    held_out_count,
    is_past_optimum,
)

pytestmark = pytest.mark.small


@pytest.mark.parametrize(
    ("pictures", "count"),
    [(1, 0), (2, 1), (3, 1), (5, 1), (6, 2), (9, 3), (10, 3), (30, 3), (31, 4), (50, 5)],
)
def test_held_out_are_a_tenth_and_three_but_never_more_than_a_third(pictures: int, count: int) -> None:
    assert held_out_count(pictures, 0.1, 3) == count


def test_none_is_held_out_where_none_is_wanted() -> None:
    assert held_out_count(20, 0.0, 0) == 0


def candidate(
    score: float, step: int = 0, kind: Kind = Kind.AVERAGE, noise: float = 0.0, seed: int = 0
) -> Candidate:
    """Its cells differ from those of others by the score, and by noise of its own."""
    cells = numpy.random.default_rng(1).random((3, 2, 16)) - 0.5
    cells = cells - cells.mean() + noise * numpy.random.default_rng(seed).standard_normal(cells.shape)
    return Candidate(kind, step, 0, {}, cells + score)


def test_cells_are_compared_in_pairs() -> None:
    difference = compare(candidate(1.0).losses, candidate(1.25).losses)
    assert difference.mean == pytest.approx(0.25)
    assert difference.error == pytest.approx(0.0, abs=1e-12)
    noisy = compare(candidate(1.0, noise=0.1, seed=1).losses, candidate(1.25, noise=0.1, seed=2).losses)
    assert noisy.error == pytest.approx(0.1 * (2 / 96) ** 0.5, rel=0.3)


@pytest.mark.parametrize(
    ("scores", "past"),
    [
        ([3.0, 2.0, 1.0], False),
        ([3.0, 1.0, 1.1, 1.2], False),  # two later scores are too few
        ([3.0, 1.0, 1.1, 1.2, 1.3], True),
        ([3.0, 1.0, 1.1, 0.9, 1.3], False),  # a better one came
        ([1.0, 1.1, 1.2, 1.3], True),  # it was never better than the base
    ],
)
def test_the_optimum_is_past_when_nothing_better_comes(scores: list[float], past: bool) -> None:
    curve = [candidate(score, step=100 + number) for number, score in enumerate(scores)]
    assert is_past_optimum(curve) is past


def test_the_first_steps_say_nothing() -> None:
    scores = [1.0, 1.1, 1.2, 1.3, 1.4]
    curve = [candidate(score, step) for score, step in zip(scores, (0, 8, 10, 12, 15), strict=True)]
    assert not is_past_optimum(curve)
    assert is_past_optimum([*curve, candidate(1.5, FEWEST_STEPS)])


def test_differences_within_the_noise_take_longer() -> None:
    scores = [3.0, 1.0, 1.0, 1.0, 1.0]
    flat = [candidate(score, 100 + at, noise=0.1, seed=at) for at, score in enumerate(scores)]
    best = min(range(5), key=lambda at: flat[at].score)
    assert not is_past_optimum(
        [
            *flat[: best + 1],
            *(candidate(flat[best].score + 1e-4, 200 + at, noise=0.1, seed=9 + at) for at in range(2)),
        ]
    )
    late = [candidate(flat[best].score + 1e-3, step, noise=0.0) for step in (120, 140, 160)]
    assert is_past_optimum([*flat[: best + 1], *late])


def test_the_clearly_best_wins() -> None:
    best, mean = candidate(1.0, step=50, kind=Kind.RAW), candidate(1.1, kind=Kind.MEAN)
    assert best_of([mean, best, candidate(1.2)]) is best


def test_of_equal_ones_the_least_noisy_kind_wins_and_then_the_earliest() -> None:
    raw = candidate(1.0, step=10, kind=Kind.RAW, noise=0.2, seed=1)
    late, early = (candidate(1.001, step=step, kind=Kind.AVERAGE, noise=0.2, seed=step) for step in (30, 20))
    equal = [other for other in (late, early) if compare(raw.losses, other.losses).mean <= 0.03]
    assert best_of([raw, late, early]) in (early, late)
    assert best_of([raw, late, early]) is (early if early in equal else late)
