"""Wheels of a folder on the path, before anything that they hold is imported: standard library alone."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Unpacked wheels for one part alone, by its name: what is only half there could break the imports of others.
OF_PART: dict[str, Path] = {}


def use_wheels(arguments: Sequence[str]) -> None:
    """Unpack what `--wheels FOLDER` names, for this process and its children; pip is not needed. Wheels in a
    folder within it, named like a part, are for that part. The source tree comes first."""
    path = [str(ROOT)]
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--wheels":
            folder = Path(value if equals else next(iter(arguments[place + 1 :]), ""))
            path.append(str(_unpacked(folder)))
            OF_PART.update({one.name: _unpacked(one) for one in folder.glob("*/") if one.is_dir()})
    sys.path += path[1:]
    os.environ["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])


def _unpacked(wheels: Path) -> Path:
    into = Path(tempfile.mkdtemp(prefix="god-miner-wheels-"))
    atexit.register(shutil.rmtree, into, ignore_errors=True)
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    return into
