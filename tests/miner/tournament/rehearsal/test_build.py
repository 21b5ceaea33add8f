"""Builds of an entry by a real Docker Engine."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from core.domain.tournament_rules import TEXT_DOCKERFILE
from miner.backends.docker.client import DockerClient
from miner.tournament.rehearsal.build import Build, build_entry, remove_entry
from tests.doubles import base_image
from tests.doubles.dockerd import Dockerd

pytestmark = [
    pytest.mark.docker,
    pytest.mark.usefixtures("unread_replies_collected"),
]

TAG = "rehearsed:1"


def build(
    docker_host: Dockerd, root: Path, *lines: str, directory: str = "dockerfiles", **more: Any
) -> Build:
    path = root / "dockerfiles" / TEXT_DOCKERFILE
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(lines) + "\n")
    with closing(DockerClient(docker_host.host)) as client:
        return build_entry(client, root, TEXT_DOCKERFILE, TAG, network="none", **more)


def containers(docker_host: Dockerd) -> set[str]:
    with docker_host.client() as client:
        return {one["Id"] for one in client.api.containers(all=True)}


@pytest.fixture
def others(docker_host: Dockerd) -> set[str]:
    """The containers that other tests have left in Docker."""
    return containers(docker_host)


def wait_for_docker(docker_host: Dockerd, others: set[str]) -> None:
    """It ends the step of a cancelled build by itself."""
    until = time.monotonic() + 120
    while not containers(docker_host) <= others:
        assert time.monotonic() < until
        time.sleep(0.05)


def remove(docker_host: Dockerd, built: Build) -> None:
    with closing(DockerClient(docker_host.host)) as client:
        remove_entry(client, built)


def tags(docker_host: Dockerd) -> list[str]:
    """Of all images there, those between two steps too."""
    with docker_host.client() as client:
        images = client.api.images(all=True)
    return sorted(tag for image in images for tag in image["RepoTags"] or ["<none>:<none>"])


def test_each_step_is_timed_and_the_base_is_kept_apart(docker_host: Dockerd, tmp_path: Path) -> None:
    before = tags(docker_host)
    seen: list[str] = []
    (tmp_path / "file").write_text("of the context")
    built = build(
        docker_host,
        tmp_path,
        *("ARG BASE=nothing", "FROM ${BASE}", "COPY file /file", "RUN cat \\", " /file && sleep 0.1"),
        arguments={"BASE": base_image.NAME},
        on_line=seen.append,
    )
    assert built.problem is None
    assert built.image is not None
    assert built.size_bytes > 1_000_000
    assert [step.number for step in built.steps] == [1, 2, 3, 4]
    assert built.steps[3].instruction.startswith("RUN cat")
    assert built.steps[3].seconds >= 0.1
    assert [step.is_base for step in built.steps] == [False, True, False, False]
    assert sum(step.seconds for step in built.steps) <= built.seconds
    assert built.own_seconds + built.base_seconds == pytest.approx(built.seconds)
    assert "of the context" in seen
    assert len(built.made) == 2
    remove(docker_host, built)
    assert tags(docker_host) == before


def test_a_step_that_fails_is_named_and_leaves_no_container(
    docker_host: Dockerd, others: set[str], tmp_path: Path
) -> None:
    before = tags(docker_host)
    built = build(docker_host, tmp_path, f"FROM {base_image.NAME}", "ENV A=1", "RUN echo so far && false")
    assert built.image is None
    assert "returned a non-zero code: 1" in str(built.problem)
    assert "so far" in built.tail
    assert built.steps[-1].number == 3
    remove(docker_host, built)
    assert tags(docker_host) == before
    assert containers(docker_host) <= others


def test_an_interrupted_build_leaves_nothing(docker_host: Dockerd, others: set[str], tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        if line.startswith("Step 3"):
            raise KeyboardInterrupt

    before = tags(docker_host)
    lines = (f"FROM {base_image.NAME}", "ENV A=1", "RUN sleep 1000")
    with pytest.raises(KeyboardInterrupt):
        build(docker_host, tmp_path, *lines, on_line=interrupt)
    wait_for_docker(docker_host, others)
    assert tags(docker_host) == before


def test_a_build_is_ended_at_its_limit(docker_host: Dockerd, others: set[str], tmp_path: Path) -> None:
    built = build(docker_host, tmp_path, f"FROM {base_image.NAME}", "RUN sleep 1000", limit_s=3)
    assert built.image is None
    assert "not built within 3 s" in str(built.problem)
    wait_for_docker(docker_host, others)


def test_the_first_directory_that_has_the_file_counts(docker_host: Dockerd, tmp_path: Path) -> None:
    assert "no Dockerfile: neither of ops/docker/" in str(build_nothing(docker_host, tmp_path).problem)
    other = tmp_path / "ops" / "docker" / TEXT_DOCKERFILE
    other.parent.mkdir(parents=True)
    other.write_text(f"FROM {base_image.NAME}\n")
    built = build(docker_host, tmp_path, "FROM nothing-at-all")
    assert (built.dockerfile, built.problem) == (f"ops/docker/{TEXT_DOCKERFILE}", None)


def build_nothing(docker_host: Dockerd, root: Path) -> Build:
    with closing(DockerClient(docker_host.host)) as client:
        return build_entry(client, root, TEXT_DOCKERFILE, TAG)
