"""Many offers at the same moment, over HTTP, for GPUs that only a few can have; and what `kill -9` leaves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from core.domain.tasks import TaskType
from miner.api.fleet import FleetStatus
from miner.daemon_client import get
from miner.dev.samples import SampleTask
from miner.dev.stack import ChildProcess
from miner.settings import load_settings
from tests.integration import raw
from tests.integration.traffic import GENEROUS, Sent, Validator, store

OFFERS = 500
#: One GPU for a task, and no waiting: what is taken is taken.
POLICY = "extends: everything-feasible\nfitting: {max_wait: 0s}\n"


def settings(folder: Path, gpus: str) -> dict[str, str]:
    file = folder / "at-once.yaml"
    file.write_text(POLICY)
    wide = {"miner.server.MAX_PER_ADDRESS": "1000", "miner.http.apps.MAX_CONCURRENT_REQUESTS": "1000"}
    return {**GENEROUS, **wide, "POLICY": str(file), "GPUS": gpus}


def one_gpu_task(validator: Validator) -> SampleTask:
    """Each the same work, under an id of its own."""
    task = validator.task()
    while task.task_type is not TaskType.INSTRUCT:
        task = validator.task()
    return replace(task, model="NousResearch/Meta-Llama-3-8B-Instruct", params=8_030_261_248, hours=4.0)


async def all_at_once(port: int, requests: list[Sent]) -> list[bool]:
    """Every request on a connection of its own; all are open before the first one is sent."""
    connections = [await raw.connect(port) for _ in requests]
    for connection, one in zip(connections, requests, strict=True):
        connection.send(one.request)
    answers = await asyncio.gather(*(connection.answer() for connection in connections))
    for connection in connections:
        await connection.__aexit__(None, None, None)
    assert [answer.status for answer in answers if answer is not None] == [200] * len(requests)
    return [answer.json["accepted"] for answer in answers if answer is not None]


async def test_exactly_as_many_are_accepted_as_fit(
    validator: Validator, running: Callable[..., ChildProcess], tmp_path: Path
) -> None:
    fit = 4
    running(**settings(tmp_path, f"{fit}xH100"))
    offers = [validator.offer(one_gpu_task(validator)) for _ in range(OFFERS)]
    accepted = await all_at_once(validator.stack.public_port, offers)
    assert sum(accepted) == fit
    with store(validator.stack) as connection:
        held = connection.execute("SELECT gpus FROM reservations WHERE state = 'held'").fetchall()
        answers = (
            "SELECT accepted, count(*) FROM offers JOIN decisions ON decisions.id = decision_id GROUP BY 1"
        )
        assert dict(map(tuple, connection.execute(answers))) == {0: OFFERS - fit, 1: fit}
    gpus = [gpu for row in held for gpu in json.loads(row["gpus"])]
    assert sorted(gpus) == [str(index) for index in range(fit)]


async def test_what_was_held_is_held_after_kill_9_and_nothing_else(
    validator: Validator, running: Callable[..., ChildProcess], tmp_path: Path
) -> None:
    terms = settings(tmp_path, "2xH100")
    daemon = running(**terms)
    port = validator.stack.public_port
    first, second, third = (one_gpu_task(validator) for _ in range(3))
    assert await all_at_once(port, [validator.offer(first)]) == [True]
    assert await all_at_once(port, [validator.offer(second)]) == [True]
    (started,) = await asyncio.gather(started_with(port, validator.start(second)))
    assert started == second.task_id
    before = holds(validator)
    assert daemon.process is not None
    os.kill(daemon.pid, signal.SIGKILL)
    daemon.process.wait()

    running(**terms)
    assert holds(validator) == before
    assert {kind for kind, _ in before.values()} == {"offer", "job"}
    assert await all_at_once(port, [validator.offer(third)]) == [False]
    assert await all_at_once(port, [validator.offer(first)]) == [True]  # it stands


async def started_with(port: int, start: Sent) -> str:
    async with await raw.connect(port) as connection:
        connection.send(start.request)
        answer = await connection.answer()
    assert answer is not None
    return str(answer.json["task_id"])


def holds(validator: Validator) -> dict[str, tuple[str, tuple[str, ...]]]:
    """As the daemon shows them to the operator: task → offer or job, and its GPUs."""
    stack = validator.stack
    page = get(load_settings(env=stack.settings(), env_file=None), "/fleet", FleetStatus)
    return {claim.task_id: (claim.kind, tuple(claim.gpus)) for claim in page.claims}
