"""A job's inputs, as the pipeline wants them: see `miner.jobs.ports.Inputs`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from core.data import DatasetFacts
from core.tasks import ImageModelType
from miner.jobs.inputs.cache import ModelCache
from miner.jobs.inputs.child import Worker
from miner.jobs.inputs.words import (
    DatasetDone,
    DatasetOrder,
    Event,
    Measured,
    MeasureOrder,
    ModelDone,
    ModelOrder,
    Order,
    Patience,
)
from miner.jobs.ports import Fetched, StepFailed, Told, Wanted
from miner.jobs.states import MEANING, Retry
from miner.settings import Settings

log = logging.getLogger(__name__)

#: Lengths in real tokens are worth a moment, not more: without them they are reckoned by bytes.
MEASURE_SECONDS = 60.0
#: For looking at a dataset; two gigabytes take ten seconds.
CHECK_SECONDS = 1200.0
E = TypeVar("E", bound=Event)


@dataclass
class JobInputs:
    """Fetches through workers, two at a time for a job: its dataset and its model."""

    settings: Settings
    redact: Callable[[str], str] = lambda text: text
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        settings = self.settings
        self.cache = ModelCache(
            settings.model_cache_dir, settings.model_cache_bytes, settings.min_free_disk_bytes
        )
        self._worker = Worker(settings.data_dir / "hub", redact=self.redact)

    async def fetch(self, wanted: Wanted, told: Told) -> Fetched:
        if wanted.model_folder is None:
            await asyncio.to_thread(self.cache.leases.hold, wanted.job_id, wanted.model)
        model, data = await _both(self._model(wanted, told), self._dataset(wanted, told))
        facts = await self._measured(wanted, model, data, told) if data.sampled else data.facts
        return Fetched(model_path=model.path, data_path=data.path, model=model.facts, data=facts)

    def hold(self, wanted: Wanted) -> None:
        if wanted.model_folder is None:
            self.cache.leases.hold(wanted.job_id, wanted.model)

    def release(self, job_id: int) -> None:
        self.cache.leases.release(job_id)

    def release_all_but(self, jobs: Collection[int]) -> None:
        """At the start, with the jobs that are not over: what ended without a word needs no model."""
        self.cache.leases.release_all_but(jobs)

    async def _dataset(self, wanted: Wanted, told: Told) -> DatasetDone:
        settings = self.settings
        order = DatasetOrder(
            folder=wanted.folder,
            url=wanted.data if isinstance(wanted.data, str) else None,
            file=wanted.data if isinstance(wanted.data, Path) else None,
            file_format=wanted.file_format,
            dataset=wanted.dataset,
            image_type=wanted.image_type,
            max_bytes=settings.dataset_max_bytes,
            seconds=settings.dataset_timeout_seconds,
            allowed_networks=tuple(map(str, settings.allow_private_networks)),
            keep_free=settings.min_free_disk_bytes,
            patience=self.patience,
        )
        limit = settings.dataset_timeout_seconds + CHECK_SECONDS
        return await self._carry_out(wanted.job_id, order, told, DatasetDone, limit)

    async def fetch_model(
        self,
        model: str,
        image_type: ImageModelType | None,
        told: Told,
        *,
        job_id: int = 0,
        own: Path | None = None,
    ) -> ModelDone:
        """A model alone. No limit of time: a job's deadline is one, and what is there is never lost."""
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
        return await self._carry_out(job_id, order, told, ModelDone)

    async def _model(self, wanted: Wanted, told: Told) -> ModelDone:
        return await self.fetch_model(
            wanted.model, wanted.image_type, told, job_id=wanted.job_id, own=wanted.model_folder
        )

    async def _measured(
        self, wanted: Wanted, model: ModelDone, data: DatasetDone, told: Told
    ) -> DatasetFacts:
        tokenizer = model.path / "tokenizer.json"
        if wanted.dataset is None or not tokenizer.is_file():
            return data.facts
        order = MeasureOrder(folder=wanted.folder, tokenizer=tokenizer, dataset=wanted.dataset)
        try:
            found = await self._carry_out(wanted.job_id, order, told, Measured, MEASURE_SECONDS)
        except StepFailed as failure:
            log.warning("job %d: lengths are reckoned by bytes: %s", wanted.job_id, failure)
            return data.facts
        return found.facts or data.facts

    async def _carry_out(
        self, job_id: int, order: Order, told: Told, kind: type[E], limit: float | None = None
    ) -> E:
        answer = await self._worker.run(job_id, order, told, limit)
        assert isinstance(answer, kind)
        return answer


A = TypeVar("A")
B = TypeVar("B")


async def _both(first: Awaitable[A], second: Awaitable[B]) -> tuple[A, B]:
    """Both results. A failure for good ends the other one; while one waits for better times, it goes on."""
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
    waits = isinstance(failure, StepFailed) and MEANING[failure.reason].retry is Retry.WAIT
    return failure is not None and not waits
