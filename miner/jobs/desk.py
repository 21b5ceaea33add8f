"""One job's desk: what all the steps of its worker share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from core.errors import GodMinerError
from core.profile.load import LoadedProfile
from miner.engines.base import Engine
from miner.engines.trial import Trials
from miner.fleet.base import Fleet, Grant, TaskKey
from miner.jobs.book import JobBook
from miner.jobs.folder import JobFolder, job_folder
from miner.jobs.live import Bus, Live
from miner.jobs.ports import Fetched, Inputs, Publisher, StepFailed
from miner.jobs.states import MEANING, EndReason, JobState, Retry
from miner.jobs.times import Pace, Timeline, timeline
from miner.store.work import AttemptRow, JobRow

log = logging.getLogger(__name__)

T = TypeVar("T")


def _nobody_knows(_gpus: tuple[str, ...]) -> bool | None:
    return None


async def _no_room() -> int:
    return 0


@dataclass(frozen=True)
class Parts:
    """What every worker works with."""

    data_dir: Path
    book: JobBook
    engine: Engine
    fleet: Fleet
    inputs: Inputs
    publisher: Publisher
    #: The profile as its files are now.
    profile: Callable[[], LoadedProfile]
    pace: Pace = field(default_factory=Pace)
    bus: Bus = field(default_factory=Bus)
    clock: Callable[[], float] = time.time
    random: Random = field(default_factory=Random)
    #: Engines of earlier choices that still have runs of ours, by name.
    others: Mapping[str, Engine] = field(default_factory=dict)
    #: Whether GPUs do nothing at the moment; None where nobody can tell.
    gpus_idle: Callable[[tuple[str, ...]], bool | None] = _nobody_knows
    #: An alert for the operator: (kind, text).
    alert: Callable[[str, str], None] = lambda _kind, _text: None
    #: Removes what finished jobs have left, for a disk that is full; the bytes freed.
    make_room: Callable[[], Awaitable[int]] = _no_room
    #: What each image can train, found by trial; None: the engine is taken at its word.
    trials: Trials | None = None
    #: Ports that running attempts were given, by job.
    ports: dict[int, int] = field(default_factory=dict)
    #: The numbers of the jobs that have a worker.
    numbers: dict[TaskKey, int] = field(default_factory=dict)

    def engine_of(self, attempt: AttemptRow) -> Engine:
        return self.others.get(attempt.engine, self.engine)


class _TimeUp(StepFailed):
    """The moment came until which a step was tried."""


class Desk:
    """The job's row as last read, its folder, its GPUs, and what displays are told of it."""

    def __init__(self, parts: Parts, row: JobRow) -> None:
        self.parts = parts
        self.row = row
        self.folder: JobFolder = job_folder(parts.data_dir, row.id)
        self.live = Live(row.id, row.task_id, row.state)
        self.fetched: Fetched | None = None
        self.grant: Grant | None = None
        #: Why a GPU that this job holds can't be used any more.
        self.gpu_lost: str | None = None
        #: Something has changed that a waiting worker should look at.
        self.poked = asyncio.Event()
        #: The last attempt that was handed to the engine, perhaps still on its way there.
        self.submitting: asyncio.Future[str] | None = None
        self._told: dict[str, Any] = {}
        self.show()

    @property
    def key(self) -> TaskKey:
        return TaskKey(self.row.validator, self.row.task_id)

    @property
    def log(self) -> Mapping[str, object]:
        """For `extra=`."""
        return {"task_id": self.row.task_id, "job_id": self.row.id}

    def now(self) -> float:
        return self.parts.clock()

    def times(self, *, reserve_s: float = 0.0, publish_s: float = 60.0) -> Timeline:
        """The job's timeline, whatever of it is over already."""
        row = self.row
        return timeline(
            row.started_at, row.deadline_at, self.parts.pace, reserve_s=reserve_s, publish_s=publish_s
        )

    async def reload(self) -> None:
        self.row = await self.parts.book.load(self.row.id)
        self.show()

    async def move(self, state: JobState, reason: EndReason | None = None, detail: str = "") -> None:
        self.row = await self.parts.book.move(self.row, state, reason, detail)
        text = f" ({reason}{': ' + detail if detail else ''})" if reason else ""
        log.info("job %d is %s%s", self.row.id, state, text, extra=self.log)
        went_wrong = reason is not None and reason is not EndReason.PUBLISHED
        self.live.stage, self.live.trouble, self.live.retry_at = "", detail if went_wrong else "", None
        self.show()

    def show(self) -> None:
        """Tell the displays."""
        live, row = self.live, self.row
        live.state, live.deadline_at = row.state.value, row.deadline_at
        live.published = row.submission.repo if row.submission else None
        live.gpus = self.grant.ids if self.grant else ()
        told = live.as_dict()
        if told != self._told:
            self._told = told
            self.parts.bus.tell("job", row.id, told)

    def note(self, kind: str, text: str) -> None:
        """Something an operator may want to read, in the log and on the displays."""
        log.info("job %d: %s", self.row.id, text, extra=self.log)
        self.parts.bus.tell("note", self.row.id, {"job_id": self.row.id, "kind": kind, "text": text})

    def doing(self, stage: str, done: int | None = None, total: int | None = None) -> None:
        """Also what inputs and publisher are given as `told`."""
        self.live.stage, self.live.bytes_done, self.live.bytes_total = stage, done, total
        self.show()

    def told(self, what: str, done: int, total: int | None) -> None:
        self.doing(what, done, total)

    async def submitted(self) -> None:
        """Nothing is on its way to the engine any more: what it does not know now, it never will."""
        if self.submitting is not None:
            await asyncio.wait({self.submitting})
            self.submitting = None

    def poke(self) -> None:
        self.poked.set()

    async def pause(self, seconds: float) -> None:
        """Wait, but not longer than until somebody pokes."""
        try:
            async with asyncio.timeout(max(seconds, 0.0)):
                await self.poked.wait()
        except TimeoutError:
            pass
        self.poked.clear()

    def take_back(self, gpus: tuple[str, ...]) -> None:
        """After a restart: what a run goes on with is its own. While the fleet can't see its cards that is
        not known, and asked again: a card that is not seen yet is no lost one."""
        if self.grant is not None or self.gpu_lost is not None:
            return
        fleet = self.parts.fleet
        self.grant = fleet.adopt(self.key, gpus, until=self.row.deadline_at)
        seen = fleet.snapshot(self.now())
        if self.grant is None and seen.gpus and seen.trouble is None:
            self.gpu_lost = f"of {', '.join(gpus)} not all can be used any more"

    def release_gpus(self) -> None:
        self.parts.fleet.release(self.key)
        self.parts.ports.pop(self.row.id, None)
        self.grant = None
        self.gpu_lost = None
        self.show()

    async def persist(
        self,
        name: str,
        action: Callable[[], Awaitable[T]],
        until: Callable[[], float],
        attempt: int | None = None,
    ) -> T:
        """One step, tried again as its reason allows, until a moment that may move. `StepFailed`."""
        failures, last = 0, ""
        while True:
            try:
                return await self._once(name, action, until(), attempt)
            except StepFailed as failed:
                if isinstance(failed, _TimeUp) and self.now() < until():
                    continue  # a second start has put it off meanwhile
                if failed.reason is EndReason.DEADLINE:
                    raise StepFailed(failed.reason, f"{failed}{last}") from None
                if MEANING[failed.reason].retry is not Retry.WAIT:
                    raise
                failures, last = failures + 1, f"; the last try: {failed}"
                pause = max(self.parts.pace.pause(failures, self.parts.random), failed.retry_after or 0.0)
                if self.now() + pause >= until():
                    raise StepFailed(EndReason.DEADLINE, f"{name} was not over in time{last}") from None
                if failed.reason is EndReason.DISK_FULL:
                    await self.parts.make_room()
                await self._wait(name, failed, failures, pause)

    async def _once(
        self, name: str, action: Callable[[], Awaitable[T]], until: float, attempt: int | None
    ) -> T:
        async with self.parts.book.step(self.row, name, attempt):
            try:
                async with asyncio.timeout(max(until - self.now(), 0.0)) as limit:
                    return await action()
            except TimeoutError:
                if not limit.expired():
                    raise
                raise _TimeUp(EndReason.DEADLINE, f"{name} was not over in time") from None

    async def _wait(self, name: str, failed: StepFailed, failures: int, pause: float) -> None:
        log.warning(
            "job %d: %s failed (%s: %s); try %d in %.1f s",
            self.row.id,
            name,
            failed.reason,
            str(failed),
            failures + 1,
            pause,
            extra=self.log,
        )
        if failures == 3:
            self.parts.alert(f"job_{failed.reason}", f"job {self.row.id}, {name}: {failed}")
        self.live.trouble, self.live.retry_at = str(failed), self.now() + pause
        self.show()
        await self.pause(pause)
        self.live.trouble, self.live.retry_at = "", None


def unreachable(error: GodMinerError) -> StepFailed:
    return StepFailed(EndReason.ENGINE_GONE, str(error))
