"""Publish submissions for the daemon: run one process per try, retry, and stop at the deadline.

Each try is a process of its own (`miner.publish.worker`). What one try has sent is not sent again: the hub
keeps whole files by SHA-256, and pieces of files where it deduplicates. `UploadSpeed` warns when an upload
will be late.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Protocol

from pydantic import SecretStr

from core.domain.job_states import EndReason, ProgressCallback, StepFailed
from core.domain.tasks import ImageModelType, TaskType
from core.domain.wire import MinerSubmission
from miner.observe.redact import Redactor
from miner.publish.messages import (
    PROTOCOL,
    HubAccount,
    PublishedRepo,
    PublishEvent,
    PublishFailed,
    PublishNote,
    PublishOrder,
    PublishProgress,
    PublishTask,
    PublishTrouble,
)
from miner.settings import Settings
from miner.settings.values import HUGGINGFACE
from miner.support.subprocess import ChildSilent, run_order, worker_environment


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """A submission that is to become the job's published one."""

    job_id: int
    task_type: TaskType
    #: The hub's name of the base model, for `adapter_config.json`; and its path, to compare a full model's
    #: configuration with.
    model: str
    model_path: Path
    #: A snapshot: regular files only, nobody writes here while it is being published. It is not changed: what
    #: has to be different (a README, a base name) replaces its file in the upload only.
    folder: Path
    #: The last part of the repository's name, as the validator expects it.
    repo_name: str
    image_type: ImageModelType | None = None
    #: The job's earlier submission, perhaps under another name: moved, then replaced in one commit.
    earlier: MinerSubmission | None = None
    #: Seconds since the epoch: an upload still going on then is ended, after a warning.
    finish_by: float | None = None


class SubmissionPublisher(Protocol):
    async def publish(self, request: PublishRequest, on_progress: ProgressCallback) -> MinerSubmission:
        """Check the directory, upload it, verify the repository.

        `StepFailed` with NETWORK, RATE_LIMITED, HUB_REFUSED, DISK_FULL (tried again), DEADLINE or
        BAD_SUBMISSION (the repository stays as it is).
        """

    async def move(
        self, earlier: MinerSubmission, repo_name: str, finish_by: float | None = None
    ) -> MinerSubmission:
        """Move the files to another name, as a second start may want. Repeating it does nothing.

        `StepFailed` as above.
        """

    def forget(self, job_id: int) -> None:
        """The job is over: remove what is remembered of its files for another try. Safe to repeat.

        If the job is started again after all, its files are read once more.
        """


log = logging.getLogger(__name__)

#: Settings of the hub's client that an operator may set.
_PASSED = ("HF_HUB_DISABLE_XET", "HF_XET_HIGH_PERFORMANCE")


def publish_environment(cache: Path, *, deduplicate: bool) -> dict[str, str]:
    """The client keeps its files in `cache`."""
    environment = worker_environment(
        *_PASSED,
        HF_HOME=str(cache),
        HF_XET_CACHE=str(cache / "xet"),
        # Each stored piece of 64 MB is recorded at once; by default an upload that is killed loses its last
        # 20 s.
        HF_XET_SESSION_XORB_METADATA_FLUSH_MAX_COUNT="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        HF_HUB_DISABLE_IMPLICIT_TOKEN="1",  # noqa: S106 - a switch
        DO_NOT_TRACK="1",
    )
    return environment if deduplicate else {**environment, "HF_HUB_DISABLE_XET": "1"}


#: The window of the speed: long enough for the gaps between files, short enough to notice a change.
WINDOW_SECONDS = 30.0
#: A shorter measurement predicts nothing.
MIN_MEASURED_SECONDS = 3.0
_MEGA = 1e6


class UploadSpeed:
    def __init__(
        self, finish_by: float | None, clock: Callable[[], float], on_late: Callable[[str], None]
    ) -> None:
        """`on_late` is called when the upload will not be done by `finish_by`, and again if it will."""
        self._finish_by = finish_by
        self._clock = clock
        self._on_late = on_late
        self._points: deque[tuple[float, int]] = deque()
        self._is_late = False

    def add(self, done: int, total: int) -> None:
        now = self._clock()
        if self._points and done < self._points[-1][1]:
            self._points.clear()  # another try
        self._points.append((now, done))
        while len(self._points) > 2 and self._points[1][0] <= now - WINDOW_SECONDS:
            self._points.popleft()
        self._warn(now, done, total)

    @property
    def speed(self) -> float | None:
        """Bytes per second; None while it is unknown."""
        if len(self._points) < 2:
            return None
        (first, start), (last, end) = self._points[0], self._points[-1]
        return (end - start) / (last - first) if last - first >= MIN_MEASURED_SECONDS else None

    def _warn(self, now: float, done: int, total: int) -> None:
        speed = self.speed
        if self._finish_by is None or speed is None:
            return
        left = self._finish_by - now
        needed = (total - done) / speed if speed > 0 else float("inf")
        if needed > left and not self._is_late:
            self._is_late = True
            rest = f"{(total - done) / _MEGA:,.0f} MB to go at {speed / _MEGA:,.1f} MB/s"
            self._on_late(f"the upload will not be done in time: {rest}, and {max(left, 0):,.0f} s are left")
        elif needed < left * 0.9 and self._is_late:
            self._is_late = False
            self._on_late(f"the upload will be done in time after all, at {speed / _MEGA:,.1f} MB/s")


