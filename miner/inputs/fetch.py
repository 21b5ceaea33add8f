"""Fetch a job's inputs, dataset and model, each in a worker process; implements `InputsProvider`.

`InputWorkers` starts the processes, a few at a time, and turns their events into results or `StepFailed`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from core.data.facts import DatasetFacts
from core.domain.job_states import END_MEANINGS, EndReason, ProgressCallback, RetryRule, StepFailed
from core.domain.tasks import DatasetType, FileFormat, ImageModelType, TaskType
from core.models.facts import ModelFacts
from miner.inputs.messages import (
    PROTOCOL,
    DatasetDone,
    DatasetOrder,
    FetchEvent,
    FetchFailed,
    FetchNote,
    FetchOrder,
    FetchProgress,
    LengthsMeasured,
    MeasureOrder,
    ModelDone,
    ModelOrder,
    RetryLimits,
)
from miner.inputs.model_cache import ModelCache
from miner.settings import Settings
from miner.support.subprocess import ChildSilent, run_order, worker_environment


@dataclass(frozen=True, slots=True)
class JobTask:
    """The model to train and its data, whoever sent the request."""

    job_id: int
    task_type: TaskType
    #: The hub's name of the base model.
    model: str
    #: A presigned URL of the rows or of the zip; with FileFormat.HF a dataset's name on the hub. A `Path` is
    #: the operator's own file (`god-miner run --task`), never from a request: copied or linked, then checked.
    data: str | Path
    file_format: FileFormat
    #: The job's own directory of inputs, which may not exist yet: files in it get names of ours.
    folder: Path
    dataset: DatasetType | None = None
    image_type: ImageModelType | None = None
    #: The operator's own copy of the model, never from a request: used where it lies.
    model_folder: Path | None = None
    #: The operator's choice for this task, instead of the profile in force.
    profile: str | None = None

    @property
    def is_hostile(self) -> bool:
        """True if code from outside will run: reward functions."""
        return self.task_type.generates


@dataclass(frozen=True, slots=True)
class FetchedInputs:
    """A job's inputs: present, checked and identified."""

    #: A directory (or, for some image models, a file) in the shared cache; read-only for training.
    model_path: Path
    #: Text: one JSON array of rows. Images: the zip.
    data_path: Path
    model: ModelFacts
    data: DatasetFacts


class InputsProvider(Protocol):
    async def fetch(self, task: JobTask, on_progress: ProgressCallback) -> FetchedInputs:
        """Fetch what is missing and check all of it. Idempotent: resumes partial files and trusts none.

        The model stays in the cache until `release`. `StepFailed` with NETWORK, RATE_LIMITED, DISK_FULL
        (tried again), DATA_GONE, URL_REFUSED, BAD_DATA, MODEL_MISSING, MODEL_GATED or BAD_MODEL (final).
        """

    def hold(self, task: JobTask) -> None:
        """After a restart: keep this model in the cache, a run uses it. Hardly any I/O."""

    def release(self, job_id: int) -> None:
        """The job no longer needs its model. Safe to repeat. The pipeline removes the job's own directory."""

    def release_all_but(self, jobs: Collection[int]) -> None:
        """At the start, with the jobs that are not over.

        A job that ended as the daemon was killed, between its end and its release, would keep its model for
        ever.
        """


log = logging.getLogger(__name__)

#: A worker reports its progress several times a second; one that is silent for this long hangs.
SILENCE_SECONDS = 900.0
#: They share one network line and one disk: more would make all of them late. A job has two.
WORKERS_AT_ONCE = 8


class InputWorkers:
    """Starts a process for each order, a few at a time; the others wait, oldest first."""

    def __init__(
        self,
        home: Path,
        *,
        redact: Callable[[str], str] = lambda text: text,
        command: Sequence[str] | None = None,
    ) -> None:
        """`home` is a directory for what the hub's client wants to remember."""
        self._command = command
        self._redact = redact
        self._slots = asyncio.Semaphore(WORKERS_AT_ONCE)
        self._environment = worker_environment(
            HF_HOME=str(home),
            HF_HUB_DISABLE_TELEMETRY="1",
            HF_HUB_DISABLE_IMPLICIT_TOKEN="1",  # noqa: S106 - a switch
            HF_HUB_DISABLE_PROGRESS_BARS="1",
            HF_HUB_DISABLE_XET="1",
            DO_NOT_TRACK="1",
        )

    async def run(
        self, job_id: int, order: FetchOrder, on_progress: ProgressCallback, limit: float | None = None
    ) -> FetchEvent:
        """Return the answer. `StepFailed` when it is a failure, or (NETWORK) when it took longer than `limit`
        seconds, the wait for a free slot aside."""

        def on_event(event: FetchEvent) -> None:
            if isinstance(event, FetchProgress):
                on_progress(event.what, event.done, event.total)
            elif isinstance(event, FetchNote):
                log.info("job %d: %s", job_id, event.text)

        try:
            async with self._slots, asyncio.timeout(limit):
                answer = await run_order(
                    PROTOCOL,
                    order,
                    on_event,
                    environment=self._environment,
                    silence=SILENCE_SECONDS,
                    redact=self._redact,
                    command=self._command,
                )
        except (TimeoutError, ChildSilent):
            seconds = limit if limit is not None else SILENCE_SECONDS
            text = f"the {order.task} did not come within {seconds:g} s; the next try resumes it"
            raise StepFailed(EndReason.NETWORK, text) from None
        except OSError as error:
            raise StepFailed(EndReason.BUG, f"the {order.task} worker cannot be started: {error}") from None
        event = answer.event
        if event is None or isinstance(event, FetchProgress | FetchNote):
            # Killed from outside, as on a host without memory, is not a bug: the next try resumes.
            killed = answer.code is not None and answer.code < 0
            reason = EndReason.NETWORK if killed else EndReason.BUG
            raise StepFailed(reason, f"the {order.task} worker {answer.ending}")
        if isinstance(event, FetchFailed):
            raise StepFailed(event.reason, self._redact(event.text), event.retry_after)
        return event


