"""The backends: one folder each, found by its name.

A new backend is a member of `BackendKind` and a folder of that name with `plugin.py`, which holds `PLUGIN`,
and, if it has settings, `settings.py`, which holds their `SECTION`. Settings, daemon, fleet and doctor find
them there.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from core.domain.errors import GodMinerError
from core.system import wrapper
from miner.backends.base import Backend
from miner.fleet.sources import GpuSource
from miner.observe.redact import Redactor
from miner.settings import BackendKind, Settings
from miner.support.data_id import data_id
from miner.support.findings import Finding

#: Below the data directory: what backends keep of their own.
BACKENDS_FOLDER = "backends"
#: Most processes and threads of one training.
MAX_PROCESSES = 16_384
CHECK_LIMIT_S = 240.0

log = logging.getLogger(__name__)

#: What `auto` chose last, in the backends' folder.
CHOICE_FILE = "chosen"
#: The backends that BACKEND=auto chooses from. Others are chosen by name only.
AUTOMATIC = (BackendKind.DOCKER, BackendKind.PROCESS)


class NoBackend(GodMinerError):
    """Nothing here can run a training."""

    code = "no_backend"


@dataclass(frozen=True, slots=True)
class BackendContext:
    """Everything that the backends of a data directory share."""

    data_id: str
    #: What backends keep of their own.
    folder: Path
    #: Hide secrets in a text.
    redact: Callable[[str], str]
    #: Our own directories, in which no link may lead elsewhere.
    trusted: tuple[Path, ...]
    ulimits: Mapping[str, int]
    #: Most processes and threads of a run.
    processes: int
    #: The user that runs are given to if the daemon is root; None if they are the daemon's own.
    training_uid: int | None

    @classmethod
    def of(cls, settings: Settings, data_dir: Path) -> BackendContext:
        return cls(
            data_id(data_dir),
            backends_folder(data_dir),
            Redactor(settings.secrets()),
            (data_dir,),
            settings.ulimits(),
            MAX_PROCESSES,
            settings.trainer_uid if os.geteuid() == 0 else None,
        )

    def wrapper_file(self) -> Path:
        """Copy the wrapper, named by its content, to where Docker and other machines see it.

        A run that goes on over an upgrade keeps the one that it was started with.
        """
        text = Path(wrapper.__file__).read_bytes()
        path = self.folder / f"wrapper-{sha256(text).hexdigest()[:12]}.py"
        if not path.exists():
            part = path.with_suffix(".part")
            part.write_bytes(text)
            part.chmod(0o644)
            part.replace(path)
        return path


@dataclass(frozen=True, slots=True)
class ClusterContext:
    """Facts of the fleet that a backend needs to find the GPUs of other machines."""

    #: GPU kinds by node or type from FLEET_FILE, where the cluster does not say them.
    kinds: Callable[[], Mapping[str, str]]
    #: Fields of `Hardware` that hold for every node, such as the shared disk's.
    host: Callable[[], Mapping[str, Any]]
    #: Return whether one of our jobs has this GPU.
    is_in_use: Callable[[str], bool]
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class BackendPlugin:
    """A backend as its folder registers it."""

    kind: BackendKind
    #: Build it on the context's data directory; `NoBackend` says why there is none.
    build: Callable[[Settings, BackendContext], Backend]
    #: The doctor's findings about it.
    check: Callable[[Settings], Iterable[Finding]]
    #: What the operator does when it lacks what training needs.
    fix: str
    #: Find the GPUs of its own machines; None if it trains on this machine's.
    gpu_source: Callable[[Settings, ClusterContext], GpuSource] | None = None
    #: Time limit of `check`.
    check_limit_s: float = CHECK_LIMIT_S


@cache
def plugin_of(kind: BackendKind) -> BackendPlugin:
    """Load a backend. Only those in use are imported: Docker's client library is large."""
    plugin: BackendPlugin = importlib.import_module(f"miner.backends.{kind}.plugin").PLUGIN
    return plugin


def backend_kinds() -> list[BackendKind]:
    """The backends that there are."""
    return [kind for kind in BackendKind if kind.is_backend]


async def build_backend(settings: Settings, kind: str, trial_dir: Path | None = None) -> Backend:
    """Build a backend by its name, also to finish runs that an earlier choice left; `NoBackend`.

    Everything of its own is kept in `trial_dir`, if given, instead of the data directory.
    """
    if kind not in backend_kinds():
        raise NoBackend(f"there is no backend {kind!r}; those there are: {', '.join(backend_kinds())}")
    return await asyncio.to_thread(build_here, settings, BackendKind(kind), trial_dir)


def build_here(settings: Settings, kind: BackendKind, trial_dir: Path | None = None) -> Backend:
    """Build a backend in the caller's own thread: it starts programs to learn what works."""
    context = BackendContext.of(settings, trial_dir or settings.data_dir)
    return plugin_of(kind).build(settings, context)


def backends_folder(data_dir: Path) -> Path:
    folder = data_dir / BACKENDS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
