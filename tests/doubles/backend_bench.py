"""A bench for backends: a data directory, runs in it, and waiting for their ends."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from miner.backends.base import AttemptSpec, Backend, Mount, RunPhase, RunStatus
from miner.backends.registry import BackendContext, build_here
from miner.backends.run_folder import log_tail
from miner.dev.stack import with_constants
from miner.settings import BackendKind, Settings, load_settings
from tests.doubles.base_image import PYTHON

#: Less than the payloads sleep: what should be ended must not have ended by itself.
WAIT_S = 90.0
#: Most processes of a training: enough for each test, and few enough to see a fork bomb end.
PROCESSES = 256
_counter = itertools.count(1)


@dataclass
class Run:
    spec: AttemptSpec
    ref: str = ""

    @property
    def dir(self) -> Path:
        return self.spec.run_dir

    def file(self, name: str) -> str:
        path = self.dir / name
        return path.read_text() if path.exists() else ""

    @property
    def log(self) -> str:
        return log_tail(self.dir, 1 << 20)


@dataclass
class BackendBench:
    """One backend on a data folder of its own; `kind` is what the test was parametrised with."""

    kind: str
    settings: Settings
    build: Callable[[], Backend]
    backend: Backend
    #: Whether runs see nothing but what they were given.
    closed: bool
    processes: int = PROCESSES
    runs: list[Run] = field(default_factory=list)

    @property
    def data_dir(self) -> Path:
        return self.settings.data_dir

    def spec(self, *argv: str, **more: Any) -> AttemptSpec:
        number = next(_counter)
        run_dir = self.data_dir / "jobs" / str(number) / "attempt_1"
        run_dir.mkdir(parents=True)
        labels = {"job": str(number), "attempt": "1"}
        return AttemptSpec(
            **{
                "key": f"gm-{os.getpid()}-{number}-1",
                "argv": argv,
                "run_dir": run_dir,
                "labels": labels,
                **more,
            }
        )

    def code(self, text: str, **more: Any) -> AttemptSpec:
        return self.spec("python", "-c", text, **more)

    async def submit(self, spec: AttemptSpec) -> Run:
        run = Run(spec)
        self.runs.append(run)
        run.ref = await self.backend.submit(spec)
        return run

    async def status(self, run: Run) -> RunStatus:
        return await self.backend.poll(run.ref, run.dir)

    async def end_of(self, run: Run, limit_s: float = WAIT_S) -> RunStatus:
        ends = time.monotonic() + limit_s
        while (status := await self.status(run)).phase in (RunPhase.RUNNING, RunPhase.QUEUED):
            assert time.monotonic() < ends, f"{run.spec.key} still runs; its log: {run.log}"
            await asyncio.sleep(0.02)
        return status

    async def play(self, text: str, **more: Any) -> tuple[Run, RunStatus]:
        """A run of this Python code, to its end."""
        run = await self.submit(self.code(text, **more))
        return run, await self.end_of(run)

    async def said(self, run: Run, name: str, limit_s: float = WAIT_S) -> str:
        """The content of a file that the run writes, once there is some."""
        ends = time.monotonic() + limit_s
        while not (text := run.file(name)):
            assert time.monotonic() < ends, f"{name} was not written; the log: {run.log}"
            await asyncio.sleep(0.01)
        return text

    def again(self) -> Backend:
        """The backend of a daemon that was restarted on the same data directory."""
        self.backend = self.build()
        return self.backend

    def require_limits(self) -> None:
        if self.kind == "slurm":
            pytest.skip("a Slurm without cgroups, which need a machine to themselves, limits no memory")
        if self.kind != "docker" and self.backend._cgroups is None:  # type: ignore[attr-defined]
            pytest.skip("no cgroups with limits can be made here")

    async def clear(self) -> None:
        for run in self.runs:
            if run.ref:
                await self.backend.stop(run.ref, force=True)
                await self.end_of(run)
                await self.backend.remove(run.ref)
        await self.backend.close()


def quick_backend(
    settings: Settings, kind: BackendKind, *, poll_s: float = 0.2, processes: int = PROCESSES
) -> Backend:
    """Build a backend that asks Slurm more often and allows fewer processes."""
    constants = {"slurm.backend.POLL_S": poll_s, "registry.MAX_PROCESSES": processes}
    with with_constants({f"miner.backends.{name}": value for name, value in constants.items()}):
        return build_here(settings, kind)


def process_bench(data_dir: Path, *, sandbox: bool, **more: Any) -> BackendBench:
    given = {"trainer_python": PYTHON, "trainer_sandbox": "auto" if sandbox else "off"}
    settings = bench_settings(data_dir, **given, trainer_uid=own_uid(data_dir), **more)
    label = "sandboxed process" if sandbox else "process"
    return bench_on(label, settings, BackendKind.PROCESS, closed=sandbox)


def docker_bench(data_dir: Path, host: str, image: str, **more: Any) -> BackendBench:
    settings = bench_settings(data_dir, docker_host=host, trainer_text_image=image, **more)
    return bench_on("docker", settings, BackendKind.DOCKER, closed=True)


def slurm_bench(
    data_dir: Path, commands: Path, *, poll_s: float = 0.2, processes: int = PROCESSES, **more: Any
) -> BackendBench:
    given = {"trainer_python": PYTHON, "slurm_bin_dir": commands, **more}
    settings = bench_settings(data_dir, trainer_uid=own_uid(data_dir), **given)
    return bench_on("slurm", settings, BackendKind.SLURM, poll_s=poll_s, processes=processes)


def bench_on(
    label: str, settings: Settings, kind: BackendKind, closed: bool | None = None, **constants: Any
) -> BackendBench:
    build = partial(quick_backend, settings, kind, **constants)
    backend = build()
    return BackendBench(label, settings, build, backend, backend.can_sandbox if closed is None else closed)


def context_in(folder: Path, **changes: Any) -> BackendContext:
    """What backends share, for one that a test builds itself."""
    return replace(BackendContext("feed", folder, str, (), {}, 100, None), **changes)


def own_uid(data_dir: Path) -> int:
    """A user for each bench. The kernel counts processes by user: a fork bomb of one test must not take them
    from another."""
    return 100_000 + zlib.crc32(str(data_dir).encode()) % 1_000_000


def bench_settings(data_dir: Path, **more: Any) -> Settings:
    # Limits that no test machine forbids.
    given: dict[str, Any] = {"trainer_ulimits": "core=0", **more}
    return load_settings(env={}, env_file=None, data_dir=data_dir, **given)


def shown(path: Path) -> Mount:
    return Mount(path, read_only=True)
