"""Publish the best model of all attempts under the newest name, after training and already during it.

The first model is published as soon as it exists, better ones now and then: the validator finds something
whatever happens to this host. Uploads during training get a share of the time, and none begins when the
last one is due soon.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

from core.domain.job_states import EndReason, JobState, ProgressCallback, StepFailed
from core.domain.wire import MinerSubmission
from core.submission.folder import FileIdentity
from miner.jobs.context import JobContext
from miner.jobs.folder import AttemptFolder
from miner.jobs.history import (
    ModelCandidate,
    PublishedModel,
    best_model_of,
    folder_identity,
    put_refused_aside,
    snapshot_best,
)
from miner.jobs.launch import read_run
from miner.jobs.progress import RunProgress
from miner.jobs.tasks import repo_name
from miner.observe.alerts import AlertKind
from miner.publish.publisher import PublishRequest
from miner.store import jobs as store_jobs
from miner.store.attempts import mark_bad_submission
from miner.store.jobs import has_repo_of_another


async def publish_best(job: JobContext) -> bool:
    """Publish and move to state DONE; return False if there is nothing to publish.

    `StepFailed` when it cannot be published in time.
    """
    if all(attempt.ended_at for attempt in await job.attempts()):
        job.release_gpus()  # otherwise a run that could not be ended in time still has them
    while (best := await best_model(job)) is not None:
        try:
            await _publish_with_retries(job, best)
        except StepFailed as failed:
            if failed.reason is not EndReason.BAD_SUBMISSION:
                raise
            text = f"the model of attempt {best.attempt} is refused: {failed}"
            job.note("refused", text)
            job.alert(AlertKind.BAD_SUBMISSION, text)
            await asyncio.to_thread(put_refused_aside, best)
            await job.services.store.write(mark_bad_submission, job.row.id, best.attempt, str(failed))
            continue
        if not job.row.misnamed:  # a second start may have come meanwhile
            break
    if job.row.submission is None:
        return False
    await job.move(JobState.DONE, EndReason.PUBLISHED, f"published as {job.row.submission.repo}")
    return True


async def best_model(job: JobContext) -> ModelCandidate | None:
    return await asyncio.to_thread(best_model_of, await job.attempts())


async def _publish_with_retries(job: JobContext, best: ModelCandidate) -> None:
    await job.run_step(
        "publish",
        lambda: publish_model(job, best, job.set_stage),
        job.deadline,
        best.attempt,
    )


async def publish_model(job: JobContext, model: ModelCandidate, on_progress: ProgressCallback) -> None:
    """Make this the published model; nothing happens if it is already."""
    row, folder = job.row, job.folder
    known = await asyncio.to_thread(PublishedModel.load, folder)
    if known is not None and known.is_of(model, row.submission, repo_name(row)):
        return
    await _require_own_repo(job)
    identity = await asyncio.to_thread(snapshot_best, model.folder, folder.submission)
    await _withdraw_hash(job)
    submission = await job.services.publisher.publish(await _publish_request(job, model), on_progress)
    await _record_submission(job, submission)
    published = PublishedModel(identity, model.attempt, model.score, submission.repo, submission.model_hash)
    await asyncio.to_thread(published.save, folder)
    job.note("published", f"the model of attempt {model.attempt} is published as {submission.repo}")
    job.show_state()


async def _require_own_repo(job: JobContext) -> None:
    """Refuse a repository with another validator's submission, which stays as it was published.

    Repositories are public, so any validator can name one.
    """
    row, name = job.row, repo_name(job.row)
    if await job.services.store.read(has_repo_of_another, row.validator, name):
        raise StepFailed(EndReason.HUB_REFUSED, f"the repository {name} holds another validator's submission")


async def _withdraw_hash(job: JobContext) -> None:
    """Remove the hash of the submission before another model replaces it.

    From here on the hub may hold another model at any moment. If we are ended then, we would report the old
    hash: a submission that scores nothing. Without a hash validators take what is there.
    """
    submission = job.row.submission
    if submission is not None and submission.model_hash is not None:
        without = MinerSubmission(repo=submission.repo, model_hash=None)
        await _record_submission(job, without)


async def _record_submission(job: JobContext, submission: MinerSubmission) -> None:
    """Record the submission even if another worker has taken the job: it describes the hub."""
    store = job.services.store
    await store.write(store_jobs.record_submission, job.key, submission, job.now())
    job.row = await store.read(store_jobs.get_job, job.row.id)


async def _publish_request(job: JobContext, model: ModelCandidate) -> PublishRequest:
    row, task = job.row, job.task
    attempts = await job.attempts()
    attempt = next(attempt for attempt in attempts if attempt.number == model.attempt)
    run = await asyncio.to_thread(read_run, AttemptFolder(attempt.folder))
    return PublishRequest(
        job_id=row.id,
        task_type=row.task_type,
        model=task.model,
        model_path=Path(run.model_path),
        folder=job.folder.submission,
        repo_name=repo_name(row),
        image_type=run.image_type,
        earlier=row.submission,
        finish_by=row.deadline_at,
    )


async def rename_published(job: JobContext) -> None:
    """Move the model of a finished job to the repository that a second start has named."""
    name = repo_name(job.row)

    async def move() -> MinerSubmission:
        await _require_own_repo(job)
        assert job.row.submission is not None
        try:
            return await job.services.publisher.move(job.row.submission, name, job.row.deadline_at)
        except StepFailed as failed:
            best = await best_model(job) if failed.reason is EndReason.HUB_REFUSED else None
            if best is None:
                raise
            # Not where the store has it, as when it could not be written after an earlier move.
            await publish_model(job, best, job.set_stage)
            return job.row.submission

    submission = await job.run_step("move", move, job.deadline)
    await _record_submission(job, submission)
    known = await asyncio.to_thread(PublishedModel.load, job.folder)
    if known is not None:
        await asyncio.to_thread(replace(known, repo=submission.repo).save, job.folder)
    job.note("moved", f"the published model is {submission.repo} now")
    job.show_state()


log = logging.getLogger(__name__)


class EarlyPublisher:
    def __init__(self, job: JobContext, attempt: int) -> None:
        self.job, self.attempt = job, attempt
        self._task: asyncio.Task[None] | None = None
        self._seen = 0
        self._not_before = 0.0
        self._took_s = 0.0
        self._failures = 0
        self._refused: FileIdentity | None = None

    def maybe_start(self, progress: RunProgress, stop_at: float) -> None:
        """Start an upload if there is a new model and it is time for one."""
        job, now = self.job, self.job.now()
        if not job.services.timings.publish_early or progress.submission is None:
            return
        if self._task is not None and not self._task.done():
            return
        if progress.submissions == self._seen or now < self._not_before:
            return
        if self._seen and now + 2 * self._took_s > stop_at:
            return  # the last upload comes soon
        folder = job.folder.attempt(self.attempt).submission
        self._seen = progress.submissions
        model = ModelCandidate(self.attempt, folder, progress.submission.score)
        self._task = asyncio.create_task(self._publish(model), name=f"early upload of job {job.row.id}")

    async def close(self) -> None:
        """Cancel the upload; the last one resumes it."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None

    async def _publish(self, model: ModelCandidate) -> None:
        job, began = self.job, self.job.now()
        if folder_identity(model.folder) == self._refused or not await self._is_better(model):
            return
        try:
            async with job.record_step("publish early", model.attempt):
                await publish_model(job, model, lambda _what, _done, _total: None)
        except StepFailed as failed:
            self._after_failure(model, failed)
        except Exception:
            log.exception("the early upload of job %d failed", job.row.id, extra=job.log)
            self._wait()
        else:
            self._failures, self._took_s = 0, job.now() - began
            self._not_before = job.now() + self._took_s / job.services.timings.early_share

    async def _is_better(self, model: ModelCandidate) -> bool:
        """Return True if it beats an earlier attempt's model; within an attempt the trainer ensures that."""
        known = await asyncio.to_thread(PublishedModel.load, self.job.folder)
        if known is None or self.job.row.submission is None or known.attempt == model.attempt:
            return True
        return model.beats(known)

    def _after_failure(self, model: ModelCandidate, failed: StepFailed) -> None:
        job = self.job
        log.warning("the early upload of job %d failed: %s", job.row.id, str(failed), extra=job.log)
        if failed.reason is EndReason.BAD_SUBMISSION:
            self._refused = folder_identity(model.folder)
            job.alert(AlertKind.BAD_SUBMISSION, f"while training: {failed}")
        self._wait(failed.retry_after or 0.0)

    def _wait(self, at_least: float = 0.0) -> None:
        services = self.job.services
        self._failures += 1
        self._seen = 0
        self._not_before = self.job.now() + max(
            services.timings.pause(self._failures, services.random), at_least
        )
