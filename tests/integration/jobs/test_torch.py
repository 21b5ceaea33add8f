"""A real training on the CPU as the payload, end to end, and through the faults that change its plan."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from core.domain.job_states import EndReason
from tests.doubles.required import missing
from tests.integration.jobs.field import QUICK, Field, Files, process_field

pytestmark = [
    pytest.mark.training,
    pytest.mark.thorough,
]

#: Importing torch takes seconds, on a busy machine minutes, and is silent.
PATIENT = replace(QUICK, start_limit_s=300.0, stall_min_s=60.0)


@pytest_asyncio.fixture
async def field(files: Files, tmp_path: Path) -> AsyncIterator[Field]:
    python = os.environ.get("GOD_MINER_TRAINING_PYTHON")
    if not python:
        missing("GOD_MINER_TRAINING_PYTHON names no training environment")
    async with process_field(tmp_path / "data", files, python=python, timings=PATIENT) as field:
        yield field


async def test_a_real_training_runs_out_of_memory_and_is_published_in_the_end(field: Field) -> None:
    good = {"torch": True, "steps": 60, "step_s": 0.0, "save": [20, 40]}
    job = await field.start("t1", {"1": {"torch": True, "at": {"3": "oom"}}, "*": good})
    await field.over(job, 600)
    await field.published(job)
    assert await field.ends(job) == [EndReason.OOM, EndReason.TRAINED]
