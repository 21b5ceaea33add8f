"""Has one order carried out by a worker, and turns what it says into what the pipeline wants to hear."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from miner.children import Ended, Silent, converse, own_environment
from miner.jobs.inputs import words
from miner.jobs.inputs.words import Event, Failed, Note, Order, Progress
from miner.jobs.ports import StepFailed, Told
from miner.jobs.states import EndReason

log = logging.getLogger(__name__)

#: A worker tells several times a second how far it is; one that is silent for so long hangs.
SILENCE_SECONDS = 900.0
#: They share one line and one disk: more would make all of them late. Two are a job's.
AT_ONCE = 8
WORKER = (sys.executable, "-P", "-m", "miner.jobs.inputs.worker")


class Worker:
    """Starts a process for each order, a few at a time: the others wait for their turn, oldest first."""

    def __init__(
        self,
        home: Path,
        *,
        redact: Callable[[str], str] = lambda text: text,
        command: Sequence[str] = WORKER,
    ) -> None:
        """`home` is a folder for what the hub's client wants to remember."""
        self._command = command
        self._redact = redact
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._environment = own_environment(
            HF_HOME=str(home),
            HF_HUB_DISABLE_TELEMETRY="1",
            HF_HUB_DISABLE_IMPLICIT_TOKEN="1",  # noqa: S106 - a switch
            HF_HUB_DISABLE_PROGRESS_BARS="1",
            HF_HUB_DISABLE_XET="1",
            DO_NOT_TRACK="1",
        )

    async def run(self, job_id: int, order: Order, told: Told, limit: float | None = None) -> Event:
        """The answer. `StepFailed` when it says so, or (NETWORK) when it took longer than `limit` seconds,
        the wait for its turn aside."""
        async with self._turns:
            return await self._run(job_id, order, told, limit)

    async def _run(self, job_id: int, order: Order, told: Told, limit: float | None) -> Event:
        answers: list[Event] = []

        def heard(line: bytes) -> None:
            event = words.event_in(line)
            if isinstance(event, Progress):
                told(event.what, event.done, event.total)
            elif isinstance(event, Note):
                log.info("job %d: %s", job_id, event.text)
            elif event is not None:
                answers.append(event)

        try:
            async with asyncio.timeout(limit):
                ended = await converse(
                    self._command,
                    words.line_of(order),
                    heard,
                    environment=self._environment,
                    max_line=words.MAX_LINE,
                    silence=SILENCE_SECONDS,
                )
        except (TimeoutError, Silent):
            seconds = limit if limit is not None else SILENCE_SECONDS
            text = (
                f"the {order.task} did not come within {seconds:g} s; the next try goes on where it stopped"
            )
            raise StepFailed(EndReason.NETWORK, text) from None
        except OSError as error:
            raise StepFailed(EndReason.BUG, f"the {order.task} worker can't be started: {error}") from None
        return self._answer(order, answers, ended)

    def _answer(self, order: Order, answers: Sequence[Event], ended: Ended) -> Event:
        said = self._redact(ended.noise.decode(errors="replace")).strip()
        if said:
            log.debug("the %s worker said: %s", order.task, said)
        if not answers:
            # Killed from outside, as by a host without memory, is no mistake in it: it goes on next time.
            killed = ended.code is not None and ended.code < 0
            text = f"the {order.task} worker ended with status {ended.code} and no answer"
            raise StepFailed(EndReason.NETWORK if killed else EndReason.BUG, text)
        answer = answers[-1]
        if isinstance(answer, Failed):
            raise StepFailed(answer.reason, self._redact(answer.text), answer.retry_after)
        return answer
