"""The dynamic learning rate."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.plan_parts import PlateauPlan
from trainer.callbacks.plateau import LEAST, MOST, Plateau

PLAN = PlateauPlan(factor=0.8, growth=1.05, patience=2)


def test_a_plateau_lowers_the_rate_after_the_patience_and_says_so() -> None:
    plateau = Plateau(PLAN)
    assert plateau.judged(better=False) is None
    said = plateau.judged(better=False)
    assert said is not None
    assert "0.8" in said
    assert plateau.factor == 0.8
    assert plateau.judged(better=False) is None


def test_the_rate_rises_while_the_score_improves() -> None:
    plateau = Plateau(PLAN)
    assert plateau.judged(better=True) is not None
    assert plateau.factor == 1.05


def test_without_growth_an_improvement_changes_nothing() -> None:
    assert Plateau(PlateauPlan(factor=0.5)).judged(better=True) is None


@given(st.lists(st.booleans(), max_size=200))
def test_the_rate_stays_within_its_bounds_whatever_the_scores_do(judged: list[bool]) -> None:
    plateau = Plateau(PLAN)
    for better in judged:
        plateau.judged(better)
        assert LEAST <= plateau.factor <= MOST


def test_a_resumed_run_goes_on_with_the_same_factor() -> None:
    one, other = Plateau(PLAN), Plateau(PLAN)
    for better in (False, False, False):
        one.judged(better)
    other.restore(one.state())
    assert other == one
