"""Every request a validator can send, to a real daemon in a process of its own (`god-miner dev tour`).

Each stop has an expectation; the tour has failed when one does not hold. With patience it also waits for
the submissions of what it started.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, NoReturn

from core.tasks import TaskType
from core.wire import TournamentType
from miner.dev import stack
from miner.dev.client import Exchange, Forger, ValidatorClient
from miner.dev.reading import Outcome
from miner.dev.samples import SampleTask, sample_task

#: Room for all the tour's tasks at once, and a repository to enter in two of the three tournaments.
SETTINGS = {
    "MAX_JOBS": str(2 * len(TaskType)),
    "TRAINING_REPO_TEXT_URL": "https://github.com/example/god-miner",
    "TRAINING_REPO_TEXT_COMMIT": "0123456789abcdef0123456789abcdef01234567",
    "TRAINING_REPO_IMAGE_URL": "https://github.com/example/god-miner",
    "TRAINING_REPO_IMAGE_COMMIT": "0123456789abcdef0123456789abcdef01234567",
}
POLL_S = 2.0


@dataclass(frozen=True)
class Expected:
    status: int
    outcome: Outcome


@dataclass(frozen=True)
class Step:
    """One request of the tour and whether it went as it should."""

    title: str
    exchange: Exchange
    expected: Expected

    @property
    def held(self) -> bool:
        reply = self.exchange.reply
        return (
            reply is not None
            and reply.status == self.expected.status
            and self.exchange.conclusion.outcome is self.expected.outcome
        )


@dataclass
class TourResult:
    folder: Path
    steps: list[Step] = field(default_factory=list)
    start_s: float = 0.0
    stop_s: float = 0.0
    #: The daemon's own verdict on its end: 0 after an orderly one.
    exit_code: int | None = None

    @property
    def held(self) -> bool:
        return bool(self.steps) and all(step.held for step in self.steps) and self.exit_code == 0

    def as_json(self) -> dict[str, Any]:
        return {
            "held": self.held,
            "folder": str(self.folder),
            "start_seconds": round(self.start_s, 3),
            "stop_seconds": round(self.stop_s, 3),
            "exit_code": self.exit_code,
            "steps": [
                {"title": step.title, "held": step.held, **step.exchange.as_json()} for step in self.steps
            ],
        }


def run_tour(
    folder: Path,
    *,
    seed: int = 0,
    patience_s: float = 0.0,
    settings: Mapping[str, str] | None = None,
    on_step: Callable[[Step], None] | None = None,
) -> TourResult:
    """Start a daemon on loopback, take the tour, stop it by SIGTERM. `on_step` hears of each step at once."""
    ground = stack.prepare(folder)
    result = TourResult(folder)
    child = stack.daemon(ground, {**SETTINGS, **(settings or {})})
    with child:
        result.start_s = child.start_s
        asyncio.run(_take(ground, seed, patience_s, result, on_step))
        began = time.perf_counter()
        result.exit_code = child.stop()
        result.stop_s = time.perf_counter() - began
    return result


@contextmanager
def somewhere(folder: Path | None) -> Iterator[Path]:
    """The folder given, kept; or a temporary one, gone afterwards, also after a SIGTERM."""

    def on_term(_number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, on_term)
    try:
        if folder is not None:
            yield folder.absolute()
        else:
            with tempfile.TemporaryDirectory(prefix="god-miner-demo-") as made:
                yield Path(made)
    finally:
        signal.signal(signal.SIGTERM, before)


async def _take(
    ground: stack.Stack,
    seed: int,
    patience_s: float,
    result: TourResult,
    on_step: Callable[[Step], None] | None,
) -> None:
    random = Random(seed)  # noqa: S311 (example data, repeatable on purpose)
    validator, miner = ground.keys.validator, ground.keys.miner.ss58_address
    async with (
        ValidatorClient(ground.url, validator, miner) as client,
        ValidatorClient(ground.url, Forger(validator), miner) as forger,
    ):
        async for step in tour(client, forger, random, patience_s):
            result.steps.append(step)
            if on_step is not None:
                on_step(step)


async def tour(
    client: ValidatorClient, forger: ValidatorClient, random: Random, patience_s: float = 0.0
) -> AsyncIterator[Step]:
    """Every stop, one after the other, as a validator would make them."""
    yield Step("health", await client.health(), Expected(200, Outcome.ALIVE))
    tasks = [sample_task(task_type, random) for task_type in TaskType]
    for task in tasks:
        yield Step(f"offer {_short(task)}", await client.offer(task), Expected(200, Outcome.ACCEPTED))
    forged = await forger.offer(sample_task(TaskType.INSTRUCT, random))
    yield Step("offer, forged signature", forged, Expected(401, Outcome.NOT_ACCEPTED))
    for task in tasks:
        yield Step(f"start {_short(task)}", await client.start(task), Expected(200, Outcome.START_NOTED))
    # What a validator does when another miner's reply broke its loop: the same task under a new name.
    tasks[0] = tasks[0].restarted(random)
    again = await client.start(tasks[0])
    yield Step(f"start {_short(tasks[0])} again", again, Expected(200, Outcome.START_NOTED))
    async for step in _submissions(client, tasks, patience_s):
        yield step
    for kind in TournamentType:
        entered = f"TRAINING_REPO_{kind.name}_URL" in SETTINGS
        expected = Expected(200, Outcome.ENTERED) if entered else Expected(404, Outcome.NOT_ENTERED)
        yield Step(f"repository for {kind}", await client.training_repo(kind), expected)


async def _submissions(
    client: ValidatorClient, tasks: list[SampleTask], patience_s: float
) -> AsyncIterator[Step]:
    """Asked once, all that is expected is an honest "not yet". With patience, a submission is."""
    expected = Expected(200, Outcome.SUBMISSION) if patience_s else Expected(404, Outcome.NO_SUBMISSION)
    deadline = time.monotonic() + patience_s
    for task in tasks:
        asked = await wait_for_submission(client, task, deadline - time.monotonic())
        yield Step(f"submission of {_short(task)}", asked, expected)


async def wait_for_submission(
    client: ValidatorClient,
    task: SampleTask,
    patience_s: float,
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Exchange:
    """Ask until there is a submission or patience ends; at least once. Gives the last answer."""
    deadline = clock() + patience_s
    while True:
        exchange = await client.submission(task.task_id, task.expected_repo_name)
        if exchange.conclusion.outcome is not Outcome.NO_SUBMISSION or clock() + POLL_S > deadline:
            return exchange
        await sleep(POLL_S)


def _short(task: SampleTask) -> str:
    return task.task_type.name.lower()
