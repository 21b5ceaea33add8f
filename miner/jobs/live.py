"""What is going on right now, for displays: one `Live` per job that is worked on, and who listens to changes.

Nothing here is needed after a restart; what must last is in the books.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, fields
from typing import Any, Self

from miner.jobs.states import EndReason
from miner.store.work import JobRow

#: Changes that a slow listener may be behind; then it is told that it has missed some, and goes on from now.
BACKLOG = 256


@dataclass
class Live:
    """A job as it is worked on. None: not known, or not there yet."""

    job_id: int
    task_id: str
    state: str
    #: What is being done: "model" and "dataset" are fetched, "gpus" are waited for, then the trainer's own
    #: words.
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
    tokens_s: float | None = None
    memory_bytes: int | None = None
    #: The last held-out score and the best one.
    score: float | None = None
    best_score: float | None = None
    #: When the job will be over, seconds since the epoch; and when it has to be.
    ends_at: float | None = None
    deadline_at: float | None = None
    published: str | None = None
    #: What is being waited for, or went wrong last.
    trouble: str = ""
    #: When the next try begins.
    retry_at: float | None = None

    @classmethod
    def of(cls, row: JobRow) -> Self:
        """Of a job that nobody works on."""
        return cls(
            row.id,
            row.task_id,
            row.state.value,
            deadline_at=row.deadline_at,
            published=row.submission.repo if row.submission else None,
            trouble="" if row.end_reason is EndReason.PUBLISHED else row.detail,
        )

    def as_dict(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def forget_run(self) -> None:
        """An attempt is over: its numbers are no longer what is going on."""
        for one in ("step", "steps", "epoch", "loss", "learning_rate", "tokens_s", "memory_bytes", "ends_at"):
            setattr(self, one, None)


@dataclass(frozen=True, slots=True)
class Change:
    """`kind`: "job" for a change of the whole picture, "note" for something said, "missed" for a gap."""

    number: int
    kind: str
    job_id: int | None
    data: dict[str, Any]

    def as_text(self) -> str:
        """As a server-sent event."""
        return f"id: {self.number}\nevent: {self.kind}\ndata: {json.dumps(self.data)}\n\n"


@dataclass(eq=False)
class _Listener:
    job_id: int | None
    queue: asyncio.Queue[Change | None] = field(default_factory=lambda: asyncio.Queue(BACKLOG))
    missed: bool = False


class Bus:
    """Hands changes on to whoever listens. Never waits for a listener."""

    def __init__(self) -> None:
        self._listeners: set[_Listener] = set()
        self._number = 0
        self._closed = False

    def tell(self, kind: str, job_id: int | None, data: dict[str, Any]) -> None:
        self._number += 1
        change = Change(self._number, kind, job_id, data)
        for one in self._listeners:
            if one.job_id is None or one.job_id == job_id:
                self._hand(one, change)

    def _hand(self, one: _Listener, change: Change) -> None:
        if one.queue.full():
            one.missed = True
            return
        if one.missed:
            one.missed = False
            one.queue.put_nowait(Change(change.number, "missed", None, {}))
            if one.queue.full():
                one.missed = True
                return
        one.queue.put_nowait(change)

    def now(self, kind: str, job_id: int | None, data: dict[str, Any]) -> Change:
        """How it is at this moment, for one who begins to listen."""
        return Change(self._number, kind, job_id, data)

    async def listen(self, job_id: int | None = None) -> AsyncIterator[Change]:
        """Changes from now on, of one job or of all. Ends when the daemon does."""
        listener = _Listener(job_id)
        self._listeners.add(listener)
        try:
            while not self._closed:
                if listener.missed and listener.queue.empty():
                    # Nothing more may happen, and what was missed may have been the end.
                    listener.missed = False
                    yield Change(self._number, "missed", None, {})
                    continue
                change = await listener.queue.get()
                if change is None:
                    return
                yield change
        finally:
            self._listeners.discard(listener)

    def close(self) -> None:
        """Every listener's stream ends."""
        self._closed = True
        for one in self._listeners:
            while one.queue.full():
                one.queue.get_nowait()
            one.queue.put_nowait(None)
