"""Fields on each engine, in turn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from miner.engines.choose import docker_engine, process_engine
from tests.doubles import base_image
from tests.doubles.base_image import PYTHON
from tests.doubles.dockerd import Dockerd
from tests.doubles.engine_fixtures import docker_host
from tests.integration.jobs.field import Field, Files, field_of, field_settings

__all__ = ["docker_host"]

KINDS = ("process", "docker")


@pytest.fixture
def files() -> Iterator[Files]:
    with Files() as made:
        yield made


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture
async def field(
    kind: str, files: Files, request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[Field]:
    if kind == "docker":
        host: Dockerd = request.getfixturevalue("docker_host")
        settings = field_settings(
            tmp_path / "data", docker_host=host.host, trainer_text_image=base_image.NAME
        )
        engine = docker_engine(settings)
    else:
        settings = field_settings(tmp_path / "data", trainer_python=PYTHON, trainer_sandbox="off")
        engine = process_engine(settings)  # type: ignore[assignment]
    async with field_of(engine, settings, files) as made:
        yield made
    await engine.close()
