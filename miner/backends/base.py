"""The interface of a backend: whatever runs an attempt.

Rules that every backend keeps:

- `submit` is idempotent on the key. A key is used once: a new attempt has a new one.
- A backend that does not answer raises `BackendUnreachable`, which never changes a job's state.
- The wrapper (`core.system.wrapper`) runs the command and records start and exit in the run directory, so
  that an end is known after the backend has forgotten it.
- Logs and progress are files in the run directory, and are never read through the backend.
- GPU ids are the fleet's. A backend for other machines needs a `miner.fleet.sources.GpuSource` for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from core.domain.choices import Engine
from core.domain.errors import GodMinerError

#: Written by the wrapper in the run folder: {"at": …, "pid": …} and {"at": …, "code": …}.
START_FILE = "start.json"
EXIT_FILE = "exit.json"
#: Written by the backend when `stop` is called, so that a requested end is known as one for ever.
STOP_RECORD_FILE = "stop-asked.json"

#: The image that each engine is in, by its short name.
IMAGE_OF: Mapping[Engine, str] = {
    Engine.AXOLOTL: "text",
    Engine.NATIVE: "text",
    Engine.KOHYA: "image",
    Engine.AI_TOOLKIT: "toolkit",
}


class BackendRejected(GodMinerError):
    """The backend understood and refuses: repeating the call does not help."""

    code = "backend_rejected"


class BackendUnreachable(GodMinerError):
    """The backend did not answer: nothing is known, nothing changes, try again later."""

    code = "backend_unreachable"


class BackendDiskFull(BackendUnreachable):
    """A disk of the backend's own is full: try again when there is space."""

    code = "backend_disk_full"


class RunPhase(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"
    #: Unknown to the backend, and no exit was recorded.
    LOST = "lost"


class EndCause(StrEnum):
    """The cause of an end as far as the backend can tell; the trainer's result file knows better."""

    OK = "ok"
    FAILED = "failed"
    #: By `stop`.
    STOPPED = "stopped"
    #: By a signal that `stop` did not send: from a restart of the backend, somebody else or the kernel.
    KILLED = "killed"
    #: By `AttemptSpec.timeout_s`.
    TIMEOUT = "timeout"
    #: The machine was restarted or failed.
    NODE_FAIL = "node-fail"
    #: A cluster's scheduler gave the machine to a job of higher priority.
    PREEMPTED = "preempted"
    #: Somebody else cancelled it in the cluster's scheduler.
    CANCELLED = "cancelled"
    #: It never started: the machine could not start it (its prolog, its shared directory, its GPUs), or the
    #: scheduler did not in time. Best tried on another machine.
    NOT_STARTED = "not-started"
    #: Host memory, not the GPU's.
    OOM_KILLED = "oom-killed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Mount:
    """A path of the host, visible to the training at the same path: written commands run in both places."""

    path: Path
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class AttemptSpec:
    """One attempt. Nothing in it is secret: anyone who may ask a backend can read it."""

    #: Never used twice, and the name in the backend: letters, digits and dashes.
    key: str
    #: `argv[0]` may be "python": the backend puts the training environment's interpreter there.
    argv: tuple[str, ...]
    #: The attempt's directory: working directory, log, start and exit records. Writable.
    run_dir: Path
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    #: GPU ids as the fleet names them; empty for a run on the CPU, which gets no device request at all.
    gpus: tuple[str, ...] = ()
    #: The cluster's nodes to run on, one task each; empty: this machine.
    nodes: tuple[str, ...] = ()
    memory_bytes: int | None = None
    shm_bytes: int | None = None
    #: As docker's cpuset: "0-63".
    cpus: str | None = None
    #: It runs hostile code (reward functions): a backend without a sandbox must reject it.
    hostile: bool = False
    #: What the profile asks of the cluster's scheduler for this task.
    cluster: Mapping[str, str] = field(default_factory=dict)
    #: Which of our images, by its short name: "text", "image" or "toolkit".
    image: str = "text"
    #: The backend ends it after this long, as a last resort: the deadline is the daemon's.
    timeout_s: float | None = None
    #: Time for which the cluster's scheduler leaves the machine to us, or None if no end is known. It starts
    #: nothing that may take longer.
    free_s: float | None = None
    #: Shown beside the run in the backend's own listings: job and attempt.
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunStatus:
    phase: RunPhase
    why: EndCause | None = None
    code: int | None = None
    started_at: float | None = None
    ended_at: float | None = None
    #: For people: the node, the backend's message.
    detail: str = ""
    #: Where it runs, or ran, as a cluster's scheduler names it: "n1", "n[1-2]".
    node: str = ""


class BackendRun(NamedTuple):
    key: str
    ref: str
    run_dir: Path | None


class Backend(Protocol):
    """A backend, which runs attempts.

    Calls may take seconds, and do not block the event loop. All may raise `BackendUnreachable`; only `submit`
    raises `BackendRejected`.
    """

    @property
    def name(self) -> str: ...

    @property
    def can_sandbox(self) -> bool:
        """True if it takes hostile runs. Fixed at the start: every decision on an offer reads it."""

    async def submit(self, spec: AttemptSpec) -> str:
        """Start it, or find it started; return the backend's reference. Safe to repeat."""

    async def find(self, key: str) -> str | None:
        """Return a key's reference, to reattach and after a `submit` that timed out.

        None if the key is unknown, or was prepared but never started; `submit` goes on from there.
        """

    async def poll(self, ref: str, run_dir: Path) -> RunStatus: ...

    async def stop(self, ref: str, *, force: bool = False) -> None:
        """Ask it to end (SIGTERM to the trainer), or kill it. Safe to repeat; `poll` says when it is over."""

    async def dump_stacks(self, ref: str) -> None:
        """Have the trainer write its stacks to its log (SIGUSR1 to all its processes)."""

    async def remove(self, ref: str) -> None:
        """Delete an ended run in the backend. Safe to repeat; files stay. One that goes on is left alone."""

    async def missing_images(self) -> Mapping[str, str]:
        """The images, by their short names, that could not be started now, and why."""

    async def identity(self, image: str) -> str:
        """Name what would be started for this image now: it changes with the build or the interpreter."""

    async def list_runs(self) -> list[BackendRun]:
        """Every run of this data directory that the backend knows: prepared, running or ended."""

    async def close(self) -> None: ...
