"""What the commands have in common: whom to ask, as whom, about which task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from core.tasks import TaskType
from miner.dev import throwaway
from miner.dev.client import Exchange, Forger, ValidatorClient
from miner.dev.samples import SampleTask, sample_task
from miner.fiber import Signer


@dataclass(frozen=True)
class Target:
    """A miner and the key that speaks to it."""

    url: str
    signer: Signer
    miner_hotkey: str
    compact: bool = False


def target(
    url: str,
    folder: Path,
    key: Path | None = None,
    miner_hotkey: str | None = None,
    *,
    compact: bool = False,
    forged: bool = False,
) -> Target:
    """The throwaway keys fill in for what is not given; they are made when that is needed."""
    signer: Signer
    if key is not None and miner_hotkey is not None:
        signer = throwaway.read_key(key)
    else:
        keys = throwaway.keys_of(folder)
        signer = keys.validator if key is None else throwaway.read_key(key)
        miner_hotkey = miner_hotkey or keys.miner.ss58_address
    return Target(url, Forger(signer) if forged else signer, miner_hotkey, compact)


def ask(target: Target, call: Callable[[ValidatorClient], Awaitable[Exchange]]) -> Exchange:
    """One call, on an event loop of its own."""

    async def run() -> Exchange:
        async with ValidatorClient(
            target.url, target.signer, target.miner_hotkey, compact_json=target.compact
        ) as client:
            return await call(client)

    return asyncio.run(run())


def example(task_name: str, seed: int, **wanted: Any) -> SampleTask:
    """The example with this short name and seed, a task of its own for each type; `wanted` overrides its
    fields, None changes nothing."""
    task = sample_task(TaskType[task_name.upper()], Random(f"{task_name} {seed}"))  # noqa: S311 (repeatable on purpose)
    return replace(task, **{name: value for name, value in wanted.items() if value is not None})
