"""The settings, which were good enough to load, and the file that they may come from."""

from __future__ import annotations

import stat
from collections.abc import Iterator

from miner.doctor.examine import Check, Surroundings
from miner.doctor.finding import Finding, ok, warn


def run(surroundings: Surroundings) -> Iterator[Finding]:
    settings = surroundings.settings
    changed = sum(settings.source_of(name) != "default" for name in type(settings).model_fields)
    yield ok("settings", f"all values are good, {changed} of them set by you")
    for warning in settings.warnings:
        yield warn("settings", warning, f"correct the line in {surroundings.env_file}, or take it out")
    yield from _env_file(surroundings)


def _env_file(surroundings: Surroundings) -> Iterator[Finding]:
    path = surroundings.env_file
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield warn(
            "secrets", f"{path} has mode {mode:o}: others on this machine can get at it", f"chmod 600 {path}"
        )
    else:
        yield ok("secrets", f"{path} is for its owner only (mode {mode:o})")


CHECK = Check("settings", run)
