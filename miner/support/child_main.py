"""The worker's half of a child process: one order on standard input, events as JSON lines on standard output.

`miner.support.subprocess` is the daemon's half; workers do not import it, as asyncio would delay their start.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

OrderT = TypeVar("OrderT")
EventT = TypeVar("EventT")

#: How often progress is reported at most.
PROGRESS_SECONDS = 0.25


@dataclass(frozen=True)
class ChildProtocol(Generic[OrderT, EventT]):
    """The module that a worker runs, the orders it takes and the events it writes.

    Secrets travel in the order only: not in arguments, environment, files or logs.
    """

    module: str
    orders: TypeAdapter[OrderT]
    events: TypeAdapter[EventT]
    #: A longer line is not an event.
    max_line: int = 1 << 20

    @property
    def command(self) -> tuple[str, ...]:
        return (sys.executable, "-P", "-m", self.module)

    def order_in(self, line: bytes) -> OrderT:
        return self.orders.validate_json(line)

    def event_in(self, line: bytes) -> EventT | None:
        """The event of a line; None for anything else that a library may print."""
        try:
            return self.events.validate_json(line)
        except ValidationError:
            return None


def line_of(message: BaseModel) -> bytes:
    """An order or an event as one line."""
    return message.model_dump_json().encode() + b"\n"


class EventWriter:
    """Writes events to the daemon; whatever else is printed goes to standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        #: By what is reported: when it was last written, and how far it was.
        self._written: dict[str, tuple[float, int]] = {}

    def __call__(self, event: BaseModel) -> None:
        with self._lock:
            self._out.write(line_of(event))

    def is_due(self, what: str, done: int, total: int | None) -> bool:
        """Return True if this progress is due: a few times a second, and always the last of it."""
        now = time.monotonic()
        written_at, before = self._written.get(what, (0.0, -1))
        if now - written_at < PROGRESS_SECONDS and not done == total != before:
            return False
        self._written[what] = now, done
        return True


def serve(
    protocol: ChildProtocol[OrderT, Any],
    carry_out: Callable[[OrderT, EventWriter], BaseModel],
    failure_event: Callable[[Exception, OrderT], BaseModel],
    *,
    niceness: int,
    max_memory: int | None = None,
) -> int:
    """Carry out one order and write its answer, or what failed; return the exit status."""
    os.nice(niceness)
    if max_memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    write = EventWriter()
    # Not through sys.stdin: a thread that waits there would keep the interpreter from ending.
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        order = protocol.order_in(stdin.readline())
    threading.Thread(target=_exit_with_parent, name="lifeline", daemon=True).start()
    try:
        write(carry_out(order, write))
    except Exception as error:  # noqa: BLE001 - the outermost: everything becomes an answer
        write(failure_event(error, order))
        return 1
    return 0


def _exit_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(3)
