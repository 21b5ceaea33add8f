"""How a run is started as a process: the wrapper's command line and the environment, which is not ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from miner.engines import wrapper
from miner.engines.base import EngineSpec
from miner.engines.checks import gpus_of
from miner.engines.remains import MARK

#: Where the lock is to be found by the wrapper.
LOCK_FD = 3
#: All of ours that a run gets to see: where libraries of the driver are, and how this machine writes and
#: counts. Everything else may be a token.
PASSED_ON = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "LANG", "LC_ALL", "TZ")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def command(
    spec: EngineSpec,
    argv: Sequence[str],
    *,
    ulimits: Mapping[str, int],
    cgroups: Sequence[Path] = (),
    oom_files: Sequence[Path] = (),
) -> list[str]:
    options = ["--dir", str(spec.run_dir), "--lock-fd", str(LOCK_FD)]
    for cgroup in cgroups:
        options += ["--cgroup", str(cgroup)]
    for file in oom_files:
        options += ["--oom-file", str(file)]
    for name, value in ulimits.items():
        options += ["--rlimit", f"{name}={value}"]
    cores = cores_of(spec.cpus)
    if cores:
        options += ["--cpus", ",".join(map(str, cores))]
    if spec.limit_s is not None:
        options += ["--limit-s", f"{spec.limit_s:g}"]
    return [sys.executable, "-I", "-S", wrapper.__file__, *options, "--", *argv]


def environment(spec: EngineSpec, python: Path, code: Path, mark: str, home: str) -> dict[str, str]:
    ours = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {
        "PATH": f"{python.parent}:{_PATH}",
        "LANG": "C.UTF-8",
        "HOME": home,
        "USER": "trainer",
        "LOGNAME": "trainer",
        "PYTHONPATH": str(code),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONFAULTHANDLER": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        **ours,
        **spec.env,
        # Last: these decide what it may use, and by what it is found.
        "CUDA_VISIBLE_DEVICES": ",".join(gpus_of(spec)),
        MARK: mark,
    }


def cores_of(cpus: str | None) -> list[int]:
    """Those of `0-31,64` that we have ourselves; none means no choice."""
    if not cpus:
        return []
    wanted: set[int] = set()
    for part in cpus.split(","):
        first, _, last = part.partition("-")
        wanted.update(range(int(first), int(last or first) + 1))
    return sorted(wanted & os.sched_getaffinity(0))
