"""The whole pipeline on a field of real things: a backend, a file server that fails on request, a hub.

Trainings are `payload.py`; what each one does stands in its dataset.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from core.domain.job_states import EndReason, JobState, ProgressCallback, StepFailed
from core.profile.resolve import load_profile
from miner.backends.base import Backend
from miner.inputs.fetch import FetchedInputs, InputsProvider, JobInputs, JobTask
from miner.jobs import launch
from miner.jobs.context import JobServices
from miner.jobs.folder import FinishedJobCleaner
from miner.jobs.manager import JobManager
from miner.jobs.tasks import OPERATOR, read_task_file
from miner.jobs.timeline import JobTimings
from miner.observe.alerts import MINER
from miner.publish import HubPublisher, PublishTarget
from miner.publish.publisher import SubmissionPublisher
from miner.settings import BackendKind, Settings, load_settings
from miner.store import database
from miner.store.attempts import AttemptRow, attempts_of
from miner.store.jobs import JobRow, get_job
from miner.store.store import Store
from tests.core.submission import folders
from tests.doubles.backend_bench import quick_backend
from tests.doubles.base_image import PYTHON
from tests.doubles.flaky import FlakyServer, Reply, Request
from tests.miner.jobs.harness import MemoryHub, MemoryInputs, TrustedBackend, fleet_of

DAEMON = Path(__file__).with_name("daemon.py")
PAYLOAD = Path(__file__).with_name("payload.py").read_text()
TRAINER = ("python", "-c", PAYLOAD)
DATASET = {"field_instruction": "instruct", "field_output": "output"}

#: Everything that waits is scaled down; the order of things stays. What a training is ended for stays long: a
#: disk that others write to may hold one `fsync` up for seconds.
QUICK = JobTimings(
    poll_s=0.05,
    backend_poll_s=0.2,
    pause_s=0.1,
    pause_cap_s=0.5,
    margin_s=2.0,
    grace_s=2.0,
    stall_factor=10.0,
    stall_min_s=20.0,
    start_limit_s=120.0,
    dump_s=2.0,
    attempt_needs_s=1.0,
)

#: A cap, on machines of any speed: what is waited for is there long before, or never.
LIMIT_S = 240.0

#: Of the campaign, which prints it.
SEED = int(os.environ.get("GOD_MINER_SEED", "56"))


class Files(FlakyServer):
    """Datasets by name."""

    def __init__(self) -> None:
        super().__init__()
        self.datasets: dict[str, bytes] = {}

    def answer(self, request: Request) -> Reply:
        content = self.datasets.get(request.path.strip("/").partition("?")[0])
        return Reply(404) if content is None else Reply(200, body=content)


def rows(do: dict[str, Any], count: int = 40) -> bytes:
    sums: list[dict[str, Any]] = [
        {"instruct": f"What is {number} + 1?", "output": f"It is {number + 1}."} for number in range(count)
    ]
    sums[0]["_do"] = do
    return json.dumps(sums).encode()


def base_model(folder: Path) -> Path:
    """A model small enough to be made here, whole enough to be taken for one."""
    files = {
        "model.embed_tokens.weight": folders.bf16(folders.ROWS, 16),
        "model.layers.0.self_attn.q_proj.weight": folders.bf16(16, 16),
    }
    folders.base(folder)
    (folder / "model.safetensors").write_bytes(folders.safetensors(files))
    return folder


class LightInputs(MemoryInputs):
    """What the file server has, without asking it: where the network is not what is tried, two processes for
    each fetch are not worth their second."""

    def __init__(self, model: Path, files: Files) -> None:
        super().__init__(model)
        self.files = files

    async def fetch(self, task: JobTask, on_progress: ProgressCallback) -> FetchedInputs:
        fetched = await super().fetch(task, on_progress)
        name = str(task.data).rsplit("/", 1)[-1]
        try:
            fetched.data_path.write_bytes(self.files.datasets[name])
        except OSError as error:
            raise StepFailed(EndReason.DISK_FULL, str(error)) from None
        return fetched


@dataclass
class Field:
    folder: Path
    settings: Settings
    store: Store
    backend: Backend
    inputs: InputsProvider
    publisher: SubmissionPublisher
    files: Files
    model: Path
    timings: JobTimings
    alerts: list[tuple[str, str]] = field(default_factory=list)
    gpus: str = "4xH100"
    profile: str = "steady"
    jobs: JobManager = field(init=False)

    @property
    def data_dir(self) -> Path:
        return self.settings.data_dir

    async def up(self) -> None:
        """Begin, or begin again as after a restart."""
        loaded = load_profile(self.profile)
        services = JobServices(
            data_dir=self.data_dir,
            store=self.store,
            backends={"": self.backend},
            fleet=fleet_of(self.gpus),
            inputs=self.inputs,
            publisher=self.publisher,
            profile=lambda: loaded,
            timings=self.timings,
            alert=lambda kind, text, about=MINER: self.alerts.append((kind, about.with_text(text))),
            cleaner=FinishedJobCleaner(self.data_dir, self.store, keep_s=3600, clock=time.time),
            trials={"": TrustedBackend(self.backend, self.data_dir)},
        )
        self.jobs = JobManager(services)
        await self.jobs.start()

    async def start(
        self,
        name: str,
        do: dict[str, Any],
        *,
        seconds: float = 3600.0,
        repo: str | None = None,
        query: str = "",
        count: int = 40,
    ) -> int:
        self.files.datasets[name] = rows(do, count)
        task = {
            "model": folders.BASE_ID,
            "model_folder": str(self.model),
            "task_id": name,
            "hours_to_complete": seconds / 3600,
            "expected_repo_name": repo or f"repo-{name}",
            "dataset": f"{self.files.url}/{name}{query}",
            "dataset_type": DATASET,
        }
        read = read_task_file(json.dumps(task), name)
        return (await self.jobs.start_own(read.start(time.time()), OPERATOR)).job_id

    async def row(self, job: int) -> JobRow:
        return await self.store.read(get_job, job)

    async def attempts(self, job: int) -> list[AttemptRow]:
        return await self.store.read(attempts_of, job)

    async def ends(self, job: int) -> list[str | None]:
        return [attempt.end_reason for attempt in await self.attempts(job)]

    async def over(self, job: int, limit_s: float = LIMIT_S) -> JobRow:
        """Once the job is over and all of it is put away."""
        try:
            async with asyncio.timeout(limit_s):
                while not ((row := await self.row(job)).state.is_over and self.jobs.live(job) is None):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(await self.describe(job)) from None
        return row

    async def published(self, job: int) -> JobRow:
        """Once the job is over: published, whole, and nothing of it is left in the backend."""
        row, details = await self.over(job), await self.describe(job)
        assert (row.state, row.end_reason) == (JobState.DONE, EndReason.PUBLISHED), details
        assert row.submission is not None
        if isinstance(self.publisher, MemoryHub):
            assert "adapter_model.safetensors" in self.publisher.repos[row.submission.repo], details
        elif self.settings.hub.startswith("local:"):
            hub = Path(self.settings.hub.removeprefix("local:"))
            assert (hub / row.submission.repo / "adapter_model.safetensors").is_file(), details
        assert await self.orphans() == [], details
        return row

    async def describe(self, job: int) -> str:
        """All that is known of a job that did not come to its end."""
        row, live = await self.row(job), self.jobs.live(job)
        logs = [Path(attempt.folder) / "log" for attempt in await self.attempts(job)]
        tails = [log.read_text(errors="replace")[-1500:] if log.exists() else "no log" for log in logs]
        return f"{row}\n{live}\n{await self.attempts(job)}\n" + "\n---\n".join(tails)

    async def training(self, job: int, step: int = 1, limit_s: float = LIMIT_S) -> None:
        """Once its training has done so many steps."""
        await self.until(job, lambda live: (live.step or 0) >= step, limit_s)

    async def until(self, job: int, holds: Any, limit_s: float = LIMIT_S) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while (live := self.jobs.live(job)) is None or not holds(live):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(await self.describe(job)) from None

    def go(self, job: int, attempt: int = 1) -> None:
        """Let a training that waits at a step ("wait_at") go on."""
        self.attempt_file(job, attempt, "go").touch()

    async def anew(self, **timings: float) -> None:
        """Begin again at another timings, or with another backend."""
        await self.jobs.stop()
        self.timings = replace(self.timings, **timings)
        await self.up()

    def launches(self, job: int, attempt: int = 1) -> int:
        launches = self.attempt_file(job, attempt, "launches")
        return len(launches.read_text()) if launches.exists() else 0

    def attempt_file(self, job: int, attempt: int, name: str) -> Path:
        return self.data_dir / f"jobs/{job}/attempt_{attempt}/{name}"

    def run(self, job: int, attempt: int) -> dict[str, Any]:
        run: dict[str, Any] = json.loads(self.attempt_file(job, attempt, "run.json").read_text())
        return run

    @property
    def light_hub(self) -> MemoryHub:
        assert isinstance(self.publisher, MemoryHub)
        return self.publisher

    async def orphans(self) -> list[str]:
        """What the backend still has of jobs that are over."""
        over = [await self.row(int(run.key.partition("-")[0])) for run in await self.backend.list_runs()]
        return [row.task_id for row in over if row.state.is_over]


@asynccontextmanager
async def field_of(
    backend: Backend,
    settings: Settings,
    files: Files,
    *,
    light: bool,
    timings: JobTimings = QUICK,
    **more: Any,
) -> AsyncIterator[Field]:
    """`light`: fetched and published within this process."""
    store = Store(database.prepare_store(settings.data_dir))
    store.writer.start(asyncio.get_running_loop())
    model = base_model(settings.data_dir / "base")
    field = Field(
        settings.data_dir,
        settings,
        store,
        backend,
        LightInputs(model, files) if light else JobInputs(settings),
        MemoryHub() if light else HubPublisher(PublishTarget.from_settings(settings)),
        files,
        model,
        timings,
        **more,
    )
    before = dict(launch.TRAINERS)
    launch.TRAINERS["text"] = TRAINER
    try:
        await field.up()
        yield field
    finally:
        await field.jobs.stop()
        for run in await backend.list_runs():
            await backend.stop(run.ref, force=True)
        launch.TRAINERS.update(before)
        await store.writer.close()


@asynccontextmanager
async def process_field(
    data_dir: Path, files: Files, *, python: str | Path = PYTHON, timings: JobTimings = QUICK, **more: Any
) -> AsyncIterator[Field]:
    """With everything real, on local processes; `more`: settings."""
    settings = field_settings(data_dir, trainer_python=python, trainer_sandbox="off", **more)
    backend = quick_backend(settings, BackendKind.PROCESS)
    async with field_of(backend, settings, files, light=False, timings=timings) as field:
        yield field
    await backend.close()


def field_settings(data_dir: Path, **more: Any) -> Settings:
    given: dict[str, Any] = {
        "data_dir": data_dir,
        "hub": f"local:{data_dir / 'hub'}",
        "hf_user": "tester",
        "allow_private_networks": "127.0.0.0/8",
        "min_free_disk_bytes": 0,
        "trainer_ulimits": "core=0",
        **more,
    }
    return load_settings(env={}, env_file=None, **given)
