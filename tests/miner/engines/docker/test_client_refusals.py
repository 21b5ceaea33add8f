"""What Docker's refusals mean. The texts are those of a Docker Engine 20.10."""

from __future__ import annotations

from miner.engines.base import EngineDiskFull, EngineRejected, EngineUnreachable
from miner.engines.docker.client import DockerRefused, error_for_refusal, is_leftover_conflict
from tests.doubles.each import each


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
    found = error_for_refusal(DockerRefused(status, text), "starting")
    assert isinstance(found, EngineRejected)
    assert way_out in str(found)
    assert text[:30] in str(found)


def test_a_full_docker_disk_is_reported_as_such() -> None:
    text = "mkdir /var/lib/docker/overlay2/7f: no space left on device"
    found = error_for_refusal(DockerRefused(500, text), "making the container")
    assert isinstance(found, EngineDiskFull)
    assert "god-miner images prune" in str(found)


@each(
    "text",
    [
        "connection error: dial unix /run/containerd/containerd.sock: connect: connection refused",
        "context deadline exceeded",
        "task f57901e5: already exists",
        "id already in use",
        "something that nobody has seen yet",
    ],
)
def test_docker_s_own_failures_are_retried_later(text: str) -> None:
    assert isinstance(error_for_refusal(DockerRefused(500, text), "starting"), EngineUnreachable)


def test_left_overs_of_an_earlier_start_are_known() -> None:
    assert is_leftover_conflict(DockerRefused(500, "task f57901e5: already exists"))
    assert is_leftover_conflict(DockerRefused(500, "id already in use"))
    assert not is_leftover_conflict(DockerRefused(500, "unknown device"))
