"""Programs that the scripts use, each in an environment of its own below .cache."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from scripts.pins import FOLDER, ROOT


def program(name: str, files: str) -> Path:
    """Return the path of a program; install it first, by the hashes of a file of requirements/, if that was
    not done."""
    wanted = FOLDER / f"{files}.txt"
    folder = ROOT / ".cache" / files
    done = folder / "installed.txt"
    if done.exists() and done.read_bytes() == wanted.read_bytes():
        return folder / "bin" / name
    pip: list[str | Path] = [
        folder / "bin" / "pip",
        "--disable-pip-version-check",
        "install",
        "-q",
        "--require-hashes",
        "--no-deps",
    ]
    pip += ["--only-binary", ":all:", "-r", wanted]
    environment: list[str | Path] = [sys.executable, "-m", "venv", "--clear", folder]
    for command in (environment, pip):
        if subprocess.run(command, check=False).returncode:
            print(f"{name} cannot be installed, nothing was done: see above", file=sys.stderr)
            raise SystemExit(2)
    shutil.copy(wanted, done)
    return folder / "bin" / name
