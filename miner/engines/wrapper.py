"""Stands between the engine and the trainer: starts it, keeps its output, passes signals on, records its end.

Every engine runs this one file, as a script of its own: `python3 -I -S wrapper.py OPTIONS -- COMMAND`. It
imports nothing but the standard library, because inside a container there is nothing else to import.

- `start.json` is on disk before the command starts, `exit.json` after all that it started is gone.
- Output goes to `log`, which is turned over before it grows too large: a chatty run must not fill the disk.
- SIGTERM goes to the trainer, SIGQUIT kills all it started, SIGUSR1 goes to every process that handles it.

The run folder may be written by hostile code: files are made new or not at all, and no link is followed.
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
from collections.abc import Iterator

START, EXIT, RESERVED, LOG = "start.json", "exit.json", ".exit.part", "log"
#: Renamed to when `log` is full: the beginning is kept for good, the rest is the newest before the current.
LOG_FIRST, LOG_BEFORE = "log.first", "log.before"

#: The exit record is written over this much reserved room, so that it fits on a disk that is full by then.
RESERVED_BYTES = 512
#: From the backstop's SIGTERM to its SIGKILL.
GRACE_S = 30.0
#: How long killed processes may take to vanish before the end is recorded without them.
REAP_S = 10.0
PR_SET_CHILD_SUBREAPER = 36
PIECE = 1 << 16
#: The most that a pipe can hold back (fs.pipe-max-size).
PIPE_BYTES = 1 << 20
#: Of a command that can not be run, as shells have it.
NOT_EXECUTABLE, NOT_FOUND = 126, 127
#: What may take the place of `python` in front of the sandbox's own processes.
SANDBOX = "bwrap"
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGCHLD, signal.SIGHUP)


def main() -> int:
    options = _options()
    folder = os.open(options.dir, os.O_RDONLY | os.O_DIRECTORY)
    os.fchdir(folder)
    _adopt_orphans()
    for cgroup in options.cgroup:
        _write(os.path.join(cgroup, "cgroup.procs"), b"0")
    if options.lock_fd is not None:
        _sign(options.lock_fd)
    _record(folder, START, _start())
    reserved = _reserve(folder)
    kills = _oom_kills(options.oom_file)
    run = Run(options, Log(folder, options.log_bytes))
    try:
        code = run.wait()
    finally:
        run.kill_all()
    end = {"at": time.time(), "code": code, "signals": run.signals, "timeout": run.timed_out}
    end["oom_kills"] = _oom_kills(options.oom_file) - kills
    _finish(folder, reserved, end)
    return code


class Log:
    """Output in files that can not grow without end."""

    def __init__(self, folder: int, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._file = self._open(LOG, os.O_APPEND)
        self._size = os.fstat(self._file).st_size

    def write(self, data: bytes) -> None:
        """A full disk costs the line, not the run: what can not be written is dropped."""
        with contextlib.suppress(OSError):
            if self._size and self._size + len(data) > self._limit:
                self._turn_over()
            while data:
                written = os.write(self._file, data)
                self._size += written
                data = data[written:]

    def _turn_over(self) -> None:
        kept = LOG_BEFORE if self._exists(LOG_FIRST) else LOG_FIRST
        os.rename(LOG, kept, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        fresh = self._open(LOG, os.O_EXCL)
        os.close(self._file)
        self._file, self._size = fresh, 0
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


class Run:
    """The command and all it started."""

    def __init__(self, options: argparse.Namespace, log: Log) -> None:
        self.signals: list[str] = []
        self.timed_out = False
        self._log = log
        self._stopping = False
        self._code: int | None = None
        self._ends = time.monotonic() + options.limit_s if options.limit_s else None
        self._woken = _wake_on_signals()
        self._output, theirs = os.pipe()
        os.set_blocking(self._output, False)
        self._pid = _spawn(options, theirs)
        os.close(theirs)

    def wait(self) -> int:
        """Until the command ended: its exit code."""
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while self._code is None:
            for ready, _ in poll.poll(self._pause() * 1000):
                if ready == self._woken:
                    self._on_signals()
                elif not self._keep_output():
                    # All of them closed their output; they may still run.
                    poll.unregister(self._output)
            self._reap()
            self._backstop()
            if self._stopping:
                self._terminate()
        return self._code

    def kill_all(self) -> None:
        """Nothing outlives the command: neither what it left behind nor what left its session."""
        ends = time.monotonic() + REAP_S
        while time.monotonic() < ends:
            left = [process.pid for process in _descendants(os.getpid())]
            for pid in left:
                _signal(pid, signal.SIGKILL)
            self._reap()
            if not left:
                break
            time.sleep(0.01)
        for _ in range(PIPE_BYTES // PIECE + 1):
            self._keep_output()

    def _pause(self) -> float:
        """Seconds until something has to be done without being asked to."""
        if self._stopping:
            return 0.05
        return 60.0 if self._ends is None else min(60.0, max(0.0, self._ends - time.monotonic()))

    def _on_signals(self) -> None:
        for number in os.read(self._woken, 4096):
            if number in (signal.SIGTERM, signal.SIGINT):
                self.signals.append(signal.Signals(number).name)
                self._stopping = True
            elif number == signal.SIGQUIT:
                self.signals.append("SIGQUIT")
                for process in _descendants(os.getpid()):
                    _signal(process.pid, signal.SIGKILL)
            elif number == signal.SIGUSR1:
                _ask_for_stacks()

    def _terminate(self) -> None:
        """SIGTERM to the trainer itself; while a sandbox is still being built there is none yet."""
        trainer = _trainer(self._pid)
        if trainer is not None:
            _signal(trainer, signal.SIGTERM)
            self._stopping = False

    def _backstop(self) -> None:
        if self._ends is None or time.monotonic() < self._ends:
            return
        if self.timed_out:
            self.kill_all()
        self.timed_out = self._stopping = True
        self._ends = time.monotonic() + GRACE_S

    def _keep_output(self) -> bool:
        """One piece of it, so that a flood does not keep signals waiting; False once nobody can write."""
        try:
            data = os.read(self._output, PIECE)
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
    parser.add_argument("--dir", required=True, help="the run folder")
    parser.add_argument("--log-bytes", type=int, default=64 << 20, help="when the log is turned over")
    parser.add_argument("--limit-s", type=float, help="SIGTERM after so long, and SIGKILL after a grace")
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


def _adopt_orphans() -> None:
    """What is left by its parent becomes our child, so that we can find and end it."""
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
            _become(options, output)
        except FileNotFoundError as error:
            os.write(2, f"{options.command[0]} can not be started: {error}\n".encode())
            os._exit(NOT_FOUND)
        except BaseException as error:  # noqa: BLE001 - the fork of this program must not go on as this program
            os.write(2, f"{options.command[0]} can not be started: {error}\n".encode())
            os._exit(NOT_EXECUTABLE)
    return pid


def _become(options: argparse.Namespace, output: int) -> None:
    # A session of its own: a trainer that signals its process group does not meet us in it.
    os.setsid()
    for number in (*HANDLED, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if options.cpus:
        os.sched_setaffinity(0, {int(one) for one in options.cpus.split(",")})
    for limit in options.rlimit:
        _limit(*limit.split("="))
    with contextlib.suppress(OSError):
        # When memory runs out, this goes before the daemon.
        _write("/proc/self/oom_score_adj", b"500")
    os.execvp(options.command[0], options.command)  # noqa: S606 - what we are for


def _limit(name: str, wanted: str) -> None:
    kind = getattr(resource, f"RLIMIT_{name.upper()}")
    _, hard = resource.getrlimit(kind)
    value = resource.RLIM_INFINITY if int(wanted) < 0 else int(wanted)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (value, value))
        return
    resource.setrlimit(kind, (hard, hard))


def _start() -> dict[str, object]:
    return {"at": time.time(), "pid": os.getpid(), "boot": boot_id()}


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _sign(lock: int) -> None:
    """Say who holds the lock; the number alone may be another process's one day."""
    os.set_inheritable(lock, False)
    ticks = next(process.started for process in _processes() if process.pid == os.getpid())
    os.pwrite(lock, json.dumps({"pid": os.getpid(), "started": ticks, "boot": boot_id()}).encode(), 0)
    os.fsync(lock)


