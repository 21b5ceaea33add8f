"""The rival's rules, as they are written down."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.text_rules import winner_rules as rules
from core.domain.choices import Method
from core.domain.tasks import TaskType
from tests.doubles.each import each

FULL, LORA = Method.FULL, Method.LORA
INSTRUCT, CHAT, DPO, GRPO = TaskType.INSTRUCT, TaskType.CHAT, TaskType.DPO, TaskType.GRPO


@each(
    ("rule", "arguments", "expected"),
    [
        # The smallest classes of the tables are used.
        (rules.class_of, (INSTRUCT, FULL), rules.WinnerClass(1e-4, 140)),
        (rules.class_of, (CHAT, LORA), rules.WinnerClass(1e-4, 32)),
        (rules.class_of, (DPO, LORA), rules.WinnerClass(6.5e-6, 12)),
        (rules.class_of, (GRPO, FULL), rules.WinnerClass(8e-6, 40)),
        # Small batches are accumulated.
        (rules.rows_of_step, (INSTRUCT, FULL), 140),
        (rules.rows_of_step, (CHAT, LORA), 64),
        (rules.rows_of_step, (DPO, FULL), 64),
        (rules.rows_of_step, (DPO, LORA), 48),
        (rules.rows_of_step, (GRPO, FULL), 160),
        # Epochs fill the time within bounds: seconds left, of a step, steps of an epoch, rows.
        (rules.epochs, (1000, 1.0, 100, 5000), 4.0),
        (rules.epochs, (1000, 1.0, 100, 20_000), 3.0),
        (rules.epochs, (200, 1.0, 100, 5000), 2.125),
        (rules.epochs, (10, 1.0, 100, 5000), 1.3),
        # The warmup follows steps and hours.
        (rules.warmup, (200, 1), 10),
        (rules.warmup, (1000, 1), 30),
        (rules.warmup, (9000, 1), 60),
        (rules.warmup, (9000, 9), 200),
        (rules.warmup, (20, 1), 5),
        (rules.dev_rows, (240,), 48),
        (rules.dev_rows, (5000,), 400),
        (rules.dev_rows, (20_000,), 606),
        (rules.dev_rows, (50_000,), 1000),
        # Long prompts count a little.
        (rules.prompt_weight, (50, 10), 0.0),
        (rules.prompt_weight, (100, 10), 0.025),
        # The first rate follows the weights, and the probe changes it within bounds.
        (rules.first_rate, (CHAT, 1e-3, 0.06, 0.03), 2e-3),
        (rules.first_rate, (DPO, 1e-3, 0.06, 0.03), 1e-3),
        (rules.first_rate, (DPO, 1e-3, 0.015, 0.03), 5e-4),
        (rules.probed_factor, (-1.0,), 0.6),
        (rules.probed_factor, (0.04,), 1.0),
        (rules.probed_factor, (0.14,), 1.4),
        (rules.probed_factor, (1.0,), 1.6),
        # Edges and gaps are looked at.
        (rules.next_rate, ({1.0: 3.0, 2.0: 1.0, 8.0: 2.0}, 2.0), 4.0),
        (rules.next_rate, ({1.0: 3.0, 2.0: 1.0, 8.0: 2.0}, 8.0), 8 * 10**0.15),
        (rules.next_rate, ({1.0: 3.0, 2.0: 1.0, 8.0: 2.0}, 1.0), 10**-0.15),
        (rules.next_rate, ({1.0: 2.0, 1.1: 1.0, 1.2: 2.0}, 1.1), None),
        # Hopeless candidates are given up.
        (rules.given_up, ([5.0, 4.0], 1.0), False),
        (rules.given_up, ([5.0, 9.0], 1.0), True),
        (rules.given_up, ([5.0, math.nan], math.inf), True),
        (rules.given_up, ([1.0, 1.2, 1.3, 1.4, 1.6], math.inf), True),
    ],
)
def test_a_rule_is_the_one_that_is_written_down(rule: Any, arguments: tuple[Any, ...], expected: Any) -> None:
    found = rule(*arguments)
    assert found == (pytest.approx(expected) if isinstance(expected, float) else expected)


def test_the_rate_warms_up_and_falls_to_a_quarter() -> None:
    factors = [rules.rate_factor(step, 100, 10) for step in range(101)]
    assert factors[0] == 0.1
    assert max(factors) == factors[10] == 1.0
    assert factors[100] == pytest.approx(0.25)
    assert factors[10:] == sorted(factors[10:], reverse=True)


@each(
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
