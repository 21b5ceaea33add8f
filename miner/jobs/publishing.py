"""From models on disk to the one that is published: the best of all attempts, under the newest name."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from core.wire import MinerSubmission
from miner.jobs.best import Candidate, Published, best_of, refuse, snapshot
from miner.jobs.desk import Desk
from miner.jobs.launch import Attempt
from miner.jobs.past import candidates
from miner.jobs.ports import Outgoing, StepFailed, Told
from miner.jobs.states import EndReason, JobState
from miner.jobs.tasks import repo_name, task_of
from miner.store import work


async def publish(desk: Desk) -> bool:
    """Ends in state DONE; False when there is nothing to publish. `StepFailed` when it can't be in time."""
    if all(one.ended_at for one in await desk.parts.book.attempts(desk.row.id)):
        desk.release_gpus()  # else a run that could not be ended in time has them still
    while (best := await best_model(desk)) is not None:
        try:
            await _publish_well(desk, best)
        except StepFailed as failed:
            if failed.reason is not EndReason.BAD_SUBMISSION:
                raise
            text = f"the model of attempt {best.attempt} is refused: {failed}"
            desk.note("refused", text)
            desk.parts.alert("bad_submission", f"job {desk.row.id}: {text}")
            await asyncio.to_thread(refuse, best)
            await desk.parts.book.refuse(desk.row, best.attempt, str(failed))
            continue
        if not desk.row.misnamed:  # a second start may have come meanwhile
            break
    if desk.row.submission is None:
        return False
    await desk.move(JobState.DONE, EndReason.PUBLISHED, f"published as {desk.row.submission.repo}")
    return True


async def best_model(desk: Desk) -> Candidate | None:
    rows = await desk.parts.book.attempts(desk.row.id)
    return await asyncio.to_thread(lambda: best_of(candidates(rows)))


async def _publish_well(desk: Desk, best: Candidate) -> None:
    await desk.persist(
        "publish", lambda: publish_one(desk, best, desk.told), lambda: desk.row.deadline_at, best.attempt
    )


async def publish_one(desk: Desk, model: Candidate, told: Told) -> None:
    """Make this the published model. What is there already is left as it is."""
    row, folder = desk.row, desk.folder
    known = await asyncio.to_thread(Published.load, folder)
    if known is not None and known.is_of(model, row.submission, repo_name(row)):
        return
    await _must_be_free(desk)
    taken = await asyncio.to_thread(snapshot, model.folder, folder.submission)
    await _take_back_the_hash(desk)
    made = await desk.parts.publisher.publish(await _outgoing(desk, model), told)
    desk.row = await desk.parts.book.submitted(desk.row, made)
    published = Published(taken, model.attempt, model.score, made.repo)
    await asyncio.to_thread(published.save, folder)
    desk.note("published", f"the model of attempt {model.attempt} is published as {made.repo}")
    desk.show()


async def _must_be_free(desk: Desk) -> None:
    """Repositories are public, so any validator can name one that holds another's submission: what was
    published for a task stays."""
    row, name = desk.row, repo_name(desk.row)
    if await desk.parts.book.read(lambda db: work.has_repo_of_another(db, row.validator, name)):
        raise StepFailed(EndReason.HUB_REFUSED, f"the repository {name} holds another validator's submission")


async def _take_back_the_hash(desk: Desk) -> None:
    """From here on the hub may hold another model at any moment, and whatever ends us, ours would be the old
    one's hash: a submission that scores nothing. Without a hash validators take what is there."""
    known = desk.row.submission
    if known is not None and known.model_hash is not None:
        without = MinerSubmission(repo=known.repo, model_hash=None)
        desk.row = await desk.parts.book.submitted(desk.row, without)


async def _outgoing(desk: Desk, model: Candidate) -> Outgoing:
    row, task = desk.row, task_of(desk.row)
    attempts = await desk.parts.book.attempts(row.id)
    of = next(one for one in attempts if one.number == model.attempt)
    run = (await asyncio.to_thread(Attempt.load, of)).run
    return Outgoing(
        job_id=row.id,
        task_id=row.task_id,
        task_type=row.task_type,
        model=task.model,
        model_path=Path(run.model_path),
        folder=desk.folder.submission,
        repo_name=repo_name(row),
        image_type=task.image_type,
        earlier=row.submission,
        finish_by=row.deadline_at,
    )


async def rename(desk: Desk) -> None:
    """A second start for a job that is done named another repository: the model moves there."""
    name = repo_name(desk.row)

    async def move() -> MinerSubmission:
        await _must_be_free(desk)
        assert desk.row.submission is not None
        try:
            return await desk.parts.publisher.move(desk.row.submission, name, desk.row.deadline_at)
        except StepFailed as failed:
            best = await best_model(desk) if failed.reason is EndReason.HUB_REFUSED else None
            if best is None:
                raise
            # Not where the books have it, as when they could not be written after an earlier move.
            await publish_one(desk, best, desk.told)
            return desk.row.submission

    made = await desk.persist("move", move, lambda: desk.row.deadline_at)
    desk.row = await desk.parts.book.submitted(desk.row, made)
    known = await asyncio.to_thread(Published.load, desk.folder)
    if known is not None:
        await asyncio.to_thread(replace(known, repo=made.repo).save, desk.folder)
    desk.note("moved", f"the published model is {made.repo} now")
    desk.show()
