"""Choose the engine that runs the training: Docker, local processes, or none, with the reason.

A new engine is a module, a member of `BackendKind` and a line in `ENGINES`: settings, the doctor and the
recovery of earlier runs find it there.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import core
from core.config.files import config_dir
from core.domain.errors import GodMinerError
from core.system import wrapper
from miner.backends import sandbox_init
from miner.backends.base import EngineUnreachable, ExecutionEngine
from miner.backends.docker.client import DockerClient, DockerRefused
from miner.backends.docker.container import ContainerDefaults
from miner.backends.docker.engine import DockerEngine
from miner.backends.docker.images import TrainerImages
from miner.backends.process.cgroups import detect_cgroups
from miner.backends.process.engine import ProcessEngine
from miner.backends.process.interpreter import Interpreter, NoTrainingPython, examine_interpreter
from miner.backends.process.run_registry import RunRegistry
from miner.backends.process.sandbox import Sandbox, detect_sandbox
from miner.backends.slurm.commands import SlurmCommands
from miner.backends.slurm.engine import SlurmEngine, SlurmOptions
from miner.backends.slurm.runs import SlurmRuns
from miner.observe.redact import Redactor
from miner.settings import BackendKind, SandboxKind, Settings
from miner.support.data_id import data_id

log = logging.getLogger(__name__)

#: Below the data directory: what engines keep of their own.
ENGINES_FOLDER = "engines"
#: Most processes and threads of one training.
MAX_PROCESSES = 16_384
#: How often Slurm is asked for the state of all jobs, with one command.
SLURM_POLL_SECONDS = 5.0
#: What `auto` chose last.
CHOICE_FILE = "chosen"
SOURCE_ROOT = Path(core.__file__).resolve().parents[1]


class NoEngine(GodMinerError):
    """Nothing here can run a training."""

    code = "no_engine"


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """`engine` is None where nothing can train; `why` is for people either way."""

    engine: ExecutionEngine | None
    why: str


async def choose_engine(settings: Settings, kind: BackendKind) -> EngineChoice:
    """The engine for one of BACKEND's words. Calls Docker only if it may be the answer; never raises without
    one."""
    if kind is BackendKind.NONE:
        return EngineChoice(None, "BACKEND=none")
    if kind is BackendKind.AUTO:
        return await _choose_automatically(settings)
    try:
        engine = await build_engine(settings, kind)
    except NoEngine as error:
        return EngineChoice(None, str(error))
    return EngineChoice(engine, f"BACKEND={','.join(settings.backend)}")


async def build_engine(settings: Settings, kind: str, trial_dir: Path | None = None) -> ExecutionEngine:
    """One engine by name, also to finish runs that an earlier choice left behind; `NoEngine`, and why.

    `trial_dir`: where everything of its own is kept instead of in the data directory, for a trial of the real
    images.
    """
    if kind not in ENGINES:
        raise NoEngine(f"there is no engine {kind!r}; those there are: {', '.join(ENGINES)}")
    own = settings.model_copy(update={"data_dir": trial_dir or settings.data_dir})
    return await asyncio.to_thread(ENGINES[BackendKind(kind)].build, own, TrainerImages(settings))


def docker_engine(settings: Settings, images: TrainerImages | None = None) -> DockerEngine:
    uid = settings.trainer_uid if os.geteuid() == 0 else None
    user = f"{uid}:{uid}" if uid is not None else f"{os.geteuid()}:{os.getegid()}"
    defaults = ContainerDefaults(
        data_id(settings.data_dir),
        _wrapper_on_host(settings),
        user,
        ulimits=settings.ulimits(),
        pids=MAX_PROCESSES,
    )
    return DockerEngine(
        DockerClient(settings.docker_host),
        defaults,
        image_of=(images or TrainerImages(settings)).reference,
        redact=Redactor(settings.secrets()),
        trusted=(settings.data_dir,),
        training_uid=uid,
    )


def process_engine(settings: Settings, _images: TrainerImages | None = None) -> ProcessEngine:
    interpreter = training_interpreter(settings)
    own = data_id(settings.data_dir)
    sandbox = sandbox_of(settings, interpreter)
    cgroups = detect_cgroups(f"god-miner-{own}-probe") if sys.platform == "linux" else "not Linux"
    return ProcessEngine(
        RunRegistry(_engines_dir(settings) / "runs"),
        own,
        interpreter,
        code=_code_folder(settings),
        sandbox=sandbox if isinstance(sandbox, Sandbox) else None,
        why_no_sandbox=sandbox if isinstance(sandbox, str) else "",
        limits=None if isinstance(cgroups, str) else cgroups,
        redact=Redactor(settings.secrets()),
        trusted=(settings.data_dir,),
        ulimits={"nofile": 1 << 20, **settings.ulimits()},
        pids=MAX_PROCESSES,
    )


def slurm_engine(settings: Settings, _images: TrainerImages | None = None) -> SlurmEngine:
    folder = _engines_dir(settings) / "slurm"
    folder.mkdir(exist_ok=True)
    in_container = settings.slurm_container is not None
    interpreter = None if in_container else training_interpreter(settings)
    code = None if interpreter is None else copied_code(folder)
    sandbox: Sandbox | str = "trainings run in SLURM_CONTAINER, which has the machine's network"
    if interpreter is not None and code is not None:
        sandbox = sandbox_of(settings, interpreter, code)
    if isinstance(sandbox, Sandbox):
        sandbox = replace(sandbox, elsewhere=True)
    return SlurmEngine(
        slurm_commands(settings),
        SlurmRuns(folder / "runs"),
        data_id(settings.data_dir),
        SlurmOptions(
            placement={name: getattr(settings, f"slurm_{name}") or "" for name in SLURM_PLACEMENT},
            options=settings.slurm_options,
            modules=settings.slurm_modules,
            container=settings.slurm_container,
            nodes=settings.slurm_nodes or "",
            cpus_per_gpu=settings.slurm_cpus_per_gpu,
            memory_per_gpu=settings.slurm_memory_per_gpu,
            pending_s=settings.slurm_pending_seconds,
            grace_s=settings.stop_grace_seconds,
        ),
        interpreter=interpreter,
        code=code,
        wrapper_file=_wrapper_on_host(settings),
        sandbox=sandbox if isinstance(sandbox, Sandbox) else None,
        why_no_sandbox=sandbox if isinstance(sandbox, str) else "",
        poll_s=SLURM_POLL_SECONDS,
        redact=Redactor(settings.secrets()),
        trusted=(settings.data_dir,),
        ulimits=settings.ulimits(),
    )


#: What settings and profiles say of where a job runs, by sbatch's option.
SLURM_PLACEMENT = ("partition", "account", "qos", "constraint", "reservation")


def slurm_commands(settings: Settings) -> SlurmCommands:
    return SlurmCommands(str(settings.slurm_bin_dir or ""))


@dataclass(frozen=True, slots=True)
class EngineEntry:
    build: Callable[[Settings, TrainerImages], ExecutionEngine]
    #: What the operator does when it lacks what training needs.
    fix: str


ENGINES: Mapping[BackendKind, EngineEntry] = {
    BackendKind.DOCKER: EngineEntry(docker_engine, "god-miner images build"),
    BackendKind.PROCESS: EngineEntry(process_engine, "make training, or set TRAINER_PYTHON"),
    BackendKind.SLURM: EngineEntry(slurm_engine, "set TRAINER_PYTHON or SLURM_CONTAINER: docs/slurm.md"),
}
#: The engines of this machine, which BACKEND=auto chooses from. Others are chosen by name only.
AUTOMATIC = (BackendKind.DOCKER, BackendKind.PROCESS)


def sandbox_of(settings: Settings, interpreter: Interpreter, copy: Path | None = None) -> Sandbox | str:
    """A sandbox that was tried out on this machine; or why there is none. `copy`: of our packages, for other
    machines."""
    if settings.trainer_sandbox is SandboxKind.OFF:
        return "TRAINER_SANDBOX=off"
    uid = settings.trainer_uid if os.geteuid() == 0 else None
    code = copy or _code_folder(settings)
    init = Path(sandbox_init.__file__)
    if copy is not None:
        init = copy / init.relative_to(SOURCE_ROOT)
    visible = (code, *(path.resolve() for path in code.iterdir()), config_dir())
    hosts = _engines_dir(settings) / "hosts"
    return detect_sandbox(interpreter, hosts, visible, uid, MAX_PROCESSES, init)


def training_python(settings: Settings) -> Path | None:
    """TRAINER_PYTHON, else the Python of the environment of `make training`, if there is one."""
    made = SOURCE_ROOT / ".venv-training" / "bin" / "python"
    return settings.trainer_python or (made if made.exists() else None)


def training_interpreter(settings: Settings) -> Interpreter:
    """The training environment's Python; our own if there is none and we have torch."""
    path = training_python(settings)
    if path is None and importlib.util.find_spec("torch") is not None:
        path = Path(sys.executable)
    if path is None:
        raise NoEngine(
            "local processes need a python with the training stack: "
            "run `make training` (4 GB, 7 GB with CUDA), or set TRAINER_PYTHON"
        )
    try:
        return examine_interpreter(path)
    except NoTrainingPython as error:
        raise NoEngine(str(error)) from None


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
    registry = RunRegistry(_engines_dir(settings) / "runs")
    if any(map(registry.is_alive, registry.keys())):
        log.info("local processes of an earlier choice still run; Docker takes over at a later start")
        return process
    return docker


