"""Which engine runs the training: Docker, local processes, or none and why."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import core
from core.configs import config_dir
from core.errors import GodMinerError
from miner.engines import wrapper
from miner.engines.base import Engine, Unreachable
from miner.engines.docker import DockerEngine
from miner.engines.docker.client import Client, Refused
from miner.engines.docker.config import House
from miner.engines.docker.images import Images
from miner.engines.owner import data_id
from miner.engines.process import ProcessEngine
from miner.engines.process.book import Book
from miner.engines.process.cgroups import detect as detect_cgroups
from miner.engines.process.interpreter import Interpreter, NoTrainingPython, examine
from miner.engines.process.sandbox import Sandbox
from miner.engines.process.sandbox import detect as detect_sandbox
from miner.redact import Redactor
from miner.settings import EngineKind, SandboxKind, Settings

log = logging.getLogger(__name__)

#: Below the data folder: what engines keep of their own.
FOLDER = "engines"
#: What `auto` chose last.
CHOICE_FILE = "chosen"
SOURCE = Path(core.__file__).resolve().parents[1]


class NoEngine(GodMinerError):
    """Nothing here can run a training."""

    code = "no_engine"


@dataclass(frozen=True, slots=True)
class Choice:
    """`engine` is None where nothing can train; `why` is for people either way."""

    engine: Engine | None
    why: str


async def choose(settings: Settings) -> Choice:
    """What ENGINE asks for. Touches Docker only if it may be the answer; never raises for its absence."""
    if settings.engine is EngineKind.NONE:
        return Choice(None, "ENGINE=none")
    if settings.engine is EngineKind.AUTO:
        return await _auto(settings)
    try:
        engine = await build(settings, settings.engine)
    except NoEngine as error:
        return Choice(None, str(error))
    return Choice(engine, f"ENGINE={settings.engine}")


async def build(settings: Settings, kind: str) -> Engine:
    """One engine by name, also to look after runs that an earlier choice left behind; `NoEngine`, and why."""
    if kind == EngineKind.DOCKER:
        return await asyncio.to_thread(docker_engine, settings)
    if kind == EngineKind.PROCESS:
        return await asyncio.to_thread(process_engine, settings)
    raise NoEngine(f"there is no engine {kind!r}; those there are: docker, process")


async def trial_engine(settings: Settings, kind: str, folder: Path) -> Engine:
    """As `build`, but with everything that it keeps in a throwaway folder, and the real images."""
    images = Images(settings)
    apart = settings.model_copy(update={"data_dir": folder})
    if kind == EngineKind.DOCKER:
        return await asyncio.to_thread(docker_engine, apart, images)
    return await build(apart, kind)


def docker_engine(settings: Settings, images: Images | None = None) -> DockerEngine:
    uid = settings.trainer_uid if os.geteuid() == 0 else None
    user = f"{uid}:{uid}" if uid is not None else f"{os.geteuid()}:{os.getegid()}"
    house = House(
        data_id(settings.data_dir),
        _wrapper_on_host(settings),
        user,
        ulimits=settings.ulimits(),
        pids=settings.trainer_processes,
    )
    return DockerEngine(
        Client(settings.docker_host),
        house,
        image_of=(images or Images(settings)).reference,
        redact=Redactor(settings.secrets()),
        trusted=(settings.data_dir,),
        training_uid=uid,
    )


def process_engine(settings: Settings) -> ProcessEngine:
    interpreter = training_interpreter(settings)
    own = data_id(settings.data_dir)
    sandbox = sandbox_of(settings, interpreter)
    cgroups = detect_cgroups(f"god-miner-{own}-probe") if sys.platform == "linux" else "not Linux"
    return ProcessEngine(
        Book(_folder(settings) / "runs"),
        own,
        interpreter,
        code=_code(settings),
        sandbox=sandbox if isinstance(sandbox, Sandbox) else None,
        why_no_sandbox=sandbox if isinstance(sandbox, str) else "",
        limits=None if isinstance(cgroups, str) else cgroups,
        redact=Redactor(settings.secrets()),
        trusted=(settings.data_dir,),
        ulimits={"nofile": 1 << 20, **settings.ulimits()},
        pids=settings.trainer_processes,
    )


def sandbox_of(settings: Settings, interpreter: Interpreter) -> Sandbox | str:
    """Tried out; or why there is none."""
    if settings.trainer_sandbox is SandboxKind.OFF:
        return "TRAINER_SANDBOX=off"
    uid = settings.trainer_uid if os.geteuid() == 0 else None
    code = _code(settings)
    shown = (code, *(path.resolve() for path in code.iterdir()), config_dir())
    return detect_sandbox(interpreter, _folder(settings) / "hosts", shown, uid, settings.trainer_processes)


def training_interpreter(settings: Settings) -> Interpreter:
    """TRAINER_PYTHON; else the environment that `make training` made; else our own if torch is there."""
    if settings.trainer_python is not None:
        return _examined(settings.trainer_python)
    made = SOURCE / ".venv-training" / "bin" / "python"
    if made.exists():
        return _examined(made)
    if importlib.util.find_spec("torch") is not None:
        return _examined(Path(sys.executable))
    raise NoEngine(
        "local processes need a python with the training stack: run `make training` (4 GB, 7 GB with CUDA), "
        "or set TRAINER_PYTHON"
    )


def _examined(path: Path) -> Interpreter:
    try:
        return examine(path)
    except NoTrainingPython as error:
        raise NoEngine(str(error)) from None


async def _auto(settings: Settings) -> Choice:
    last = _last(settings)
    docker = await docker_state(settings)
    if docker.ready or (last == EngineKind.DOCKER and not docker.answers):
        # Its containers may go on, although it does not answer now: nothing else may start their jobs anew.
        because = (
            "Docker answers and has the image" if docker.ready else f"the last runs were its; {docker.why}"
        )
        engine: Engine = await build(settings, EngineKind.DOCKER)
        if last == EngineKind.PROCESS:
            engine = await _unless_still_running(settings, engine)
        return _remembered(settings, engine, because)
    try:
        return _remembered(
            settings, await build(settings, EngineKind.PROCESS), f"local processes: {docker.why}"
        )
    except NoEngine as error:
        if docker.answers:
            return _remembered(settings, await build(settings, EngineKind.DOCKER), docker.why)
        return Choice(None, f"{docker.why}; {error}")


async def _unless_still_running(settings: Settings, docker: Engine) -> Engine:
    """Local processes of an earlier choice are seen to their end before Docker takes over."""
    try:
        process = await build(settings, EngineKind.PROCESS)
    except NoEngine:
        return docker
    book = Book(_folder(settings) / "runs")
    if any(map(book.lives, book.keys())):
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
    client = Client(settings.docker_host)
    images = Images(settings)
    try:
        await client.ask("ping", lambda api: api.ping())
        reference = images.reference("text")
        await client.ask("image", lambda api: api.inspect_image(reference))
    except Unreachable as error:
        return DockerState(False, False, str(error))
    except (Refused, GodMinerError):
        return DockerState(
            True, False, f"Docker lacks the image {images.name('text')}: god-miner images build"
        )
    finally:
        client.close()
    return DockerState(True, True, "")


def _folder(settings: Settings) -> Path:
    folder = settings.data_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _remembered(settings: Settings, engine: Engine, why: str) -> Choice:
    (_folder(settings) / CHOICE_FILE).write_text(engine.name)
    return Choice(engine, why)


def _last(settings: Settings) -> str:
    try:
        return (settings.data_dir / FOLDER / CHOICE_FILE).read_text().strip()
    except OSError:
        return ""


def _wrapper_on_host(settings: Settings) -> Path:
    """A copy by its content: Docker mounts it from our data folder, which it sees for sure, and a run that
    goes on over an upgrade keeps the one that it was started with."""
    text = Path(wrapper.__file__).read_bytes()
    path = _folder(settings) / f"wrapper-{sha256(text).hexdigest()[:12]}.py"
    if not path.exists():
        part = path.with_suffix(".part")
        part.write_bytes(text)
        part.chmod(0o644)
        part.replace(path)
    return path


def _code(settings: Settings) -> Path:
    """A folder with our packages for the training's interpreter, and nothing of the daemon's environment."""
    folder = _folder(settings) / "code"
    folder.mkdir(exist_ok=True)
    for name in ("core", "trainer"):
        link, target = folder / name, SOURCE / name
        if not link.is_symlink() or link.resolve() != target:
            link.unlink(missing_ok=True)
            link.symlink_to(target)
    return folder
