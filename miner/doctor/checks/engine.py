"""What would run the training, tried out: Docker and its images, or local processes and their sandbox."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import GodMinerError
from miner.doctor.examine import Check, Surroundings
from miner.doctor.finding import Finding, Status, fail, ok, warn
from miner.settings import EngineKind, Settings

if TYPE_CHECKING:
    from miner.engines.docker.client import Client

LIMIT_SECONDS = 240.0
GIB = 1024**3
#: NCCL and data loaders share memory through it; pods come with 64 MiB.
ENOUGH_SHM = 8 * GIB
SHM = "/dev/shm"  # noqa: S108 - looked at only
#: Says what a training would find.
_TRIAL = "import os; print(os.getuid())"
_CARD = Path("/dev/nvidia0")


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
        yield _docker_itself(client)
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
    except (Unreachable, Refused) as error:
        yield fail("docker", str(error), "start Docker, or set ENGINE=process")
    finally:
        client.close()


def _docker_itself(client: Client) -> Finding:
    info: dict[str, Any] = client.ask_here(lambda api: api.info(), client.look_s)
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
    yield _torch(interpreter.path)
    yield _sandbox(settings)
    yield _limits()
    yield shared_memory(shutil.disk_usage(SHM).total)
    yield _tried(settings, EngineKind.PROCESS)


def _torch(python: Path) -> Finding:
    import subprocess

    asked = (
        "import importlib.util as u; print(*(name for name in ('torch', 'axolotl') if not u.find_spec(name)))"
    )
    done = subprocess.run([python, "-c", asked], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode or done.stdout.strip():
        lacks = done.stdout.strip() or done.stderr.strip()[-200:]
        return fail("training python", f"{python} lacks {lacks}", "make training, or set TRAINER_PYTHON")
    return ok("training python", str(python))


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


def _tried(settings: Settings, kind: EngineKind) -> Finding:
    from miner.engines.choose import trial_engine
    from miner.engines.trial import TrialFailed, trial

    gpus = ("0",) if _CARD.exists() else ()

    async def tried() -> str:
        with _apart(settings) as apart:
            engine = await trial_engine(settings, kind, apart.data_dir)
            try:
                hostile = engine.can_sandbox
                return await trial(engine, apart.data_dir, _TRIAL, gpus=gpus, hostile=hostile)
            finally:
                await engine.close()

    try:
        uid = asyncio.run(tried())
    except TrialFailed as error:
        return fail("trial run", str(error), "correct what it says; a training would end the same way")
    except GodMinerError as error:
        return fail("trial run", str(error), "correct what it says")
    card = "with a GPU" if gpus else "without a GPU: there is none"
    return ok("trial run", f"started and ended as user {uid}, {card}")


@contextmanager
def _apart(settings: Settings) -> Iterator[Settings]:
    """The settings on a throwaway folder beside the real one, so that nothing is left and Docker sees it."""
    beside = next(place for place in (settings.data_dir, *settings.data_dir.parents) if place.is_dir())
    with tempfile.TemporaryDirectory(prefix=".god-miner-doctor-", dir=beside) as folder:
        yield settings.model_copy(update={"data_dir": Path(folder)})


CHECK = Check("training engine", run, LIMIT_SECONDS)
