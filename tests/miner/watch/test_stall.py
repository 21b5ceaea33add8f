from __future__ import annotations

import pytest

from core.progress import StageEvent, StepEvent
from miner.jobs.times import Pace
from miner.watch.progress import Course
from miner.watch.stall import BUSY_FACTOR, stalled

PACE = Pace(stall_factor=20, stall_min_s=600, start_limit_s=3600)


def course(step_s: float, steps: int = 30) -> Course:
    made = Course(began_at=0.0)
    for number in range(1, steps + 1):
        made.take(StepEvent(t=number * step_s, step=number), number * step_s)
    return made


@pytest.mark.parametrize(("step_s", "limit"), [(1.0, 600.0), (60.0, 1200.0)])
def test_a_training_is_hung_after_many_times_its_usual_step(step_s: float, limit: float) -> None:
    made = course(step_s)
    last = 30 * step_s
    assert stalled(made, last + limit - 1, PACE) is None
    assert stalled(made, last + limit + 1, PACE)


def test_a_gpu_that_works_buys_time() -> None:
    made = course(1.0)
    assert stalled(made, 30 + 601, PACE, gpu_idle=True)
    assert stalled(made, 30 + 601, PACE, gpu_idle=None)
    assert stalled(made, 30 + 601, PACE, gpu_idle=False) is None
    assert stalled(made, 30 + 600 * BUSY_FACTOR + 1, PACE, gpu_idle=False)


def test_loading_evaluating_and_saving_may_take_longer() -> None:
    made = course(1.0)
    made.take(StageEvent(t=31, stage="evaluate"), 31)
    assert stalled(made, 31 + 3599, PACE) is None
    assert "'evaluate'" in (stalled(made, 31 + 3601, PACE) or "")


def test_a_training_that_never_says_anything_is_hung_in_the_end() -> None:
    silent = Course(began_at=1000.0)
    assert stalled(silent, 1000 + 3599, PACE) is None
    assert "'start'" in (stalled(silent, 1000 + 3601, PACE) or "")


def test_silence_while_nobody_looked_says_nothing() -> None:
    made = course(1.0)
    made.away(5000.0)
    assert stalled(made, 5000 + 599, PACE) is None
    assert stalled(made, 5000 + 601, PACE)
    made.away(100.0)  # a clock that was set back
    assert stalled(made, 5000 + 601, PACE)
