"""Stand between the backend and the trainer: start it, keep its output, pass signals on, record its end.

Every backend runs this one file, as a script of its own: `python3 -I -S wrapper.py OPTIONS -- COMMAND`. It
imports nothing but the standard library, because inside a container there is nothing else to import. The
trainer, which supervises its engines in the same way, imports what both need to know of process trees.

- `start.json` is on disk before the command starts, `exit.json` after everything that it started is gone.
- Output goes to `log`, which is rotated before it grows too large: a chatty run must not fill the disk.
- SIGTERM goes to the trainer, SIGQUIT kills all it started, SIGUSR1 goes to every process that handles it.

The run directory may be written by hostile code: files are created exclusively, and no link is followed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator

START, EXIT, RESERVED, LOG = "start.json", "exit.json", ".exit.part", "log"
#: A full `log` is renamed to these: the beginning is kept for good, then the newest before the current.
LOG_FIRST, LOG_BEFORE = "log.first", "log.before"

#: The exit record is written over this much reserved space, so that it fits on a disk that is full by then.
RESERVED_BYTES = 512
#: From the backstop's SIGTERM to its SIGKILL.
GRACE_S = 30.0
#: Seconds for killed processes to vanish before the end is recorded without them.
REAP_S = 10.0
PR_SET_CHILD_SUBREAPER = 36
#: The kernel's counters of what it killed for memory, as a container sees its own: cgroup v2, then v1.
CONTAINER_OOM_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
READ_BYTES = 1 << 16
#: The most that a pipe can hold back (fs.pipe-max-size).
PIPE_BYTES = 1 << 20
#: Exit codes of a command that cannot be run, as shells have them.
NOT_EXECUTABLE, NOT_FOUND = 126, 127
#: The program that may take the place of `python` in front of the sandbox's own processes.
SANDBOX = "bwrap"
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGCHLD, signal.SIGHUP)


def main() -> int:
    options = _options()
    folder = os.open(options.dir, os.O_RDONLY | os.O_DIRECTORY)
    os.fchdir(folder)
    adopt_orphans()
    for cgroup in options.cgroup:
        _write(os.path.join(cgroup, "cgroup.procs"), b"0")
    if options.lock_fd is not None:
        _sign_lock(options.lock_fd)
    _record(folder, START, _start_record())
    reserved = _write_new(folder, RESERVED, b" " * RESERVED_BYTES)
    kills = oom_kills(options.oom_file)
    run = WrappedRun(options, RotatingLog(folder, options.log_bytes))
    try:
        code = run.wait()
    finally:
        run.kill_all()
    end = {"at": time.time(), "code": code, "signals": run.signals, "timeout": run.timed_out}
    end["oom_kills"] = oom_kills(options.oom_file) - kills
    _finish(folder, reserved, end)
    return code


class RotatingLog:
    """Keep the output in files of limited size."""

    def __init__(self, folder: int, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._file = self._open(LOG, os.O_APPEND)
        self._size = os.fstat(self._file).st_size

    def write(self, data: bytes) -> None:
        """Append; what a full disk does not take is dropped: it costs the line, not the run."""
        with contextlib.suppress(OSError):
            if self._size and self._size + len(data) > self._limit:
                self._rotate()
            while data:
                written = os.write(self._file, data)
                self._size += written
                data = data[written:]

    def _rotate(self) -> None:
        target = LOG_BEFORE if self._exists(LOG_FIRST) else LOG_FIRST
        os.rename(LOG, target, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        new = self._open(LOG, os.O_EXCL)
        os.close(self._file)
        self._file, self._size = new, 0
        self.write(f"[the output before this is in {LOG_FIRST} and {LOG_BEFORE}]\n".encode())

    def _open(self, name: str, flags: int) -> int:
        flags |= os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o644, dir_fd=self._folder)

    def _exists(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True


class WrappedRun:
    """The command and all it started."""

    def __init__(self, options: argparse.Namespace, log: RotatingLog) -> None:
        self.signals: list[str] = []
        self.timed_out = False
        self._log = log
        self._stopping = False
        self._code: int | None = None
        self._limit_at = time.monotonic() + options.limit_s if options.limit_s else None
        self._wakeups = _wake_on_signals()
        self._output, theirs = os.pipe()
        os.set_blocking(self._output, False)
        self._pid = _spawn(options, theirs)
        os.close(theirs)

    def wait(self) -> int:
        """Wait until the command ends; return its exit code."""
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        poll.register(self._wakeups, select.POLLIN)
        while self._code is None:
            for ready, _ in poll.poll(self._poll_timeout_s() * 1000):
                if ready == self._wakeups:
                    self._on_signals()
                elif not self._copy_output():
                    # All of them closed their output; they may still run.
                    poll.unregister(self._output)
            self._reap()
            self._enforce_limit()
            if self._stopping:
                self._pass_on_sigterm()
        return self._code

    def kill_all(self) -> None:
        """Kill everything that the command left behind, also what left its session."""

        def left() -> list[int]:
            self._reap()
            return descendant_pids()

        kill_until_gone(left, REAP_S)
        for _ in range(PIPE_BYTES // READ_BYTES + 1):
            self._copy_output()

    def _poll_timeout_s(self) -> float:
        """Seconds until something has to be done although no signal and no output came."""
        if self._stopping:
            return 0.05
        return 60.0 if self._limit_at is None else min(60.0, max(0.0, self._limit_at - time.monotonic()))

    def _on_signals(self) -> None:
        for number in os.read(self._wakeups, 4096):
            if number in (signal.SIGTERM, signal.SIGINT):
                self.signals.append(signal.Signals(number).name)
                self._stopping = True
            elif number == signal.SIGQUIT:
                self.signals.append("SIGQUIT")
                for process in descendants():
                    _signal(process.pid, signal.SIGKILL)
            elif number == signal.SIGUSR1:
                dump_stacks()

    def _pass_on_sigterm(self) -> None:
        """Send SIGTERM to the trainer itself, once it is there: a sandbox is built first."""
        trainer = _trainer_pid(self._pid)
        if trainer is not None:
            _signal(trainer, signal.SIGTERM)
            self._stopping = False

    def _enforce_limit(self) -> None:
        if self._limit_at is None or time.monotonic() < self._limit_at:
            return
        if self.timed_out:
            self.kill_all()
        self.timed_out = self._stopping = True
        self._limit_at = time.monotonic() + GRACE_S

    def _copy_output(self) -> bool:
        """Copy one piece, so that a flood does not keep signals waiting; False once nobody can write."""
        try:
            data = os.read(self._output, READ_BYTES)
        except BlockingIOError:
            return True
        self._log.write(data)
        return bool(data)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._pid:
                    code = os.waitstatus_to_exitcode(status)
                    self._code = code if code >= 0 else 128 - code


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs one attempt and records its start and end.")
    parser.add_argument("--dir", required=True, help="the run directory")
    parser.add_argument("--log-bytes", type=int, default=64 << 20, help="when the log is rotated")
    parser.add_argument(
        "--limit-s", type=float, help="SIGTERM after this many seconds, and SIGKILL after a grace"
    )
    parser.add_argument("--lock-fd", type=int, help="a locked file that is held while this runs")
    parser.add_argument("--cgroup", action="append", default=[], help="a cgroup to join")
    parser.add_argument("--oom-file", action="append", default=[], help="where the kernel counts its kills")
    parser.add_argument("--cpus", help="the cores to run on: 0,1,2")
    parser.add_argument("--rlimit", action="append", default=[], help="name=number, as far as it is allowed")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    if options.command[0] == "python":
        options.command[0] = sys.executable
    return options


def adopt_orphans() -> None:
    """Become the parent of what its own parent left, so that we can find and end it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _wake_on_signals() -> int:
    read, write = os.pipe()
    for end in (read, write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in HANDLED:
        # A handler that does nothing: the number comes through the pipe.
        signal.signal(number, lambda *_: None)
    return read


def _spawn(options: argparse.Namespace, output: int) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            _exec_command(options, output)
        except FileNotFoundError as error:
            os.write(2, f"{options.command[0]} cannot be started: {error}\n".encode())
            os._exit(NOT_FOUND)
        except BaseException as error:  # noqa: BLE001 - the fork of this program must not go on as this program
            os.write(2, f"{options.command[0]} cannot be started: {error}\n".encode())
            os._exit(NOT_EXECUTABLE)
    return pid


def _exec_command(options: argparse.Namespace, output: int) -> None:
    # A session of its own: a trainer that signals its process group does not meet us in it.
    os.setsid()
    for number in (*HANDLED, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if options.cpus:
        os.sched_setaffinity(0, {int(core) for core in options.cpus.split(",")})
    for limit in options.rlimit:
        _set_rlimit(*limit.split("="))
    with contextlib.suppress(OSError):
        # When memory runs out, this goes before the daemon.
        _write("/proc/self/oom_score_adj", b"500")
    os.execvp(options.command[0], options.command)  # noqa: S606 - what we are for


def _set_rlimit(name: str, wanted: str) -> None:
    kind = getattr(resource, f"RLIMIT_{name.upper()}")
    _, hard = resource.getrlimit(kind)
    value = resource.RLIM_INFINITY if int(wanted) < 0 else int(wanted)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (value, value))
        return
    resource.setrlimit(kind, (hard, hard))


def _start_record() -> dict[str, object]:
    return {"at": time.time(), "pid": os.getpid(), "boot": boot_id()}


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _sign_lock(lock: int) -> None:
    """Write down who holds the lock; the process id alone may be another process's one day."""
    os.set_inheritable(lock, False)
    ticks = next(process.started for process in processes() if process.pid == os.getpid())
    os.pwrite(lock, json.dumps({"pid": os.getpid(), "started": ticks, "boot": boot_id()}).encode(), 0)
    os.fsync(lock)


def _record(folder: int, name: str, content: dict[str, object]) -> None:
    _write_new(folder, f".{name}.part", json.dumps(content).encode())
    os.rename(f".{name}.part", name, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)


def _finish(folder: int, reserved: int, content: dict[str, object]) -> None:
    os.pwrite(reserved, json.dumps(content).encode().ljust(RESERVED_BYTES), 0)
    os.fsync(reserved)
    os.rename(RESERVED, EXIT, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)


def _write_new(folder: int, name: str, content: bytes) -> int:
    """Create a file that nobody else made, on disk; return its open descriptor."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(name, flags, 0o644, dir_fd=folder)
    os.write(file, content)
    os.fsync(file)
    return file


def _write(path: str, content: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, content)
    finally:
        os.close(file)


def oom_kills(files: Iterable[str] = CONTAINER_OOM_FILES) -> int:
    """Count the kernel's kills for memory in these cgroups; 0 if it cannot be read."""
    count = 0
    for path in files:
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            count += sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    return count


class ProcessEntry:
    __slots__ = ("name", "parent", "pid", "started")

    def __init__(self, pid: int, name: str, parent: int, started: int) -> None:
        self.pid, self.name, self.parent, self.started = pid, name, parent, started


def processes() -> Iterator[ProcessEntry]:
    """Every process but those that ended and were not waited for yet (zombies)."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{entry}/stat", "rb") as file:
                # The name stands in parentheses, and may hold parentheses and spaces itself.
                head, _, tail = file.read().decode(errors="replace").rpartition(") ")
                fields = tail.split()
                if fields[0] not in "ZX":
                    yield ProcessEntry(int(entry), head.partition("(")[2], int(fields[1]), int(fields[19]))


def descendants(root: int | None = None) -> list[ProcessEntry]:
    """Every process below this one, parents before their children."""
    children: dict[int, list[ProcessEntry]] = {}
    for process in processes():
        children.setdefault(process.parent, []).append(process)
    found, queue = [], [os.getpid() if root is None else root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += [process.pid for process in below]
    return found


def descendant_pids(root: int | None = None) -> list[int]:
    return [process.pid for process in descendants(root)]


def reap(own: int | None = None) -> None:
    """Collect the exit codes of adopted orphans; the child `own` is left to whoever waits for it."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != own:
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                if file.read().rpartition(b") ")[2][:1] == b"Z":
                    os.waitpid(int(entry), os.WNOHANG)


def _trainer_pid(pid: int) -> int | None:
    """The command's own process, below those of its sandbox; None while there is none yet."""
    by_pid = {process.pid: process for process in descendants()}
    while pid in by_pid and by_pid[pid].name == SANDBOX:
        below = [process.pid for process in by_pid.values() if process.parent == pid]
        if not below:
            return None
        pid = min(below)
    return pid


def kill_until_gone(list_pids: Callable[[], Iterable[int]], timeout_s: float) -> int:
    """Kill these processes, and those that appear meanwhile, until none is left; return how many at first."""
    ends = time.monotonic() + timeout_s
    first = left = set(list_pids())
    while left and time.monotonic() < ends:
        for pid in left:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.01)
        left = set(list_pids())
    return len(first)


def dump_stacks() -> int:
    """Send SIGUSR1 to every descendant that handles it, which would end the others; return how many do."""
    handling = [process.pid for process in descendants() if _catches(process.pid, signal.SIGUSR1)]
    for pid in handling:
        _signal(pid, signal.SIGUSR1)
    return len(handling)


def _catches(pid: int, number: int) -> bool:
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status") as file:
        masks = [int(line.split()[1], 16) for line in file if line.startswith("SigCgt:")]
        return any(mask >> (number - 1) & 1 for mask in masks)
    return False


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main())
