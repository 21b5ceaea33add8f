"""Choose the engine that a word of BACKEND asks for, with the reason."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from miner.backends.base import ExecutionEngine
from miner.backends.docker.backend import docker_state
from miner.backends.process.backend import has_live_runs
from miner.backends.registry import NoEngine, build_engine, engines_folder
from miner.settings import BackendKind, Settings

log = logging.getLogger(__name__)

#: What `auto` chose last, in the engines' folder.
CHOICE_FILE = "chosen"
#: The backends that BACKEND=auto chooses from. Others are chosen by name only.
AUTOMATIC = (BackendKind.DOCKER, BackendKind.PROCESS)


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, or None if nothing can train, and the reason for people."""

    engine: ExecutionEngine | None
    why: str


async def choose_engine(settings: Settings, kind: BackendKind) -> EngineChoice:
    """Choose the engine for one of BACKEND's words. Docker is called only if it may be the answer."""
    if kind is BackendKind.NONE:
        return EngineChoice(None, "BACKEND=none")
    if kind is BackendKind.AUTO:
        return await _choose_automatically(settings)
    try:
        engine = await build_engine(settings, kind)
    except NoEngine as error:
        return EngineChoice(None, str(error))
    return EngineChoice(engine, f"BACKEND={','.join(settings.backend)}")


async def _choose_automatically(settings: Settings) -> EngineChoice:
    last = _last_choice(settings)
    docker = await docker_state(settings)
    if docker.ready or (last == BackendKind.DOCKER and not docker.answers):
        # Its containers may go on although it does not answer now: nothing else may start their jobs again.
        why = "Docker answers and has the image" if docker.ready else f"the last runs were its; {docker.why}"
        engine = await build_engine(settings, BackendKind.DOCKER)
        if last == BackendKind.PROCESS:
            engine = await _unless_processes_run(settings, engine)
        return _remember_choice(settings, engine, why)
    try:
        engine = await build_engine(settings, BackendKind.PROCESS)
        return _remember_choice(settings, engine, f"local processes: {docker.why}")
    except NoEngine as error:
        if docker.answers:
            return _remember_choice(settings, await build_engine(settings, BackendKind.DOCKER), docker.why)
        return EngineChoice(None, f"{docker.why}; {error}")


async def _unless_processes_run(settings: Settings, docker: ExecutionEngine) -> ExecutionEngine:
    """Local processes of an earlier choice run to their end before Docker takes over."""
    try:
        process = await build_engine(settings, BackendKind.PROCESS)
    except NoEngine:
        return docker
    if has_live_runs(settings):
        log.info("local processes of an earlier choice still run; Docker takes over at a later start")
        return process
    return docker


def _remember_choice(settings: Settings, engine: ExecutionEngine, why: str) -> EngineChoice:
    (engines_folder(settings.data_dir) / CHOICE_FILE).write_text(engine.name)
    return EngineChoice(engine, why)


def _last_choice(settings: Settings) -> str:
    try:
        return (engines_folder(settings.data_dir) / CHOICE_FILE).read_text().strip()
    except OSError:
        return ""