#: Tries of one call; the caller may call again.
TRIES = 5
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
#: The longest pause that a hub may request, and never more than half of the time that is left: a model that
#: was held back out of politeness is worth nothing.
MAX_REQUESTED_PAUSE = 600.0
#: The client sleeps through a rate limit without a word, for at most five minutes.
SILENCE_SECONDS = 420.0
#: With this many failures of the deduplicating transfer the plain one is tried.
DEDUPLICATED_TRIES = 2
#: Identifying the token takes a second; this ends a client that hangs.
ACCOUNT_SECONDS = 60.0
#: Troubles that may pass in a moment.
RETRIED_TROUBLES = frozenset(
    {
        PublishTrouble.CONFLICT,
        PublishTrouble.SERVER,
        PublishTrouble.NETWORK,
        PublishTrouble.MISMATCH,
        PublishTrouble.RATE_LIMITED,
        PublishTrouble.CRASHED,
    }
)
REASON_OF_TROUBLE: dict[PublishTrouble, EndReason] = {
    PublishTrouble.TOKEN: EndReason.HUB_REFUSED,
    PublishTrouble.FORBIDDEN: EndReason.HUB_REFUSED,
    PublishTrouble.REFUSED: EndReason.HUB_REFUSED,
    PublishTrouble.GONE: EndReason.HUB_REFUSED,
    PublishTrouble.RATE_LIMITED: EndReason.RATE_LIMITED,
    PublishTrouble.CONFLICT: EndReason.NETWORK,
    PublishTrouble.SERVER: EndReason.NETWORK,
    PublishTrouble.NETWORK: EndReason.NETWORK,
    PublishTrouble.MISMATCH: EndReason.NETWORK,
    PublishTrouble.CRASHED: EndReason.NETWORK,
    PublishTrouble.BAD_SUBMISSION: EndReason.BAD_SUBMISSION,
    PublishTrouble.DISK_FULL: EndReason.DISK_FULL,
}


@dataclass(frozen=True)
class PublishTarget:
    """The place to publish, the account, and the directory for files that outlive a try."""

    #: `huggingface`, or `local:DIR`.
    hub: str
    endpoint: str
    token: SecretStr | None
    user: str | None
    folder: Path

    @classmethod
    def from_settings(cls, settings: Settings) -> PublishTarget:
        return cls(
            hub=settings.hub,
            endpoint=settings.hf_endpoint,
            token=settings.hf_token,
            user=settings.hf_user,
            folder=settings.data_dir / "publishing",
        )

    @property
    def local(self) -> str | None:
        return None if self.hub == HUGGINGFACE else self.hub.partition(":")[2]


def _log_note(job_id: int, text: str) -> None:
    log.info("job %d: %s", job_id, text)


def _ignore(_event: PublishEvent) -> None:
    return None


