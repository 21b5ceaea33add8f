"""Ask the engine regularly whether it answers and what it can train; offers depend on it."""

from __future__ import annotations

import logging

from core.domain.choices import Engine
from miner.backends.base import IMAGE_OF, EngineUnreachable
from miner.backends.trial import BEING_TRIED
from miner.fleet.base import EngineAbility
from miner.jobs.context import JobServices
from miner.observe.alerts import AlertKind

log = logging.getLogger(__name__)

#: The ability until an engine was found.
ENGINE_NOT_FOUND_YET = EngineAbility(problem="the engine is being looked for")
_NO_SANDBOX = "the engine {} has none here; see god-miner doctor"


async def current_ability(services: JobServices, name: str) -> EngineAbility:
    engine = services.engines[name]
    no_sandbox = None if engine.can_sandbox else _NO_SANDBOX.format(engine.name)
    try:
        return EngineAbility(None, no_sandbox, await services.trials[name].missing())
    except EngineUnreachable as error:
        return EngineAbility(str(error), no_sandbox)
    except Exception as error:  # an engine's odd answer must not leave offers undecided for good
        log.exception("the engine cannot be asked what it can do")
        return EngineAbility(f"{type(error).__name__}: {error}", no_sandbox)


async def watch_engine(services: JobServices, name: str) -> None:
    """Keep the fleet's knowledge of one engine up to date, until cancelled. It decides about offers, not
    about runs."""
    last = services.fleet.abilities.get(name, EngineAbility())
    trials = services.trials[name]
    try:
        while True:
            now = await current_ability(services, name)
            _apply_ability(services, name, now)
            if now.problem is not None or BEING_TRIED not in now.missing.values():
                _alert_change(services, name, last, now)
                last = now
            await trials.pause(services.timings.engine_check_s)
    finally:
        await trials.close()


def _apply_ability(services: JobServices, name: str, now: EngineAbility) -> None:
    before = services.fleet.abilities.get(name, EngineAbility())
    if now == before and name in services.fleet.abilities:
        return
    services.fleet.abilities = {**services.fleet.abilities, name: now}
    for engine, why in now.missing.items():
        if before.missing.get(engine) != why:
            log.warning("offers that need %s on %s are refused: %s", engine, services.engines[name].name, why)


def _alert_change(services: JobServices, name: str, before: EngineAbility, now: EngineAbility) -> None:
    """Alert the operator to what has changed since everything was last known."""
    if now == before:
        return
    first = before == ENGINE_NOT_FOUND_YET
    engine = services.engines[name].name
    where = f" on {engine}" if len(services.engines) > 1 else ""
    if now.problem is not None and (before.problem is None or first):
        services.alert(AlertKind.ENGINE_GONE, f"no offers are accepted{where} meanwhile: {now.problem}")
    elif (
        now.problem is None
        and not _trainable_engines(now)
        and (before.problem is not None or _trainable_engines(before))
    ):
        why = "; ".join(dict.fromkeys(now.missing.values()))
        services.alert(AlertKind.ENGINE_CANNOT_TRAIN, f"every offer is refused{where}: {why}")
    elif now.problem is None and not first and (before.problem is not None or not _trainable_engines(before)):
        services.alert(AlertKind.ENGINE_BACK, f"{engine} can train again")


def _trainable_engines(ability: EngineAbility) -> list[Engine]:
    return [engine for engine in IMAGE_OF if engine not in ability.missing]
