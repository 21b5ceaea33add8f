"""Docker's API without a daemon or with a silent one, and what its refusals mean."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from miner.backends.base import BackendDiskFull, BackendRejected, BackendUnreachable
from miner.backends.docker.client import DockerClient, DockerRefused, error_for_refusal, is_leftover_conflict
from tests.doubles.each import each


@contextmanager
def listening(path: Path, mode: int = 0o600) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        path.chmod(mode)
        yield


async def assert_unreachable(path: Path, why: str) -> None:
    with pytest.raises(BackendUnreachable, match=why):
        await DockerClient(f"unix://{path}", query_timeout_s=0.2).query("ping", lambda api: api.ping())


@pytest.mark.process
async def test_a_socket_that_nobody_or_a_silent_program_listens_on_is_unreachable(tmp_path: Path) -> None:
    await assert_unreachable(tmp_path / "s", "does not run: No such file")
    with listening(tmp_path / "s"):
        await assert_unreachable(tmp_path / "s", "cannot be used|does not answer")
    await assert_unreachable(tmp_path / "s", "Connection refused")


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
async def test_a_socket_that_is_not_ours_says_how_to_get_it(tmp_path: Path) -> None:
    with listening(tmp_path / "s", mode=0):
        await assert_unreachable(tmp_path / "s", "usermod -aG docker")


#: The texts are those of a Docker Engine 20.10.
@each(
    ("status", "text", "way_out"),
    [
        (404, "No such image: god-miner/text-trainer:latest", "images build"),
        (400, "Requested CPUs are not available - requested 90, available: 0-1", "docker info"),
        (400, "invalid mount config: bind source path does not exist: /x", "same files"),
        (500, 'could not select device driver "" with capabilities: [[gpu]]', "container toolkit"),
        (
            500,
            "OCI runtime create failed: error running hook: stderr: nvidia-container-cli: device error: 7: "
            "unknown device: unknown",
            "nvidia-smi -L",
        ),
        (500, "runc create failed: error setting rlimit type 8: operation not permitted", "TRAINER_ULIMITS"),
        (500, "cannot set both Count and DeviceIDs on device request", ""),
    ],
)
def test_what_will_never_be_is_rejected_with_the_way_out(status: int, text: str, way_out: str) -> None:
    error = error_for_refusal(DockerRefused(status, text), "starting")
    assert isinstance(error, BackendRejected)
    assert way_out in str(error)
    assert text[:30] in str(error)


def test_a_full_docker_disk_is_reported_as_such() -> None:
    text = "mkdir /var/lib/docker/overlay2/7f: no space left on device"
    error = error_for_refusal(DockerRefused(500, text), "creating the container")
    assert isinstance(error, BackendDiskFull)
    assert "god-miner images prune" in str(error)


@each(
    "text",
    [
        "connection error: dial unix /run/containerd/containerd.sock: connect: connection refused",
        "context deadline exceeded",
        "task f57901e5: already exists",
        "id already in use",
        "something that nobody has seen yet",
        "failed to create shim task: OCI runtime create failed: runc create failed: signal: killed: unknown",
    ],
)
def test_docker_s_own_failures_are_retried_later(text: str) -> None:
    assert isinstance(error_for_refusal(DockerRefused(500, text), "starting"), BackendUnreachable)


def test_left_overs_of_an_earlier_start_are_known() -> None:
    assert is_leftover_conflict(DockerRefused(500, "task f57901e5: already exists"))
    assert is_leftover_conflict(DockerRefused(500, "id already in use"))
    assert not is_leftover_conflict(DockerRefused(500, "unknown device"))
