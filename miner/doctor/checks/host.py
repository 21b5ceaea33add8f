"""The machine: system, Python, limits."""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Iterator

from miner.doctor.examine import Check, Surroundings
from miner.doctor.finding import Finding, ok, warn

#: Files that the daemon holds open besides its connections: database, logs, wallet, chain, libraries.
FILES_BESIDES_CONNECTIONS = 256


def run(surroundings: Surroundings) -> Iterator[Finding]:
    yield _system()
    needed = surroundings.settings.max_connections + FILES_BESIDES_CONNECTIONS
    yield open_files(needed, *resource.getrlimit(resource.RLIMIT_NOFILE))


def _system() -> Finding:
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    if sys.platform != "linux":
        return warn("system", system, "run it on Linux: nothing else is tested")
    return ok("system", system)


def open_files(needed: int, soft: int, hard: int) -> Finding:
    """Whether as many files may be open as MAX_CONNECTIONS promises."""
    if soft == resource.RLIM_INFINITY or soft >= needed:
        shown = "without limit" if soft == resource.RLIM_INFINITY else f"up to {soft}"
        return ok("open files", f"{shown}, {needed} needed")
    raise_it = f"ulimit -n {needed} in the shell that starts it (with pm2: then pm2 kill and start again)"
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise_it = (
            f"raise the hard limit of {hard} in /etc/security/limits.conf, log in again, then {raise_it}"
        )
    return warn(
        "open files",
        f"only {soft} may be open at once, and MAX_CONNECTIONS may need {needed}",
        f"{raise_it}; or set MAX_CONNECTIONS lower",
    )


CHECK = Check("host", run)
