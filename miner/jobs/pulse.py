"""Whether the engine answers, asked now and then: nothing new is promised while it does not."""

from __future__ import annotations

import asyncio
import logging

from miner.engines.base import Engine, Unreachable
from miner.fleet.base import Ability
from miner.jobs.desk import Parts

log = logging.getLogger(__name__)

_NO_SANDBOX = "the engine {} has none here; see god-miner doctor"


async def ability_of(engine: Engine) -> Ability:
    no_sandbox = None if engine.can_sandbox else _NO_SANDBOX.format(engine.name)
    try:
        return Ability(None, no_sandbox, await engine.lacks())
    except Unreachable as error:
        return Ability(str(error), no_sandbox)
    except Exception as error:  # an engine's odd answer must not leave offers undecided for good
        log.exception("the engine can't be asked what it can do")
        return Ability(f"{type(error).__name__}: {error}", no_sandbox)


async def pulse(parts: Parts) -> None:
    """Until cancelled. What runs, runs on: only those who decide about offers hear of it."""
    while True:
        _tell(parts, await ability_of(parts.engine))
        await asyncio.sleep(parts.pace.pulse_s)


def _tell(parts: Parts, now: Ability) -> None:
    before = parts.fleet.ability
    if now == before:
        return
    parts.fleet.ability = now
    if now.trouble is not None and before.trouble is None:
        parts.alert("engine_gone", f"no offers are accepted meanwhile: {now.trouble}")
    elif now.trouble is None and before.trouble is not None:
        parts.alert("engine_back", f"{parts.engine.name} answers again")
    for short, why in now.lacks.items():
        if before.lacks.get(short) != why:
            log.warning("offers that need the image %r are refused: %s", short, why)
