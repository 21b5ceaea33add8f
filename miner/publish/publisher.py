"""Publishes submissions for the daemon: tries again what may go better, and is over when time is.

Each try is a process of its own (`miner.publish.worker`). What a try has sent is not sent again by the next:
the hub keeps whole files under their SHA-256, and pieces of files where it deduplicates.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from core.wire import MinerSubmission
from miner.jobs.ports import Outgoing, StepFailed, Told
from miner.jobs.states import EndReason
from miner.publish import child, words
from miner.publish.pace import Pace
from miner.publish.words import Account, Event, Failed, Order, Published, Task, Trouble
from miner.redact import Redactor
from miner.settings import Settings
from miner.settings.values import HUGGINGFACE

log = logging.getLogger(__name__)

#: Tries of one call; whoever calls may call again.
TRIES = 5
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
#: What a hub asks for is granted as far as this, and never beyond half of the time that is left: a model that
#: was held back out of politeness is worth nothing.
LONGEST_ASKED = 600.0
#: The client sleeps through a rate limit without a word, for at most five minutes.
SILENCE_SECONDS = 420.0
#: With this many failures of the deduplicating transfer the plain one is tried.
DEDUPLICATED_TRIES = 2
#: Looking whose token it is takes a second; this ends what hangs.
ACCOUNT_SECONDS = 60.0
#: What may go better by itself, a moment later.
PASSING = frozenset(
    {
        Trouble.CONFLICT,
        Trouble.SERVER,
        Trouble.NETWORK,
        Trouble.MISMATCH,
        Trouble.RATE_LIMITED,
        Trouble.CRASHED,
    }
)
REASON: dict[Trouble, EndReason] = {
    Trouble.TOKEN: EndReason.HUB_REFUSED,
    Trouble.FORBIDDEN: EndReason.HUB_REFUSED,
    Trouble.REFUSED: EndReason.HUB_REFUSED,
    Trouble.GONE: EndReason.HUB_REFUSED,
    Trouble.RATE_LIMITED: EndReason.RATE_LIMITED,
    Trouble.CONFLICT: EndReason.NETWORK,
    Trouble.SERVER: EndReason.NETWORK,
    Trouble.NETWORK: EndReason.NETWORK,
    Trouble.MISMATCH: EndReason.NETWORK,
    Trouble.CRASHED: EndReason.NETWORK,
    Trouble.BAD_SUBMISSION: EndReason.BAD_SUBMISSION,
    Trouble.DISK_FULL: EndReason.DISK_FULL,
}


@dataclass(frozen=True)
class PublishTo:
    """Where to, as whom, and where what must outlive a try is kept."""

    #: `huggingface`, or `local:DIR`.
    hub: str
    endpoint: str
    token: SecretStr | None
    user: str | None
    folder: Path

    @classmethod
    def of(cls, settings: Settings) -> PublishTo:
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


class HubPublisher:
    """Satisfies `miner.jobs.ports.Publisher`."""

    def __init__(
        self,
        to: PublishTo,
        *,
        tries: int = TRIES,
        silence: float = SILENCE_SECONDS,
        first_pause: float = FIRST_PAUSE,
        worker: Sequence[str] = child.WORKER,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.time,
        noted: Callable[[int, str], None] | None = None,
    ) -> None:
        """`noted` gets (job id, text) of what an operator should see: mended files, an upload that will be
        late, a hub that makes us wait."""
        self._to = to
        self._tries = tries
        self._silence = silence
        self._first_pause = first_pause
        self._worker = worker
        self._pause = pause
        self._clock = clock
        self._noted = noted or (lambda job_id, text: log.info("job %d: %s", job_id, text))
        secret = to.token.get_secret_value() if to.token else ""
        self._redact = Redactor([secret])
        #: Asked once: the hub limits strictly how often one may.
        self._owner = to.user

    async def publish(self, outgoing: Outgoing, told: Told, *, keep_card: bool = False) -> MinerSubmission:
        """As the port says, with `keep_card` for a README that a person wrote."""
        order = self._order(
            Task.PUBLISH,
            repo_name=outgoing.repo_name,
            folder=str(outgoing.folder),
            task_type=outgoing.task_type,
            model=outgoing.model or None,
            base=None if outgoing.model_path == Path() else str(outgoing.model_path),
            keep_card=keep_card,
            earlier=outgoing.earlier.repo if outgoing.earlier else None,
            memory=str(self._to.folder / f"{outgoing.job_id}.json"),
        )
        pace = Pace(outgoing.finish_by, self._clock, lambda text: self._noted(outgoing.job_id, text))

        def heard(event: Event) -> None:
            if isinstance(event, words.Progress):
                told(event.what, event.done, event.total)
                if event.what == "upload":
                    pace.at(event.done, event.total)
            elif isinstance(event, words.Note):
                self._noted(outgoing.job_id, self._redact(event.text))

        done = await self._until_done(order, heard, outgoing.finish_by)
        sizes = f"{done.files} files, {done.size:,} bytes, {done.sent:,} of them sent in the last try"
        self._noted(outgoing.job_id, f"published {done.repo}: {sizes}")
        return MinerSubmission(repo=done.repo, model_hash=done.model_hash)

    async def move(
        self, earlier: MinerSubmission, repo_name: str, finish_by: float | None = None
    ) -> MinerSubmission:
        if earlier.repo.rpartition("/")[2] == repo_name:
            return earlier
        order = self._order(Task.MOVE, earlier=earlier.repo, repo_name=repo_name)
        done = await self._until_done(order, lambda event: None, finish_by)
        return MinerSubmission(repo=done.repo, model_hash=earlier.model_hash)

    async def account(self) -> Account:
        """Whose token this is and whether it may write. `StepFailed` when the hub does not say."""
        answer = await self._once(self._order(Task.ACCOUNT), lambda event: None, ACCOUNT_SECONDS, plain=False)
        if isinstance(answer, Account):
            return answer
        assert isinstance(answer, Failed)
        raise self._failed(answer)

    def forget(self, job_id: int) -> None:
        """The job is over: nothing more of it will be published."""
        (self._to.folder / f"{job_id}.json").unlink(missing_ok=True)

    def _order(self, task: Task, **more: object) -> Order:
        token = self._to.token.get_secret_value() if self._to.token and not self._to.local else None
        about = {"endpoint": self._to.endpoint, "local": self._to.local, "user": self._owner, "token": token}
        return Order.model_validate({"task": task, **about, **more})

    async def _until_done(
        self, order: Order, heard: Callable[[Event], None], finish_by: float | None
    ) -> Published:
        limit = None if finish_by is None else max(finish_by - self._clock(), 0.0)
        try:
            async with asyncio.timeout(limit):
                return await self._tried(order, heard, finish_by)
        except TimeoutError:
            text = f"{order.repo_name} was not published in time: the upload was ended at its deadline"
            raise StepFailed(EndReason.DEADLINE, text) from None

    async def _tried(
        self, order: Order, heard: Callable[[Event], None], finish_by: float | None
    ) -> Published:
        pause, failures = self._first_pause, 0
        while True:
            answer = await self._once(order, heard, self._silence, plain=failures >= DEDUPLICATED_TRIES)
            if isinstance(answer, Published):
                self._owner = self._owner or answer.repo.partition("/")[0]
                return answer
            assert isinstance(answer, Failed)
            failures += 1
            if answer.trouble not in PASSING or failures >= self._tries:
                raise self._failed(answer)
            asked = min(answer.retry_after or 0.0, LONGEST_ASKED)
            wait = max(pause * random.uniform(0.5, 1.5), asked)  # noqa: S311 - jitter
            if finish_by is not None:
                wait = min(wait, max(finish_by - self._clock(), 0.0) / 2)
            log.warning(
                "publishing %s: %s; again in %.1f s", order.repo_name, self._redact(answer.text), wait
            )
            await self._pause(wait)
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _once(
        self, order: Order, heard: Callable[[Event], None], silence: float, *, plain: bool
    ) -> Event:
        made = child.Child(
            order, self._to.folder / "client", deduplicate=not plain, worker=self._worker, redact=self._redact
        )
        try:
            return await made.run(heard, silence)
        except child.Stalled as error:
            return Failed(trouble=Trouble.NETWORK, text=str(error))

    def _failed(self, answer: Failed) -> StepFailed:
        return StepFailed(REASON[answer.trouble], self._redact(answer.text), answer.retry_after)
