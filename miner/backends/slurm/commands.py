"""Run Slurm's commands off the event loop, each with a time limit; read what they print.

The commands are the one interface that every site has and that has stayed the same over the releases: JSON
differs between them, and the REST service is rarely there. Times are asked for as seconds since the epoch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from core.domain.errors import GodMinerError
from miner.backends.slurm.settings import SlurmSection
from miner.settings import Settings
from miner.support.background import run_in_thread
from miner.support.subprocess import PASSED_VARIABLES

#: While its controller is away, a command blocks for up to 20 seconds before it says so.
QUERY_S, SUBMIT_S = 30.0, 60.0
#: The commands' own, which a job that inherits their environment has to unset.
NOT_FOR_JOBS = (
    *(name for name in PASSED_VARIABLES if name not in ("PATH", "HOME")),
    *("SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT"),
)
#: What commands need beside our usual variables: which cluster, and where its configuration is.
_SLURM_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_:/%*\-]*)=")


class SlurmUnreachable(GodMinerError):
    """Slurm did not answer: nothing is known, try again later."""

    code = "slurm_unreachable"


class SlurmRefused(GodMinerError):
    """Slurm answered, and refused."""

    code = "slurm_refused"


def job_prefix(data_id: str) -> str:
    """Prefix of the names of a data directory's jobs."""
    return f"god-miner-{data_id}-"


@dataclass(frozen=True, slots=True)
class SlurmCommands:
    """The commands on this machine, in `directory` or, if that is empty, on PATH."""

    directory: str = ""

    async def run(
        self,
        program: str,
        *arguments: str,
        script: str | None = None,
        limit_s: float = QUERY_S,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Run a command with `script` as its standard input; return what it prints.

        `SlurmRefused` if Slurm refuses, `SlurmUnreachable` if it does not answer.
        """
        command = (self.path_of(program), *arguments)
        try:
            return await run_in_thread(
                lambda: _run(command, script, limit_s, environment or {}), limit_s + 5, program
            )
        except TimeoutError as error:
            raise SlurmUnreachable(str(error)) from None

    def run_blocking(self, program: str, *arguments: str) -> str:
        """Run a command in the caller's own thread, as at exit, when no other can be started."""
        return _run((self.path_of(program), *arguments), None, QUERY_S, {})

    def path_of(self, program: str) -> str:
        """Find a command; `SlurmUnreachable` if it is not installed."""
        path = shutil.which(program, path=self.directory or None)
        if path is None:
            where = f"in {self.directory}" if self.directory else "on PATH"
            raise SlurmUnreachable(f"there is no {program} {where}: install Slurm's client commands")
        return path


def slurm_commands(settings: Settings) -> SlurmCommands:
    return SlurmCommands(str(settings.section(SlurmSection).slurm_bin_dir or ""))


def _run(command: Sequence[str], script: str | None, limit_s: float, more: Mapping[str, str]) -> str:
    variables = (*PASSED_VARIABLES, *_SLURM_VARIABLES)
    environment = {name: os.environ[name] for name in variables if name in os.environ}
    try:
        done = subprocess.run(
            command,
            input=script or "",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            env={**environment, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C", **more},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SlurmUnreachable(f"{command[0]} has not answered for {limit_s:g} s") from None
    except OSError as error:
        raise SlurmUnreachable(f"{command[0]} cannot be started: {error}") from None
    if done.returncode == 0:
        return done.stdout
    if done.returncode < 0:
        raise SlurmUnreachable(f"{command[0]} was ended by signal {-done.returncode}")
    text = " ".join((done.stderr or done.stdout).split())[-500:]
    if _NO_ANSWER.search(text):
        raise SlurmUnreachable(text)
    raise SlurmRefused(text or f"{command[0]} ended with status {done.returncode}")


#: Messages that say that the controller, or the way to it, is away.
_NO_ANSWER = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|Connection timed out"
    r"|Zero Bytes were transmitted|Transport endpoint|munge|Munge|Resource temporarily unavailable"
    r"|Slurm backup controller in standby|Configuration is not available|cannot be reached"
    r"|standby mode|authentication agent|configuration source|Unable to establish|temporarily disabled"
    r"|Protocol authentication error",
)


def records(text: str) -> Iterator[dict[str, str]]:
    """The lines of `scontrol -o show …`, each as its fields.

    A value reaches up to the next `Name=`: values may contain spaces (a reason, a path), and only the last
    field of a name counts.
    """
    for line in text.splitlines():
        fields = list(_FIELD.finditer(line))
        ends = [field.start() for field in fields[1:]] + [len(line)]
        if fields:
            yield {field[1]: line[field.end() : end].strip() for field, end in zip(fields, ends, strict=True)}


def seconds(text: str | None) -> float | None:
    """A time as Slurm prints it with SLURM_TIME_FORMAT=%s; None for "Unknown", "N/A" and the like."""
    return float(text) if text and text.isdigit() else None
