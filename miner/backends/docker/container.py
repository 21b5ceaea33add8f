"""Describe an attempt as a container: the request that creates it, and what `inspect` says of it.

The request is written as the API has it, without the library's helpers: those change defaults between
versions, and this is what keeps hostile code in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from core.system.wrapper import CONTAINER_OOM_FILES
from miner.backends.base import AttemptSpec, EndCause, RunPhase, RunStatus
from miner.backends.ownership import MARK_VARIABLE, run_mark
from miner.backends.preflight import gpus_of, mounts_of
from miner.backends.run_folder import BackendEndReport, end_status, read_start

PREFIX = "god-miner."
LABEL_KEY, LABEL_DATA, LABEL_DIR = f"{PREFIX}key", f"{PREFIX}data", f"{PREFIX}run-dir"
#: The container's own host. Without its name in /etc/hosts torchrun waits for ever: there is no network.
HOSTNAME = "job"
#: In memory, and counted as the container's.
TMP_BYTES = 4 << 30
#: Of the host's memory, where a specification names no limit: the daemon and the system live beside it.
MEMORY_SHARE = 0.9
#: What Docker gives the trainer to save when its own daemon is stopped.
STOP_GRACE_S = 30


@dataclass(frozen=True, slots=True)
class ContainerDefaults:
    """Everything that the containers of a daemon have in common."""

    data_id: str
    #: The wrapper's file on the host.
    wrapper: Path
    #: uid:gid
    user: str
    ulimits: Mapping[str, int] = field(default_factory=dict)
    pids: int = 16384
    #: Where a specification names no limit.
    memory_bytes: int | None = None
    userns: str = ""
    security: tuple[str, ...] = ("no-new-privileges:true",)


def adapt_defaults(defaults: ContainerDefaults, info: Mapping[str, Any]) -> ContainerDefaults:
    """The defaults as this Docker needs them, by its own `info`."""
    options = " ".join(info.get("SecurityOptions") or ())
    if "name=rootless" in options:
        # Root inside is the user who runs Docker; any other user could write nothing.
        defaults = replace(defaults, user="0:0")
    elif "name=userns" in options:
        # User ids inside differ from those outside, and the run directory belongs to one of the host.
        defaults = replace(defaults, userns="host")
    if "name=selinux" in options:
        # Every model and input would need a label, and they are not the training's alone.
        defaults = replace(defaults, security=(*defaults.security, "label=disable"))
    total = int(info.get("MemTotal") or 0)
    if defaults.memory_bytes is None and total:
        defaults = replace(defaults, memory_bytes=int(total * MEMORY_SHARE))
    return defaults


def container_body(spec: AttemptSpec, image: str, defaults: ContainerDefaults) -> dict[str, object]:
    return {
        "Image": image,
        "User": defaults.user,
        "Hostname": HOSTNAME,
        "WorkingDir": str(spec.run_dir),
        "Entrypoint": ["python3", "-I", "-S", str(defaults.wrapper), *_wrapper_options(spec), "--"],
        "Cmd": list(spec.argv),
        "Env": [f"{name}={value}" for name, value in container_environment(spec, defaults).items()],
        "Labels": container_labels(spec, defaults),
        "StopSignal": "SIGTERM",
        "StopTimeout": STOP_GRACE_S,
        "AttachStdin": False,
        "AttachStdout": False,
        "AttachStderr": False,
        "HostConfig": {**_visible(spec, defaults), **_limits(spec, defaults), **_restrictions(defaults)},
    }


def container_labels(spec: AttemptSpec, defaults: ContainerDefaults) -> dict[str, str]:
    own = {LABEL_KEY: spec.key, LABEL_DATA: defaults.data_id, LABEL_DIR: str(spec.run_dir)}
    return {**{f"{PREFIX}{name}": value for name, value in spec.labels.items()}, **own}


def container_environment(spec: AttemptSpec, defaults: ContainerDefaults) -> dict[str, str]:
    gpus = gpus_of(spec)
    return {
        # The training's uid is not in /etc/passwd; libraries need a home and a name.
        "HOME": "/tmp",  # noqa: S108 - the container's own
        "USER": "trainer",
        "LOGNAME": "trainer",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONFAULTHANDLER": "1",
        **spec.env,
        # Last: these decide what it may use, and how it is found. Images made for GPUs carry `all`, which
        # means every GPU under nvidia's default runtime.
        "NVIDIA_VISIBLE_DEVICES": ",".join(gpus) or "void",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        MARK_VARIABLE: run_mark(defaults.data_id, spec.key),
    }


def _wrapper_options(spec: AttemptSpec) -> list[str]:
    options = ["--dir", str(spec.run_dir)]
    for path in CONTAINER_OOM_FILES:
        options += ["--oom-file", path]
    if spec.timeout_s is not None:
        options += ["--limit-s", f"{spec.timeout_s:g}"]
    return options


def _visible(spec: AttemptSpec, defaults: ContainerDefaults) -> dict[str, object]:
    """The mounts of the container."""
    binds = [(mount.path, mount.read_only) for mount in mounts_of(spec)] + [(defaults.wrapper, True)]
    return {
        "NetworkMode": "none",
        "ExtraHosts": [f"{HOSTNAME}:127.0.0.1"],
        # `Mounts` and not `Binds`: the latter makes a directory on the host where the source is missing.
        "Mounts": [
            {"Type": "bind", "Source": str(path), "Target": str(path), "ReadOnly": read_only}
            for path, read_only in binds
        ],
        "Tmpfs": {"/tmp": f"rw,nosuid,nodev,exec,mode=1777,size={TMP_BYTES}"},  # noqa: S108 - its own
        "DeviceRequests": _devices(spec),
    }


def _devices(spec: AttemptSpec) -> list[dict[str, object]]:
    """By id. An empty list of ids means not "none" but "what the image says", which may be all."""
    gpus = gpus_of(spec)
    if not gpus:
        return []
    # Driver "": whichever has the capability, as with `docker run --gpus`.
    return [{"Driver": "", "DeviceIDs": list(gpus), "Capabilities": [["gpu", "compute", "utility"]]}]


def _limits(spec: AttemptSpec, defaults: ContainerDefaults) -> dict[str, object]:
    limits: dict[str, object] = {
        "PidsLimit": defaults.pids,
        "Ulimits": [{"Name": name, "Soft": value, "Hard": value} for name, value in defaults.ulimits.items()],
        "OomScoreAdj": 500,
        # The wrapper keeps the output; this is for its own messages.
        "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m", "max-file": "2"}},
    }
    memory = spec.memory_bytes or defaults.memory_bytes
    if memory:
        # The same number twice: no swap.
        limits |= {"Memory": memory, "MemorySwap": memory}
    if spec.shm_bytes:
        limits["ShmSize"] = spec.shm_bytes
    if spec.cpus:
        limits["CpusetCpus"] = spec.cpus
    return limits


def _restrictions(defaults: ContainerDefaults) -> dict[str, object]:
    """The restrictions of the container."""
    return {
        "Init": True,
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        "SecurityOpt": list(defaults.security),
        "UsernsMode": defaults.userns,
        "Privileged": False,
        "IpcMode": "private",
        "PidMode": "",
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
    }


#: How Docker writes "never".
_NEVER = "0001-01-01T00:00:00Z"
_GOES_ON = {
    "running": "",
    "paused": "the container is paused: `docker unpause` lets it go on",
    "restarting": "Docker starts the container again",
}


def never_started(inspected: Mapping[str, Any]) -> bool:
    state = inspected.get("State") or {}
    return state.get("Status") == "created" and state.get("StartedAt", _NEVER) == _NEVER


def start_was_interrupted(inspected: Mapping[str, Any], run_dir: Path) -> bool:
    """Return True if Docker died while it started the container, before it recorded the start."""
    return never_started(inspected) and read_start(run_dir) is not None


def container_status(inspected: Mapping[str, Any], run_dir: Path) -> RunStatus:
    state = inspected.get("State") or {}
    name = str(state.get("Status"))
    started = parse_docker_time(state.get("StartedAt"))
    if name in _GOES_ON:
        return RunStatus(RunPhase.RUNNING, started_at=started, detail=_GOES_ON[name])
    problem = str(state.get("Error") or "")
    if start_was_interrupted(inspected, run_dir):
        return end_status(run_dir, BackendEndReport(detail="Docker died while it started it"))
    if never_started(inspected):
        if not problem:
            return RunStatus(RunPhase.QUEUED, detail="created, and not started yet")
        return RunStatus(
            RunPhase.ENDED, EndCause.FAILED, state.get("ExitCode"), detail=f"not startable: {problem[:500]}"
        )
    return end_status(
        run_dir,
        BackendEndReport(
            code=int(state.get("ExitCode") or 0),
            oom_killed=bool(state.get("OOMKilled")),
            started_at=started,
            ended_at=parse_docker_time(state.get("FinishedAt")),
            detail=problem[:500],
        ),
    )


def parse_docker_time(text: object) -> float | None:
    """Seconds since the epoch. Docker writes nanoseconds, Python reads at most six digits."""
    if not isinstance(text, str) or text == _NEVER:
        return None
    head, dot, tail = text.partition(".")
    digits = tail[: len(tail) - len(tail.lstrip("0123456789"))]
    zone = tail[len(digits) :] if dot else ""
    try:
        return datetime.fromisoformat(f"{head}{dot}{digits[:6]}{zone}").timestamp()
    except (ValueError, OverflowError):
        return None
