"""Speed between two logs: what counts as slow and what does not."""

from __future__ import annotations

import pytest

from core.domain.hardware import CPU, GpuSet
from core.domain.tasks import TaskType
from tests.core.builders import plan
from trainer.session.progress_log import SpeedMeter, SpeedReading


class Watch:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def begun(**changes: object) -> tuple[SpeedMeter, Watch]:
    watch = Watch()
    meter = SpeedMeter(plan().model_copy(update=changes), now=watch)
    assert meter.read() == SpeedReading()
    return meter, watch


def test_tokens_are_counted_over_all_ranks_and_for_the_time_of_steps_alone() -> None:
    meter, watch = begun()
    world = meter.plan.batch.world_size
    meter.tokens, meter.paused, watch.time = 40_000, 6.0, 110.0
    reading = meter.read()
    assert reading.tokens_s == pytest.approx(40_000 * world / 4)
    assert meter.tokens == 0


def test_waiting_for_data_is_a_share_of_the_time() -> None:
    meter, watch = begun()
    meter.waited, watch.time = 1.5, 106.0
    assert meter.read().wait == pytest.approx(0.25)
    meter.waited, watch.time = 99.0, 107.0
    assert meter.read().wait == 1


def test_the_share_of_the_peak_rises_with_the_speed_and_is_never_above_it() -> None:
    meter, watch = begun()
    shares = []
    for tokens in (1_000, 10_000, 10**12):
        meter.tokens, watch.time = tokens, watch.time + 1
        mfu = meter.read().mfu
        assert mfu is not None
        shares.append(mfu)
    assert shares[1] == pytest.approx(10 * shares[0])
    assert shares[2] == 1


def test_where_the_number_would_mean_nothing_there_is_none() -> None:
    for meter, watch in (
        begun(gpus=GpuSet(kind=CPU, count=1)),
        begun(task=plan().task.model_copy(update={"task_type": TaskType.GRPO})),
    ):
        meter.tokens, watch.time = 1_000, 101.0
        reading = meter.read()
        assert (reading.tokens_s is not None, reading.mfu) == (True, None)


def test_no_time_no_speed() -> None:
    meter, _ = begun()
    meter.tokens = 5
    assert meter.read() == SpeedReading()
