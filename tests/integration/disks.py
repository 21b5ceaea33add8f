"""Disks that are full, and folders that cannot be written, also for root."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from miner.dev.stack import ChildProcess

#: Root may write where the permissions forbid it, by a capability that a process can give up for good.
_WITHOUT_OVERRIDE = """
import ctypes, os, sys
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2
for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
    if ctypes.CDLL(None, use_errno=True).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
        sys.exit(f"capability {capability} cannot be dropped: {os.strerror(ctypes.get_errno())}")
os.execv(sys.argv[1], sys.argv[1:])
"""


def bound_by_permissions(child: ChildProcess) -> ChildProcess:
    """The same daemon, to whom a folder's permissions apply."""
    if os.geteuid() == 0:
        child.command = [sys.executable, "-c", _WITHOUT_OVERRIDE, *child.command]
    return child


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    """The folder can be read, and nothing in it be made or removed."""
    before = folder.stat().st_mode
    folder.chmod(0o500)
    try:
        yield
    finally:
        folder.chmod(before)


class Disk(Protocol):
    """Where the data folder lies."""

    def fill(self, pid: int) -> None: ...

    def free(self, pid: int) -> None: ...


class _SmallDisk:
    """A file system of a few megabytes, filled to the last byte."""

    def __init__(self, folder: Path) -> None:
        self._filler = folder / "filler"

    def fill(self, _pid: int) -> None:
        with self._filler.open("wb") as file:
            for size in (65536, 4096):
                with suppress(OSError):
                    while os.write(file.fileno(), b"x" * size):
                        pass
        assert os.statvfs(self._filler).f_bavail == 0

    def free(self, _pid: int) -> None:
        self._filler.unlink()


class _SizeLimit:
    """Files that may not grow, for one process: what can be had without mounting anything."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def fill(self, pid: int) -> None:
        largest = 0
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # the daemon's own, gone meanwhile
                largest = max(largest, path.stat().st_size)
        self._limit(pid, largest)

    def free(self, pid: int) -> None:
        self._limit(pid, resource.RLIM_INFINITY)

    @staticmethod
    def _limit(pid: int, size: int) -> None:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def size_limit(folder: Path) -> Disk:
    folder.mkdir(exist_ok=True)
    return _SizeLimit(folder)


@contextmanager
def small_disk(folder: Path, megabytes: int = 4) -> Iterator[Disk | None]:
    """A file system of its own at `folder`; None where this machine lets none be mounted."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=700", "god-miner-test", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield _SmallDisk(folder)
    finally:
        # Lazily: also while a daemon that a failed test left behind has files open there.
        subprocess.run(["umount", "-l", str(folder)], check=True)
