"""A real training on the CPU as the payload, end to end, and through the faults that change its plan."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from core.domain.job_states import EndReason, JobState
from miner.engines.choose import process_engine
from tests.doubles.required import missing
from tests.integration.jobs.field import QUICK, Field, Files, field_of, field_settings

pytestmark = pytest.mark.integration

#: Importing torch takes seconds, on a busy machine minutes, and is silent.
PATIENT = replace(QUICK, start_limit_s=300.0, stall_min_s=60.0)


@pytest_asyncio.fixture
async def field(files: Files, tmp_path: Path) -> AsyncIterator[Field]:
    python = os.environ.get("GOD_MINER_TRAINING_PYTHON")
    if not python:
        missing("GOD_MINER_TRAINING_PYTHON names no training environment")
    settings = field_settings(tmp_path / "data", trainer_python=python, trainer_sandbox="off")
    engine = process_engine(settings)
    async with field_of(engine, settings, files, light=False, timings=PATIENT) as made:
        yield made
    await engine.close()


async def test_a_real_training_runs_out_of_memory_and_is_published_in_the_end(field: Field) -> None:
    good = {"torch": True, "steps": 60, "step_s": 0.0, "save": [20, 40]}
    job = await field.start("t1", {"1": {"torch": True, "at": {"3": "oom"}}, "*": good})
    row = await field.over(job, 600)
    assert (row.state, row.end_reason) == (JobState.DONE, EndReason.PUBLISHED), await field.describe(job)
    assert await field.ends(job) == [EndReason.OOM, EndReason.TRAINED]
    assert field.is_published(row.submission)
