"""Check what trains: the GPUs, the policy and profile in force, and the engine, with a trial run."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.domain.choices import Engine
from core.domain.errors import ConfigError, GodMinerError
from core.profile.explain import ProfileFinding as Remark
from core.profile.explain import ProfileFindingLevel, check_profile
from core.profile.resolve import load_profile, profile_files
from core.recipes.dry_run import check_profile_plan
from miner.backends.base import IMAGE_OF
from miner.backends.build_fleet import scan_once
from miner.doctor.examine import CheckContext, DoctorCheck, Finding, fail, is_healthy, ok, warn
from miner.fleet.base import InventoryState
from miner.offers.backtest.policy_check import policy_findings
from miner.offers.policies.load import load_policy, policy_files
from miner.offers.policies.selection import ActiveConfig, active_config
from miner.settings import BackendKind, Settings

if TYPE_CHECKING:
    from miner.backends.docker.client import DockerClient


#: A driver that wakes its GPUs first takes long.
SCAN_LIMIT_SECONDS = 40.0


def check_gpus(context: CheckContext) -> Iterator[Finding]:
    fleet, source = scan_once(context.settings)
    yield from gpu_findings(fleet.inventory, source)


def gpu_findings(stock: InventoryState, source: str) -> Iterator[Finding]:
    if stock.problem is not None:
        way = "see that nvidia-smi works for this user, or name the GPUs in GPUS or FLEET_FILE"
        yield fail("gpus", f"they cannot be read: {stock.problem}", way)
        return
    hardware = stock.hardware
    if hardware is None:
        yield fail("gpus", f"none can be used ({source})", "see god-miner fleet show")
    elif hardware.gpus.is_cpu:
        yield warn("gpus", f"a pretended GPU ({source})", "install the NVIDIA driver, or set GPUS")
    else:
        yield ok("gpus", f"{hardware.gpus} ({source})")
    for reason, count in Counter(
        gpu.unusable_reason for gpu in stock.gpus if gpu.unusable_reason is not None
    ).items():
        yield warn("gpus", f"{count} out: {reason}", "see god-miner fleet show")


GPUS_CHECK = DoctorCheck("gpus", check_gpus, SCAN_LIMIT_SECONDS)


def check_tuning(context: CheckContext) -> Iterator[Finding]:
    settings = context.settings
    used: set[Path] = set()
    try:
        active = active_config(settings, scan_once(settings)[0].inventory.installed)
    except ConfigError as error:
        way = "correct it; until then the daemon uses its last good version, or a shipped one, and alerts"
        yield fail("policy and profile", str(error), way)
    else:
        used = {layer.file for config in (active.policy, active.profile) for layer in config.layers}
        yield from tuning_findings(active)
    own = settings.policy_dir
    yield from _unreadable_files("policy", policy_files([own]), own, used, load_policy)
    own = settings.profile_dir
    yield from _unreadable_files("profile", profile_files([own]), own, used, load_profile)


def tuning_findings(active: ActiveConfig) -> Iterator[Finding]:
    """What is in force, why, and what `check` finds wrong in it."""
    yield ok("policy", f"{active.policy.name} ({active.policy.file}), because {active.why_policy}")
    yield from _remark_findings(
        "policy", policy_findings(active.policy), f"god-miner policy check {active.policy.name}"
    )
    yield ok("profile", f"{active.profile.name} ({active.profile.file}), because {active.why_profile}")
    checked = check_profile(active.profile, check_profile_plan)
    yield from _remark_findings("profile", checked, f"god-miner profile check {active.profile.name}")


def _remark_findings(word: str, remarks: list[Remark], command: str) -> Iterator[Finding]:
    for remark in remarks:
        if remark.level is ProfileFindingLevel.ERROR:
            yield warn(word, f"{remark.where}: {remark.message}", f"see {command}")


def _unreadable_files(
    word: str,
    files: dict[str, Path],
    directory: Path,
    used: set[Path],
    load: Callable[[str, list[Path]], Any],
) -> Iterator[Finding]:
    """The operator's own files that are not in force, where they cannot be read."""
    for file in files.values():
        if file.parent == directory and file not in used:
            try:
                load(str(file), [directory])
            except ConfigError as error:
                yield warn(word, str(error), f"correct {file}; it is not in force")


