"""Progress bars of the image engines."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.wrapper.steps import Step, is_broken, step_of

LINES = [
    ("steps:   3%|▎         | 48/1600 [01:02<33:20,  1.29s/it, avr_loss=0.123]", 1600, Step(48, 1600, 0.123)),
    (
        "steps: 100%|██████████| 1600/1600 [33:00<00:00,  1.24s/it, avr_loss=0.0871]",
        1600,
        Step(1600, 1600, 0.0871),
    ),
    ("steps:   0%|          | 0/1600 [00:00<?, ?it/s]", 1600, Step(0, 1600)),
    (
        "last:   1%|          | 12/2000 [00:30<1:22:00,  2.48s/it, lr: 1.0e-04 loss: 3.456e-01]",
        2000,
        Step(12, 2000, 0.3456, 1e-4),
    ),
]


@pytest.mark.parametrize(("line", "total", "step"), LINES)
def test_a_bar_of_the_training_says_step_loss_and_rate(line: str, total: int, step: Step) -> None:
    assert step_of(line, total) == step


@pytest.mark.parametrize(
    "line",
    [
        "100%|██████████| 30/30 [00:04<00:00,  7.1it/s]",
        "Loading checkpoint shards: 100%|██████████| 1600/1600 [00:04<00:00,  7.1it/s]",
        "epoch 1/10",
        "steps: lots",
    ],
)
def test_other_bars_and_lines_say_nothing(line: str) -> None:
    assert step_of(line, 1600) is None


def test_a_loss_of_nan_is_seen() -> None:
    found = step_of("steps:   3%|▎| 48/1600 [01:02<33:20,  1.29s/it, avr_loss=nan]", 1600)
    assert found is not None
    assert found.loss is not None
    assert math.isnan(found.loss)
    assert is_broken(found)


@given(st.text(max_size=300), st.integers(0, 10_000))
def test_whatever_an_engine_prints_is_a_step_or_nothing(line: str, total: int) -> None:
    found = step_of(line, total)
    assert found is None or found.total == total
