"""Start a run as a process: the interpreter, the wrapper's command line, and a clean environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.domain.errors import GodMinerError
from core.system import wrapper
from miner.engines.base import EngineSpec
from miner.engines.ownership import MARK_VARIABLE
from miner.engines.preflight import gpus_of

_PATHS_SCRIPT = (
    "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path]))"
)
ANSWER_S = 30.0
#: Always visible, as a whole.
_ALWAYS_VISIBLE = Path("/usr")


class NoTrainingPython(GodMinerError):
    """There is no interpreter to train with."""

    code = "no_training_python"


@dataclass(frozen=True, slots=True)
class Interpreter:
    path: Path
    #: Directories and files outside of /usr that it consists of.
    needs: tuple[Path, ...]

    def identity(self) -> str:
        """A text that changes when a package is added or removed, and with the interpreter."""
        site = self.path.parent.parent / "lib"
        places = [self.path, *sorted(site.glob("python*/site-packages"))]
        return " ".join(f"{directory}@{directory.stat().st_mtime_ns}" for directory in places)


def examine_interpreter(path: Path) -> Interpreter:
    """Run it once to learn where its parts are, virtual environments and links included."""
    try:
        done = subprocess.run(
            [path, "-c", _PATHS_SCRIPT],
            env={"PATH": "/usr/bin:/bin"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ANSWER_S,
            check=True,
            cwd="/",
        )
        paths = [Path(path) for path in json.loads(done.stdout) if path]
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
        raise NoTrainingPython(f"TRAINER_PYTHON={path} does not work: {error}") from None
    return Interpreter(path, _outermost([*paths, *_link_targets(path)]))


def _link_targets(path: Path) -> list[Path]:
    """A virtual environment's python is a link, often to another one: each must be there to follow it."""
    found: list[Path] = []
    while path.is_symlink() and len(found) < 10:
        path = path.parent / os.readlink(path)
        found.append(path.parent.parent if path.parent.name == "bin" else path)
    return found


def _outermost(paths: list[Path]) -> tuple[Path, ...]:
    wanted = {Path(os.path.normpath(path)) for path in paths if path.exists()}
    wanted = {path for path in wanted if not path.is_relative_to(_ALWAYS_VISIBLE) and len(path.parts) > 1}
    return tuple(sorted(path for path in wanted if not any(other in path.parents for other in wanted)))


#: Where the lock is to be found by the wrapper.
LOCK_FD = 3
#: The only variables of ours that a run gets: where the driver's libraries are, locale and time zone.
#: Anything else may be a token.
PASSED_ON = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "LANG", "LC_ALL", "TZ")
_SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def wrapper_command(
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
    if spec.timeout_s is not None:
        options += ["--limit-s", f"{spec.timeout_s:g}"]
    return [sys.executable, "-I", "-S", wrapper.__file__, *options, "--", *argv]


def process_environment(spec: EngineSpec, python: Path, code: Path, mark: str, home: str) -> dict[str, str]:
    list_runs = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {
        "PATH": f"{python.parent}:{_SEARCH_PATH}",
        "LANG": "C.UTF-8",
        "HOME": home,
        "USER": "trainer",
        "LOGNAME": "trainer",
        "PYTHONPATH": str(code),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONFAULTHANDLER": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        **list_runs,
        **spec.env,
        # Last: these decide what it may use, and how it is found.
        "CUDA_VISIBLE_DEVICES": ",".join(gpus_of(spec)),
        MARK_VARIABLE: mark,
    }


def cores_of(cpus: str | None) -> list[int]:
    """The cores of `0-31,64` that this process may use; empty without a choice."""
    if not cpus:
        return []
    wanted: set[int] = set()
    for part in cpus.split(","):
        first, _, last = part.partition("-")
        wanted.update(range(int(first), int(last or first) + 1))
    return sorted(wanted & os.sched_getaffinity(0))