#: Lengths in real tokens are worth a moment, not more: otherwise they are estimated by bytes.
MEASURE_SECONDS = 60.0
#: One try to fetch a dataset; the next continues where it ended.
DATASET_SECONDS = 1800.0
#: For checking a dataset; two gigabytes take ten seconds.
CHECK_SECONDS = 1200.0
E = TypeVar("E", bound=FetchEvent)


@dataclass
class JobInputs:
    """Fetches through workers, two at a time for a job: its dataset and its model."""

    settings: Settings
    redact: Callable[[str], str] = lambda text: text
    patience: RetryLimits = field(default_factory=RetryLimits)

    def __post_init__(self) -> None:
        settings = self.settings
        self.cache = ModelCache(
            settings.model_cache_dir, settings.model_cache_bytes, settings.min_free_disk_bytes
        )
        self._worker = InputWorkers(settings.data_dir / "hub", redact=self.redact)

    async def fetch(self, task: JobTask, on_progress: ProgressCallback) -> FetchedInputs:
        if task.model_folder is None:
            await asyncio.to_thread(self.cache.leases.hold, task.job_id, task.model)
        model, data = await _fetch_both(
            self.fetch_model(
                task.model, task.image_type, on_progress, job_id=task.job_id, own=task.model_folder
            ),
            self._dataset(task, on_progress),
        )
        facts = await self._measured(task, model, data, on_progress) if data.sampled else data.facts
        return FetchedInputs(model_path=model.path, data_path=data.path, model=model.facts, data=facts)

    def hold(self, task: JobTask) -> None:
        if task.model_folder is None:
            self.cache.leases.hold(task.job_id, task.model)

    def release(self, job_id: int) -> None:
        self.cache.leases.release(job_id)

    def release_all_but(self, jobs: Collection[int]) -> None:
        self.cache.leases.release_all_but(jobs)

    async def _dataset(self, task: JobTask, on_progress: ProgressCallback) -> DatasetDone:
        settings = self.settings
        order = DatasetOrder(
            folder=task.folder,
            url=task.data if isinstance(task.data, str) else None,
            file=task.data if isinstance(task.data, Path) else None,
            file_format=task.file_format,
            dataset=task.dataset,
            image_type=task.image_type,
            max_bytes=settings.dataset_max_bytes,
            seconds=DATASET_SECONDS,
            allowed_networks=tuple(map(str, settings.allow_private_networks)),
            keep_free=settings.min_free_disk_bytes,
            patience=self.patience,
        )
        limit = DATASET_SECONDS + CHECK_SECONDS
        return await self._carry_out(task.job_id, order, on_progress, DatasetDone, limit)

    async def fetch_model(
        self,
        model: str,
        image_type: ImageModelType | None,
        on_progress: ProgressCallback,
        *,
        job_id: int = 0,
        own: Path | None = None,
    ) -> ModelDone:
        """Fetch a model alone. The job's deadline is its only time limit; partial files are kept."""
        settings = self.settings
        order = ModelOrder(
            model=model,
            image_type=image_type,
            own=own,
            endpoint=settings.hf_endpoint,
            token=settings.hf_token.get_secret_value() if settings.hf_token else None,
            cache=settings.model_cache_dir,
            quota=settings.model_cache_bytes,
            keep_free=settings.min_free_disk_bytes,
            patience=self.patience,
        )
        return await self._carry_out(job_id, order, on_progress, ModelDone)

    async def _measured(
        self, task: JobTask, model: ModelDone, data: DatasetDone, on_progress: ProgressCallback
    ) -> DatasetFacts:
        tokenizer = model.path / "tokenizer.json"
        if task.dataset is None or not tokenizer.is_file():
            return data.facts
        order = MeasureOrder(folder=task.folder, tokenizer=tokenizer, dataset=task.dataset)
        try:
            lengths = await self._carry_out(task.job_id, order, on_progress, LengthsMeasured, MEASURE_SECONDS)
        except StepFailed as failure:
            log.warning("job %d: lengths are estimated by bytes: %s", task.job_id, failure)
            return data.facts
        return lengths.facts or data.facts

    async def _carry_out(
        self,
        job_id: int,
        order: FetchOrder,
        on_progress: ProgressCallback,
        kind: type[E],
        limit: float | None = None,
    ) -> E:
        answer = await self._worker.run(job_id, order, on_progress, limit)
        assert isinstance(answer, kind)
        return answer


A = TypeVar("A")
B = TypeVar("B")


async def _fetch_both(first: Awaitable[A], second: Awaitable[B]) -> tuple[A, B]:
    """Return both results. A permanent failure cancels the other task; a transient one does not."""
    tasks = asyncio.ensure_future(first), asyncio.ensure_future(second)
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if not any(_is_final(task.exception()) for task in done):
            await asyncio.wait(tasks)
        for task in sorted(tasks, key=lambda task: not (task.done() and _is_final(task.exception()))):
            if task.done():
                task.result()
        return tasks[0].result(), tasks[1].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_final(failure: BaseException | None) -> bool:
    waits = isinstance(failure, StepFailed) and END_MEANINGS[failure.reason].retry is RetryRule.WAIT
    return failure is not None and not waits
