"""One attempt as the body of Docker's request to make a container. Pure: the same in, the same out.

Written as the API has it and not through the library's helpers: those move defaults about between versions,
and this is what keeps hostile code in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from miner.engines.base import EngineSpec
from miner.engines.checks import gpus_of, mounts_of
from miner.engines.remains import MARK, mark

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
#: The kernel's counters of what it killed for memory, as a container sees its own: cgroup v2, then v1.
OOM_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


@dataclass(frozen=True, slots=True)
class House:
    """What is the same for all containers of a daemon."""

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


def suited(house: House, info: Mapping[str, Any]) -> House:
    """The house as this engine needs it, by its own `info`."""
    options = " ".join(info.get("SecurityOptions") or ())
    if "name=rootless" in options:
        # Root in there is the user who runs the engine out here; any other number could write nothing.
        house = replace(house, user="0:0")
    elif "name=userns" in options:
        # User numbers in there are others out here, and the run folder belongs to the one that we know.
        house = replace(house, userns="host")
    if "name=selinux" in options:
        # Labels would have to be put on every model and every input, which are not the training's alone.
        house = replace(house, security=(*house.security, "label=disable"))
    total = int(info.get("MemTotal") or 0)
    if house.memory_bytes is None and total:
        house = replace(house, memory_bytes=int(total * MEMORY_SHARE))
    return house


def container(spec: EngineSpec, image: str, house: House) -> dict[str, Any]:
    return {
        "Image": image,
        "User": house.user,
        "Hostname": HOSTNAME,
        "WorkingDir": str(spec.run_dir),
        "Entrypoint": ["python3", "-I", "-S", str(house.wrapper), *_wrapper_options(spec), "--"],
        "Cmd": list(spec.argv),
        "Env": [f"{name}={value}" for name, value in environment(spec, house).items()],
        "Labels": labels(spec, house),
        "StopSignal": "SIGTERM",
        "StopTimeout": STOP_GRACE_S,
        "AttachStdin": False,
        "AttachStdout": False,
        "AttachStderr": False,
        "HostConfig": {**_inside(spec, house), **_limits(spec, house), **_locked(house)},
    }


def labels(spec: EngineSpec, house: House) -> dict[str, str]:
    own = {LABEL_KEY: spec.key, LABEL_DATA: house.data_id, LABEL_DIR: str(spec.run_dir)}
    return {**{f"{PREFIX}{name}": value for name, value in spec.labels.items()}, **own}


def environment(spec: EngineSpec, house: House) -> dict[str, str]:
    gpus = gpus_of(spec)
    return {
        # Nobody has the training's user number in /etc/passwd; libraries ask for a home and a name.
        "HOME": "/tmp",  # noqa: S108 - the container's own
        "USER": "trainer",
        "LOGNAME": "trainer",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONFAULTHANDLER": "1",
        **spec.env,
        # Last: these decide what it may use, and by what it is found.
        #
        # Images made for GPUs carry `all`: under a default runtime of nvidia's that means every card.
        "NVIDIA_VISIBLE_DEVICES": ",".join(gpus) or "void",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        MARK: mark(house.data_id, spec.key),
    }


def _wrapper_options(spec: EngineSpec) -> list[str]:
    options = ["--dir", str(spec.run_dir)]
    for path in OOM_FILES:
        options += ["--oom-file", path]
    if spec.limit_s is not None:
        options += ["--limit-s", f"{spec.limit_s:g}"]
    return options


def _inside(spec: EngineSpec, house: House) -> dict[str, Any]:
    """What it sees."""
    binds = [(mount.path, mount.read_only) for mount in mounts_of(spec)] + [(house.wrapper, True)]
    return {
        "NetworkMode": "none",
        "ExtraHosts": [f"{HOSTNAME}:127.0.0.1"],
        # `Mounts` and not `Binds`: the latter makes a folder on the host where the source is missing.
        "Mounts": [
            {"Type": "bind", "Source": str(path), "Target": str(path), "ReadOnly": read_only}
            for path, read_only in binds
        ],
        "Tmpfs": {"/tmp": f"rw,nosuid,nodev,exec,mode=1777,size={TMP_BYTES}"},  # noqa: S108 - its own
        "DeviceRequests": _devices(spec),
    }


def _devices(spec: EngineSpec) -> list[dict[str, Any]]:
    """By id. An empty list of ids would not be "none" but "whatever the image says", which may be all."""
    gpus = gpus_of(spec)
    if not gpus:
        return []
    # Driver "": whichever has the capability, as with `docker run --gpus`.
    return [{"Driver": "", "DeviceIDs": list(gpus), "Capabilities": [["gpu", "compute", "utility"]]}]


def _limits(spec: EngineSpec, house: House) -> dict[str, Any]:
    limits: dict[str, Any] = {
        "PidsLimit": house.pids,
        "Ulimits": [{"Name": name, "Soft": value, "Hard": value} for name, value in house.ulimits.items()],
        "OomScoreAdj": 500,
        # The wrapper keeps the output; here is room for its own last words.
        "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m", "max-file": "2"}},
    }
    memory = spec.memory_bytes or house.memory_bytes
    if memory:
        # The same number twice: no swap.
        limits |= {"Memory": memory, "MemorySwap": memory}
    if spec.shm_bytes:
        limits["ShmSize"] = spec.shm_bytes
    if spec.cpus:
        limits["CpusetCpus"] = spec.cpus
    return limits


def _locked(house: House) -> dict[str, Any]:
    """What it may not."""
    return {
        "Init": True,
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        "SecurityOpt": list(house.security),
        "UsernsMode": house.userns,
        "Privileged": False,
        "IpcMode": "private",
        "PidMode": "",
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
    }
