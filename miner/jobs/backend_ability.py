"""Ask the backend regularly whether it answers and what it can train; offers depend on it."""

from __future__ import annotations

import logging

from core.domain.choices import Engine
from miner.backends.base import IMAGE_OF, BackendUnreachable
from miner.backends.trial import BEING_TRIED
from miner.fleet.base import BackendAbility
from miner.jobs.context import JobServices
from miner.observe.alerts import AlertKind

log = logging.getLogger(__name__)

#: The ability until a backend was found.
BACKEND_NOT_FOUND_YET = BackendAbility(problem="the backend is being looked for")
_NO_SANDBOX = "the backend {} has none here; see god-miner doctor"


async def current_ability(services: JobServices, name: str) -> BackendAbility:
    backend = services.backends[name]
    no_sandbox = None if backend.can_sandbox else _NO_SANDBOX.format(backend.name)
    try:
        return BackendAbility(None, no_sandbox, await services.trials[name].missing())
    except BackendUnreachable as error:
        return BackendAbility(str(error), no_sandbox)
    except Exception as error:  # a backend's odd answer must not leave offers undecided for good
        log.exception("the backend cannot be asked what it can do")
        return BackendAbility(f"{type(error).__name__}: {error}", no_sandbox)


async def watch_backend(services: JobServices, name: str) -> None:
    """Keep the fleet's knowledge of one backend up to date, until cancelled. It decides about offers, not
    about runs."""
    last = services.fleet.abilities.get(name, BackendAbility())
    trials = services.trials[name]
    try:
        while True:
            now = await current_ability(services, name)
            _apply_ability(services, name, now)
            if now.problem is not None or BEING_TRIED not in now.missing.values():
                _alert_change(services, name, last, now)
                last = now
            await trials.pause(services.timings.backend_check_s)
    finally:
        await trials.close()


def _apply_ability(services: JobServices, name: str, now: BackendAbility) -> None:
    before = services.fleet.abilities.get(name, BackendAbility())
    if now == before and name in services.fleet.abilities:
        return
    services.fleet.abilities = {**services.fleet.abilities, name: now}
    for engine, why in now.missing.items():
        if before.missing.get(engine) != why:
            log.warning(
                "offers that need %s on %s are refused: %s", engine, services.backends[name].name, why
            )


def _alert_change(services: JobServices, name: str, before: BackendAbility, now: BackendAbility) -> None:
    """Alert the operator to what has changed since everything was last known."""
    if now == before:
        return
    first = before == BACKEND_NOT_FOUND_YET
    backend = services.backends[name].name
    where = f" on {backend}" if len(services.backends) > 1 else ""
    if now.problem is not None and (before.problem is None or first):
        services.alert(AlertKind.BACKEND_GONE, f"no offers are accepted{where} meanwhile: {now.problem}")
    elif (
        now.problem is None
        and not _trainable_engines(now)
        and (before.problem is not None or _trainable_engines(before))
    ):
        why = "; ".join(dict.fromkeys(now.missing.values()))
        services.alert(AlertKind.BACKEND_CANNOT_TRAIN, f"every offer is refused{where}: {why}")
    elif now.problem is None and not first and (before.problem is not None or not _trainable_engines(before)):
        services.alert(AlertKind.BACKEND_BACK, f"{backend} can train again")


def _trainable_engines(ability: BackendAbility) -> list[Engine]:
    return [engine for engine in IMAGE_OF if engine not in ability.missing]
