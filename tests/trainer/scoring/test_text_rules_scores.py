"""Several trainings of each side of a cell, compared with each other."""

from __future__ import annotations

import pytest

from benchmarks.text_rules.cells import Cell
from benchmarks.text_rules.scores import compared

CELL = Cell.of("instruct-llama-1")


def losses(level: float) -> list[float]:
    return [level + 0.01 * (at % 7) for at in range(60)]


def test_each_training_meets_each_of_the_other_side() -> None:
    """Of two against three, five of six pairs are won: by mean rows it would look sure."""
    theirs = [losses(2.0), losses(1.5), losses(2.0)]
    found = compared(CELL, theirs, [losses(1.0), losses(1.75)])
    assert len(found["chances"]) == 6
    assert sorted(round(chance) for chance in found["chances"]) == [0, 1, 1, 1, 1, 1]
    assert found["p_better"] == pytest.approx(5 / 6, abs=0.01)
    assert found["mean_gap"] == pytest.approx(5.5 / 3 - 1.375)


def test_one_training_of_each_side_is_the_boss_rounds_comparison() -> None:
    found = compared(CELL, [losses(2.0)], [losses(1.9)])
    assert found["p_better"] == found["chances"][0] == 1.0
    assert found["mean_gap"] == pytest.approx(0.1)
