"""Build the job pipeline from the settings: backend, inputs, publisher, profile and timings."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NoReturn

from core.domain.errors import GodMinerError
from core.profile.resolve import LoadedProfile, load_profile
from miner.backends import registry
from miner.backends.base import Backend, BackendUnreachable
from miner.backends.registry import build_backend
from miner.backends.trial import BackendTrials
from miner.fleet.base import BackendAbility
from miner.fleet.fleet import Fleet
from miner.fleet.sampler import SampleHistory
from miner.inputs.fetch import JobInputs
from miner.jobs.context import JobServices, WorthOfTask
from miner.jobs.events import JobEventBus
from miner.jobs.folder import FinishedJobCleaner
from miner.jobs.manager import JobManager
from miner.jobs.timeline import JobTimings
from miner.observe.alerts import AlertKind, SendAlert
from miner.observe.redact import Redactor
from miner.publish import HubPublisher, PublishTarget
from miner.settings import BackendKind, Settings
from miner.store import attempts
from miner.store.store import Store

log = logging.getLogger(__name__)

#: Interval for looking for a backend while there is none.
BACKEND_RETRY_SECONDS = 30.0
#: Seconds that a restart waits for the fleet to see its GPUs before it adopts the runs on them.
GPU_WAIT_SECONDS = 30.0


class UnavailableBackend:
    """Stands in for the backend of earlier runs that is unavailable now.

    Those runs may still be going on, so nothing is known of them and none is repeated.
    """

    can_sandbox = False

    def __init__(self, name: str, why: str) -> None:
        self.name, self._why = name, why

    async def _unreachable(self, *_: object, **__: object) -> NoReturn:
        raise BackendUnreachable(f"the backend {self.name} is unavailable: {self._why}")

    submit = find = poll = stop = dump_stacks = remove = _unreachable
    missing_images = identity = list_runs = _unreachable

    async def close(self) -> None:
        return None


async def wait_for_backend(settings: Settings, kind: BackendKind, alert: SendAlert, fleet: Fleet) -> Backend:
    """Wait for a backend of the settings: one can be installed while the daemon runs.

    No offer is accepted until then, nor before the backend was tried out.
    """
    alerted = ""
    while True:
        choice = await registry.choose_backend(settings, kind)
        if choice.backend is not None:
            log.info("trainings run on %s: %s", choice.backend.name, choice.why)
            return choice.backend
        fleet.abilities = {**fleet.abilities, kind: BackendAbility(problem=choice.why)}
        if choice.why != alerted:
            alerted = choice.why
            alert(AlertKind.NO_BACKEND, f"nothing here can train: {choice.why}")
        await asyncio.sleep(BACKEND_RETRY_SECONDS)


async def earlier_backends(settings: Settings, store: Store, current: Iterable[Backend]) -> list[Backend]:
    """The backends of earlier settings that still have runs."""
    used = {attempt.backend for attempt in await store.read(attempts.open_attempts)}
    backends: list[Backend] = []
    for name in sorted(used - {backend.name for backend in current}):
        try:
            backends.append(await build_backend(settings, name))
        except GodMinerError as error:
            backends.append(UnavailableBackend(name, str(error)))
    return backends


async def build_jobs(
    settings: Settings,
    store: Store,
    fleet: Fleet,
    profile: Callable[[], LoadedProfile],
    *,
    alert: SendAlert,
    worth: WorthOfTask,
    samples: SampleHistory | None = None,
    clock: Callable[[], float] = time.time,
) -> JobManager:
    """Build everything but start nothing. Waits for the backends, and for the fleet to see its GPUs."""
    waited = [await wait_for_backend(settings, kind, alert, fleet) for kind in settings.backends]
    backends: dict[str, Backend] = dict(zip(settings.backends, waited, strict=True))
    await _wait_for_gpus(fleet)
    events = JobEventBus()

    def on_note(job_id: int, text: str) -> None:
        log.info("job %d: %s", job_id, text)
        events.send("note", job_id, {"job_id": job_id, "kind": "publishing", "text": text})

    services = JobServices(
        data_dir=settings.data_dir,
        store=store,
        backends=backends,
        other_backends=await earlier_backends(settings, store, waited),
        fleet=fleet,
        worth=worth,
        samples=samples or SampleHistory(),
        inputs=JobInputs(settings, Redactor(settings.secrets())),
        publisher=HubPublisher(PublishTarget.from_settings(settings), on_note=on_note),
        profile=profile,
        named_profile=partial(load_profile, directories=[settings.profile_dir]),
        cleaner=FinishedJobCleaner(
            settings.data_dir, store, keep_s=settings.keep_finished_hours * 3600, clock=clock
        ),
        timings=JobTimings.from_settings(settings),
        events=events,
        clock=clock,
        alert=alert,
        trials={name: BackendTrials(backend, settings.data_dir) for name, backend in backends.items()},
    )
    return JobManager(services)


async def _wait_for_gpus(fleet: Fleet) -> None:
    waited = 0.0
    while not fleet.inventory.gpus and waited < GPU_WAIT_SECONDS:
        await asyncio.sleep(0.05)
        waited += 0.05
