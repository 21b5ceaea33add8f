"""Whether the engine answers and what it can train, asked now and then: offers are refused by it."""

from __future__ import annotations

import asyncio
import logging

from core.choices import Engine as TrainingEngine
from miner.engines.base import IMAGE_OF, Unreachable
from miner.engines.trial import BEING_TRIED
from miner.fleet.base import Ability
from miner.jobs.desk import Parts

log = logging.getLogger(__name__)

#: Until the engine was found.
NOT_TRIED = Ability(trouble="the engine is being looked for")
_NO_SANDBOX = "the engine {} has none here; see god-miner doctor"


async def ability_of(parts: Parts) -> Ability:
    engine = parts.engine
    no_sandbox = None if engine.can_sandbox else _NO_SANDBOX.format(engine.name)
    try:
        if parts.trials is not None:
            return Ability(None, no_sandbox, await parts.trials.lacks())
        absent = await engine.lacks()
        lacks = {name: absent[image] for name, image in IMAGE_OF.items() if image in absent}
        return Ability(None, no_sandbox, lacks)
    except Unreachable as error:
        return Ability(str(error), no_sandbox)
    except Exception as error:  # an engine's odd answer must not leave offers undecided for good
        log.exception("the engine cannot be asked what it can do")
        return Ability(f"{type(error).__name__}: {error}", no_sandbox)


async def pulse(parts: Parts) -> None:
    """Until cancelled. What runs, runs on: this only decides about offers."""
    last = parts.fleet.ability
    try:
        while True:
            now = await ability_of(parts)
            _note(parts, now)
            if now.trouble is not None or BEING_TRIED not in now.lacks.values():
                _alert(parts, last, now)
                last = now
            await (parts.trials.pause if parts.trials is not None else asyncio.sleep)(parts.pace.pulse_s)
    finally:
        if parts.trials is not None:
            await parts.trials.close()


def _note(parts: Parts, now: Ability) -> None:
    before = parts.fleet.ability
    if now == before:
        return
    parts.fleet.ability = now
    for engine, why in now.lacks.items():
        if before.lacks.get(engine) != why:
            log.warning("offers that need %s are refused: %s", engine, why)


def _alert(parts: Parts, before: Ability, now: Ability) -> None:
    """Tell the operator what has changed since everything was known the last time."""
    if now == before:
        return
    first = before == NOT_TRIED
    if now.trouble is not None and (before.trouble is None or first):
        parts.alert("engine_gone", f"no offers are accepted meanwhile: {now.trouble}")
    elif now.trouble is None and not _trains(now) and (before.trouble is not None or _trains(before)):
        why = "; ".join(dict.fromkeys(now.lacks.values()))
        parts.alert("engine_cannot_train", f"every offer is refused: {why}")
    elif now.trouble is None and not first and (before.trouble is not None or not _trains(before)):
        parts.alert("engine_back", f"{parts.engine.name} can train again")


def _trains(ability: Ability) -> list[TrainingEngine]:
    return [engine for engine in IMAGE_OF if engine not in ability.lacks]
