from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miner.jobs.timeline import MAX_MARGIN_SHARE, JobTimings, job_timeline
from miner.settings import load_settings

spans = st.floats(0, 1e6, allow_nan=False)


def test_a_usual_job_ends_three_minutes_before_its_deadline() -> None:
    times = job_timeline(0.0, 4 * 3600.0, JobTimings(), reserve_s=600, publish_s=120)
    assert times.publish_by == 4 * 3600 - 180
    assert times.kill_at == times.publish_by - 120
    assert times.stop_at == 4 * 3600 - 600 - 120
    assert times.end_by == times.stop_at - 10


@given(whole=st.floats(0.1, 1e6), margin=spans, grace=spans, reserve=spans, publish=spans)
def test_the_moments_are_in_order_and_leave_time_to_train(
    whole: float, margin: float, grace: float, reserve: float, publish: float
) -> None:
    timings = JobTimings(margin_s=margin, grace_s=grace)
    times = job_timeline(1000.0, 1000.0 + whole, timings, reserve_s=reserve, publish_s=publish)
    assert times.end_by <= times.stop_at <= times.kill_at <= times.publish_by <= times.deadline
    assert times.end_by >= 1000.0 + 0.2 * whole
    assert times.deadline - times.publish_by == pytest.approx(min(margin, MAX_MARGIN_SHARE * whole), abs=1e-3)


def test_a_deadline_before_the_start_leaves_nothing() -> None:
    times = job_timeline(1000.0, 900.0, JobTimings())
    assert times.end_by <= 900.0


def test_pauses_double_up_to_their_cap_with_jitter() -> None:
    timings, random = JobTimings(pause_s=5, pause_cap_s=60), Random(1)
    means = [
        sum(timings.pause(failures, random) for _ in range(500)) / 500 for failures in (1, 2, 3, 9, 10_000)
    ]
    assert means == pytest.approx([3.75, 7.5, 15, 45, 45], rel=0.1)
    assert {round(timings.pause(1, random), 3) for _ in range(50)} != {5.0}


def test_the_settings_set_the_pace() -> None:
    given = {
        "STOP_GRACE_SECONDS": "60",
        "MAX_ATTEMPTS": "2",
        "PUBLISH_EARLY": "false",
    }
    timings = JobTimings.from_settings(load_settings(env=given, env_file=None))
    assert (timings.grace_s, timings.max_attempts, timings.publish_early) == (60, 2, False)