TUNING_CHECK = DoctorCheck("policy and profile", check_tuning, SCAN_LIMIT_SECONDS)


ENGINE_LIMIT_SECONDS = 240.0
GIB = 1024**3
#: NCCL and data loaders share memory through it; pods come with 64 MiB.
ENOUGH_SHM = 8 * GIB
SHM = "/dev/shm"  # noqa: S108 - only read
#: The text image is about 25 GB with its base, and a rebuild needs room beside it.
DOCKER_SPACE = 40 * GIB
_PROTECTION = "from trainer.rewards.sandbox import describe_isolation as about; print('isolation:', about())"
_GPU_DEVICE = Path("/dev/nvidia0")


def check_engine(context: CheckContext) -> Iterator[Finding]:
    settings = context.settings
    asked = f"BACKEND={','.join(settings.backend)}"
    if not settings.backends:
        yield warn(
            "training engine", "BACKEND=none: offers are answered, nothing is trained", "another BACKEND"
        )
        return
    from miner.backends.registry import AUTOMATIC

    for wanted in settings.backends:
        yield from _usable_engine(settings, AUTOMATIC if wanted is BackendKind.AUTO else (wanted,), asked)


def _usable_engine(settings: Settings, kinds: Sequence[BackendKind], asked: str) -> Iterator[Finding]:
    """What is found of the first of these that can be used; of all, where none can."""
    by_kind = {kind: list(_engine_findings(settings, kind)) for kind in kinds}
    usable = [kind for kind in kinds if is_healthy(by_kind[kind])]
    if not usable:
        for findings in by_kind.values():
            yield from findings
        yield fail(
            "training engine",
            f"{' and '.join(kinds)} cannot run a training ({asked})",
            "correct Docker or the local python, as said above; or set MAX_JOBS=0 to refuse all offers",
        )
        return
    yield ok("training engine", f"{usable[0]} ({asked})")
    yield from by_kind[usable[0]]


def _engine_findings(settings: Settings, kind: BackendKind) -> Iterator[Finding]:
    if kind is BackendKind.DOCKER:
        yield from _docker(settings)
    elif kind is BackendKind.PROCESS:
        yield from _process(settings)
    elif kind is not BackendKind.SLURM:  # that has a check of its own
        # An engine without checks of its own: what it can train says the most.
        yield trial_finding(settings, kind)
        yield from reward_isolation(settings, kind)


def _docker(settings: Settings) -> Iterator[Finding]:
    from miner.backends.base import EngineUnreachable
    from miner.backends.docker.client import DockerClient, DockerRefused
    from miner.backends.docker.images import ImageState, TrainerImages, image_statuses

    client = DockerClient(settings.docker_host)
    try:
        info: dict[str, Any] = client.call_blocking(lambda api: api.info(), client.query_timeout_s)
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
    except (EngineUnreachable, DockerRefused) as error:
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


def _process(settings: Settings) -> Iterator[Finding]:
    from miner.backends.registry import NoEngine, training_interpreter

    try:
        interpreter = training_interpreter(settings)
    except NoEngine as error:
        yield fail("training python", str(error), "make training, or set TRAINER_PYTHON")
        return
    yield ok("training python", str(interpreter.path))
    yield _sandbox(settings)
    yield _limits()
    yield shared_memory(shutil.disk_usage(SHM).total)
    yield trial_finding(settings, BackendKind.PROCESS)
    yield from reward_isolation(settings, BackendKind.PROCESS)


def _sandbox(settings: Settings) -> Finding:
    from miner.backends.registry import sandbox_of, training_interpreter

    with temporary_data_dir(settings) as temporary:
        sandbox = sandbox_of(temporary, training_interpreter(temporary))
    if isinstance(sandbox, str):
        return warn(
            "sandbox",
            f"{sandbox}: tasks with reward functions (GRPO) are refused, other trainings have the network",
            "install bubblewrap where user namespaces are allowed, or use Docker",
        )
    return ok("sandbox", f"{sandbox.program} works")