@dataclass(eq=False, repr=False)
class HubPublisher:
    """Implements `SubmissionPublisher`."""

    to: PublishTarget
    _: KW_ONLY
    tries: int = TRIES
    silence: float = SILENCE_SECONDS
    first_pause: float = FIRST_PAUSE
    worker: Sequence[str] | None = None
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.time
    #: Gets (job id, text) for the operator: mended files, a late upload, a busy hub.
    on_note: Callable[[int, str], None] = _log_note

    def __post_init__(self) -> None:
        self._redact = Redactor([self.to.token.get_secret_value() if self.to.token else ""])
        #: Requested once: the hub limits these requests strictly.
        self._owner = self.to.user

    async def publish(
        self, request: PublishRequest, on_progress: ProgressCallback, *, keep_card: bool = False
    ) -> MinerSubmission:
        """Publish as `SubmissionPublisher` does, with `keep_card` for a README that a person wrote."""
        order = self._order(
            PublishTask.PUBLISH,
            repo_name=request.repo_name,
            folder=str(request.folder),
            task_type=request.task_type,
            image_type=request.image_type,
            model=request.model or None,
            base=None if request.model_path == Path() else str(request.model_path),
            keep_card=keep_card,
            earlier=request.earlier.repo if request.earlier else None,
            memory=str(self.to.folder / f"{request.job_id}.json"),
        )
        speed = UploadSpeed(request.finish_by, self.clock, lambda text: self.on_note(request.job_id, text))

        def on_event(event: PublishEvent) -> None:
            if isinstance(event, PublishProgress):
                on_progress(event.what, event.done, event.total)
                if event.what == "upload":
                    speed.add(event.done, event.total)
            elif isinstance(event, PublishNote):
                self.on_note(request.job_id, self._redact(event.text))

        repo = await self._until_done(order, on_event, request.finish_by)
        sizes = f"{repo.files} files, {repo.size:,} bytes, {repo.sent:,} of them sent in the last try"
        self.on_note(request.job_id, f"published {repo.repo}: {sizes}")
        return MinerSubmission(repo=repo.repo, model_hash=repo.model_hash)

    async def move(
        self, earlier: MinerSubmission, repo_name: str, finish_by: float | None = None
    ) -> MinerSubmission:
        if earlier.repo.rpartition("/")[2] == repo_name:
            return earlier
        order = self._order(PublishTask.MOVE, earlier=earlier.repo, repo_name=repo_name)
        moved = await self._until_done(order, _ignore, finish_by)
        return MinerSubmission(repo=moved.repo, model_hash=earlier.model_hash)

    async def account(self) -> HubAccount:
        """Return whose token this is and whether it may write. `StepFailed` when the hub does not say."""
        answer = await self._try_once(self._order(PublishTask.ACCOUNT), _ignore, ACCOUNT_SECONDS, plain=False)
        if isinstance(answer, HubAccount):
            return answer
        assert isinstance(answer, PublishFailed)
        raise self._failed(answer)

    def forget(self, job_id: int) -> None:
        (self.to.folder / f"{job_id}.json").unlink(missing_ok=True)

    def _order(self, task: PublishTask, **more: object) -> PublishOrder:
        token = self.to.token.get_secret_value() if self.to.token and not self.to.local else None
        common = {"endpoint": self.to.endpoint, "local": self.to.local, "user": self._owner, "token": token}
        return PublishOrder.model_validate({"task": task, **common, **more})

    async def _until_done(
        self, order: PublishOrder, on_event: Callable[[PublishEvent], None], finish_by: float | None
    ) -> PublishedRepo:
        limit = None if finish_by is None else max(finish_by - self.clock(), 0.0)
        try:
            async with asyncio.timeout(limit):
                return await self._publish_with_retries(order, on_event, finish_by)
        except TimeoutError:
            text = f"{order.repo_name} was not published in time: the upload was ended at its deadline"
            raise StepFailed(EndReason.DEADLINE, text) from None

    async def _publish_with_retries(
        self, order: PublishOrder, on_event: Callable[[PublishEvent], None], finish_by: float | None
    ) -> PublishedRepo:
        pause, failures = self.first_pause, 0
        while True:
            answer = await self._try_once(order, on_event, self.silence, plain=failures >= DEDUPLICATED_TRIES)
            if isinstance(answer, PublishedRepo):
                self._owner = self._owner or answer.repo.partition("/")[0]
                return answer
            assert isinstance(answer, PublishFailed)
            failures += 1
            if answer.trouble not in RETRIED_TROUBLES or failures >= self.tries:
                raise self._failed(answer)
            requested = min(answer.retry_after or 0.0, MAX_REQUESTED_PAUSE)
            wait = max(pause * random.uniform(0.5, 1.5), requested)  # noqa: S311 - jitter
            if finish_by is not None:
                wait = min(wait, max(finish_by - self.clock(), 0.0) / 2)
            log.warning(
                "publishing %s: %s; again in %.1f s", order.repo_name, self._redact(answer.text), wait
            )
            await self.pause(wait)
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _try_once(
        self, order: PublishOrder, on_event: Callable[[PublishEvent], None], silence: float, *, plain: bool
    ) -> PublishedRepo | HubAccount | PublishFailed:
        """Run one process for the order and return its answer."""
        try:
            answer = await run_order(
                PROTOCOL,
                order,
                on_event,
                environment=publish_environment(self.to.folder / "client", deduplicate=not plain),
                silence=silence,
                redact=self._redact,
                command=self.worker,
            )
        except ChildSilent:
            text = f"the publishing process was silent for {silence:g} s"
            return PublishFailed(trouble=PublishTrouble.NETWORK, text=text)
        except OSError as error:
            text = f"the publishing process cannot be started: {error}"
            return PublishFailed(trouble=PublishTrouble.CRASHED, text=text)
        if isinstance(answer.event, PublishedRepo | HubAccount | PublishFailed):
            return answer.event
        return PublishFailed(trouble=PublishTrouble.CRASHED, text=f"the publishing process {answer.ending}")

    def _failed(self, answer: PublishFailed) -> StepFailed:
        return StepFailed(REASON_OF_TROUBLE[answer.trouble], self._redact(answer.text), answer.retry_after)
