"""The engine itself: what is asked of Docker, in which order, and what its answers mean.

A container is named by its key, which makes everything safe to repeat: whoever comes second finds the first
one's container. It is made and then started, never `run`, which would pull a missing image from anywhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from core.errors import GodMinerError
from miner.engines import remains
from miner.engines.aside import aside
from miner.engines.base import EngineSpec, Found, Phase, Rejected, Status, Unreachable, Why
from miner.engines.checks import check, mounts_of
from miner.engines.docker.client import Client, Refused
from miner.engines.docker.config import LABEL_DATA, LABEL_DIR, LABEL_KEY, House, container, suited
from miner.engines.docker.images import KINDS, UnknownImage
from miner.engines.docker.refusals import is_left_over, meaning
from miner.engines.docker.state import never_started, status_of, was_cut_off
from miner.engines.handover import hand_over
from miner.engines.outcome import ended
from miner.engines.records import write_asked

log = logging.getLogger(__name__)

#: Handing over a run folder and looking at mounts: local files, few of them.
FILES_S = 60.0
#: Between two looks at a container that is being made.
LOOK_AGAIN_S = 0.2


class DockerEngine:
    """`image_of` gives what to start for a short name, pinned; `GodMinerError` when there is none."""

    name = "docker"
    can_sandbox = True

    def __init__(
        self,
        client: Client,
        house: House,
        *,
        image_of: Callable[[str], str],
        redact: Callable[[str], str],
        trusted: tuple[Path, ...],
        training_uid: int | None,
    ) -> None:
        self._client = client
        self._house = house
        self._image_of = image_of
        self._redact = redact
        self._trusted = trusted
        #: Who gets the run folders; None: the daemon is not root, and training is the same user.
        self._training_uid = training_uid

    async def submit(self, spec: EngineSpec) -> str:
        await aside(lambda: check(spec, self._redact, self._trusted), FILES_S, "engine check")
        ends = time.monotonic() + self._client.make_s
        older = await self._inspect(spec.key)
        found = self._own(older or await self._made(spec, ends), spec.key)
        if never_started(found):
            try:
                await self._start(found, spec)
            except Rejected as refused:
                if older is None:
                    raise
                # Docker may have died while it made this one, and left half of its files.
                log.warning(
                    "container %s was made before and cannot be started (%s): anew", spec.key, refused
                )
                found = self._own(await self._made(spec, ends), spec.key)
                if never_started(found):
                    await self._start(found, spec)
        return str(found["Id"])

    async def find(self, key: str) -> str | None:
        found = await self._inspect(key)
        if found is None or not self._is_ours(found, key):
            return None
        run_dir = _labels(found).get(LABEL_DIR, "")
        if never_started(found) and not was_cut_off(found, Path(run_dir)):
            return None
        return str(found["Id"])

    async def poll(self, ref: str, run_dir: Path) -> Status:
        found = await self._inspect(ref)
        status = ended(run_dir) if found is None else status_of(found, run_dir)
        if found is not None and status.phase is Phase.ENDED and status.why is Why.FAILED:
            last = await self._last_words(ref)
            if last:
                return replace(status, detail=f"{status.detail}; {last}")
        return status

    async def stop(self, ref: str, *, force: bool = False) -> None:
        found = await self._inspect(ref)
        if found is None:
            return
        run_dir = _labels(found).get(LABEL_DIR)
        if run_dir:
            await aside(lambda: _note_asked(Path(run_dir), force), FILES_S, "engine stop")
        await self._kill(ref, "SIGKILL" if force else "SIGTERM")

    async def dump_stacks(self, ref: str) -> None:
        await self._kill(ref, "SIGUSR1")

    async def remove(self, ref: str) -> None:
        try:
            await self._client.make("remove", lambda api: api.remove_container(ref, v=True))
        except Refused as refused:
            if refused.status == 409:  # it runs, or is being removed
                log.debug("container %s is left alone: %s", ref[:12], refused)
            elif refused.status != 404:
                raise Unreachable(f"Docker did not remove container {ref[:12]}: {refused}") from None

    async def lacks(self) -> Mapping[str, str]:
        found = {}
        for short in KINDS:
            try:
                reference = await aside(lambda name=short: self._image_of(name), FILES_S, "engine image")  # type: ignore[misc]
                await self._client.ask("image", lambda api, one=reference: api.inspect_image(one))  # type: ignore[misc]
            except Refused as refused:
                if refused.status != 404:
                    raise Unreachable(f"Docker did not show image {reference}: {refused}") from None
                found[short] = f"Docker lacks the image {reference}: god-miner images build"
            except UnknownImage as error:
                found[short] = str(error)
        return found

    async def identity(self, image: str) -> str:
        try:
            reference = await aside(lambda: self._image_of(image), FILES_S, "engine image")
            found = await self._client.ask("image", lambda api: api.inspect_image(reference))
        except (Refused, UnknownImage) as error:
            raise Unreachable(f"Docker did not show the image {image!r}: {error}") from None
        return str(found["Id"])

    async def ours(self) -> list[Found]:
        wanted = {"label": [f"{LABEL_DATA}={self._house.data_id}"]}
        try:
            listed = await self._client.ask("list", lambda api: api.containers(all=True, filters=wanted))
        except Refused as refused:
            raise Unreachable(f"Docker did not list containers: {refused}") from None
        return [_found(one) for one in listed]

    async def close(self) -> None:
        self._client.close()

    async def _made(self, spec: EngineSpec, ends: float) -> Mapping[str, Any]:
        """A container of this name, made here or by an earlier request whose answer nobody lived to see.
        Docker holds a name from the beginning of the making, shows the container at its end, and lets go of
        the name when nothing came of it."""
        await aside(lambda: self._hand_over(spec), FILES_S, "engine files")
        try:
            image = await aside(lambda: self._image_of(spec.image), FILES_S, "engine image")
        except GodMinerError as error:
            raise Rejected(str(error)) from None
        body = container(spec, image, suited(self._house, await self._about()))
        while True:
            await self._make(spec.key, body)
            if (made := await self._inspect(spec.key)) is not None:
                return made
            if time.monotonic() > ends:
                raise Unreachable(f"Docker holds the name {spec.key!r} and does not show the container yet")
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _make(self, name: str, body: Mapping[str, Any]) -> None:
        """Or leave the one that has the name."""
        try:
            await self._client.make("create", lambda api: api.create_container_from_config(body, name))
        except Refused as refused:
            if refused.status != 409:
                raise meaning(refused, "making the container") from None

    async def _about(self) -> Mapping[str, Any]:
        try:
            found: Mapping[str, Any] = await self._client.ask("info", lambda api: api.info())
        except Refused as refused:
            raise Unreachable(f"Docker did not say what it is: {refused}") from None
        return found

    async def _start(self, found: Mapping[str, Any], spec: EngineSpec) -> None:
        ref = str(found["Id"])
        if was_cut_off(found, spec.run_dir):
            # It may run, and Docker could neither tell nor end it. A key is used once: it ends here.
            value = remains.mark(self._house.data_id, spec.key)
            killed = await aside(lambda: remains.end(value), FILES_S, "engine remains")
            log.warning("Docker died while it started %s: %d processes of it were killed", spec.key, killed)
            return
        try:
            await self._client.make("start", lambda api: api.start(ref))
        except Refused as refused:
            problem = meaning(refused, "starting the container")
            if isinstance(problem, Rejected) or is_left_over(refused):
                # It will never run.
                await self._discard(ref)
            raise problem from None

    async def _discard(self, ref: str) -> None:
        try:
            await self._client.make("remove", lambda api: api.remove_container(ref, v=True, force=True))
        except (Refused, Unreachable) as error:
            log.warning("container %s could not be started, and is left behind: %s", ref[:12], error)

    async def _inspect(self, name: str) -> Mapping[str, Any] | None:
        try:
            found: Mapping[str, Any] = await self._client.ask(
                "inspect", lambda api: api.inspect_container(name)
            )
        except Refused as refused:
            if refused.status == 404:
                return None
            raise Unreachable(f"Docker did not show container {name[:40]}: {refused}") from None
        return found

    async def _kill(self, ref: str, signal: str) -> None:
        try:
            await self._client.ask("kill", lambda api: api.kill(ref, signal))
        except Refused as refused:
            # 404: gone; 409: not running (500 in older engines).
            if refused.status not in (404, 409) and "not running" not in str(refused):
                raise Unreachable(f"Docker did not signal container {ref[:12]}: {refused}") from None

    async def _last_words(self, ref: str) -> str:
        """Of the wrapper itself, whose output alone Docker keeps: why it could not do its work."""
        try:
            raw = await self._client.ask("logs", lambda api: api.logs(ref, tail=5))
        except (Refused, Unreachable):
            return ""
        return bytes(raw).decode(errors="replace").strip()[-500:]

    def _is_ours(self, found: Mapping[str, Any], key: str) -> bool:
        labels = _labels(found)
        return labels.get(LABEL_DATA) == self._house.data_id and labels.get(LABEL_KEY) == key

    def _own(self, found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        if not self._is_ours(found, key):
            raise Rejected(f"the name {key!r} is taken by a container that is not ours: docker rm -f {key}")
        return found

    def _hand_over(self, spec: EngineSpec) -> None:
        if self._training_uid is not None and os.geteuid() == 0:
            hand_over(spec, mounts_of(spec), self._training_uid, self._trusted)


def _labels(found: Mapping[str, Any]) -> Mapping[str, str]:
    return (found.get("Config") or {}).get("Labels") or {}


def _found(listed: Mapping[str, Any]) -> Found:
    labels = listed.get("Labels") or {}
    run_dir = labels.get(LABEL_DIR)
    return Found(labels.get(LABEL_KEY, ""), str(listed["Id"]), Path(run_dir) if run_dir else None)


def _note_asked(run_dir: Path, force: bool) -> None:
    try:
        write_asked(run_dir, force=force)
    except OSError as error:
        log.warning("%s: that it was asked to end could not be noted (%s)", run_dir, error.strerror)
