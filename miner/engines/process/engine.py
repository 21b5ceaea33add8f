"""The engine itself. A run's reference is its key; what is known of it lies in the book."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from miner.engines import remains
from miner.engines.aside import aside
from miner.engines.base import EngineSpec, Found, Phase, Rejected, Status, Unreachable
from miner.engines.checks import check, mounts_of
from miner.engines.handover import hand_over
from miner.engines.outcome import ended
from miner.engines.process import cgroups, launch
from miner.engines.process.book import ERRORS, Book
from miner.engines.process.cgroups import Cgroups
from miner.engines.process.interpreter import Interpreter
from miner.engines.process.sandbox import Sandbox
from miner.engines.records import read_start, write_asked

log = logging.getLogger(__name__)

T = TypeVar("T")

CALL_S = 60.0
#: What images for pictures hold beside the trainer, where it looks for it.
TOOLS = {"image": Path("/app/sd-scripts"), "toolkit": Path("/app/ai-toolkit")}
#: From the start of the wrapper to its signature, and from a forced stop to its end.
SIGN_S, FORCE_S = 15.0, 5.0


class ProcessEngine:
    name = "process"

    def __init__(
        self,
        book: Book,
        data_id: str,
        interpreter: Interpreter,
        *,
        code: Path,
        sandbox: Sandbox | None,
        why_no_sandbox: str,
        limits: Cgroups | None,
        redact: Callable[[str], str],
        trusted: tuple[Path, ...],
        ulimits: Mapping[str, int],
        pids: int,
    ) -> None:
        self._book = book
        self._data_id = data_id
        self._interpreter = interpreter
        self._code = code
        self._sandbox = sandbox
        self._why_no_sandbox = why_no_sandbox
        self._cgroups = limits
        self._redact = redact
        self._trusted = trusted
        self._ulimits = ulimits
        self._pids = pids
        #: Looking at a lock takes it for a moment, which starting must not mistake for a run.
        self._lock = threading.Lock()
        #: Ours to collect once they ended; those of an earlier daemon are init's.
        self._children: set[int] = set()

    @property
    def can_sandbox(self) -> bool:
        return self._sandbox is not None

    async def submit(self, spec: EngineSpec) -> str:
        return await self._aside(lambda: self._submit(spec), "submit")

    async def find(self, key: str) -> str | None:
        return await self._aside(lambda: key if self._known(key) else None, "find")

    async def poll(self, ref: str, run_dir: Path) -> Status:
        return await self._aside(lambda: self._poll(ref, run_dir), "poll")

    async def stop(self, ref: str, *, force: bool = False) -> None:
        await self._aside(lambda: self._stop(ref, force), "stop")

    async def dump_stacks(self, ref: str) -> None:
        await self._aside(lambda: self._signal(ref, signal.SIGUSR1), "dump")

    async def remove(self, ref: str) -> None:
        await self._aside(lambda: self._remove(ref), "remove")

    async def lacks(self) -> Mapping[str, str]:
        return await self._aside(self._lacking, "look")

    async def identity(self, image: str) -> str:
        return await self._aside(self._identity, "look")

    async def ours(self) -> list[Found]:
        return await self._aside(self._listed, "list")

    async def close(self) -> None:
        """Runs go on."""

    async def _aside(self, call: Callable[[], T], what: str) -> T:
        def alone() -> T:
            with self._lock:
                return call()

        try:
            return await aside(alone, CALL_S, f"process {what}")
        except (TimeoutError, OSError) as error:
            raise Unreachable(f"the process engine could not {what}: {error}") from None

    def _submit(self, spec: EngineSpec) -> str:
        check(spec, self._redact, self._trusted)
        if self._known(spec.key):
            return spec.key
        if spec.hostile and self._sandbox is None:
            raise Rejected(
                f"{spec.key!r} runs code of strangers and there is no sandbox: {self._why_no_sandbox}"
            )
        if self._sandbox is not None and self._sandbox.uid is not None:
            hand_over(spec, mounts_of(spec), self._sandbox.uid, self._trusted)
        groups = self._groups(spec)
        # Noted before it starts: whoever comes next must find what there is to clear away.
        self._book.write(spec.key, spec.run_dir, spec.labels, groups)
        lock = self._book.locked(spec.key)
        if lock is None:
            return spec.key
        try:
            pid = self._spawn(spec, groups, lock)
        finally:
            # From here on the wrapper holds it.
            os.close(lock)
        self._children.add(pid)
        self._await_signature(spec.key)
        return spec.key

    def _groups(self, spec: EngineSpec) -> tuple[Path, ...]:
        if self._cgroups is None:
            return ()
        return self._cgroups.make(f"god-miner-{self._data_id}-{spec.key}", spec.memory_bytes, self._pids)

    def _spawn(self, spec: EngineSpec, groups: tuple[Path, ...], lock: int) -> int:
        sandbox, mark = self._sandbox, self._mark(spec.key)
        python = str(self._interpreter.path)
        argv = [python if spec.argv[0] == "python" else spec.argv[0], *spec.argv[1:]]
        command = launch.command(
            spec,
            sandbox.command(spec, argv) if sandbox else argv,
            ulimits=self._ulimits,
            cgroups=groups,
            oom_files=self._cgroups.oom_files(groups) if self._cgroups else (),
        )
        home = "/tmp" if sandbox else str(spec.run_dir)  # noqa: S108 - the sandbox's own
        errors = str(self._book.place(spec.key) / ERRORS)
        return os.posix_spawn(
            sys.executable,
            command,
            launch.environment(spec, self._interpreter.path, self._code, mark, home),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
                (os.POSIX_SPAWN_DUP2, lock, launch.LOCK_FD),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),
        )

    def _await_signature(self, key: str) -> None:
        """A wrapper that could not do its work says so here, and not as a run that was lost."""
        ends = time.monotonic() + SIGN_S
        while not self._book.was_started(key):
            if not self._book.lives(key):
                why = self._book.errors(key) or "it said nothing"
                self._forget(key)
                raise Rejected(f"{key!r} could not be started: {why}")
            if time.monotonic() > ends:
                raise Unreachable(f"{key!r} is starting for {SIGN_S:g} s already")
            time.sleep(0.005)

    def _lacking(self) -> Mapping[str, str]:
        if not self._interpreter.path.exists():
            why = f"{self._interpreter.path} is not there any more"
            return dict.fromkeys(("text", *TOOLS), why)
        found = {}
        for short, place in TOOLS.items():
            if not place.is_dir():
                found[short] = f"there is no {place} here: such pictures need Docker and its image"
            elif self._sandbox is not None and not self._sandbox.shows(place):
                found[short] = f"{place} is not seen in the sandbox: such pictures need Docker and its image"
        return found

    def _identity(self) -> str:
        """An upgrade of our own code is another thing to start, too: it may need other packages."""
        packages = (path.resolve() for path in sorted(self._code.iterdir()))
        changed = [file.stat().st_mtime_ns for package in packages for file in package.rglob("*.py")]
        return f"{self._interpreter.identity()} code {len(changed)}@{max(changed, default=0)}"

    def _listed(self) -> list[Found]:
        keys = list(self._book.keys())
        return [Found(key, key, self._book.run_dir(key)) for key in keys]

    def _known(self, key: str) -> bool:
        """Started at some time, or being started."""
        return self._book.was_started(key) or self._book.lives(key)

    def _poll(self, key: str, run_dir: Path) -> Status:
        if self._book.lives(key):
            start = read_start(run_dir)
            return Status(Phase.RUNNING, started_at=start.at if start else None)
        self._collect()
        self._end_remains(key)
        return ended(run_dir)

    def _stop(self, key: str, force: bool) -> None:
        if not self._book.lives(key):
            return
        run_dir = self._book.run_dir(key)
        if run_dir is not None:
            try:
                write_asked(run_dir, force=force)
            except OSError as error:
                log.warning("%s: that it was asked to end could not be noted (%s)", run_dir, error.strerror)
        # SIGQUIT: the wrapper kills all it started, and lives to record the end.
        self._signal(key, signal.SIGQUIT if force else signal.SIGTERM)
        if force and not self._ends_within(key, FORCE_S):
            self._signal(key, signal.SIGKILL)
            self._ends_within(key, FORCE_S)
            self._end_remains(key)

    def _ends_within(self, key: str, seconds: float) -> bool:
        ends = time.monotonic() + seconds
        while self._book.lives(key):
            if time.monotonic() > ends:
                return False
            time.sleep(0.02)
        return True

    def _signal(self, key: str, number: signal.Signals) -> None:
        holder = self._book.holder(key) if self._book.lives(key) else None
        if holder is None:
            return
        with contextlib.suppress(ProcessLookupError):
            # A descriptor stays with its process, whatever happens to the number.
            process = os.pidfd_open(holder.pid)
            try:
                if _started(holder.pid) == holder.started:
                    signal.pidfd_send_signal(process, number)
            finally:
                os.close(process)

    def _remove(self, key: str) -> None:
        if self._book.lives(key):
            log.debug("run %s goes on, and is left alone", key)
            return
        self._collect()
        self._end_remains(key)
        self._forget(key)

    def _forget(self, key: str) -> None:
        cgroups.remove(self._book.cgroups(key))
        self._book.forget(key)

    def _end_remains(self, key: str) -> None:
        cgroups.kill(self._book.cgroups(key))
        left = remains.end(self._mark(key))
        if left:
            log.warning("run %s: %d processes outlived it and were killed", key, left)

    def _collect(self) -> None:
        for pid in tuple(self._children):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            self._children.discard(pid)

    def _mark(self, key: str) -> str:
        return remains.mark(self._data_id, key)


def _started(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(") ")[2].split()[19])
