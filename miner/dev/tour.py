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

from core.domain.tasks import OFFERED_TASKS, TaskType
from core.domain.wire import TournamentType
from miner.dev import stack
from miner.dev.samples import SampleTask, sample_task
from miner.dev.validator import Exchange, ForgedSigner, ValidatorClient, ValidatorOutcome

#: Enough GPUs for all the tour's tasks, and repositories for two of the three tournaments.
TOUR_SETTINGS = {
    "MAX_JOBS": str(2 * len(OFFERED_TASKS)),
    "TRAINING_REPO_TEXT_URL": "https://github.com/example/god-miner",
    "TRAINING_REPO_TEXT_COMMIT": "0123456789abcdef0123456789abcdef01234567",
    "TRAINING_REPO_IMAGE_URL": "https://github.com/example/god-miner",
    "TRAINING_REPO_IMAGE_COMMIT": "0123456789abcdef0123456789abcdef01234567",
}
POLL_S = 2.0


@dataclass(frozen=True)
class TourExpectation:
    status: int
    outcome: ValidatorOutcome


@dataclass(frozen=True)
class TourStep:
    """One request of the tour and whether it went as it should."""

    title: str
    exchange: Exchange
    expected: TourExpectation

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
    steps: list[TourStep] = field(default_factory=list)
    start_s: float = 0.0
    stop_s: float = 0.0
    #: The daemon's exit code: 0 after an orderly stop.
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
    on_step: Callable[[TourStep], None] | None = None,
) -> TourResult:
    """Start a daemon on loopback, take the tour, stop it by SIGTERM. `on_step` is called after each step."""
    ground = stack.prepare_stack(folder)
    result = TourResult(folder)
    child = stack.daemon_process(ground, {**TOUR_SETTINGS, **(settings or {})})
    with child:
        result.start_s = child.start_s
        asyncio.run(_run_steps(ground, seed, patience_s, result, on_step))
        began = time.perf_counter()
        result.exit_code = child.stop()
        result.stop_s = time.perf_counter() - began
    return result


@contextmanager
def work_folder(folder: Path | None) -> Iterator[Path]:
    """Yield the given directory, or a temporary one; remove that one also after SIGTERM or SIGHUP."""

    def on_signal(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    # A closed terminal sends SIGHUP: the daemon and the page, in sessions of their own, would stay behind.
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        if folder is not None:
            yield folder.absolute()
        else:
            with tempfile.TemporaryDirectory(prefix="god-miner-demo-") as made:
                yield Path(made)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _run_steps(
    ground: stack.DevStack,
    seed: int,
    patience_s: float,
    result: TourResult,
    on_step: Callable[[TourStep], None] | None,
) -> None:
    random = Random(seed)  # noqa: S311 (example data, repeatable on purpose)
    validator, miner = ground.keys.validator, ground.keys.miner.ss58_address
    async with (
        ValidatorClient(ground.url, validator, miner) as client,
        ValidatorClient(ground.url, ForgedSigner(validator), miner) as forger,
    ):
        async for step in tour_steps(client, forger, random, patience_s):
            result.steps.append(step)
            if on_step is not None:
                on_step(step)


async def tour_steps(
    client: ValidatorClient, forger: ValidatorClient, random: Random, patience_s: float = 0.0
) -> AsyncIterator[TourStep]:
    """Yield every request, one after the other, as a validator would make them."""
    yield TourStep("health", await client.health(), TourExpectation(200, ValidatorOutcome.ALIVE))
    tasks = [sample_task(task_type, random) for task_type in OFFERED_TASKS]
    for task in tasks:
        yield TourStep(
            f"offer {_short_task_name(task)}",
            await client.offer(task),
            TourExpectation(200, ValidatorOutcome.ACCEPTED),
        )
    forged = await forger.offer(sample_task(TaskType.INSTRUCT, random))
    yield TourStep("offer, forged signature", forged, TourExpectation(401, ValidatorOutcome.NOT_ACCEPTED))
    for task in tasks:
        yield TourStep(
            f"start {_short_task_name(task)}",
            await client.start(task),
            TourExpectation(200, ValidatorOutcome.START_NOTED),
        )
    # What a validator does when another miner's reply broke its loop: the same task under a new name.
    tasks[0] = tasks[0].restarted(random)
    again = await client.start(tasks[0])
    yield TourStep(
        f"start {_short_task_name(tasks[0])} again", again, TourExpectation(200, ValidatorOutcome.START_NOTED)
    )
    async for step in _submission_steps(client, tasks, patience_s):
        yield step
    for kind in TournamentType:
        entered = f"TRAINING_REPO_{kind.name}_URL" in TOUR_SETTINGS
        expected = (
            TourExpectation(200, ValidatorOutcome.ENTERED)
            if entered
            else TourExpectation(404, ValidatorOutcome.NOT_ENTERED)
        )
        yield TourStep(f"repository for {kind}", await client.training_repo(kind), expected)


async def _submission_steps(
    client: ValidatorClient, tasks: list[SampleTask], patience_s: float
) -> AsyncIterator[TourStep]:
    """Ask for submissions: "not yet" is expected, or with patience a submission."""
    expected = (
        TourExpectation(200, ValidatorOutcome.SUBMISSION)
        if patience_s
        else TourExpectation(404, ValidatorOutcome.NO_SUBMISSION)
    )
    deadline = time.monotonic() + patience_s
    for task in tasks:
        asked = await wait_for_submission(client, task, deadline - time.monotonic())
        yield TourStep(f"submission of {_short_task_name(task)}", asked, expected)


async def wait_for_submission(
    client: ValidatorClient,
    task: SampleTask,
    patience_s: float,
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Exchange:
    """Ask until there is a submission or patience ends, at least once. Return the last answer."""
    deadline = clock() + patience_s
    while True:
        exchange = await client.submission(task.task_id, task.expected_repo_name)
        if exchange.conclusion.outcome is not ValidatorOutcome.NO_SUBMISSION or clock() + POLL_S > deadline:
            return exchange
        await sleep(POLL_S)


def _short_task_name(task: SampleTask) -> str:
    return task.task_type.name.lower()
