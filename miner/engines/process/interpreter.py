"""The training's interpreter: which one, and what of the disk it needs to see."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from core.errors import GodMinerError

_ASK = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path]))"
ANSWER_S = 30.0
#: Always visible, as a whole.
_SYSTEM = Path("/usr")


class NoTrainingPython(GodMinerError):
    """There is no interpreter to train with."""

    code = "no_training_python"


@dataclass(frozen=True, slots=True)
class Interpreter:
    path: Path
    #: Folders and files outside of /usr that it lives in.
    needs: tuple[Path, ...]

    def identity(self) -> str:
        """Changes when a package is added or removed, or the interpreter is another one."""
        site = self.path.parent.parent / "lib"
        places = [self.path, *sorted(site.glob("python*/site-packages"))]
        return " ".join(f"{place}@{place.stat().st_mtime_ns}" for place in places)


def examine(path: Path) -> Interpreter:
    """Ask it once where its parts are, environments and links on the way included."""
    try:
        asked = subprocess.run(
            [path, "-c", _ASK],
            env={"PATH": "/usr/bin:/bin"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ANSWER_S,
            check=True,
            cwd="/",
        )
        told = [Path(one) for one in json.loads(asked.stdout) if one]
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
        raise NoTrainingPython(f"TRAINER_PYTHON={path} does not work: {error}") from None
    return Interpreter(path, _outermost([*told, *_hops(path)]))


def _hops(path: Path) -> list[Path]:
    """A virtual environment's python is a link, often to another one: each must be there to follow it."""
    found: list[Path] = []
    while path.is_symlink() and len(found) < 10:
        path = path.parent / os.readlink(path)
        found.append(path.parent.parent if path.parent.name == "bin" else path)
    return found


def _outermost(paths: list[Path]) -> tuple[Path, ...]:
    wanted = {Path(os.path.normpath(path)) for path in paths if path.exists()}
    wanted = {path for path in wanted if not path.is_relative_to(_SYSTEM) and len(path.parts) > 1}
    return tuple(sorted(path for path in wanted if not any(other in path.parents for other in wanted)))
