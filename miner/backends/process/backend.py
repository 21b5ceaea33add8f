"""Run attempts as local processes.

A run's reference is its key; what is known of it lies in the run registry.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from core.domain.cores import cores_in
from core.system import wrapper
from miner.backends import ownership
from miner.backends.base import (
    AttemptSpec,
    BackendRejected,
    BackendRun,
    BackendUnreachable,
    RunPhase,
    RunStatus,
)
from miner.backends.environment import TOOLS, TrainingEnvironment
from miner.backends.preflight import check_spec, gpus_of, hand_over_files, mounts_of
from miner.backends.process import cgroups
from miner.backends.process.cgroups import Cgroups
from miner.backends.process.run_registry import ERRORS_FILE, RunRegistry
from miner.backends.registry import BackendContext
from miner.backends.run_folder import end_status, read_start, write_stop_record
from miner.support.background import run_in_thread

log = logging.getLogger(__name__)

T = TypeVar("T")

CALL_S = 60.0
#: Time limits: from the start of the wrapper to its signature, and from a forced stop to its end.
SIGN_S, FORCE_S = 15.0, 5.0
#: Where the lock is to be found by the wrapper.
LOCK_FD = 3
#: The only variables of ours that a run gets: where the driver's libraries are, locale and time zone.
#: Anything else may be a token.
PASSED_ON = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "LANG", "LC_ALL", "TZ")
_SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ProcessBackend:
    name = "process"

    def __init__(
        self,
        context: BackendContext,
        environment: TrainingEnvironment,
        registry: RunRegistry,
        limits: Cgroups | None,
    ) -> None:
        self._context = context
        self._environment = environment
        self._registry = registry
        self._cgroups = limits
        self._ulimits = {"nofile": 1 << 20, **context.ulimits}
        #: Checking a run's lock takes it for a moment, which a start must not mistake for a run.
        self._lock = threading.Lock()
        #: Our own children, to wait for; those of an earlier daemon are init's.
        self._children: set[int] = set()

    @property
    def can_sandbox(self) -> bool:
        return self._environment.sandbox is not None

    async def submit(self, spec: AttemptSpec) -> str:
        return await self._in_thread("submit", self._submit, spec)

    async def find(self, key: str) -> str | None:
        return await self._in_thread("find", self._find, key)

    async def poll(self, ref: str, run_dir: Path) -> RunStatus:
        return await self._in_thread("poll", self._poll, ref, run_dir)

    async def stop(self, ref: str, *, force: bool = False) -> None:
        await self._in_thread("stop", self._stop, ref, force)

    async def dump_stacks(self, ref: str) -> None:
        await self._in_thread("dump", self._signal, ref, signal.SIGUSR1)

    async def remove(self, ref: str) -> None:
        await self._in_thread("remove", self._remove, ref)

    async def missing_images(self) -> Mapping[str, str]:
        return await self._in_thread("check its images", self._missing_images)

    async def identity(self, image: str) -> str:
        return await self._in_thread("identify itself", self._identity)

    async def list_runs(self) -> list[BackendRun]:
        return await self._in_thread("list", self._listed)

    async def close(self) -> None:
        """Nothing to close: runs go on."""

    async def _in_thread(self, what: str, call: Callable[..., T], *arguments: object) -> T:
        def alone() -> T:
            with self._lock:
                return call(*arguments)

        try:
            return await run_in_thread(alone, CALL_S, f"process {what}")
        except (TimeoutError, OSError) as error:
            raise BackendUnreachable(f"the process backend could not {what}: {error}") from None

    def _submit(self, spec: AttemptSpec) -> str:
        check_spec(spec, self._context.redact, self._context.trusted)
        if self._known(spec.key):
            return spec.key
        sandbox = self._environment.sandbox
        if spec.hostile and sandbox is None:
            why = self._environment.why_no_sandbox
            raise BackendRejected(f"{spec.key!r} runs third-party code, and there is no sandbox: {why}")
        if sandbox is not None and sandbox.uid is not None:
            hand_over_files(spec, mounts_of(spec), sandbox.uid, self._context.trusted)
        groups = self._groups(spec)
        # Recorded before it starts: after a crash, the next daemon must find what to remove.
        self._registry.write(spec.key, spec.run_dir, spec.labels, groups)
        lock = self._registry.take_lock(spec.key)
        if lock is None:
            return spec.key
        try:
            pid = self._spawn(spec, groups, lock)
        finally:
            # From here on the wrapper has it.
            os.close(lock)
        self._children.add(pid)
        self._await_signature(spec.key, pid)
        return spec.key

    def _groups(self, spec: AttemptSpec) -> tuple[Path, ...]:
        if self._cgroups is None:
            return ()
        return self._cgroups.make(
            f"god-miner-{self._context.data_id}-{spec.key}", spec.memory_bytes, self._context.processes
        )

    def _spawn(self, spec: AttemptSpec, groups: tuple[Path, ...], lock: int) -> int:
        sandbox, mark = self._environment.sandbox, self._mark(spec.key)
        python = str(self._environment.interpreter.path)
        argv = [python if spec.argv[0] == "python" else spec.argv[0], *spec.argv[1:]]
        command = wrapper_command(
            spec,
            sandbox.command(spec, argv) if sandbox else argv,
            ulimits=self._ulimits,
            cgroups=groups,
            oom_files=self._cgroups.oom_files(groups) if self._cgroups else (),
        )
        home = "/tmp" if sandbox else str(spec.run_dir)  # noqa: S108 - the sandbox's own
        errors = str(self._registry.directory(spec.key) / ERRORS_FILE)
        return os.posix_spawn(
            sys.executable,
            command,
            process_environment(spec, self._environment.interpreter.path, self._environment.code, mark, home),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
                (os.POSIX_SPAWN_DUP2, lock, LOCK_FD),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),
        )

    def _await_signature(self, key: str, pid: int) -> None:
        """Wait for the wrapper's start; a failed one is reported here, not later as a lost run. One that a
        signal ended, for example for lack of memory, is no fault of the run: it counts as lost."""
        ends = time.monotonic() + SIGN_S
        while not self._registry.was_started(key):
            if not self._registry.is_alive(key):
                self._children.discard(pid)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if code < 0:
                    log.warning("run %s was ended by %s while it started", key, signal.Signals(-code).name)
                    self._registry.sign_for_lost(key)
                    return
                why = self._registry.errors(key) or "without a message"
                self._forget(key)
                raise BackendRejected(f"{key!r} could not be started: {why}")
            if time.monotonic() > ends:
                raise BackendUnreachable(f"{key!r} has been starting for {SIGN_S:g} s")
            time.sleep(0.005)

    def _missing_images(self) -> Mapping[str, str]:
        if not self._environment.interpreter.path.exists():
            why = f"{self._environment.interpreter.path} no longer exists"
            return dict.fromkeys(("text", *TOOLS), why)
        need = "such pictures need Docker and its image"
        missing = {}
        for short, path in TOOLS.items():
            if not path.is_dir():
                missing[short] = f"there is no {path} here: {need}"
            elif self._environment.sandbox is not None and not self._environment.sandbox.shows(path):
                missing[short] = f"{path} is not visible in the sandbox: {need}"
        return missing

    def _identity(self) -> str:
        """The interpreter and our own code: an upgrade of that may need other packages."""
        packages = (path.resolve() for path in sorted(self._environment.code.iterdir()))
        changed = [file.stat().st_mtime_ns for package in packages for file in package.rglob("*.py")]
        return f"{self._environment.interpreter.identity()} code {len(changed)}@{max(changed, default=0)}"

    def _listed(self) -> list[BackendRun]:
        keys = list(self._registry.keys())
        return [BackendRun(key, key, self._registry.run_dir(key)) for key in keys]

    def _find(self, key: str) -> str | None:
        return key if self._known(key) else None

    def _known(self, key: str) -> bool:
        """Return True if it was ever started, or is being started."""
        return self._registry.was_started(key) or self._registry.is_alive(key)

    def _poll(self, key: str, run_dir: Path) -> RunStatus:
        if self._registry.is_alive(key):
            start = read_start(run_dir)
            return RunStatus(RunPhase.RUNNING, started_at=start.at if start else None)
        self._collect()
        self._kill_marked(key)
        return end_status(run_dir)

    def _stop(self, key: str, force: bool) -> None:
        if not self._registry.is_alive(key):
            return
        run_dir = self._registry.run_dir(key)
        if run_dir is not None:
            write_stop_record(run_dir, force=force)
        # SIGQUIT: the wrapper kills all that it started, and records the end.
        self._signal(key, signal.SIGQUIT if force else signal.SIGTERM)
        if force and not self._ends_within(key, FORCE_S):
            self._signal(key, signal.SIGKILL)
            self._ends_within(key, FORCE_S)
            self._kill_marked(key)

    def _ends_within(self, key: str, seconds: float) -> bool:
        ends = time.monotonic() + seconds
        while self._registry.is_alive(key):
            if time.monotonic() > ends:
                return False
            time.sleep(0.02)
        return True

    def _signal(self, key: str, number: signal.Signals) -> None:
        lock_holder = self._registry.lock_holder(key) if self._registry.is_alive(key) else None
        if lock_holder is None:
            return
        with contextlib.suppress(ProcessLookupError):
            # The descriptor stays with its process, even if the process id is used again.
            process = os.pidfd_open(lock_holder.pid)
            try:
                if _started(lock_holder.pid) == lock_holder.started:
                    signal.pidfd_send_signal(process, number)
            finally:
                os.close(process)

    def _remove(self, key: str) -> None:
        if self._registry.is_alive(key):
            log.debug("run %s goes on and is left alone", key)
            return
        self._collect()
        self._kill_marked(key)
        self._forget(key)

    def _forget(self, key: str) -> None:
        cgroups.remove(self._registry.cgroups(key))
        self._registry.forget(key)

    def _kill_marked(self, key: str) -> None:
        cgroups.kill(self._registry.cgroups(key))
        left = ownership.kill_marked(self._mark(key))
        if left:
            log.warning("run %s: %d processes outlived it and were killed", key, left)

    def _collect(self) -> None:
        for pid in tuple(self._children):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            self._children.discard(pid)

    def _mark(self, key: str) -> str:
        return ownership.run_mark(self._context.data_id, key)


def _started(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(") ")[2].split()[19])


def wrapper_command(
    spec: AttemptSpec,
    argv: Sequence[str],
    *,
    ulimits: Mapping[str, int],
    cgroups: Sequence[Path] = (),
    oom_files: Sequence[Path] = (),
) -> list[str]:
    options = ["--dir", str(spec.run_dir), "--lock-fd", str(LOCK_FD)]
    for cgroup in cgroups:
        options += ["--cgroup", str(cgroup)]
    for file in oom_files:
        options += ["--oom-file", str(file)]
    for name, value in ulimits.items():
        options += ["--rlimit", f"{name}={value}"]
    cores = cores_of(spec.cpus)
    if cores:
        options += ["--cpus", ",".join(map(str, cores))]
    if spec.timeout_s is not None:
        options += ["--limit-s", f"{spec.timeout_s:g}"]
    return [sys.executable, "-I", "-S", wrapper.__file__, *options, "--", *argv]


def process_environment(spec: AttemptSpec, python: Path, code: Path, mark: str, home: str) -> dict[str, str]:
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {
        "PATH": f"{python.parent}:{_SEARCH_PATH}",
        "LANG": "C.UTF-8",
        "HOME": home,
        "USER": "trainer",
        "LOGNAME": "trainer",
        "PYTHONPATH": str(code),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONFAULTHANDLER": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        **passed_on,
        **spec.env,
        # Last: these decide what it may use, and how it is found.
        "CUDA_VISIBLE_DEVICES": ",".join(gpus_of(spec)),
        ownership.MARK_VARIABLE: mark,
    }


def cores_of(cpus: str | None) -> list[int]:
    """The cores of `0-31,64` that this process may use; empty without a choice."""
    return sorted(cores_in(cpus or "") & os.sched_getaffinity(0))
