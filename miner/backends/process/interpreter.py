"""The interpreter that trains: what it consists of, and what changes it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from core.domain.errors import GodMinerError

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