def _limits() -> Finding:
    from miner.backends.process.cgroups import detect_cgroups

    cgroups = detect_cgroups(f"god-miner-doctor-{os.getpid()}")
    if isinstance(cgroups, str):
        return warn(
            "memory limit",
            f"a training that takes too much memory takes the machine's: {cgroups}",
            "nothing can be done in most pods; the kernel is asked to end the training first",
        )
    return ok("memory limit", f"cgroups of version {cgroups.version} can be created")


def shared_memory(total: int) -> Finding:
    if total < ENOUGH_SHM:
        return warn(
            "shared memory",
            f"{SHM} has {total / GIB:.2f} GiB; several GPUs and data loaders need more",
            "start the pod with more (docker run --shm-size=32g), or mount -o remount,size=32G /dev/shm",
        )
    return ok("shared memory", f"{SHM} has {total / GIB:.0f} GiB")


def trial_finding(
    settings: Settings, kind: BackendKind, gpus: tuple[str, ...] | None = None, key: str = ""
) -> Finding:
    """Start the smallest training with this engine. `gpus`: if they are not this machine's; `key`: the run's,
    if the caller needs it."""
    from miner.backends.registry import ENGINES, build_engine
    from miner.backends.trial import TrialFailed, missing_in_image

    if gpus is None:
        gpus = ("0",) if _GPU_DEVICE.exists() else ()

    async def try_out() -> Mapping[Engine, str]:
        with temporary_data_dir(settings) as temporary:
            engine = await build_engine(settings, kind, temporary.data_dir)
            try:
                return await missing_in_image(engine, temporary.data_dir, "text", gpus=gpus, key=key)
            finally:
                await engine.close()

    try:
        lacks = asyncio.run(try_out())
    except TrialFailed as error:
        return fail("trial run", str(error), "correct what it says; a training would end the same way")
    except GodMinerError as error:
        return fail("trial run", str(error), "correct what it says")
    trains = [engine for engine, short in IMAGE_OF.items() if short == "text" and engine not in lacks]
    missing = "; ".join(f"{engine}: {why}" for engine, why in lacks.items())
    if not trains:
        return fail("trial run", missing, ENGINES[kind].fix)
    gpu = "with a GPU" if gpus else "without a GPU: there is none"
    detail = f"{' and '.join(trains)} can train, {gpu}"
    if missing:
        return warn(
            "trial run", f"{detail}; {missing}", f"{ENGINES[kind].fix}, or profiles with engine: {trains[0]}"
        )
    return ok("trial run", detail)


def reward_isolation(settings: Settings, kind: BackendKind) -> Iterator[Finding]:
    """What isolates reward code. Nothing if such tasks are refused, or if the trial run failed too."""
    from miner.backends.registry import build_engine
    from miner.backends.trial import TrialFailed, run_trial

    async def try_out() -> str:
        with temporary_data_dir(settings) as temporary:
            engine = await build_engine(settings, kind, temporary.data_dir)
            try:
                command = ("python", "-c", _PROTECTION)
                return await run_trial(engine, temporary.data_dir, command) if engine.can_sandbox else ""
            finally:
                await engine.close()

    try:
        protection = asyncio.run(try_out()).rpartition("isolation: ")[2]
    except (TrialFailed, GodMinerError):
        return
    if protection.startswith("exposed"):
        advice = "Linux 6.2 or newer with Landlock, or god-miner as root with bubblewrap"
        yield warn("reward isolation", f"reward code is not kept from the training: {protection}", advice)
    elif protection.startswith("user "):
        yield ok("reward isolation", f"reward code runs as {protection}")


@contextmanager
def temporary_data_dir(settings: Settings) -> Iterator[Settings]:
    """The settings with a temporary data directory beside the real one, where Docker sees it."""
    beside = next(place for place in (settings.data_dir, *settings.data_dir.parents) if place.is_dir())
    with tempfile.TemporaryDirectory(prefix=".god-miner-doctor-", dir=beside) as folder:
        yield settings.model_copy(update={"data_dir": Path(folder)})


ENGINE_CHECK = DoctorCheck("training engine", check_engine, ENGINE_LIMIT_SECONDS)
