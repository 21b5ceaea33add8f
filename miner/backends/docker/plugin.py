"""Register Docker: build the backend, see what state it is in, and check it for the doctor."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.domain.errors import GodMinerError
from miner.backends.base import BackendUnreachable
from miner.backends.docker.backend import DockerBackend
from miner.backends.docker.client import DockerClient, DockerRefused, docker_client
from miner.backends.docker.container import ContainerDefaults
from miner.backends.docker.images import ImageState, TrainerImages, image_statuses
from miner.backends.registry import BackendContext, BackendPlugin
from miner.backends.trial import reward_isolation, trial_finding
from miner.settings import BackendKind, Settings
from miner.support.findings import Finding, fail, ok, warn

GIB = 1024**3
#: The text image is about 25 GB with its base, and a rebuild needs room beside it.
DOCKER_SPACE = 40 * GIB


def build(settings: Settings, context: BackendContext) -> DockerBackend:
    uid = context.training_uid
    user = f"{uid}:{uid}" if uid is not None else f"{os.geteuid()}:{os.getegid()}"
    defaults = ContainerDefaults(
        context.data_id, context.wrapper_file(), user, ulimits=context.ulimits, pids=context.processes
    )
    image_of = TrainerImages(settings).reference
    return DockerBackend(context, docker_client(settings), defaults, image_of)


@dataclass(frozen=True, slots=True)
class DockerState:
    answers: bool
    ready: bool
    why: str


async def docker_state(settings: Settings) -> DockerState:
    """See whether Docker answers and has the image for text."""
    client = docker_client(settings)
    images = TrainerImages(settings)
    try:
        await client.query("ping", lambda api: api.ping())
        reference = images.reference("text")
        await client.query("image", lambda api: api.inspect_image(reference))
    except BackendUnreachable as error:
        return DockerState(False, False, str(error))
    except (DockerRefused, GodMinerError):
        return DockerState(
            True, False, f"Docker lacks the image {images.name('text')}: god-miner images build"
        )
    finally:
        client.close()
    return DockerState(True, True, "")


def check(settings: Settings) -> Iterator[Finding]:
    client = docker_client(settings)
    try:
        info: Mapping[str, Any] = client.call_blocking(lambda api: api.info(), client.query_timeout_s)
        yield _docker_itself(client, info)
        yield from _docker_disk(info)
        for image in image_statuses(client, TrainerImages(settings)):
            # Most tasks are text tasks; the other images are only needed for theirs.
            if_missing = fail if image.short == "text" else warn
            if image.state is ImageState.OK:
                yield ok(f"image {image.short}", f"{image.name}: {image.text}")
            else:
                report = if_missing if image.state is ImageState.MISSING else warn
                yield report(f"image {image.short}", f"{image.name}: {image.text}", image.fix)
            if image.short == "text" and image.state is not ImageState.MISSING:
                yield trial_finding(settings, BackendKind.DOCKER)
                yield from reward_isolation(settings, BackendKind.DOCKER)
    except (BackendUnreachable, DockerRefused) as error:
        yield fail("docker", str(error), "start Docker, or set BACKEND=process")
    finally:
        client.close()


def _docker_disk(info: Mapping[str, Any]) -> Iterator[Finding]:
    """Images and containers are on a disk of their own, often the small one of the system."""
    root = Path(str(info.get("DockerRootDir") or ""))
    if not root.is_dir():
        return
    free = shutil.disk_usage(root).free
    detail = f"{free / GIB:.1f} GiB free for images and containers in {root}"
    way_out = f"have {DOCKER_SPACE // GIB} GiB free: god-miner images prune; docker system df"
    yield ok("docker disk", detail) if free >= DOCKER_SPACE else warn("docker disk", detail, way_out)


def _docker_itself(client: DockerClient, info: Mapping[str, Any]) -> Finding:
    version = f"Docker {info.get('ServerVersion')} at {client.host}"
    if not info.get("LiveRestoreEnabled"):
        return warn(
            "docker",
            f"{version}: its restart or upgrade ends every training",
            'put {"live-restore": true} into /etc/docker/daemon.json, then: systemctl reload docker',
        )
    return ok("docker", f"{version}, leaves trainings running when it is restarted")


PLUGIN = BackendPlugin(BackendKind.DOCKER, build, check, fix="god-miner images build")
