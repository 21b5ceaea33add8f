"""What would run the training, tried out: Docker and its images, or local processes and their sandbox."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.choices import Engine as TrainingEngine
from core.errors import GodMinerError
from miner.doctor.examine import Check, Surroundings
from miner.doctor.finding import Finding, Status, fail, ok, warn
from miner.engines.base import IMAGE_OF
from miner.settings import EngineKind, Settings

if TYPE_CHECKING:
    from miner.engines.docker.client import Client

LIMIT_SECONDS = 240.0
GIB = 1024**3
#: NCCL and data loaders share memory through it; pods come with 64 MiB.
ENOUGH_SHM = 8 * GIB
SHM = "/dev/shm"  # noqa: S108 - looked at only
#: The text image is about 25 GB with its base, and a rebuild needs room beside it.
DOCKER_SPACE = 40 * GIB
_PROTECTION = "from trainer.sandbox import protection; print('isolation:', protection())"
_CARD = Path("/dev/nvidia0")
_WAY_OUT = {
    EngineKind.DOCKER: "god-miner images build",
    EngineKind.PROCESS: "make training, or set TRAINER_PYTHON",
}


def run(surroundings: Surroundings) -> Iterator[Finding]:
    settings = surroundings.settings
    if settings.engine is EngineKind.NONE:
        yield warn(
            "training engine", "ENGINE=none: offers are answered, nothing is trained", "another ENGINE"
        )
        return
    by_kind: dict[EngineKind, list[Finding]] = {}
    if settings.engine is not EngineKind.PROCESS:
        by_kind[EngineKind.DOCKER] = list(_docker(settings))
    if settings.engine is not EngineKind.DOCKER:
        by_kind[EngineKind.PROCESS] = list(_process(settings))
    usable = [kind for kind, findings in by_kind.items() if not any(_bad(one) for one in findings)]
    if not usable:
        for findings in by_kind.values():
            yield from findings
        yield fail(
            "training engine",
            f"nothing here can run a training (ENGINE={settings.engine})",
            "mend Docker or the local python, as told above; or set MAX_JOBS=0 to refuse all offers",
        )
        return
    yield ok("training engine", f"{usable[0]} (ENGINE={settings.engine})")
    yield from by_kind[usable[0]]


def _bad(finding: Finding) -> bool:
    return finding.status is Status.FAIL


def _docker(settings: Settings) -> Iterator[Finding]:
    from miner.engines.base import Unreachable
    from miner.engines.docker.client import Client, Refused
    from miner.engines.docker.images import Images
    from miner.engines.docker.looking import ImageState, look

    client = Client(settings.docker_host)
    try:
        info: dict[str, Any] = client.ask_here(lambda api: api.info(), client.look_s)
        yield _docker_itself(client, info)
        yield from _docker_disk(info)
        for one in look(client, Images(settings)):
            # Text tasks are what there is most of; the others are only needed for theirs.
            missing = fail if one.short == "text" else warn
            if one.state is ImageState.OK:
                yield ok(f"image {one.short}", f"{one.name}: {one.text}")
            else:
                say = missing if one.state is ImageState.MISSING else warn
                yield say(f"image {one.short}", f"{one.name}: {one.text}", one.fix)
            if one.short == "text" and one.state is not ImageState.MISSING:
                yield _tried(settings, EngineKind.DOCKER)
                yield from _reward_isolation(settings, EngineKind.DOCKER)
    except (Unreachable, Refused) as error:
        yield fail("docker", str(error), "start Docker, or set ENGINE=process")
    finally:
        client.close()


def _docker_disk(info: Mapping[str, Any]) -> Iterator[Finding]:
    """Images and containers lie on a disk of their own, often the small one of the system."""
    root = Path(str(info.get("DockerRootDir") or ""))
    if not root.is_dir():
        return
    free = shutil.disk_usage(root).free
    detail = f"{free / GIB:.1f} GiB free for images and containers in {root}"
    way_out = f"have {DOCKER_SPACE // GIB} GiB free: god-miner images prune; docker system df"
    yield ok("docker disk", detail) if free >= DOCKER_SPACE else warn("docker disk", detail, way_out)


def _docker_itself(client: Client, info: Mapping[str, Any]) -> Finding:
    version = f"Docker {info.get('ServerVersion')} at {client.host}"
    if not info.get("LiveRestoreEnabled"):
        return warn(
            "docker",
            f"{version}: its restart or upgrade ends every training",
            'put {"live-restore": true} into /etc/docker/daemon.json, then: systemctl reload docker',
        )
    return ok("docker", f"{version}, leaves trainings running when it is restarted")


def _process(settings: Settings) -> Iterator[Finding]:
    from miner.engines.choose import NoEngine, training_interpreter

    try:
        interpreter = training_interpreter(settings)
    except NoEngine as error:
        yield fail("training python", str(error), "make training, or set TRAINER_PYTHON")
        return
    yield ok("training python", str(interpreter.path))
    yield _sandbox(settings)
    yield _limits()
    yield shared_memory(shutil.disk_usage(SHM).total)
    yield _tried(settings, EngineKind.PROCESS)
    yield from _reward_isolation(settings, EngineKind.PROCESS)


def _sandbox(settings: Settings) -> Finding:
    from miner.engines.choose import sandbox_of, training_interpreter

    with _apart(settings) as apart:
        found = sandbox_of(apart, training_interpreter(apart))
    if isinstance(found, str):
        return warn(
            "sandbox",
            f"{found}: tasks with reward functions (GRPO) are refused, and other trainings have the network",
            "install bubblewrap where user namespaces are allowed, or use Docker",
        )
    return ok("sandbox", f"{found.program} works")


def _limits() -> Finding:
    from miner.engines.process.cgroups import detect

    found = detect(f"god-miner-doctor-{os.getpid()}")
    if isinstance(found, str):
        return warn(
            "memory limit",
            f"a training that takes too much memory takes the machine's: {found}",
            "nothing to be done in most pods; the kernel is told to end the training first",
        )
    return ok("memory limit", f"cgroups of version {found.version} can be made")


def shared_memory(total: int) -> Finding:
    if total < ENOUGH_SHM:
        return warn(
            "shared memory",
            f"{SHM} has {total / GIB:.2f} GiB; several GPUs and data loaders need more",
            "start the pod with more (docker run --shm-size=32g), or mount -o remount,size=32G /dev/shm",
        )
    return ok("shared memory", f"{SHM} has {total / GIB:.0f} GiB")


def _tried(settings: Settings, kind: EngineKind, image: str = "text") -> Finding:
    from miner.engines.choose import trial_engine
    from miner.engines.trial import TrialFailed, lacking_in

    gpus = ("0",) if _CARD.exists() else ()

    async def tried() -> Mapping[TrainingEngine, str]:
        with _apart(settings) as apart:
            engine = await trial_engine(settings, kind, apart.data_dir)
            try:
                return await lacking_in(engine, apart.data_dir, image, gpus=gpus)
            finally:
                await engine.close()

    try:
        lacks = asyncio.run(tried())
    except TrialFailed as error:
        return fail("trial run", str(error), "correct what it says; a training would end the same way")
    except GodMinerError as error:
        return fail("trial run", str(error), "correct what it says")
    trains = [engine for engine, short in IMAGE_OF.items() if short == image and engine not in lacks]
    missing = "; ".join(f"{engine}: {why}" for engine, why in lacks.items())
    if not trains:
        return fail("trial run", missing, _WAY_OUT[kind])
    gpu = "with a GPU" if gpus else "without a GPU: there is none"
    found = f"{' and '.join(trains)} can train, {gpu}"
    if missing:
        return warn(
            "trial run", f"{found}; {missing}", f"{_WAY_OUT[kind]}, or profiles with engine: {trains[0]}"
        )
    return ok("trial run", found)


def _reward_isolation(settings: Settings, kind: EngineKind) -> Iterator[Finding]:
    """What reward code would be held by. Nothing where none is taken, or where the trial run failed too."""
    from miner.engines.choose import trial_engine
    from miner.engines.trial import TrialFailed, trial

    async def tried() -> str:
        with _apart(settings) as apart:
            engine = await trial_engine(settings, kind, apart.data_dir)
            try:
                command = ("python", "-c", _PROTECTION)
                return await trial(engine, apart.data_dir, command) if engine.can_sandbox else ""
            finally:
                await engine.close()

    try:
        protection = asyncio.run(tried()).rpartition("isolation: ")[2]
    except (TrialFailed, GodMinerError):
        return
    if protection.startswith("exposed"):
        advice = "Linux 6.2 or newer with Landlock, or god-miner as root with bubblewrap"
        yield warn("reward isolation", f"reward code is not kept from the training: {protection}", advice)
    elif protection.startswith("user "):
        yield ok("reward isolation", f"reward code runs as {protection}")


@contextmanager
def _apart(settings: Settings) -> Iterator[Settings]:
    """The settings on a throwaway folder beside the real one, so that nothing is left and Docker sees it."""
    beside = next(place for place in (settings.data_dir, *settings.data_dir.parents) if place.is_dir())
    with tempfile.TemporaryDirectory(prefix=".god-miner-doctor-", dir=beside) as folder:
        yield settings.model_copy(update={"data_dir": Path(folder)})


CHECK = Check("training engine", run, LIMIT_SECONDS)
