"""Fields on each engine, in turn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from miner.engines.base import ExecutionEngine
from miner.engines.choose import docker_engine, process_engine
from miner.settings import Settings
from tests.doubles import base_image
from tests.doubles.base_image import PYTHON
from tests.doubles.dockerd import Dockerd
from tests.integration.jobs.field import Field, Files, field_of, field_settings

KINDS = ("process", "docker")


@pytest.fixture
def files() -> Iterator[Files]:
    with Files() as made:
        yield made


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def settings(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    if kind == "docker":
        host: Dockerd = request.getfixturevalue("docker_host")
        return field_settings(tmp_path / "data", docker_host=host.host, trainer_text_image=base_image.NAME)
    return field_settings(tmp_path / "data", trainer_python=PYTHON, trainer_sandbox="off")


@pytest_asyncio.fixture
async def engine(kind: str, settings: Settings) -> AsyncIterator[ExecutionEngine]:
    made: ExecutionEngine = docker_engine(settings) if kind == "docker" else process_engine(settings)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def field(settings: Settings, engine: ExecutionEngine, files: Files) -> AsyncIterator[Field]:
    """With a real engine; fetching and publishing are not what is tried."""
    async with field_of(engine, settings, files, light=True) as made:
        yield made


@pytest_asyncio.fixture
async def whole(tmp_path: Path, files: Files) -> AsyncIterator[Field]:
    """With everything real, on local processes."""
    settings = field_settings(tmp_path / "data", trainer_python=PYTHON, trainer_sandbox="off")
    engine = process_engine(settings)
    async with field_of(engine, settings, files, light=False) as made:
        yield made
    await engine.close()