@dataclass(frozen=True, slots=True)
class DockerState:
    answers: bool
    ready: bool
    why: str


async def docker_state(settings: Settings) -> DockerState:
    """Whether it answers, and has the image for text."""
    client = DockerClient(settings.docker_host)
    images = TrainerImages(settings)
    try:
        await client.query("ping", lambda api: api.ping())
        reference = images.reference("text")
        await client.query("image", lambda api: api.inspect_image(reference))
    except EngineUnreachable as error:
        return DockerState(False, False, str(error))
    except (DockerRefused, GodMinerError):
        return DockerState(
            True, False, f"Docker lacks the image {images.name('text')}: god-miner images build"
        )
    finally:
        client.close()
    return DockerState(True, True, "")


def _engines_dir(settings: Settings) -> Path:
    folder = settings.data_dir / ENGINES_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _remember_choice(settings: Settings, engine: ExecutionEngine, why: str) -> EngineChoice:
    (_engines_dir(settings) / CHOICE_FILE).write_text(engine.name)
    return EngineChoice(engine, why)


def _last_choice(settings: Settings) -> str:
    try:
        return (settings.data_dir / ENGINES_FOLDER / CHOICE_FILE).read_text().strip()
    except OSError:
        return ""


def _wrapper_on_host(settings: Settings) -> Path:
    """A copy named by its content: Docker mounts it from our data directory, which it can see, and a run that
    goes on over an upgrade keeps the one that it was started with."""
    text = Path(wrapper.__file__).read_bytes()
    path = _engines_dir(settings) / f"wrapper-{sha256(text).hexdigest()[:12]}.py"
    if not path.exists():
        part = path.with_suffix(".part")
        part.write_bytes(text)
        part.chmod(0o644)
        part.replace(path)
    return path


