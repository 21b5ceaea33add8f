"""Live state of running jobs for displays: one `LiveJob` per job, and a bus of `JobEvent`s for listeners.

Nothing here is needed after a restart; what must last is in the store.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

#: Events that a slow listener may be behind; then it gets a "missed" event and goes on from now.
MAX_QUEUED_EVENTS = 256


@dataclass(frozen=True, slots=True)
class JobEvent:
    """`kind`: "job" for a new state, "note" for a text, "missed" for a gap."""

    number: int
    kind: str
    job_id: int | None
    data: dict[str, object]

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

    def send(self, kind: str, job_id: int | None, data: dict[str, object]) -> None:
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

    def current(self, kind: str, job_id: int | None, data: dict[str, object]) -> JobEvent:
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
