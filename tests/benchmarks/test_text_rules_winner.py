"""The rival's rules, as they are written down."""

from __future__ import annotations

import math

import pytest

from benchmarks.text_rules import winner_rules as rules
from core.domain.choices import Method
from core.domain.tasks import TaskType


def test_the_smallest_classes_of_the_tables_are_used() -> None:
    assert rules.class_of(TaskType.INSTRUCT, Method.FULL) == rules.WinnerClass(1e-4, 140)
    assert rules.class_of(TaskType.CHAT, Method.LORA) == rules.WinnerClass(1e-4, 32)
    assert rules.class_of(TaskType.DPO, Method.LORA) == rules.WinnerClass(6.5e-6, 12)
    assert rules.class_of(TaskType.GRPO, Method.FULL) == rules.WinnerClass(8e-6, 40)


@pytest.mark.parametrize(
    ("task", "method", "rows"),
    [
        (TaskType.INSTRUCT, Method.FULL, 140),
        (TaskType.CHAT, Method.LORA, 64),
        (TaskType.DPO, Method.FULL, 64),
        (TaskType.DPO, Method.LORA, 48),
        (TaskType.GRPO, Method.FULL, 160),
    ],
)
def test_small_batches_are_accumulated(task: TaskType, method: Method, rows: int) -> None:
    assert rules.rows_of_step(task, method) == rows


@pytest.mark.parametrize(
    ("left", "rows", "epochs"), [(1000, 5000, 4.0), (1000, 20_000, 3.0), (200, 5000, 2.125), (10, 5000, 1.3)]
)
def test_epochs_fill_the_time_within_bounds(left: float, rows: int, epochs: float) -> None:
    assert rules.epochs(left, step_s=1.0, per_epoch=100, rows=rows) == pytest.approx(epochs)


def test_the_rate_warms_up_and_falls_to_a_quarter() -> None:
    factors = [rules.rate_factor(step, 100, 10) for step in range(101)]
    assert factors[0] == 0.1
    assert max(factors) == factors[10] == 1.0
    assert factors[100] == pytest.approx(0.25)
    assert factors[10:] == sorted(factors[10:], reverse=True)


@pytest.mark.parametrize(
    ("steps", "hours", "expected"), [(200, 1, 10), (1000, 1, 30), (9000, 1, 60), (9000, 9, 200), (20, 1, 5)]
)
def test_the_warmup_follows_steps_and_hours(steps: int, hours: float, expected: int) -> None:
    assert rules.warmup(steps, hours) == expected


def test_dev_rows() -> None:
    assert [rules.dev_rows(rows) for rows in (240, 5000, 20_000, 50_000)] == [48, 400, 606, 1000]


def test_long_prompts_count_a_little() -> None:
    assert rules.prompt_weight(50, 10) == 0.0
    assert rules.prompt_weight(100, 10) == pytest.approx(0.025)


def test_the_first_rate_follows_the_weights() -> None:
    assert rules.first_rate(TaskType.CHAT, 1e-3, 0.06, 0.03) == pytest.approx(2e-3)
    assert rules.first_rate(TaskType.DPO, 1e-3, 0.06, 0.03) == 1e-3
    assert rules.first_rate(TaskType.DPO, 1e-3, 0.015, 0.03) == pytest.approx(5e-4)
    assert [rules.probed_factor(drop) for drop in (-1.0, 0.04, 0.14, 1.0)] == [
        0.6,
        1.0,
        pytest.approx(1.4),
        1.6,
    ]


@pytest.mark.parametrize(
    ("steps", "epochs", "plan"),
    [
        (500, 3.0, rules.SearchPlan(62, 50, third=True)),
        (500, 1.5, rules.SearchPlan(62, 50)),
        (140, 3.0, rules.SearchPlan(35, 0, third=True)),
        (5000, 3.0, rules.SearchPlan(100, 150, third=True)),
        (60, 3.0, rules.SearchPlan(20, 0, (-0.3, 0.0, 0.3))),
        (60, 0.5, rules.SearchPlan(20, 0, (-0.1, 0.0, 0.1))),
        (40, 3.0, None),
    ],
)
def test_stages_of_the_search_fit_its_steps(steps: int, epochs: float, plan: rules.SearchPlan | None) -> None:
    found = rules.search_plan(steps, epochs)
    assert found == plan
    if found is not None:
        assert found.first * len(found.offsets) + found.second * len(rules.STAGE_2) <= steps


def test_the_highest_of_nearly_equal_rates_is_picked() -> None:
    scores = {1e-4: 2.0, 2e-4: 1.0, 4e-4: 1.02, 8e-4: 1.1, 1e-2: math.inf}
    assert rules.pick(scores, highest=True) == 4e-4
    assert rules.pick(scores, highest=False) == 2e-4


def test_edges_and_gaps_are_looked_at() -> None:
    around = {1.0: 3.0, 2.0: 1.0, 8.0: 2.0}
    assert rules.next_rate(around, 2.0) == pytest.approx(4.0)
    assert rules.next_rate(around, 8.0) == pytest.approx(8 * 10**0.15)
    assert rules.next_rate(around, 1.0) == pytest.approx(10**-0.15)
    assert rules.next_rate({1.0: 2.0, 1.1: 1.0, 1.2: 2.0}, 1.1) is None


def test_hopeless_candidates_are_given_up() -> None:
    assert not rules.given_up([5.0, 4.0], 1.0)
    assert rules.given_up([5.0, 9.0], 1.0)
    assert rules.given_up([5.0, math.nan], math.inf)
    assert rules.given_up([1.0, 1.2, 1.3, 1.4, 1.6], math.inf)