def copied_code(parent: Path) -> Path:
    """A copy of our packages for other machines, named by its content: what runs there stays the same when
    this installation changes."""
    files = sorted(
        (Path(name) / path.relative_to(root), path)
        for name, root in _copied_parts()
        for path in ([root] if root.is_file() else root.rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    )
    digest = sha256()
    for name, path in files:
        text = path.read_bytes()
        digest.update(f"{name} {len(text)} ".encode() + text)
    folder = parent / f"code-{digest.hexdigest()[:12]}"
    if not folder.exists():
        part = Path(tempfile.mkdtemp(prefix=".code-", dir=parent))
        for name, path in files:
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, part / name)
        for copied in (part, *part.rglob("*")):
            copied.chmod(0o755 if copied.is_dir() else 0o644)
        try:
            part.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(part)
    return folder


def _copied_parts() -> Iterator[tuple[str, Path]]:
    yield from ((name, SOURCE_ROOT / name) for name in ("core", "trainer"))
    yield "configs", config_dir()
    init = Path(sandbox_init.__file__)
    yield str(init.relative_to(SOURCE_ROOT)), init


def _code_folder(settings: Settings) -> Path:
    """A directory with our packages for the training's interpreter, without the daemon's environment."""
    folder = _engines_dir(settings) / "code"
    folder.mkdir(exist_ok=True)
    for name in ("core", "trainer"):
        link, target = folder / name, SOURCE_ROOT / name
        if not link.is_symlink() or link.resolve() != target:
            link.unlink(missing_ok=True)
            link.symlink_to(target)
    return folder
