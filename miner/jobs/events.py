"""Live state of running jobs for displays: one `LiveJob` per job, and a bus of `JobEvent`s for listeners.

Nothing here is needed after a restart; what must last is in the store.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Self

from core.domain.job_states import EndReason
from miner.store.jobs import JobRow

#: Events that a slow listener may be behind; then it gets a "missed" event and goes on from now.
MAX_QUEUED_EVENTS = 256


@dataclass
class LiveJob:
    """The display state of a job. None: not known yet."""

    job_id: int
    task_id: str
    state: str
    #: What is being done: "model" and "dataset" are fetched, "gpus" are waited for, then the trainer's.
    stage: str = ""
    attempt: int | None = None
    gpus: tuple[str, ...] = ()
    #: Of what is being transferred.
    bytes_done: int | None = None
    bytes_total: int | None = None
    step: int | None = None
    steps: int | None = None
    epoch: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens_s: float | None = None
    samples_s: float | None = None
    mfu: float | None = None
    #: Share of the time that the GPU waits for data.
    wait: float | None = None
    #: Speed of the latest steps relative to the plan's (`core/planning/time/calibration.py`).
    efficiency: float | None = None
    #: Of the GPU that uses the most, and what the plan expects of each.
    memory_bytes: int | None = None
    memory_estimate_bytes: int | None = None
    #: The held-out scores: of the untouched model, the last one, and the best one of this attempt's training.
    base_score: float | None = None
    score: float | None = None
    best_score: float | None = None
    #: When the job will probably be over, seconds since the epoch; and when it has to be.
    ends_at: float | None = None
    deadline_at: float | None = None
    published: str | None = None
    #: What is being waited for, or went wrong last.
    trouble: str = ""
    #: When the next try begins.
    retry_at: float | None = None

    @classmethod
    def from_row(cls, row: JobRow) -> Self:
        """The state of a job that has no worker."""
        return cls(
            row.id,
            row.task_id,
            row.state.value,
            deadline_at=row.deadline_at,
            published=row.submission.repo if row.submission else None,
            trouble="" if row.end_reason is EndReason.PUBLISHED else row.detail,
        )

    def clear_run(self) -> None:
        """An attempt is over: remove its numbers."""
        self.step = self.steps = self.memory_bytes = self.memory_estimate_bytes = None
        self.epoch = self.loss = self.learning_rate = self.grad_norm = self.ends_at = None
        self.tokens_s = self.samples_s = self.mfu = self.wait = self.efficiency = None


@dataclass(frozen=True, slots=True)
class JobEvent:
    """`kind`: "job" for a new state, "note" for a text, "missed" for a gap."""

    number: int
    kind: str
    job_id: int | None
    data: dict[str, Any]

    def as_text(self) -> str:
        """Format as a server-sent event."""
        return f"id: {self.number}\nevent: {self.kind}\ndata: {json.dumps(self.data)}\n\n"


@dataclass(eq=False)
class _JobEventListener:
    job_id: int | None
    queue: asyncio.Queue[JobEvent | None] = field(default_factory=lambda: asyncio.Queue(MAX_QUEUED_EVENTS))
    missed: bool = False


class JobEventBus:
    """Passes events on to all listeners. Never waits for one."""

    def __init__(self) -> None:
        self._listeners: set[_JobEventListener] = set()
        self._number = 0
        self._closed = False

    def send(self, kind: str, job_id: int | None, data: dict[str, Any]) -> None:
        self._number += 1
        event = JobEvent(self._number, kind, job_id, data)
        for listener in self._listeners:
            if listener.job_id is None or listener.job_id == job_id:
                self._queue(listener, event)

    def _queue(self, listener: _JobEventListener, event: JobEvent) -> None:
        if listener.queue.full():
            listener.missed = True
            return
        if listener.missed:
            listener.missed = False
            listener.queue.put_nowait(JobEvent(event.number, "missed", None, {}))
            if listener.queue.full():
                listener.missed = True
                return
        listener.queue.put_nowait(event)

    def current(self, kind: str, job_id: int | None, data: dict[str, Any]) -> JobEvent:
        """An event with the present state, for a listener that begins."""
        return JobEvent(self._number, kind, job_id, data)

    async def listen(self, job_id: int | None = None) -> AsyncIterator[JobEvent]:
        """Events from now on, of one job or of all. Ends when the daemon does."""
        listener = _JobEventListener(job_id)
        self._listeners.add(listener)
        try:
            while not self._closed:
                if listener.missed and listener.queue.empty():
                    # No other event may come, and the missed one may have been the job's end.
                    listener.missed = False
                    yield JobEvent(self._number, "missed", None, {})
                    continue
                event = await listener.queue.get()
                if event is None:
                    return
                yield event
        finally:
            self._listeners.discard(listener)

    def close(self) -> None:
        """End every listener's stream."""
        self._closed = True
        for listener in self._listeners:
            while listener.queue.full():
                listener.queue.get_nowait()
            listener.queue.put_nowait(None)
