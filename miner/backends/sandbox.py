"""Build a sandbox with bubblewrap, without Docker: no network, and only the given files and GPUs.

A network namespace alone would not do: code that reads the wallet or a token can put it into the published
model. So without bubblewrap, or where the machine forbids its namespaces (most rented pods), hostile runs
are rejected.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from miner.backends import sandbox_init
from miner.backends.base import AttemptSpec, Mount
from miner.backends.preflight import gpus_of, mounts_of

DRIVER = Path("/proc/driver/nvidia/gpus")
DEVICES = Path("/dev")
_COMMON = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")


def device_files(gpus: Sequence[str], driver: Path = DRIVER, devices: Path = DEVICES) -> list[Path]:
    if not gpus:
        return []
    minors = _minors(driver)
    if all(gpu in minors for gpu in gpus):
        files = [devices / f"nvidia{minors[gpu]}" for gpu in gpus]
    else:
        # MIG slices, or a driver without this list: all devices, and CUDA_VISIBLE_DEVICES alone chooses.
        files = sorted(path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
        files += sorted(devices.glob("nvidia-caps"))
    return [path for path in (*(devices / name for name in _COMMON), *files) if path.exists()]


def _minors(driver: Path) -> dict[str, str]:
    """The number in the device file's name, by UUID and by index (in the order of the bus)."""
    minors: dict[str, str] = {}
    for index, information in enumerate(sorted(driver.glob("*/information"))):
        text = information.read_text(errors="replace")
        minor = re.search(r"^Device Minor:\s*(\d+)", text, re.MULTILINE)
        uuid = re.search(r"^GPU UUID:\s*(\S+)", text, re.MULTILINE)
        if minor:
            minors[str(index)] = minor[1]
            if uuid:
                minors[uuid[1]] = minor[1]
    return minors


#: In a machine that the daemon does not see.
MOST_GPUS = 16
HOSTNAME = "job"
HOSTS = f"127.0.0.1 localhost {HOSTNAME}\n::1 localhost\n"
TMP_BYTES, SHM_BYTES = 4 << 30, 16 << 30
TRIAL_S = 30.0
#: Users that no machine has: above those that systemd gives to containers.
REWARD_UIDS = 2_000_000_000
#: What programs look up; nothing in them is secret.
_SYSTEM_FILES = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/alternatives",
    "/etc/ssl/certs",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/OpenCL",
)
#: Links into /usr on most systems, directories on others.
_TOP_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_TRIAL = "import socket; print([name for _, name in socket.if_nameindex()])"


@dataclass(frozen=True, slots=True)
class Interpreter:
    path: Path
    #: Directories and files outside of /usr that it consists of.
    needs: tuple[Path, ...]

    def identity(self) -> str:
        """A text that changes when a package is added or removed, and with the interpreter."""
        site = self.path.parent.parent / "lib"
        places = [self.path, *sorted(site.glob("python*/site-packages"))]
        return " ".join(f"{directory}@{directory.stat().st_mtime_ns}" for directory in places)


