"""Run a little code of a checked repository: in a sandbox, for a limited time, with limited output.

bubblewrap closes off the network, the operator's files and other processes. The code sees its own checkout,
the packages of this installation and nothing else; what it writes is in memory and ends with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import core
from core.domain.records import printable
from core.system.files import temporary_tree
from miner.backends.base import EngineSpec, Mount
from miner.backends.sandbox import REWARD_UIDS, Interpreter, Sandbox, detect_sandbox

LIMIT_S = 60.0
#: Of what it prints; a run that was understood has a few kilobytes.
MOST_OUTPUT = 4 * 1024**2
#: Of one process, and of each of the places in memory that it can write to.
MEMORY_BYTES, WRITTEN_BYTES = 4 * 1024**3, 64 * 1024**2
#: Of a user of its own. Older kernels count all of the operator's processes, where that is the user.
PROCESSES, PROCESSES_OF_OPERATOR = 256, 4096
_UID = REWARD_UIDS - 1


@dataclass(frozen=True)
class ConfinedOutput:
    """What it printed, on either stream, and why it was ended early, if it was."""

    text: str
    #: The exit code, or the limit that was reached.
    ending: str

    @property
    def complaint(self) -> str:
        """For people: how it ended, and the last line that it printed."""
        last = self.text.strip().rpartition("\n")[2][-300:]
        return printable(f"{self.ending}: {last}" if last else self.ending)


def find_sandbox(folder: Path) -> Sandbox | str:
    """A sandbox that was tried out, with its files in the folder; or why there is none."""
    needs = {Path(sys.base_prefix), *_site_packages()}
    outside = sorted(path for path in needs if not path.is_relative_to("/usr"))
    interpreter = Interpreter(Path(os.path.realpath(sys.executable)), tuple(outside))
    is_root = os.geteuid() == 0
    processes = PROCESSES if is_root else PROCESSES_OF_OPERATOR
    visible, uid = (Path(core.__file__).parent,), _UID if is_root else None
    found = detect_sandbox(Sandbox(Path("bwrap"), interpreter, folder / "hosts", visible, uid, processes))
    return found if isinstance(found, str) else replace(found, memory_bytes=WRITTEN_BYTES)


def run_confined(
    script: str,
    tree: Path,
    order: str,
    sandbox: Sandbox | None,
    *,
    limit_s: float = LIMIT_S,
    most_output: int = MOST_OUTPUT,
) -> ConfinedOutput:
    """Run a Python script with the tree as the place of its modules and `order` as its standard input.

    Without a sandbox it has the operator's rights: time, memory and output are limited all the same."""
    tree = tree.resolve()
    with temporary_tree("god-miner-check-") as folder, _sealed(order) as given:
        scratch = folder.resolve()
        python = str(sandbox.interpreter.path) if sandbox else sys.executable
        command = [python, "-c", script, str(tree)]
        if sandbox is not None:
            spec = EngineSpec("check", tuple(command), scratch, (Mount(tree, read_only=True),))
            command = sandbox.command(spec, command)
        process = subprocess.Popen(
            command,
            env=_environment(tree, scratch),
            cwd=scratch,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_limit_process,
        )
        try:
            return _limited_output(process, limit_s, most_output)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _sealed(text: str) -> BinaryIO:
    """The text in a file in memory that nobody can write to: through another, the code could fill a disk."""
    file = os.fdopen(os.memfd_create("order", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b")
    file.write(text.encode())
    file.seek(0)  # also writes what is buffered
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return file


def _limited_output(process: subprocess.Popen[bytes], limit_s: float, most: int) -> ConfinedOutput:
    assert process.stdout is not None
    found, ends, limit = bytearray(), time.monotonic() + limit_s, ""
    with process.stdout as stream:
        while not limit:
            left = ends - time.monotonic()
            if left <= 0:
                limit = f"not done after {limit_s:g} s: ended"
            elif select.select([stream], [], [], left)[0]:
                piece = os.read(stream.fileno(), 65_536)
                if not piece:
                    break
                found += piece
                if len(found) > most:
                    limit = f"it printed more than {most / 1e6:.0f} MB: ended"
    if not limit:
        try:
            limit = f"exit code {process.wait(max(0.1, ends - time.monotonic()))}"
        except subprocess.TimeoutExpired:
            limit = f"not done after {limit_s:g} s: ended"
    return ConfinedOutput(found[:most].decode("utf-8", "replace"), limit)


def _environment(tree: Path, scratch: Path) -> dict[str, str]:
    """Nothing of the operator's: addresses of proxies may hold passwords."""
    return {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": str(scratch),
        "GOD_MINER_WORK": str(scratch),
        "PYTHONPATH": os.pathsep.join(map(str, (tree, *_site_packages()))),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _site_packages() -> list[Path]:
    return list(dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")))


def _limit_process() -> None:
    """In the child, before it becomes the sandbox; bubblewrap and all below it inherit these."""
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, int(LIMIT_S)),
    ):
        _, hard = resource.getrlimit(kind)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))
    # When memory runs out, this goes before anything of the operator's.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
