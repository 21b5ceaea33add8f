"""One publication, by a process that exists for nothing else.

`miner.publish.child` starts it, writes an order to its standard input and reads events from its output. In a
process because reading gigabytes and waiting for a client without time limits has no place in the daemon, and
because a process can be ended at any instant and takes everything with it. It ends itself when its input
does: then the daemon is gone, and another one will begin anew.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from core.submission.check import Base
from core.submission.faults import BadSubmission
from miner.publish import words
from miner.publish.words import Event, Failed, HubTrouble, Order, Task, Trouble

if TYPE_CHECKING:
    from miner.publish.huggingface import HuggingFace

#: Behind whatever answers validators.
NICENESS = 5
#: How often progress is told at most.
EVERY_SECONDS = 0.25
#: What the client says while it waits, in words for people.
_TOLD_LOGGERS = ("huggingface_hub.utils._http",)


class Teller:
    """Writes events to where the daemon listens; whatever else prints goes to standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._checked_at = 0.0

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._out.write(event.model_dump_json().encode() + b"\n")

    def note(self, text: str) -> None:
        self(words.Note(text=text[:2000]))

    def upload(self, done: int, total: int) -> None:
        self(words.Progress(what="upload", done=done, total=total))

    def check(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._checked_at >= EVERY_SECONDS or done >= total:
            self._checked_at = now
            self(words.Progress(what="check", done=done, total=total))


class _Waits(logging.Handler):
    """The client logs why it waits; it would look like a standstill otherwise."""

    def __init__(self, tell: Teller) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell.note(record.getMessage().split("?")[0])


def main() -> int:
    os.nice(NICENESS)
    tell = Teller()
    # Not through sys.stdin: a thread that waits there would keep the interpreter from ending.
    with open(0, "rb", buffering=0, closefd=False) as given:
        order = Order.model_validate_json(given.readline())
    threading.Thread(target=_end_with_the_daemon, name="lifeline", daemon=True).start()
    try:
        tell(carried_out(order, tell))
    except Exception as error:  # noqa: BLE001 - the outermost: everything becomes an answer
        traceback.print_exc()
        failure = _failure(error)
        if failure.trouble is Trouble.MISMATCH and order.memory:
            # Perhaps what was remembered of the files is what is wrong: the next try reads them.
            Path(order.memory).unlink(missing_ok=True)
        tell(failure)
        return 1
    return 0


def carried_out(order: Order, tell: Teller) -> Event:
    if order.task is Task.PUBLISH:
        return _published(order, tell)
    if order.local is not None:
        from miner.publish.local import LocalHub

        local = LocalHub(Path(order.local), order.user)
        if order.task is Task.MOVE:
            return local.move(order.earlier or "", order.repo_name)
        return words.Account(
            user=local.user, owner=local.user, may_write=True, detail=f"folder {order.local}"
        )
    hub = _hub(order, tell)
    if order.task is Task.MOVE:
        return hub.move(order.earlier or "", f"{hub.owner(order.user)}/{order.repo_name}")
    return hub.account(order.user)


def _published(order: Order, tell: Teller) -> Event:
    from miner.publish.packing import pack

    tell(words.Stage(stage="check"))
    base = Base(order.model, Path(order.base) if order.base else None)
    parcel = pack(
        Path(order.folder),
        base,
        order.task_type,
        keep_card=order.keep_card,
        memory=Path(order.memory) if order.memory else None,
        told=tell.check,
    )
    for note in parcel.notes:
        tell.note(note)
    tell(words.Stage(stage="upload"))
    if order.local is not None:
        from miner.publish.local import LocalHub

        return LocalHub(Path(order.local), order.user).publish(order.repo_name, parcel)
    hub = _hub(order, tell)
    repo = f"{hub.owner(order.user)}/{order.repo_name}"
    return hub.publish(repo, parcel, order.model, order.earlier, tell.upload)


def _hub(order: Order, tell: Teller) -> HuggingFace:
    from miner.publish.huggingface import HuggingFace

    for name in _TOLD_LOGGERS:
        logging.getLogger(name).addHandler(_Waits(tell))
    return HuggingFace(order.endpoint, order.token, tell.note)


def _failure(error: Exception) -> Failed:
    if isinstance(error, HubTrouble):
        return Failed(trouble=error.trouble, text=str(error), retry_after=error.retry_after)
    if isinstance(error, BadSubmission):
        return Failed(trouble=Trouble.BAD_SUBMISSION, text=str(error))
    from miner.publish.failures import failure_of

    return failure_of(error)


def _end_with_the_daemon() -> None:
    while os.read(0, 4096):
        pass
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main())
