"""Choose the backend that a word of BACKEND asks for, with the reason."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from miner.backends.base import Backend
from miner.backends.registry import NoBackend, backends_folder, build_backend
from miner.settings import BackendKind, Settings

log = logging.getLogger(__name__)

#: What `auto` chose last, in the backends' folder.
CHOICE_FILE = "chosen"
#: The backends that BACKEND=auto chooses from. Others are chosen by name only.
AUTOMATIC = (BackendKind.DOCKER, BackendKind.PROCESS)


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend, or None if nothing can train, and the reason for people."""

    backend: Backend | None
    why: str


async def choose_backend(settings: Settings, kind: BackendKind) -> BackendChoice:
    """Choose the backend for one of BACKEND's words. Docker is called only if it may be the answer."""
    if kind is BackendKind.NONE:
        return BackendChoice(None, "BACKEND=none")
    if kind is BackendKind.AUTO:
        return await _choose_automatically(settings)
    try:
        backend = await build_backend(settings, kind)
    except NoBackend as error:
        return BackendChoice(None, str(error))
    return BackendChoice(backend, f"BACKEND={','.join(settings.backend)}")


async def _choose_automatically(settings: Settings) -> BackendChoice:
    from miner.backends.docker.plugin import docker_state

    last = _last_choice(settings)
    docker = await docker_state(settings)
    if docker.ready or (last == BackendKind.DOCKER and not docker.answers):
        # Its containers may go on although it does not answer now: nothing else may start their jobs again.
        why = "Docker answers and has the image" if docker.ready else f"the last runs were its; {docker.why}"
        backend = await build_backend(settings, BackendKind.DOCKER)
        if last == BackendKind.PROCESS:
            backend = await _unless_processes_run(settings, backend)
        return _remember_choice(settings, backend, why)
    try:
        backend = await build_backend(settings, BackendKind.PROCESS)
        return _remember_choice(settings, backend, f"local processes: {docker.why}")
    except NoBackend as error:
        if docker.answers:
            return _remember_choice(settings, await build_backend(settings, BackendKind.DOCKER), docker.why)
        return BackendChoice(None, f"{docker.why}; {error}")


async def _unless_processes_run(settings: Settings, docker: Backend) -> Backend:
    """Local processes of an earlier choice run to their end before Docker takes over."""
    from miner.backends.process.plugin import has_live_runs

    try:
        process = await build_backend(settings, BackendKind.PROCESS)
    except NoBackend:
        return docker
    if has_live_runs(settings):
        log.info("local processes of an earlier choice still run; Docker takes over at a later start")
        return process
    return docker


def _remember_choice(settings: Settings, backend: Backend, why: str) -> BackendChoice:
    (backends_folder(settings.data_dir) / CHOICE_FILE).write_text(backend.name)
    return BackendChoice(backend, why)


def _last_choice(settings: Settings) -> str:
    try:
        return (backends_folder(settings.data_dir) / CHOICE_FILE).read_text().strip()
    except OSError:
        return ""
