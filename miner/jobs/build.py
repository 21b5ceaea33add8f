"""Puts the pipeline together from the settings: engine, inputs, publisher, profile, pace."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from core.errors import GodMinerError
from core.profile.load import LoadedProfile
from miner.engines import choose
from miner.engines.base import Engine, EngineSpec, Found, Status, Unreachable
from miner.engines.trial import Trials
from miner.fleet.base import Ability, Fleet, TaskKey
from miner.jobs.book import JobBook
from miner.jobs.desk import Parts
from miner.jobs.inputs.fetch import JobInputs
from miner.jobs.live import Bus
from miner.jobs.manager import Jobs
from miner.jobs.room import Room
from miner.jobs.times import Pace
from miner.publish import HubPublisher, PublishTo
from miner.redact import Redactor
from miner.settings import Settings
from miner.store import work
from miner.store.books import Books

log = logging.getLogger(__name__)

Alert = Callable[[str, str], None]

#: How often it is looked whether there is an engine now.
LOOK_AGAIN_SECONDS = 30.0
#: How long a restart waits for the fleet to see its cards, before it takes up what runs on them.
CARDS_SECONDS = 30.0


class AbsentEngine:
    """An engine that an earlier run was started on and that can't be had now: it may run still, so nothing of
    it is known and nothing of it is done again."""

    can_sandbox = False

    def __init__(self, name: str, why: str) -> None:
        self.name, self._why = name, why

    def _unreachable(self) -> Unreachable:
        return Unreachable(f"the engine {self.name} can't be had: {self._why}")

    async def submit(self, spec: EngineSpec) -> str:
        raise self._unreachable()

    async def find(self, key: str) -> str | None:
        raise self._unreachable()

    async def poll(self, ref: str, run_dir: Path) -> Status:
        raise self._unreachable()

    async def stop(self, ref: str, *, force: bool = False) -> None:
        raise self._unreachable()

    async def dump_stacks(self, ref: str) -> None:
        raise self._unreachable()

    async def remove(self, ref: str) -> None:
        raise self._unreachable()

    async def lacks(self) -> Mapping[str, str]:
        raise self._unreachable()

    async def identity(self, image: str) -> str:
        raise self._unreachable()

    async def ours(self) -> list[Found]:
        raise self._unreachable()

    async def close(self) -> None:
        return None


async def find_engine(settings: Settings, alert: Alert, fleet: Fleet) -> Engine:
    """The engine of the settings, waited for: one can be installed while the daemon runs. No offer is
    accepted until then, nor until it was tried out."""
    told = ""
    while True:
        choice = await choose.choose(settings)
        if choice.engine is not None:
            log.info("trainings run on %s: %s", choice.engine.name, choice.why)
            return choice.engine
        fleet.ability = Ability(trouble=choice.why)
        if choice.why != told:
            told = choice.why
            alert("no_engine", f"nothing here can train: {choice.why}")
        await asyncio.sleep(LOOK_AGAIN_SECONDS)


async def earlier_engines(settings: Settings, book: JobBook, current: Engine) -> dict[str, Engine]:
    """Those that runs of an earlier choice are still on."""
    names = {one.engine for one in await book.read(work.open_attempts)} - {current.name}
    found: dict[str, Engine] = {}
    for name in names:
        try:
            found[name] = await choose.build(settings, name)
        except GodMinerError as error:
            found[name] = AbsentEngine(name, str(error))
    return found


async def build_jobs(
    settings: Settings,
    books: Books,
    fleet: Fleet,
    profile: Callable[[], LoadedProfile],
    *,
    alert: Alert,
    clock: Callable[[], float] = time.time,
    on_taken: Callable[[TaskKey], None] = lambda _key: None,
    on_over: Callable[[TaskKey], None] = lambda _key: None,
) -> Jobs:
    """Everything but started. Waits for an engine, and for the fleet to see its cards."""
    book = JobBook(books, clock=clock)
    engine = await find_engine(settings, alert, fleet)
    await _see_cards(fleet, book)
    bus = Bus()

    def noted(job_id: int, text: str) -> None:
        log.info("job %d: %s", job_id, text)
        bus.tell("note", job_id, {"job_id": job_id, "kind": "publishing", "text": text})

    room = Room(settings.data_dir, book, keep_s=settings.keep_finished_hours * 3600)
    parts = Parts(
        data_dir=settings.data_dir,
        book=book,
        engine=engine,
        others=await earlier_engines(settings, book, engine),
        fleet=fleet,
        inputs=JobInputs(settings, Redactor(settings.secrets())),
        publisher=HubPublisher(PublishTo.of(settings), noted=noted),
        profile=profile,
        pace=Pace.of(settings),
        bus=bus,
        clock=clock,
        alert=alert,
        make_room=room.make,
        trials=Trials(engine, settings.data_dir),
    )
    return Jobs(parts, room=room, on_taken=on_taken, on_over=on_over)


async def _see_cards(fleet: Fleet, book: JobBook) -> None:
    waited = 0.0
    while not fleet.snapshot(book.clock()).gpus and waited < CARDS_SECONDS:
        await asyncio.sleep(0.05)
        waited += 0.05
