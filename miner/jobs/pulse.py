"""Whether the engine answers and what it can train, asked now and then: offers are refused by it."""

from __future__ import annotations

import asyncio
import logging

from core.choices import Engine as TrainingEngine
from miner.engines.base import IMAGE_OF, Unreachable
from miner.fleet.base import Ability
from miner.jobs.desk import Parts

log = logging.getLogger(__name__)

#: Until the engine was found and tried out.
NOT_TRIED = Ability(trouble="the engine is being tried out; this takes up to a few minutes after a change")
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
    while True:
        _tell(parts, await ability_of(parts))
        await asyncio.sleep(parts.pace.pulse_s)


def _tell(parts: Parts, now: Ability) -> None:
    before = parts.fleet.ability
    if now == before:
        return
    parts.fleet.ability = now
    first = before == NOT_TRIED
    if now.trouble is not None and (before.trouble is None or first):
        parts.alert("engine_gone", f"no offers are accepted meanwhile: {now.trouble}")
    elif now.trouble is None and not _trains(now) and (before.trouble is not None or _trains(before)):
        why = "; ".join(dict.fromkeys(now.lacks.values()))
        parts.alert("engine_cannot_train", f"every offer is refused: {why}")
    elif now.trouble is None and not first and (before.trouble is not None or not _trains(before)):
        parts.alert("engine_back", f"{parts.engine.name} can train again")
    for engine, why in now.lacks.items():
        if before.lacks.get(engine) != why:
            log.warning("offers that need %s are refused: %s", engine, why)


def _trains(ability: Ability) -> list[TrainingEngine]:
    return [engine for engine in IMAGE_OF if engine not in ability.lacks]
