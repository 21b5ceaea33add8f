"""Fixtures around real backends; import them into the conftest or module that needs them."""

from __future__ import annotations

import gc
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from tests.doubles import base_image, dockerd
from tests.doubles.backend_bench import BackendBench, docker_bench, process_bench, slurm_bench
from tests.doubles.dockerd import Dockerd
from tests.doubles.required import missing
from tests.doubles.slurm import OwnSlurm, own_slurm

KINDS = ("process", "sandboxed process", "docker", "slurm")


@contextmanager
def own_dockerd(
    *, live_restore: bool = False, nvml: Path | None = None, mounted: Sequence[Path] = ()
) -> Iterator[Dockerd]:
    """A Docker Engine with the small image in it."""
    why = dockerd.why_not()
    if why:
        missing(why)
    # Not below pytest's folder, whose path is too long for a socket's.
    place = Path(tempfile.mkdtemp(prefix="gm-"))
    try:
        with Dockerd(place / "d", live_restore=live_restore, nvml=nvml, mounted=mounted) as docker:
            base_image.load(docker.host)
            yield docker
    finally:
        shutil.rmtree(place, ignore_errors=True)


def places_of(python: str | Path) -> list[Path]:
    """Folders of an environment and of the interpreter that it was made with, but those of the system."""
    code = "import sys; print(sys.prefix); print(sys.base_prefix)"
    prefixes = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    return [Path(line) for line in prefixes.split() if not line.startswith("/usr")]


@pytest.fixture
def unread_replies_collected() -> Iterator[None]:
    """Sockets of replies that Docker's library did not read to their end, as of a build that fails: collected
    here and not in somebody else's test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="session")
def docker_host() -> Iterator[Dockerd]:
    """One for all tests that leave it alone."""
    with own_dockerd() as docker:
        yield docker


@pytest.fixture(scope="session")
def slurm() -> Iterator[OwnSlurm]:
    """One of two nodes with four GPUs each, for all tests that leave it alone."""
    with own_slurm() as slurm:
        yield slurm


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture
async def bench(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[BackendBench]:
    """Each backend in turn; nothing of a test outlives it."""
    bench = bench_of(kind, request, tmp_path)
    yield bench
    await bench.clear()


def bench_of(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> BackendBench:
    if kind == "docker":
        docker: Dockerd = request.getfixturevalue("docker_host")
        return docker_bench(tmp_path / "data", docker.host, base_image.NAME)
    if kind == "slurm":
        return slurm_bench(tmp_path / "data", request.getfixturevalue("slurm").bin)
    bench = process_bench(tmp_path / "data", sandbox=kind != "process")
    if bench.closed and not bench.backend.can_sandbox:
        missing(f"no sandbox here: {bench.backend._environment.why_no_sandbox}")  # type: ignore[attr-defined]
    return bench
