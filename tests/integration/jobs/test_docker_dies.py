"""`kill -9` of dockerd, with and without live-restore: the right reason, resumed by rule, no orphan."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from core.domain.job_states import EndReason
from miner.backends.base import EXIT_FILE
from miner.backends.registry import build_here
from miner.settings import BackendKind
from tests.doubles import base_image
from tests.doubles.backend_fixtures import own_dockerd
from tests.doubles.dockerd import Dockerd
from tests.integration.jobs.field import LIMIT_S, Field, Files, field_of, field_settings

pytestmark = [
    pytest.mark.docker,
    # The library leaves a socket to the collector when nobody listens at its other end.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(params=[True, False], ids=["live-restore", "no live-restore"])
def dockerd(request: pytest.FixtureRequest) -> Iterator[Dockerd]:
    """One of its own: it is going to be killed."""
    with own_dockerd(live_restore=request.param) as dockerd:
        yield dockerd


@pytest_asyncio.fixture
async def field(dockerd: Dockerd, files: Files, tmp_path: Path) -> AsyncIterator[Field]:
    settings = field_settings(tmp_path / "data", docker_host=dockerd.host, trainer_text_image=base_image.NAME)
    backend = build_here(settings, BackendKind.DOCKER)
    async with field_of(backend, settings, files, light=True) as field:
        yield field
    await backend.close()
    gc.collect()


async def written(path: Path) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not path.exists():
            await asyncio.sleep(0.02)


async def test_a_backend_that_is_killed_costs_no_model_and_leaves_no_orphan(
    field: Field, dockerd: Dockerd
) -> None:
    """In the middle of a training: it survives where the backend lets it, and is resumed from its checkpoint
    where not."""
    first = {"steps": 10, "save": [3], "checkpoint": [3], "wait_at": 8}
    job = await field.start("t1", {"1": first, "*": {"steps": 10, "save": [3]}})
    await field.training(job, 8)
    dockerd.kill()
    await field.until(job, lambda live: live.trouble or live.attempt == 2)
    dockerd.start()
    field.go(job)
    await field.published(job)
    ends = await field.ends(job)
    if dockerd.live_restore:
        assert ends == [EndReason.TRAINED]
        assert field.launches(job) == 1
    else:
        assert ends == [EndReason.KILLED, EndReason.TRAINED]
        assert field.run(job, 2)["resume_from"] is not None
    assert len({repo for repo, _ in field.light_hub.commits}) == 1


@pytest.mark.kept("no live-restore")
async def test_what_the_trainer_finished_while_the_backend_was_gone_is_published(
    field: Field, dockerd: Dockerd
) -> None:
    job = await field.start("t1", {"*": {"steps": 30, "step_s": 0.05, "save": [3]}})
    await field.training(job, 3)
    dockerd.kill()
    await written(field.attempt_file(job, 1, EXIT_FILE))
    dockerd.start()
    await field.published(job)
    assert await field.ends(job) == [EndReason.TRAINED]
    assert field.launches(job) == 1


@pytest.mark.kept("live-restore")
async def test_a_backend_that_is_killed_while_inputs_come_starts_the_training_when_it_is_back(
    field: Field, dockerd: Dockerd
) -> None:
    dockerd.kill()
    job = await field.start("t1", {"*": {"steps": 10, "save": [3]}})
    await field.until(job, lambda live: live.trouble)
    dockerd.start()
    await field.published(job)
    assert await field.ends(job) == [EndReason.TRAINED]
