"""Register local processes: build the backend, and check for the doctor what they need."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator

from miner.backends.environment import local_environment, training_interpreter
from miner.backends.process.backend import ProcessBackend
from miner.backends.process.cgroups import detect_cgroups
from miner.backends.process.run_registry import RunRegistry
from miner.backends.registry import BackendContext, BackendPlugin, NoBackend, backends_folder
from miner.backends.trial import reward_isolation, temporary_data_dir, trial_finding
from miner.settings import BackendKind, Settings
from miner.support.findings import Finding, fail, ok, warn

GIB = 1024**3
#: NCCL and data loaders share memory through it; pods come with 64 MiB.
ENOUGH_SHM = 8 * GIB
SHM = "/dev/shm"  # noqa: S108 - only read
RUNS_FOLDER = "runs"


def build(settings: Settings, context: BackendContext) -> ProcessBackend:
    environment = local_environment(settings, context)
    cgroups = detect_cgroups(f"god-miner-{context.data_id}-probe") if sys.platform == "linux" else "not Linux"
    registry = RunRegistry(context.folder / RUNS_FOLDER)
    return ProcessBackend(context, environment, registry, None if isinstance(cgroups, str) else cgroups)


def has_live_runs(settings: Settings) -> bool:
    """Return whether runs of this data directory still go on."""
    registry = RunRegistry(backends_folder(settings.data_dir) / RUNS_FOLDER)
    return any(map(registry.is_alive, registry.keys()))


def check(settings: Settings) -> Iterator[Finding]:
    try:
        interpreter = training_interpreter(settings)
    except NoBackend as error:
        yield fail("training python", str(error), "make training, or set TRAINER_PYTHON")
        return
    yield ok("training python", str(interpreter.path))
    yield _sandbox(settings)
    yield _limits()
    yield shared_memory(shutil.disk_usage(SHM).total)
    yield trial_finding(settings, BackendKind.PROCESS)
    yield from reward_isolation(settings, BackendKind.PROCESS)


def _sandbox(settings: Settings) -> Finding:
    with temporary_data_dir(settings) as temporary:
        environment = local_environment(temporary, BackendContext.of(temporary, temporary.data_dir))
    if environment.sandbox is None:
        why = environment.why_no_sandbox
        return warn(
            "sandbox",
            f"{why}: tasks with reward functions (GRPO) are refused, other trainings have the network",
            "install bubblewrap where user namespaces are allowed, or use Docker",
        )
    return ok("sandbox", f"{environment.sandbox.program} works")


def _limits() -> Finding:
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


PLUGIN = BackendPlugin(BackendKind.PROCESS, build, check, fix="make training, or set TRAINER_PYTHON")
