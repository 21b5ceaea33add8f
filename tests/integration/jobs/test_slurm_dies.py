"""`kill -9` of Slurm's daemons and of a node: the right reason, resumed by rule, one model, no orphan."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from core.domain.job_states import EndReason
from miner.backends.base import EXIT_FILE
from miner.settings import BackendKind
from tests.doubles.backend_bench import quick_backend
from tests.doubles.base_image import PYTHON
from tests.doubles.slurm import CONTROLLER, OwnSlurm, own_slurm
from tests.integration.jobs.field import LIMIT_S, Field, Files, field_of, field_settings


@pytest.fixture
def mortal() -> Iterator[OwnSlurm]:
    # MessageTimeout: for how long commands look for a controller that is gone.
    with own_slurm(settings={"MinJobAge": "2", "SlurmdTimeout": "5", "MessageTimeout": "4"}) as slurm:
        yield slurm


@pytest_asyncio.fixture
async def field(mortal: OwnSlurm, files: Files, tmp_path: Path) -> AsyncIterator[Field]:
    settings = field_settings(
        tmp_path / "data", trainer_python=PYTHON, trainer_sandbox="off", slurm_bin_dir=mortal.bin
    )
    backend = quick_backend(settings, BackendKind.SLURM)
    async with field_of(backend, settings, files, light=True) as field:
        yield field
        mortal.start(until_nodes_answer=False)
    await backend.close()


async def test_a_training_outlives_the_controller_and_is_published_once(
    field: Field, mortal: OwnSlurm
) -> None:
    """Also what it finished while nobody could ask for it."""
    job = await field.start("t1", {"*": {"steps": 10, "save": [3], "wait_at": 8}})
    await field.training(job, 8)
    mortal.save()
    mortal.kill(CONTROLLER)
    await field.until(job, lambda live: live.trouble)
    field.go(job)
    async with asyncio.timeout(LIMIT_S):
        while not field.attempt_file(job, 1, EXIT_FILE).exists():
            await asyncio.sleep(0.02)
    mortal.start(until_nodes_answer=False)
    await field.published(job)
    assert await field.ends(job) == [EndReason.TRAINED]
    assert field.launches(job) == 1


async def test_a_node_that_fails_costs_no_model_and_leaves_no_orphan(field: Field, mortal: OwnSlurm) -> None:
    first = {"steps": 10, "save": [3], "checkpoint": [3], "wait_at": 8}
    job = await field.start("t1", {"1": first, "*": {"steps": 10, "save": [3]}})
    await field.training(job, 8)
    (running,) = mortal.jobs().values()
    mortal.kill_node(running["NodeList"])
    mortal.fail(running["NodeList"])
    await field.published(job)
    assert await field.ends(job) == [EndReason.NODE_FAILED, EndReason.TRAINED]
    assert field.run(job, 2)["resume_from"] is not None
    assert field.launches(job, 1) == field.launches(job, 2) == 1
    assert len({repo for repo, _ in field.light_hub.commits}) == 1