@dataclass(frozen=True, slots=True)
class Sandbox:
    program: Path
    interpreter: Interpreter
    #: Mounted as /etc/hosts: torchrun waits for ever when the machine's own name does not resolve.
    hosts: Path
    #: What else is visible, read-only: our own code.
    visible: tuple[Path, ...]
    #: The user to become, when we are root.
    uid: int | None
    processes: int
    #: The most of /tmp, of /dev/shm and of the run directory, which is then in memory too: nothing that a run
    #: writes reaches a disk. None: as trainings have them.
    memory_bytes: int | None = None
    #: The program that takes the last step.
    init: Path = Path(sandbox_init.__file__)
    #: Whether it is for another machine: its scheduler chooses the GPUs, and lets a job open no others.
    elsewhere: bool = False

    def command(self, spec: AttemptSpec, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` inside the sandbox."""
        return [
            str(self.program),
            *self._namespaces(spec.hostile),
            *_system(),
            *("--ro-bind", str(self.hosts), "/etc/hosts"),
            *_memory_file_systems(
                self.memory_bytes or TMP_BYTES, self.memory_bytes or spec.shm_bytes or SHM_BYTES
            ),
            *self._devices(spec),
            *self._binds(spec),
            # The root of the mounts is in memory, and would be writable where we are not root.
            *("--remount-ro", "/", "--remount-ro", "/dev"),
            "--",
            *self._last_step(spec),
            *argv,
        ]

    def shows(self, path: Path) -> bool:
        """Return True if the path is visible to every run."""
        return any(
            path.is_relative_to(root) for root in (*self.interpreter.needs, *self.visible, Path("/usr"))
        )

    def _devices(self, spec: AttemptSpec) -> Iterator[str]:
        gpus = gpus_of(spec)
        if self.elsewhere and gpus:
            names = (*_COMMON, *(f"nvidia{number}" for number in range(MOST_GPUS)), "nvidia-caps")
            for path in (DEVICES / name for name in names):
                yield from ("--dev-bind-try", str(path), str(path))
            return
        for path in device_files(gpus):
            yield from ("--dev-bind", str(path), str(path))

    def _namespaces(self, hostile: bool) -> Iterator[str]:
        yield from (
            "--unshare-pid",
            "--unshare-net",
            "--unshare-ipc",
            "--unshare-uts",
            "--unshare-cgroup-try",
        )
        yield from ("--die-with-parent", "--hostname", HOSTNAME)
        if self.uid is None:
            yield "--unshare-user"
        else:
            # Root needs no user namespace, and becomes an ordinary user in the last step.
            yield from ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
            yield from ("--cap-add", "CAP_SETPCAP")
            if hostile:
                # For reward code's namespaces, and to end what runs as its user; the trainer has neither.
                yield from ("--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_KILL")

    def _binds(self, spec: AttemptSpec) -> Iterator[str]:
        ours = [Mount(path) for path in (self.init, *self.interpreter.needs, *self.visible)]
        mounts = (*ours, *mounts_of(spec))
        for folder in sorted({parent for mount in mounts for parent in mount.path.parents}):
            yield from ("--perms", "0755", "--dir", str(folder))
        for mount in mounts:
            if mount.path == spec.run_dir and self.memory_bytes:
                yield from _memory_file_system(mount.path, self.memory_bytes)
                continue
            yield from ("--ro-bind" if mount.read_only else "--bind", str(mount.path), str(mount.path))

    def _last_step(self, spec: AttemptSpec) -> Iterator[str]:
        yield from (str(self.interpreter.path), "-I", "-S", str(self.init))
        yield from ("--dir", str(spec.run_dir), "--processes", str(self.processes))
        if self.uid is not None:
            yield from ("--uid", str(self.uid))
            if spec.hostile:
                # A user for each run: the kernel counts processes by user, over all runs.
                uid = REWARD_UIDS + zlib.crc32(spec.key.encode()) % 100_000_000
                yield from ("--rewards", str(self.visible[0]), "--rewards-uid", str(uid))
        yield "--"


def detect_sandbox(wanted: Sandbox) -> Sandbox | str:
    """Try this sandbox out, with the program that there is; return it, or why it does not work."""
    program = shutil.which("bwrap")
    if program is None:
        return "bubblewrap is not installed (Debian and Ubuntu: apt install bubblewrap)"
    wanted.hosts.parent.mkdir(parents=True, exist_ok=True)
    wanted.hosts.write_text(HOSTS)
    sandbox = replace(wanted, program=Path(program))
    with tempfile.TemporaryDirectory(prefix="god-miner-") as folder:
        why = _why_unusable(sandbox, Path(folder))
    return sandbox if why is None else why


def _why_unusable(sandbox: Sandbox, folder: Path) -> str | None:
    if sandbox.uid is not None:
        os.chown(folder, sandbox.uid, sandbox.uid)
    spec = AttemptSpec(key="trial", argv=(), run_dir=folder, hostile=True)
    command = sandbox.command(spec, [str(sandbox.interpreter.path), "-I", "-c", _TRIAL])
    try:
        done = subprocess.run(
            command,
            env={},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TRIAL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not work here: {error}"
    if done.returncode:
        return f"bubblewrap does not work here: {done.stderr.strip()[-300:]}"
    if done.stdout.strip() != "['lo']":
        return f"bubblewrap does not close off the network here: {done.stdout.strip()[:100]}"
    return None


def _system() -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr", "--ro-bind", "/sys", "/sys", "--proc", "/proc", "--dev", "/dev")
    for name in _TOP_FOLDERS:
        path = Path("/") / name
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    # Directories that bubblewrap makes by itself are readable by root only.
    for folder in ("/etc", "/etc/ssl"):
        yield from ("--perms", "0755", "--dir", folder)
    for file in _SYSTEM_FILES:
        yield from ("--ro-bind-try", file, file)


def _memory_file_systems(tmp: int, shm: int) -> Iterator[str]:
    yield from _memory_file_system(Path("/dev/shm"), shm)  # noqa: S108 - the sandbox's own
    yield from _memory_file_system(Path("/tmp"), tmp)  # noqa: S108


def _memory_file_system(path: Path, size: int) -> Iterator[str]:
    yield from ("--perms", "1777", "--size", str(size), "--tmpfs", str(path))
