from __future__ import annotations

from pathlib import Path

from miner.jobs.states import MEANING, OVER, EndReason, JobState
from tests.doubles.each import each

PAGE = (Path(__file__).parents[3] / "docs/jobs.md").read_text()


@each("reason", EndReason)
def test_every_end_reason_is_described_as_the_operator_is_told(reason: EndReason) -> None:
    (line,) = [one for one in PAGE.splitlines() if one.startswith(f"| `{reason}` |")]
    assert line.endswith(f"| {MEANING[reason].operator} |")


def test_the_states_that_are_over_are_the_three_ends() -> None:
    assert {JobState.DONE, JobState.FAILED, JobState.CANCELLED} == OVER
    assert [state for state in JobState if state.is_over] == [state for state in JobState if state in OVER]
