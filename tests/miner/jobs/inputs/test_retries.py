"""How often something is asked again, and after what pause."""

from __future__ import annotations

import pytest

from miner.jobs.inputs.retries import PROGRESS, Retries
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason


def pauses(failures: list[StepFailed], **more: int) -> tuple[list[float], StepFailed | None]:
    found: list[float] = []
    retries = Retries(pause=found.append, jitter=lambda: 1.0, **more)
    for failure in failures:
        try:
            retries.wait(failure)
        except StepFailed as raised:
            return found, raised
    return found, None


def network(retry_after: float | None = None) -> StepFailed:
    return StepFailed(EndReason.NETWORK, "x", retry_after)


def test_pauses_double_up_to_a_limit_and_then_it_is_over() -> None:
    found, raised = pauses([network()] * 9, tries=8)
    assert found == [1, 2, 4, 8, 16, 20, 20]
    assert raised is not None


def test_jitter_takes_up_to_half_of_a_pause_away() -> None:
    found: list[float] = []
    Retries(pause=found.append, jitter=lambda: 0.0).wait(network())
    Retries(pause=found.append).wait(network())
    assert found[0] == 0.5
    assert 0.5 <= found[1] <= 1.0


def test_what_the_other_side_asks_for_is_waited_unless_it_is_too_long() -> None:
    limited = StepFailed(EndReason.RATE_LIMITED, "x", 7.0)
    assert pauses([limited, limited])[0] == [7.0, 7.0]
    found, raised = pauses([StepFailed(EndReason.RATE_LIMITED, "x", 300.0)])
    assert found == []
    assert raised is not None
    assert raised.retry_after == 300.0


@pytest.mark.parametrize(
    "reason", [EndReason.URL_REFUSED, EndReason.BAD_DATA, EndReason.DISK_FULL, EndReason.MODEL_GATED]
)
def test_what_trying_again_can_not_help_is_raised_at_once(reason: EndReason) -> None:
    assert pauses([StepFailed(reason, "x")])[0] == []


def test_something_gone_is_looked_for_three_times() -> None:
    assert pauses([StepFailed(EndReason.DATA_GONE, "x")] * 5)[0] == [1, 2]


def test_progress_worth_the_name_begins_the_count_anew() -> None:
    found: list[float] = []
    retries = Retries(tries=2, pause=found.append, jitter=lambda: 1.0)
    for _ in range(5):
        retries.wait(network(), PROGRESS)
    with pytest.raises(StepFailed):
        retries.wait(network(), PROGRESS - 1)
    assert found == [1] * 5