def _record(folder: int, name: str, content: dict[str, object]) -> None:
    _write_new(folder, f".{name}.part", json.dumps(content).encode())
    os.rename(f".{name}.part", name, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)


def _reserve(folder: int) -> int:
    return _write_new(folder, RESERVED, b" " * RESERVED_BYTES)


def _finish(folder: int, reserved: int, content: dict[str, object]) -> None:
    os.pwrite(reserved, json.dumps(content).encode().ljust(RESERVED_BYTES), 0)
    os.fsync(reserved)
    os.rename(RESERVED, EXIT, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)


def _write_new(folder: int, name: str, content: bytes) -> int:
    """A file that nobody else made, on disk; its descriptor, which stays open."""
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


def _oom_kills(files: list[str]) -> int:
    """How often the kernel killed something of this cgroup for memory."""
    found = 0
    for path in files:
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            found += sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    return found


class _Process:
    __slots__ = ("name", "parent", "pid", "started")

    def __init__(self, pid: int, name: str, parent: int, started: int) -> None:
        self.pid, self.name, self.parent, self.started = pid, name, parent, started


def _processes() -> Iterator[_Process]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{entry}/stat", "rb") as file:
                # The name stands in brackets, and may hold brackets and blanks itself.
                head, _, tail = file.read().decode(errors="replace").rpartition(") ")
                fields = tail.split()
                yield _Process(int(entry), head.partition("(")[2], int(fields[1]), int(fields[19]))


def _descendants(root: int) -> list[_Process]:
    children: dict[int, list[_Process]] = {}
    for process in _processes():
        children.setdefault(process.parent, []).append(process)
    found, look = [], [root]
    while look:
        below = children.get(look.pop(), [])
        found += below
        look += [process.pid for process in below]
    return found


def _trainer(pid: int) -> int | None:
    """The command itself: below the sandbox's own processes, where there is one."""
    names = {process.pid: process for process in _descendants(os.getpid())}
    while pid in names and names[pid].name == SANDBOX:
        below = [process.pid for process in names.values() if process.parent == pid]
        if not below:
            return None
        pid = min(below)
    return pid


def _ask_for_stacks() -> None:
    """SIGUSR1 to those that handle it: it would end the others."""
    for process in _descendants(os.getpid()):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{process.pid}/status") as file:
            caught = next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt:"))
            if caught >> (signal.SIGUSR1 - 1) & 1:
                os.kill(process.pid, signal.SIGUSR1)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main())
