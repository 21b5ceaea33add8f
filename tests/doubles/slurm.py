"""A real Slurm of the tests' own: a controller and nodes on loopback, whose daemons may be killed.

`bin` has stand-ins for Slurm's commands, for SLURM_BIN_DIR: each runs the real one against this Slurm, writes
down that it was called, and stops at a gate where a test has put one.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from miner.backends.slurm.commands import records
from miner.dev.stack import LOOPBACK, free_ports
from tests.doubles.required import missing

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/one_machine_slurm.sh"
#: What waits for Slurm itself: its loops look once a second.
LIMIT_S = 120.0
CLIENTS = ("sbatch", "squeue", "scontrol", "scancel", "sinfo", "sacct", "srun")
CONTROLLER = "slurmctld"
MUNGE = "munged"
#: Who has jobs beside ours.
OTHER_USER = "nobody"
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def why_not() -> str | None:
    """Why no Slurm can be run here."""
    programs = ("slurmctld", "slurmd", "munged", "sbatch")
    absent = [name for name in programs if not shutil.which(name, path=_SYSTEM_PATH)]
    wanted = "apt install --no-install-recommends slurmctld slurmd slurm-client munge"
    return f"{', '.join(absent)} not installed (Debian and Ubuntu: {wanted})" if absent else None


_STAND_IN = """#!/bin/sh
# Whoever comes first to a gate takes it, and waits there; the others pass.
gate() {{
    mv {gates}/$1 {gates}/$1.reached 2>/dev/null || return 0
    echo $$ >{gates}/$1.who.new && mv {gates}/$1.who.new {gates}/$1.who
    while [ -e {gates}/$1.reached ]; do sleep 0.01; done
}}
export SLURM_CONF={conf}
echo {name} "$@" >>{calls}
gate {name}-before
[ -e {gates}/{name}-after ] || exec {real} "$@"
answer=$({real} "$@")
status=$?
gate {name}-after
[ -z "$answer" ] || printf '%s\\n' "$answer"
exit $status
"""


class SlurmGate:
    """Where a stand-in stops: before the real command, or after it with its answer still untold."""

    def __init__(self, folder: Path, name: str) -> None:
        self._gate, self._reached = folder / name, folder / f"{name}.reached"
        self._who = folder / f"{name}.who"
        self._gate.touch()

    def wait(self) -> int:
        """Once a command stands there: its process."""
        waited_for(self._who.exists, f"nothing came to {self._gate.name}")
        return int(self._who.read_text())

    def lift(self) -> None:
        """Let pass who stands there, and everybody."""
        for path in (self._gate, self._who, self._reached):
            path.unlink(missing_ok=True)


class OwnSlurm:
    """Use as `with`. As root it has jobs of another user too."""

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 2,
        gpus: int = 4,
        cpus: int = 8,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """`settings`: lines of slurm.conf that differ from the script's."""
        self.folder = folder.resolve()
        self.nodes = tuple(f"n{number}" for number in range(1, nodes + 1))
        self._options = ["--nodes", str(nodes), "--gpus", str(gpus), "--cpus", str(cpus)]
        for name, value in (settings or {}).items():
            self._options += ["--set", f"{name}={value}"]
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def conf(self) -> Path:
        return self.folder / "etc/slurm.conf"

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lay_out_commands()
        self._guard = self._guarded()
        try:
            self._options += ["--port", str(_free_range(1 + len(self.nodes)))]
            self.start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.end()

    # daemons

    def start(self, *, until_nodes_answer: bool = True) -> None:
        """Start what does not run. A controller looks for its nodes seconds after it is back."""
        subprocess.run([SCRIPT, "up", self.folder, *self._options], check=True, timeout=LIMIT_S)
        away = re.compile(r"down|unk|\*" if until_nodes_answer else "^$")
        waited_for(lambda: not away.search(self.run("sinfo", "-h", "-N", "-o", "%T")), "nodes do not answer")

    def pid(self, daemon: str) -> int:
        return int((self.folder / f"run/{daemon}.pid").read_text())

    def kill(self, daemon: str) -> None:
        """`kill -9` of slurmctld, munged, or the slurmd of a node; jobs go on. See `save`."""
        os.kill(self.pid(daemon), signal.SIGKILL)
        waited_for(lambda: not _runs(self.pid(daemon)), f"{daemon} does not die")

    def kill_node(self, node: str) -> None:
        """As a machine that is gone: its slurmd, its steps and what runs in them."""
        self.kill(node)
        # A step's supervisor has the node's log open.
        for pid in [*_with_file_open(self.folder / f"log/{node}"), *_in_jobs(self.conf, node)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def save(self) -> None:
        """Have the controller write all its state, which it else does up to five seconds after a change: one
        that is killed before does not know of a job's start when it is back, and ends the job."""
        began = time.time()
        changes = {"node_state": ["update", f"NodeName={self.nodes[0]}", "Comment=saved"]}
        for job in self.jobs().values():
            if job["JobState"] in ("PENDING", "RUNNING"):
                changes["job_state"] = ["update", f"JobId={job['JobId']}", "AdminComment=saved"]
        for change in changes.values():
            for _ in range(11):  # so many are not left to the clock
                self.run("scontrol", *change)
        for name in changes:
            state = self.folder / "state" / name
            waited_for(
                lambda state=state: state.exists() and state.stat().st_mtime >= began, f"{name} is old"
            )  # type: ignore[misc]

    def supervisors(self, job: str) -> dict[str, int]:
        """The slurmstepd of each of the job's steps; "batch" is its script's."""
        found = {}
        for node in self.nodes:
            for pid in _with_file_open(self.folder / f"log/{node}"):
                with suppress(OSError):
                    title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                    if step := re.match(rf"slurmstepd: \[{job}\.(\w+)\]", title):
                        found[step[1]] = pid
        return found

    def freeze(self, daemon: str) -> None:
        """It takes connections and never answers."""
        os.kill(self.pid(daemon), signal.SIGSTOP)

    def thaw(self, daemon: str) -> None:
        os.kill(self.pid(daemon), signal.SIGCONT)

    def end(self) -> None:
        """Kill everything, and forget it."""
        subprocess.run([SCRIPT, "down", self.folder], check=False, timeout=LIMIT_S)
        if self._guard is not None:
            self._guard.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)

    # commands

    def run(self, program: str, *arguments: str, script: str = "", **more: Any) -> str:
        """What one of Slurm's commands prints; not by the stand-ins."""
        environment = {**os.environ, "SLURM_CONF": str(self.conf), "SLURM_TIME_FORMAT": "%s"}
        done = subprocess.run(
            [program, *arguments],
            input=script,
            capture_output=True,
            text=True,
            env=environment,
            timeout=LIMIT_S,
            **more,
        )
        if done.returncode:
            raise RuntimeError(f"{program} {' '.join(arguments)}: {done.stderr}")
        return str(done.stdout)

    def jobs(self) -> dict[str, dict[str, str]]:
        """Every job that the controller remembers, by its id, as `scontrol` has it."""
        found = records(self.run("scontrol", "-o", "show", "job"))
        return {job["JobId"]: job for job in found if "JobId" in job}

    def others_job(self, *options: str, seconds: int = 3600) -> str:
        """A running job of another user; returns its id. Needs root."""
        script = f"#!/bin/sh\nexec sleep {seconds}\n"
        arguments = ("--parsable", "--output=/dev/null", "--chdir=/", *options)
        job = self.run("sbatch", *arguments, script=script, user=OTHER_USER, group="nogroup").strip()
        waited_for(lambda: self.jobs()[job]["JobState"] == "RUNNING", f"{job} does not begin")
        return job

    def drain(self, node: str, reason: str = "maintenance") -> None:
        self.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")

    def fail(self, node: str) -> None:
        """As the cluster's health checks take a node down. Slurm itself sees that one is gone after more than
        SlurmdTimeout."""
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=gone")

    def resume(self, node: str) -> None:
        self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")

    # stand-ins

    def gate(self, program: str, when: str = "before") -> SlurmGate:
        """Stop the next call of this command, `before` or `after` Slurm does it."""
        return SlurmGate(self.folder / "gates", f"{program}-{when}")

    def calls(self) -> list[str]:
        """The commands that were run by the stand-ins, oldest first."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def _lay_out_commands(self) -> None:
        for name in ("bin", "gates"):
            (self.folder / name).mkdir()
        for name in CLIENTS:
            real = shutil.which(name, path=_SYSTEM_PATH)
            if real is None:
                continue
            stand_in = self.bin / name
            places = {"gates": self.folder / "gates", "conf": self.conf, "calls": self.folder / "calls"}
            quoted = {key: shlex.quote(str(path)) for key, path in places.items()}
            stand_in.write_text(_STAND_IN.format(name=name, real=shlex.quote(real), **quoted))
            stand_in.chmod(0o755)

    def _guarded(self) -> subprocess.Popen[bytes]:
        """Ends it when the tests were killed and could not, its folder too. In a session of its own: what
        kills the tests, such as `timeout`, signals their whole group."""
        command = 'cat >/dev/null; [ ! -e "$2" ] || "$1" down "$2"; rm -rf "$2"; rmdir "${2%/*}" 2>/dev/null'
        return subprocess.Popen(
            ["sh", "-c", command, "sh", str(SCRIPT), str(self.folder)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


@contextmanager
def own_slurm(**how: Any) -> Iterator[OwnSlurm]:
    """One in a folder that jobs of every user can reach; `how`: see `OwnSlurm`."""
    why = why_not()
    if why:
        missing(why)
    place = Path(tempfile.mkdtemp(prefix="gm-slurm-"))
    place.chmod(0o755)
    try:
        with OwnSlurm(place / "s", **how) as slurm:
            yield slurm
    finally:
        shutil.rmtree(place, ignore_errors=True)


def waited_for(holds: Callable[[], object], otherwise: str, limit_s: float = LIMIT_S) -> None:
    ends = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < ends, otherwise
        time.sleep(0.02)


def _free_range(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        (first,) = free_ports(1)
        with suppress(OSError):
            for port in range(first + 1, first + count):
                socket.create_server((LOOPBACK, port)).close()
            return first


def _runs(pid: int) -> bool:
    """Not what is dead and not collected: many a container has nobody who does it."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def _with_file_open(path: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if any(os.readlink(file) == str(path) for file in (entry / "fd").iterdir()):
                    found.append(int(entry.name))
    return found


def _in_jobs(conf: Path, node: str) -> list[int]:
    wanted = {f"SLURM_CONF={conf}".encode(), f"SLURMD_NODENAME={node}".encode()}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
    return found
