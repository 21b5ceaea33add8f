"""Fields on each backend, in turn."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from miner.backends.base import Backend
from miner.dev.stack import ChildProcess, DevStack, prepare_stack
from miner.settings import BackendKind, Settings
from tests.doubles import base_image
from tests.doubles.backend_bench import quick_backend
from tests.doubles.base_image import PYTHON
from tests.doubles.dockerd import Dockerd
from tests.doubles.slurm import OwnSlurm
from tests.integration.jobs.field import DAEMON, Field, Files, field_of, field_settings, process_field

KINDS = ("process", "docker")
DAEMON_SETTINGS = {
    "BACKEND": "process",
    "TRAINER_PYTHON": str(PYTHON),
    "TRAINER_SANDBOX": "off",
    "TRAINER_ULIMITS": "core=0",
    "GPUS": "4xH100",
    "PROFILE": "steady",
    "HF_USER": "tester",
    "ALLOW_PRIVATE_NETWORKS": "127.0.0.0/8",
    "MIN_FREE_DISK_BYTES": "0",
}


@pytest.fixture
def files() -> Iterator[Files]:
    with Files() as files:
        yield files


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
async def backend(kind: str, settings: Settings) -> AsyncIterator[Backend]:
    backend = quick_backend(settings, BackendKind(kind))
    yield backend
    await backend.close()


@pytest_asyncio.fixture
async def field(settings: Settings, backend: Backend, files: Files) -> AsyncIterator[Field]:
    """With a real backend; fetching and publishing are not what is tried."""
    async with field_of(backend, settings, files, light=True) as field:
        yield field


@pytest_asyncio.fixture
async def whole(tmp_path: Path, files: Files) -> AsyncIterator[Field]:
    """With everything real, on local processes."""
    async with process_field(tmp_path / "data", files) as field:
        yield field


@pytest.fixture
def stack(tmp_path: Path) -> DevStack:
    return prepare_stack(tmp_path / "miner")


@pytest.fixture
def child(stack: DevStack, request: pytest.FixtureRequest) -> Iterator[ChildProcess]:
    """A daemon whose trainer is `payload.py`; with the parameter "slurm" on the nodes of one."""
    settings = dict(DAEMON_SETTINGS)
    if getattr(request, "param", "") == "slurm":
        slurm: OwnSlurm = request.getfixturevalue("slurm")
        settings |= {"BACKEND": "slurm", "GPUS": "auto", "SLURM_BIN_DIR": str(slurm.bin)}
    child = ChildProcess(
        [sys.executable, str(DAEMON), "run"],
        stack.public_port,
        stack.folder,
        stack.log_file,
        {**stack.settings(), **settings},
    )
    yield child
    child.stop()
