"""Run attempts as Docker containers.

A container is named by its key, so that everything is safe to repeat: a second `submit` finds the first
one's container. It is created and then started, never `run`, which would pull a missing image from
anywhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from core.domain.errors import GodMinerError
from miner.backends import ownership
from miner.backends.base import (
    AttemptSpec,
    BackendRejected,
    BackendRun,
    BackendUnreachable,
    EndCause,
    RunPhase,
    RunStatus,
)
from miner.backends.docker.client import DockerClient, DockerRefused, error_for_refusal, is_leftover_conflict
from miner.backends.docker.container import (
    LABEL_DATA,
    LABEL_DIR,
    LABEL_KEY,
    ContainerDefaults,
    adapt_defaults,
    container_body,
    container_status,
    never_started,
    start_was_interrupted,
)
from miner.backends.docker.images import IMAGE_KINDS, UnknownImage
from miner.backends.preflight import check_spec, hand_over_files, mounts_of
from miner.backends.registry import BackendContext
from miner.backends.run_folder import end_status, write_stop_record
from miner.support.background import run_in_thread

log = logging.getLogger(__name__)

T = TypeVar("T")

#: To hand over a run directory and check the mounts: local files, few of them.
FILES_S = 60.0
#: Between two polls of a container that is being created.
CREATE_POLL_S = 0.2


class DockerBackend:
    """Run attempts as containers. `image_of` returns the pinned image of a short name, or raises
    `GodMinerError`."""

    name = "docker"
    can_sandbox = True

    def __init__(
        self,
        context: BackendContext,
        client: DockerClient,
        defaults: ContainerDefaults,
        image_of: Callable[[str], str],
    ) -> None:
        self._context = context
        self._client = client
        self._defaults = defaults
        self._image_of = image_of

    async def submit(self, spec: AttemptSpec) -> str:
        await run_in_thread(
            lambda: check_spec(spec, self._context.redact, self._context.trusted), FILES_S, "backend check"
        )
        ends = time.monotonic() + self._client.create_timeout_s
        older = await self._inspect(spec.key)
        container = self._require_ours(older or await self._create(spec, ends), spec.key)
        if never_started(container):
            try:
                await self._start(container, spec)
            except BackendRejected as refused:
                if older is None:
                    raise
                # Docker may have died while it created this one, and left half of its files.
                log.warning("container %s cannot be started (%s): it is created again", spec.key, refused)
                container = self._require_ours(await self._create(spec, ends), spec.key)
                if never_started(container):
                    await self._start(container, spec)
        return str(container["Id"])

    async def find(self, key: str) -> str | None:
        container = await self._inspect(key)
        if container is None or not self._is_ours(container, key):
            return None
        run_dir = _labels(container).get(LABEL_DIR, "")
        if never_started(container) and not start_was_interrupted(container, Path(run_dir)):
            return None
        return str(container["Id"])

    async def poll(self, ref: str, run_dir: Path) -> RunStatus:
        container = await self._inspect(ref)
        status = end_status(run_dir) if container is None else container_status(container, run_dir)
        if container is not None and status.phase is RunPhase.ENDED and status.why is EndCause.FAILED:
            last = await self._wrapper_output(ref)
            if last:
                return replace(status, detail=f"{status.detail}; {last}")
        return status

    async def stop(self, ref: str, *, force: bool = False) -> None:
        container = await self._inspect(ref)
        if container is None:
            return
        run_dir = _labels(container).get(LABEL_DIR)
        if run_dir:
            await run_in_thread(
                lambda: write_stop_record(Path(run_dir), force=force), FILES_S, "backend stop"
            )
        await self._kill(ref, "SIGKILL" if force else "SIGTERM")

    async def dump_stacks(self, ref: str) -> None:
        await self._kill(ref, "SIGUSR1")

    async def remove(self, ref: str) -> None:
        try:
            await self._client.create("remove", lambda api: api.remove_container(ref, v=True))
        except DockerRefused as refused:
            if refused.status == 409:  # it runs, or is being removed
                log.debug("container %s is left alone: %s", ref[:12], refused)
            elif refused.status != 404:
                raise BackendUnreachable(f"Docker did not remove container {ref[:12]}: {refused}") from None

    async def missing_images(self) -> Mapping[str, str]:
        missing = {}
        for short in IMAGE_KINDS:
            try:
                reference = await self._reference(short)
            except UnknownImage as error:
                missing[short] = str(error)
                continue
            if await self._inspect_image(reference) is None:
                missing[short] = f"Docker lacks the image {reference}: god-miner images build"
        return missing

    async def identity(self, image: str) -> str:
        try:
            inspected = await self._inspect_image(await self._reference(image))
        except UnknownImage as error:
            raise BackendUnreachable(str(error)) from None
        if inspected is None:
            raise BackendUnreachable(f"Docker lacks the image {image!r}")
        return str(inspected["Id"])

    async def _reference(self, image: str) -> str:
        return await run_in_thread(lambda: self._image_of(image), FILES_S, "backend image")

    async def _inspect_image(self, reference: str) -> Mapping[str, Any] | None:
        return await self._query(
            f"show the image {reference}", lambda api: api.inspect_image(reference), absent=404
        )

    async def list_runs(self) -> list[BackendRun]:
        wanted = {"label": [f"{LABEL_DATA}={self._defaults.data_id}"]}
        listed = await self._query("list containers", lambda api: api.containers(all=True, filters=wanted))
        return [_backend_run(container) for container in listed or ()]

    async def close(self) -> None:
        self._client.close()

    async def _create(self, spec: AttemptSpec, ends: float) -> Mapping[str, Any]:
        """A container of this name, created here or by an earlier request whose answer got lost. Docker
        reserves the name when the creation begins, shows the container when it is done, and frees the name
        when it failed."""
        await run_in_thread(lambda: self._hand_over_files(spec), FILES_S, "backend files")
        try:
            image = await self._reference(spec.image)
        except GodMinerError as error:
            raise BackendRejected(str(error)) from None
        info = await self._query("show its state", lambda api: api.info())
        body = container_body(spec, image, adapt_defaults(self._defaults, info or {}))
        while True:
            await self._request_creation(spec.key, body)
            if (container := await self._inspect(spec.key)) is not None:
                return container
            if time.monotonic() > ends:
                raise BackendUnreachable(
                    f"Docker holds the name {spec.key!r} and does not show the container yet"
                )
            await asyncio.sleep(CREATE_POLL_S)

    async def _request_creation(self, name: str, body: Mapping[str, Any]) -> None:
        """Create the container; one with this name is kept (HTTP 409)."""
        try:
            await self._client.create("create", lambda api: api.create_container_from_config(body, name))
        except DockerRefused as refused:
            if refused.status != 409:
                raise error_for_refusal(refused, "creating the container") from None

    async def _start(self, container: Mapping[str, Any], spec: AttemptSpec) -> None:
        ref = str(container["Id"])
        if start_was_interrupted(container, spec.run_dir):
            # It may run, and Docker would neither know nor end it. A key is used once: it ends here.
            value = ownership.run_mark(self._defaults.data_id, spec.key)
            killed = await run_in_thread(lambda: ownership.kill_marked(value), FILES_S, "backend leftovers")
            log.warning("Docker died while it started %s: %d processes of it were killed", spec.key, killed)
            return
        try:
            await self._client.create("start", lambda api: api.start(ref))
        except DockerRefused as refused:
            problem = error_for_refusal(refused, "starting the container")
            if isinstance(problem, BackendRejected) or is_leftover_conflict(refused):
                # It can never run.
                await self._discard(ref)
            raise problem from None

    async def _discard(self, ref: str) -> None:
        try:
            await self._client.create("remove", lambda api: api.remove_container(ref, v=True, force=True))
        except (DockerRefused, BackendUnreachable) as error:
            log.warning("container %s could not be started, and is left behind: %s", ref[:12], error)

    async def _inspect(self, name: str) -> Mapping[str, Any] | None:
        return await self._query(
            f"show container {name[:40]}", lambda api: api.inspect_container(name), absent=404
        )

    async def _query(self, doing: str, call: Callable[[Any], T], absent: int | None = None) -> T | None:
        """Docker's answer; None when it refuses with the status `absent`."""
        try:
            return await self._client.query(doing, call)
        except DockerRefused as refused:
            if refused.status == absent:
                return None
            raise BackendUnreachable(f"Docker did not {doing}: {refused}") from None

    async def _kill(self, ref: str, signal: str) -> None:
        try:
            await self._client.query("kill", lambda api: api.kill(ref, signal))
        except DockerRefused as refused:
            # 404: gone; 409: not running (500 in older versions).
            if refused.status not in (404, 409) and "not running" not in str(refused):
                raise BackendUnreachable(f"Docker did not signal container {ref[:12]}: {refused}") from None

    async def _wrapper_output(self, ref: str) -> str:
        """The wrapper's own messages, the only output that Docker keeps: why it failed."""
        try:
            raw = await self._client.query("logs", lambda api: api.logs(ref, tail=5))
        except (DockerRefused, BackendUnreachable):
            return ""
        return bytes(raw).decode(errors="replace").strip()[-500:]

    def _is_ours(self, container: Mapping[str, Any], key: str) -> bool:
        labels = _labels(container)
        return labels.get(LABEL_DATA) == self._defaults.data_id and labels.get(LABEL_KEY) == key

    def _require_ours(self, container: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        if not self._is_ours(container, key):
            raise BackendRejected(
                f"the name {key!r} is taken by a container that is not ours: docker rm -f {key}"
            )
        return container

    def _hand_over_files(self, spec: AttemptSpec) -> None:
        if self._context.training_uid is not None and os.geteuid() == 0:
            hand_over_files(spec, mounts_of(spec), self._context.training_uid, self._context.trusted)


def _labels(container: Mapping[str, Any]) -> Mapping[str, str]:
    return (container.get("Config") or {}).get("Labels") or {}


def _backend_run(listed: Mapping[str, Any]) -> BackendRun:
    labels = listed.get("Labels") or {}
    run_dir = labels.get(LABEL_DIR)
    return BackendRun(labels.get(LABEL_KEY, ""), str(listed["Id"]), Path(run_dir) if run_dir else None)
