"""A pipeline with stand-ins around it: a backend whose runs are coroutines, inputs and a hub in memory.

Store, fleet, planner, profiles and files are the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from core.data.facts import facts_from_lengths
from core.domain.decisions import IDLE_HOST
from core.domain.hardware import Hardware, parse_gpus
from core.domain.job_states import EndReason, JobState, ProgressCallback, StepFailed
from core.domain.tasks import TaskType
from core.domain.wire import MinerSubmission
from core.models.identify import facts_from_config
from core.profile.resolve import load_profile
from core.runs.progress import (
    CheckpointEvent,
    EndEvent,
    ProgressEvent,
    StageEvent,
    StepEvent,
    SubmissionEvent,
    encode_event,
)
from core.runs.run_files import HeldOutScore, RunEnd, RunResult, RunSpec
from miner.backends.base import (
    EXIT_FILE,
    IMAGE_OF,
    AttemptSpec,
    BackendRun,
    BackendUnreachable,
    EndCause,
    RunPhase,
    RunStatus,
)
from miner.backends.trial import BackendTrials, MissingByEngine
from miner.fleet.base import FleetNode, Gpu, InventoryState
from miner.fleet.fleet import Fleet
from miner.inputs.fetch import FetchedInputs, JobTask
from miner.jobs.context import JobServices, WorthOfTask
from miner.jobs.events import JobEventBus
from miner.jobs.folder import FinishedJobCleaner
from miner.jobs.manager import JobManager
from miner.jobs.timeline import JobTimings
from miner.observe.alerts import MINER
from miner.publish.publisher import PublishRequest
from miner.store import database
from miner.store.attempts import AttemptRow, attempts_of
from miner.store.jobs import JobRow, StartRequest, get_job, record_start
from miner.store.store import Store
from tests.core.planning.candidates import on_all_gpus

#: For what should come at once. Less than the minute for which stand-ins hang: what waits for them fails.
CAP_S = 240.0
VALIDATOR = "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"
FAST = JobTimings(
    poll_s=0.01,
    backend_poll_s=0.02,
    pause_s=0.01,
    pause_cap_s=0.05,
    margin_s=1.0,
    grace_s=0.3,
    stall_factor=10.0,
    stall_min_s=10.0,
    start_limit_s=30.0,
    dump_s=0.05,
    attempt_needs_s=1.0,
)
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
}
MODEL = facts_from_config(TINY, "tiny/llama", None)
ROWS = facts_from_lengths(TaskType.INSTRUCT, [20] * 200, [30] * 200)
DATASET = {"field_instruction": "instruct", "field_output": "output"}


def request(task_id: str = "t1", **changes: Any) -> dict[str, Any]:
    return {
        "model": "tiny/llama",
        "task_id": task_id,
        "hours_to_complete": 1.0,
        "expected_repo_name": "repo-1",
        "dataset": "https://files.example.org/train.json?X-Amz-Signature=abc",
        "dataset_type": DATASET,
        "file_format": "s3",
        **changes,
    }


@dataclass
class Trainer:
    """What a run can do: a trainer's way of speaking."""

    run: RunSpec
    stopped: asyncio.Event
    killed: bool = False

    def say(self, *events: ProgressEvent) -> None:
        with Path(self.run.progress_path).open("ab") as file:
            for event in events:
                file.write(encode_event(event))

    def stage(self, name: str) -> None:
        self.say(StageEvent(t=time.time(), stage=name))

    def step(self, number: int, total: int = 20, loss: float = 1.0) -> None:
        self.say(StepEvent(t=time.time(), step=number, total=total, loss=loss, tokens_s=100.0))

    def save(self, score: float | None, step: int = 1) -> None:
        """A complete submission, renamed in."""
        work, place = Path(self.run.work_dir), Path(self.run.submission_dir)
        fresh = work / f"fresh-{step}"
        fresh.mkdir()
        (fresh / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": self.run.model_id}))
        (fresh / "adapter_model.safetensors").write_bytes(f"{self.run.task_id} {score} {step}".encode())
        if place.exists():
            place.rename(work / f"old-{step}")
        fresh.rename(place)
        held_out = None if score is None else HeldOutScore(value=score, step=step)
        self.say(SubmissionEvent(t=time.time(), score=held_out, step=step))

    def checkpoint(self, step: int) -> Path:
        place = Path(self.run.work_dir) / f"checkpoint-{step}"
        place.mkdir()
        self.say(CheckpointEvent(t=time.time(), step=step, path=str(place)))
        return place

    def end(
        self, end: RunEnd = RunEnd.FINISHED, detail: str = "", moment: str | None = None, **more: Any
    ) -> None:
        """`more`: what else the result holds."""
        has = Path(self.run.submission_dir).is_dir()
        result = RunResult(end=end, submission=has, detail=detail, moment=moment, **more)
        Path(self.run.result_path).write_text(result.model_dump_json())
        self.say(EndEvent(t=time.time(), end=end, submission=has))

    @property
    def asked_to_stop(self) -> bool:
        return self.stopped.is_set() or Path(self.run.stop_path).exists()

    async def wait_for_stop(self) -> None:
        while not self.asked_to_stop:
            await asyncio.sleep(0.005)


Script = Callable[[Trainer], Awaitable[None]]


async def good(trainer: Trainer) -> None:
    for number in range(1, 6):
        trainer.step(number, 5)
        await asyncio.sleep(0.002)
    trainer.save(0.5, 5)
    trainer.end()


async def waits(trainer: Trainer) -> None:
    """Do nothing until it is asked to stop, and leave no result."""
    await trainer.wait_for_stop()


async def deaf(_: Trainer) -> None:
    await asyncio.sleep(60)


async def obeys(trainer: Trainer) -> None:
    trainer.step(1)
    trainer.save(0.5)
    await trainer.wait_for_stop()
    trainer.end(RunEnd.STOPPED)


class Gate:
    """A script that waits until it is opened, then saves a model and ends."""

    def __init__(self) -> None:
        self.reached, self.opened = asyncio.Event(), asyncio.Event()

    async def __call__(self, trainer: Trainer) -> None:
        self.reached.set()
        await self.opened.wait()
        trainer.save(0.5)
        trainer.end()


def ending(end: RunEnd, detail: str = "", moment: str | None = None) -> Script:
    async def script(trainer: Trainer) -> None:
        trainer.step(1)
        trainer.end(end, detail, moment)

    return script


@dataclass
class Run:
    spec: AttemptSpec
    task: asyncio.Task[None]
    trainer: Trainer
    status: RunStatus = field(default_factory=lambda: RunStatus(RunPhase.RUNNING))


class CoroutineBackend:
    """Runs that live in this process, and outlive the pipeline under test."""

    name = "coroutine"
    can_sandbox = True

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.default: Script = good
        self.runs: dict[str, Run] = {}
        self.submitted: list[AttemptSpec] = []
        self.removed: list[str] = []
        self.stops: list[tuple[str, bool]] = []
        self.dumped: list[str] = []
        self.gone = False
        self.lacking: dict[str, str] = {}

    def _answers(self) -> None:
        if self.gone:
            raise BackendUnreachable("the backend does not answer; start it")

    async def submit(self, spec: AttemptSpec) -> str:
        self._answers()
        if spec.key in self.runs:
            return spec.key
        self.submitted.append(spec)
        run = RunSpec.from_json((spec.run_dir / "run.json").read_bytes())
        trainer = Trainer(run, asyncio.Event())
        script = self.scripts.pop(0) if self.scripts else self.default
        task = asyncio.create_task(self._run(spec, trainer, script))
        self.runs[spec.key] = Run(spec, task, trainer)
        return spec.key

    async def _run(self, spec: AttemptSpec, trainer: Trainer, script: Script) -> None:
        code, why = 0, EndCause.OK
        try:
            await script(trainer)
            text = Path(trainer.run.result_path)
            if text.exists():
                code = RunResult.model_validate_json(text.read_text()).exit_code
                why = EndCause.OK if code == 0 else EndCause.FAILED
        except asyncio.CancelledError:
            code, why = 137, EndCause.STOPPED
        except EndedBy as ended:
            code, why = ended.code, ended.why
        with contextlib.suppress(FileNotFoundError):  # somebody removed the folder
            (spec.run_dir / EXIT_FILE).write_text(json.dumps({"at": time.time(), "code": code}))
        self.runs[spec.key].status = RunStatus(RunPhase.ENDED, why, code)

    async def find(self, key: str) -> str | None:
        self._answers()
        return key if key in self.runs else None

    async def poll(self, ref: str, run_dir: Path) -> RunStatus:
        self._answers()
        if ref not in self.runs:
            return RunStatus(RunPhase.LOST, EndCause.LOST)
        return self.runs[ref].status

    async def stop(self, ref: str, *, force: bool = False) -> None:
        self._answers()
        self.stops.append((ref, force))
        run = self.runs.get(ref)
        if run is not None:
            if force:
                run.task.cancel()
            else:
                run.trainer.stopped.set()

    async def dump_stacks(self, ref: str) -> None:
        self._answers()
        self.dumped.append(ref)

    async def remove(self, ref: str) -> None:
        self._answers()
        self.removed.append(ref)
        if self.runs.get(ref) and self.runs[ref].status.phase is RunPhase.ENDED:
            del self.runs[ref]

    async def missing_images(self) -> Mapping[str, str]:
        self._answers()
        return self.lacking

    async def identity(self, image: str) -> str:
        self._answers()
        return image

    async def list_runs(self) -> list[BackendRun]:
        self._answers()
        return [BackendRun(key, key, run.spec.run_dir) for key, run in self.runs.items()]

    async def close(self) -> None:
        for run in list(self.runs.values()):
            run.task.cancel()
            await asyncio.gather(run.task, return_exceptions=True)


class EndedBy(Exception):
    """Raised by a script: the run ends in the backend's way, without a word of the trainer's."""

    def __init__(self, why: EndCause, code: int) -> None:
        self.why, self.code = why, code


class TrustedBackend(BackendTrials):
    """Nothing is tried: an image that is there can train."""

    async def missing(self) -> MissingByEngine:
        absent = await self._backend.missing_images()
        return {name: absent[image] for name, image in IMAGE_OF.items() if image in absent}


class MemoryInputs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.troubles: list[StepFailed | float] = []
        self.fetched: list[JobTask] = []
        self.released: list[int] = []
        self.held: list[int] = []
        #: The jobs whose models stayed at the last start.
        self.kept: set[int] = set()

    async def fetch(self, task: JobTask, on_progress: ProgressCallback) -> FetchedInputs:
        on_progress("model", 10, 100)
        if self.troubles:
            trouble = self.troubles.pop(0)
            if isinstance(trouble, StepFailed):
                raise trouble
            await asyncio.sleep(trouble)
        self.fetched.append(task)
        task.folder.mkdir(parents=True, exist_ok=True)
        data = task.folder / "data.json"
        data.write_text("[]")
        return FetchedInputs(self.folder, data, MODEL, ROWS)

    def hold(self, task: JobTask) -> None:
        self.held.append(task.job_id)

    def release(self, job_id: int) -> None:
        self.released.append(job_id)

    def release_all_but(self, jobs: Collection[int]) -> None:
        self.kept = set(jobs)


class MemoryHub:
    """What is published, by repository; every change counted."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.commits: list[tuple[str, float]] = []
        self.moves: list[tuple[str, str]] = []
        self.forgotten: list[int] = []
        self.troubles: list[StepFailed | float] = []

    async def publish(self, request: PublishRequest, on_progress: ProgressCallback) -> MinerSubmission:
        if self.troubles:
            trouble = self.troubles.pop(0)
            if isinstance(trouble, StepFailed):
                raise trouble
            await asyncio.sleep(trouble)
        repo = f"me/{request.repo_name}"
        if request.earlier is not None and request.earlier.repo in self.repos.keys() - {repo}:
            await self.move(request.earlier, request.repo_name)
        files = {file.name: file.read_bytes() for file in request.folder.iterdir()}
        if self.repos.get(repo) != files:
            self.repos[repo] = files
            self.commits.append((repo, time.time()))
        return MinerSubmission(repo=repo, model_hash=f"{len(self.commits):064d}")

    def forget(self, job_id: int) -> None:
        self.forgotten.append(job_id)

    async def move(
        self, earlier: MinerSubmission, repo_name: str, finish_by: float | None = None
    ) -> MinerSubmission:
        repo = f"me/{repo_name}"
        if repo not in self.repos and earlier.repo not in self.repos:
            raise StepFailed(EndReason.HUB_REFUSED, f"{earlier.repo} is not there (any more)")
        if repo not in self.repos:
            self.repos[repo] = self.repos.pop(earlier.repo)
            self.moves.append((earlier.repo, repo))
        return MinerSubmission(repo=repo, model_hash=earlier.model_hash)


@dataclass
class JobsHarness:
    folder: Path
    store: Store
    backend: CoroutineBackend
    inputs: MemoryInputs
    hub: MemoryHub
    fleet: Fleet
    services: JobServices
    jobs: JobManager
    alerts: list[tuple[str, str]]
    over: list[Any]

    async def start(
        self, *, seconds: float = 3600.0, task_id: str = "t1", name: str | None = "repo-1", **changes: Any
    ) -> int:
        """A validator's start, taken as the offer service does."""
        wanted = request(task_id, expected_repo_name=name, hours_to_complete=seconds / 3600, **changes)
        raw, hours = json.dumps(wanted).encode(), seconds / 3600
        begun = StartRequest(task_id, TaskType.INSTRUCT, wanted["model"], hours, name, time.time(), raw)
        started = await self.store.write(record_start, VALIDATOR, begun, time.time())
        await self.jobs.started(started.job_id)
        return started.job_id

    async def launched(self, **changes: Any) -> int:
        """Start a job and wait until the backend has its run."""
        before = len(self.backend.submitted)
        job = await self.start(**changes)
        await self.until(lambda: len(self.backend.submitted) > before)
        return job

    async def over_within(self, job_id: int, seconds: float = CAP_S) -> JobRow:
        async with asyncio.timeout(seconds):
            while True:
                row = await self.row(job_id)
                if row.state.is_over and job_id not in self.jobs._workers:
                    return row
                await asyncio.sleep(0.01)

    async def done(self, job_id: int) -> JobRow:
        """Wait until the job is over: as done, with something published."""
        row = await self.over_within(job_id)
        assert (row.state, row.end_reason) == (JobState.DONE, EndReason.PUBLISHED), row
        return row

    async def failed(self, job_id: int, reason: EndReason) -> JobRow:
        row = await self.over_within(job_id)
        assert (row.state, row.end_reason) == (JobState.FAILED, reason), row
        return row

    async def in_state(self, job_id: int, state: JobState) -> JobRow:
        """Wait for a state; its worker may still have something to do."""
        async with asyncio.timeout(CAP_S):
            while (row := await self.row(job_id)).state is not state:
                await asyncio.sleep(0.01)
        return row

    async def ends(self, job_id: int) -> list[EndReason | None]:
        return [attempt.end_reason for attempt in await self.attempts(job_id)]

    @property
    def model(self) -> bytes:
        """What is published for the only job."""
        (files,) = self.hub.repos.values()
        return files["adapter_model.safetensors"]

    async def until(self, holds: Callable[[], bool], seconds: float = CAP_S) -> None:
        async with asyncio.timeout(seconds):
            while not holds():
                await asyncio.sleep(0.005)

    async def row(self, job_id: int) -> JobRow:
        return await self.store.read(get_job, job_id)

    async def attempts(self, job_id: int) -> list[AttemptRow]:
        return await self.store.read(attempts_of, job_id)

    async def restart(self) -> None:
        """The daemon dies and comes back; what runs in the backend goes on."""
        await self.jobs.stop()
        await self.store.writer.submit(lambda _: None)  # what a process wrote is written before the next one
        self.fleet = fleet_of()
        self.services = replace(self.services, fleet=self.fleet, events=JobEventBus(), ports={}, job_ids={})
        self.jobs = JobManager(self.services)
        self.jobs.on_over = self.over.append
        await self.jobs.start()


def fleet_of(gpus: str = "4xH100") -> Fleet:
    kinds = parse_gpus(gpus)
    gpus = tuple(
        Gpu(str(index), index, kinds.kind, frozenset(map(str, range(kinds.count))))
        for index in range(kinds.count)
    )
    hardware = Hardware(gpus=kinds, cpu_cores=16, memory_bytes=64 * 10**9)
    return Fleet(InventoryState(gpus, (FleetNode("", "", hardware, hardware),)))


@asynccontextmanager
async def open_harness(
    folder: Path,
    timings: JobTimings = FAST,
    gpus: str = "4xH100",
    profile: str = "all",
    with_trials: bool = False,
    worth: WorthOfTask = lambda *_: IDLE_HOST,
) -> AsyncIterator[JobsHarness]:
    store = Store(database.prepare_store(folder))
    store.writer.start(asyncio.get_running_loop())
    backend, inputs, hub, fleet = CoroutineBackend(), MemoryInputs(folder), MemoryHub(), fleet_of(gpus)
    alerts: list[tuple[str, str]] = []
    over: list[Any] = []
    loaded = on_all_gpus() if profile == "all" else load_profile(profile)
    services = JobServices(
        data_dir=folder,
        store=store,
        cleaner=FinishedJobCleaner(folder, store, keep_s=3600, clock=time.time),
        trials={"": BackendTrials(backend, folder) if with_trials else TrustedBackend(backend, folder)},
        backends={"": backend},
        fleet=fleet,
        inputs=inputs,
        publisher=hub,
        profile=lambda: loaded,
        timings=timings,
        worth=worth,
        alert=lambda kind, text, about=MINER: alerts.append((kind, about.with_text(text))),
    )
    jobs = JobManager(services)
    jobs.on_over = over.append
    await jobs.start()
    harness = JobsHarness(folder, store, backend, inputs, hub, fleet, services, jobs, alerts, over)
    try:
        yield harness
    finally:
        await harness.jobs.stop()
        await backend.close()
        await store.writer.close()
