"""The table of faults: what breaks, and what must hold, on each engine."""

from __future__ import annotations

import pytest

from miner.jobs.states import EndReason, JobState
from tests.integration.jobs.field import Field

pytestmark = pytest.mark.integration


async def test_a_job_is_fetched_trained_and_published(field: Field) -> None:
    job = await field.start("t1", {"*": {"steps": 5, "save": [2]}})
    row = await field.over(job)
    assert (row.state, row.end_reason) == (JobState.DONE, EndReason.PUBLISHED), row.detail
    assert row.submission is not None
    assert row.submission.repo == "tester/repo-t1"
    assert field.is_published(row.submission)
    assert await field.orphans() == []
