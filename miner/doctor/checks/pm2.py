"""pm2, if it is used to keep the daemon running."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from miner.doctor.examine import Check, Surroundings
from miner.doctor.finding import Finding, ok, skip, warn


def run(surroundings: Surroundings) -> Iterator[Finding]:
    program = shutil.which("pm2")
    if program is None:
        yield skip(
            "pm2", "not installed; only needed if it shall keep the daemon running", "npm install -g pm2"
        )
        return
    yield ok("pm2", f"{_version(Path(program))} at {program}")
    home = Path(os.environ.get("PM2_HOME") or Path.home() / ".pm2")
    if (home / "modules" / "pm2-logrotate").exists():
        yield ok("log rotation", "pm2-logrotate is installed")
    else:
        yield warn(
            "log rotation",
            "pm2 lets its logs grow without end",
            "pm2 install pm2-logrotate (see docs/operations.md)",
        )


def _version(program: Path) -> str:
    """From its package, because calling pm2 would start its own daemon."""
    try:
        return str(json.loads((program.resolve().parent.parent / "package.json").read_bytes())["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return "some version"


CHECK = Check("pm2", run)
