"""Short texts about a job on pages."""

from __future__ import annotations

from miner.api.jobs import AttemptDetails, JobDetails, JobResult
from miner.dashboard.job_texts import shown_target
from tests.doubles.each import each

NOT_REACHED, NOT_MEASURED = "loss below 0.064: not reached", "loss below 0.064: not measured"


@each(
    "targets, best, shown",
    [
        ([NOT_REACHED, NOT_MEASURED], 1, f"target {NOT_REACHED}"),
        ([NOT_REACHED, NOT_MEASURED], None, f"target {NOT_MEASURED}"),
        ([""], None, ""),
        ([], None, ""),
    ],
)
def test_the_target_shown_is_that_of_the_attempt_with_the_result(
    targets: list[str], best: int | None, shown: str
) -> None:
    attempts = [
        AttemptDetails.model_construct(number=number, target=target)
        for number, target in enumerate(targets, 1)
    ]
    result = best and JobResult.model_construct(attempt=best)
    assert shown_target(JobDetails.model_construct(attempts=attempts, result=result)) == shown
