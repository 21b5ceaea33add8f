"""The one small interface to whatever runs an attempt.

Rules that every engine keeps: `submit` is idempotent on the key; a key is used once (a new attempt has a new
one); an engine that cannot be asked raises `Unreachable`, which never changes a job's state; the wrapper in
the run folder records start and exit, so that an end is known after the engine has forgotten it. Logs and
progress are files in the run folder and never read through the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from core.choices import Engine as TrainingEngine
from core.errors import GodMinerError

#: Written by the wrapper in the run folder: {"at": …, "pid": …} and {"at": …, "code": …}.
START_FILE = "start.json"
EXIT_FILE = "exit.json"
#: Written by the engine when `stop` is called, so that an end that was asked for is known as one for ever.
ASKED_FILE = "stop-asked.json"


#: The image that trains with it, by its short name.
IMAGE_OF: Mapping[TrainingEngine, str] = {
    TrainingEngine.AXOLOTL: "text",
    TrainingEngine.NATIVE: "text",
    TrainingEngine.KOHYA: "image",
    TrainingEngine.AI_TOOLKIT: "toolkit",
}


class Rejected(GodMinerError):
    """The engine understood and will not do it: asking again is no use."""

    code = "engine_rejected"


class Unreachable(GodMinerError):
    """The engine did not answer: nothing is known, nothing changes, ask again later."""

    code = "engine_unreachable"


class NoSpace(Unreachable):
    """A disk of the engine's own is full: ask again when there is room."""

    code = "engine_disk_full"


class Phase(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"
    #: The engine does not know it (any more) and no exit was recorded.
    LOST = "lost"


class Why(StrEnum):
    """How it ended, as far as the engine can tell; the trainer's result file knows better."""

    OK = "ok"
    FAILED = "failed"
    #: By `stop`.
    STOPPED = "stopped"
    #: By a signal that `stop` did not send: the engine was restarted, somebody else ended it, or the kernel.
    KILLED = "killed"
    #: By `EngineSpec.limit_s`.
    TIMEOUT = "timeout"
    #: The machine was restarted or failed.
    NODE_FAIL = "node-fail"
    #: Host memory, not the GPU's.
    OOM_KILLED = "oom-killed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Mount:
    """A path of the host, seen at the same path by the training: what is written down runs anywhere."""

    path: Path
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One attempt. Nothing in it is secret: engines show it to whoever asks them."""

    #: Unique for ever and the engine-side name: letters, digits and dashes.
    key: str
    #: `argv[0]` may be "python": the engine puts the training environment's interpreter there.
    argv: tuple[str, ...]
    #: The attempt's folder: working directory, log, start and exit records. Writable.
    run_dir: Path
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    #: GPU ids as the fleet names them; empty for a run on the CPU, which gets no device request at all.
    gpus: tuple[str, ...] = ()
    memory_bytes: int | None = None
    shm_bytes: int | None = None
    #: As docker's cpuset: "0-63".
    cpus: str | None = None
    #: Hostile code is on board (reward functions): an engine without a sandbox must reject.
    hostile: bool = False
    #: Which of our images, by its short name: "text", "image" or "toolkit".
    image: str = "text"
    #: The engine's own backstop; the deadline is the daemon's.
    limit_s: float | None = None
    #: Shown beside the run: job and attempt.
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Status:
    phase: Phase
    why: Why | None = None
    code: int | None = None
    started_at: float | None = None
    ended_at: float | None = None
    #: For people: the node, the engine's own words.
    detail: str = ""


class Found(NamedTuple):
    key: str
    ref: str
    run_dir: Path | None


class Engine(Protocol):
    """Calls may take seconds and run off the event loop inside the engine. All methods may raise
    `Unreachable`; only `submit` raises `Rejected`."""

    @property
    def name(self) -> str: ...

    @property
    def can_sandbox(self) -> bool:
        """Whether it takes hostile runs. Known from the start, and no call: policies ask on every offer."""

    async def submit(self, spec: EngineSpec) -> str:
        """Start it, or find it started: the engine's reference. Calling it again is always right."""

    async def find(self, key: str) -> str | None:
        """The reference of a key: reattach, and "was my timed-out submit accepted?". None also for what was
        prepared but never started; `submit` goes on from there."""

    async def poll(self, ref: str, run_dir: Path) -> Status: ...

    async def stop(self, ref: str, *, force: bool = False) -> None:
        """Ask it to end (SIGTERM to the trainer), or end it. Safe to repeat; `poll` tells when it is over."""

    async def dump_stacks(self, ref: str) -> None:
        """Ask the trainer to write where it hangs into its log (SIGUSR1 to all its processes)."""

    async def remove(self, ref: str) -> None:
        """Forget an ended run in the engine. Safe to repeat; files stay. What still runs is left alone."""

    async def lacks(self) -> Mapping[str, str]:
        """Which images, by their short names, could not be started now, and why."""

    async def identity(self, image: str) -> str:
        """What would be started for this image now: another text when it is another build or interpreter."""

    async def ours(self) -> list[Found]:
        """Everything of this data folder that the engine knows: prepared, running or ended."""

    async def close(self) -> None: ...
